//! Activation functions over slices, computed in f32 and rounded once: GELU, its tanh approximation, SiLU and the
//! square of ReLU, each with a gated form as well.

use crate::kernels::element::{Element, ElementDtype};
use crate::kernels::f32_access::{self, get, put, vectorized};
use crate::kernels::gemm::Activation;
use crate::kernels::math;
use crate::kernels::parallel::{ParallelChunks, for_each_part};

/// The number of elements that one task computes.
const CHUNK: usize = 1 << 14;
/// The number of 16-bit elements that are widened, computed and narrowed together in functions with two results.
const BLOCK: usize = 128;

/// Runs `$body` with `$value` and `$slope` bound to a function and its derivative.
macro_rules! with_function {
    ($function:expr, ($value:ident, $slope:ident) => $body:expr) => {
        match $function {
            Activation::GeluTanh => {
                let ($value, $slope) = (math::gelu_tanh, math::gelu_tanh_slope);
                $body
            }
            Activation::Gelu => {
                let ($value, $slope) = (math::gelu, math::gelu_slope);
                $body
            }
            Activation::Silu => {
                let ($value, $slope) = (math::silu, math::silu_slope);
                $body
            }
            Activation::ReluSquared => {
                let ($value, $slope) = (math::relu_squared, math::relu_squared_slope);
                $body
            }
        }
    };
}

/// Computes y = f(x).
///
/// Panics if the lengths differ, as do all functions in this module.
pub fn forward<E: Element>(function: Activation, x: &[E], y: &mut [E]) {
    match function {
        Activation::GeluTanh => map(x, y, math::gelu_tanh_odds, math::gated_by_odds),
        Activation::Gelu => map(
            x,
            y,
            math::normal,
            #[inline(always)]
            |x, probability| x * probability,
        ),
        Activation::Silu => map(x, y, math::silu_odds, math::gated_by_odds),
        Activation::ReluSquared => map(
            x,
            y,
            math::positive_part,
            #[inline(always)]
            |_, positive| positive * positive,
        ),
    }
}

/// Computes dx = dy * f'(x).
pub fn backward<E: Element>(function: Activation, x: &[E], dy: &[E], dx: &mut [E]) {
    with_function!(function, (_value, slope) => map2(
        x,
        dy,
        dx,
        #[inline(always)]
        |x, dy| dy * slope(x),
    ));
}

/// Computes y = f(gate) * up, as in SwiGLU and GeGLU (Shazeer 2020).
pub fn gated<E: Element>(function: Activation, gate: &[E], up: &[E], y: &mut [E]) {
    with_function!(function, (value, _slope) => map2(
        gate,
        up,
        y,
        #[inline(always)]
        |gate, up| value(gate) * up,
    ));
}

/// Computes dgate = dy * up * f'(gate) and dup = dy * f(gate).
pub fn gated_backward<E: Element>(function: Activation, inputs: [&[E]; 2], dy: &[E], dgate: &mut [E], dup: &mut [E]) {
    with_function!(function, (value, slope) => gated_slopes_in_tasks(inputs, dy, [dgate, dup], (value, slope)));
}

fn gated_slopes_in_tasks<E: Element>(
    [gate, up]: [&[E]; 2],
    dy: &[E],
    [dgate, dup]: [&mut [E]; 2],
    function: (impl Fn(f32) -> f32 + Sync, impl Fn(f32) -> f32 + Sync),
) {
    let n = gate.len();
    assert_eq!([up.len(), dy.len(), dgate.len(), dup.len()], [n; 4], "the slice lengths of a gate's gradients differ");
    let parts = (ParallelChunks::new(dgate, CHUNK), ParallelChunks::new(dup, CHUNK));
    for_each_part(n.div_ceil(CHUNK), parts, |i, (dgate, dup)| {
        let [gate, up, dy] = [gate, up, dy].map(|x| &x[i * CHUNK..][..dgate.len()]);
        vectorized!({
            if E::KIND == ElementDtype::F32 {
                return gated_slopes(gate, up, dy, dgate, dup, &function);
            }
            let mut buffer = [[0f32; BLOCK]; 5];
            for start in (0..dgate.len()).step_by(BLOCK) {
                let range = start..dgate.len().min(start + BLOCK);
                let [to_gate, to_up, mut inputs @ ..] = buffer.each_mut().map(|buffer| &mut buffer[..range.len()]);
                for (buffer, x) in inputs.iter_mut().zip([gate, up, dy]) {
                    f32_access::widen(&x[range.clone()], buffer);
                }
                let [gate, up, dy] = inputs;
                gated_slopes(gate, up, dy, to_gate, to_up, &function);
                f32_access::narrow(to_gate, &mut dgate[range.clone()]);
                f32_access::narrow(to_up, &mut dup[range]);
            }
        });
    });
}

/// Computes both gradients in one loop, because they share their exponential.
#[inline(always)]
fn gated_slopes<E: Element>(
    gate: &[E],
    up: &[E],
    dy: &[E],
    dgate: &mut [E],
    dup: &mut [E],
    (value, slope): &(impl Fn(f32) -> f32, impl Fn(f32) -> f32),
) {
    for ((((dgate, dup), gate), up), dy) in dgate.iter_mut().zip(dup).zip(gate).zip(up).zip(dy) {
        let (x, dy) = (get(*gate), get(*dy));
        *dgate = put(dy * get(*up) * slope(x));
        *dup = put(dy * value(x));
    }
}

/// Computes y = x * factor in f32.
pub fn scale<E: Element>(x: &[E], factor: f64, y: &mut [E]) {
    let factor = factor as f32;
    map(
        x,
        y,
        #[inline(always)]
        |x| x * factor,
        #[inline(always)]
        |_, product| product,
    );
}

/// Computes y = second(x, first(x)).
fn map<E: Element>(x: &[E], y: &mut [E], first: impl Fn(f32) -> f32 + Sync, second: impl Fn(f32, f32) -> f32 + Sync) {
    assert_eq!(x.len(), y.len(), "the slice lengths of an activation differ");
    for_each_part(x.len().div_ceil(CHUNK), ParallelChunks::new(y, CHUNK), |i, y| {
        let x = &x[i * CHUNK..][..y.len()];
        vectorized!(f32_access::map_in_two_passes(x, y, &first, &second));
    });
}

/// Computes y = f(a, b).
fn map2<E: Element>(a: &[E], b: &[E], y: &mut [E], f: impl Fn(f32, f32) -> f32 + Sync) {
    assert_eq!([a.len(), b.len()], [y.len(); 2], "the slice lengths of an activation differ");
    for_each_part(y.len().div_ceil(CHUNK), ParallelChunks::new(y, CHUNK), |i, y| {
        let [a, b] = [a, b].map(|x| &x[i * CHUNK..][..y.len()]);
        vectorized!(f32_access::map_long(
            [a, b],
            y,
            #[inline(always)]
            |[a, b]| f(a, b)
        ));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn numbers<E: Element>(n: usize, seed: u32) -> Vec<E> {
        (0..n as u32).map(|i| put(((i.wrapping_mul(2_654_435_761) ^ seed) >> 16) as f32 / 8192.0 - 4.0)).collect()
    }

    fn same<E: Element>(got: &[E], want: impl Iterator<Item = f32>) {
        let got: Vec<E> = got.to_vec();
        let want: Vec<E> = want.map(put).collect();
        assert!(bytemuck::cast_slice::<E, u8>(&got) == bytemuck::cast_slice::<E, u8>(&want));
    }

    /// Covers several tasks, with a short last task.
    fn slices_hold_the_functions_of_their_elements<E: Element>() {
        let n = 2 * CHUNK + 37;
        let (x, dy, up) = (numbers::<E>(n, 1), numbers::<E>(n, 2), numbers::<E>(n, 3));
        let at = |i: usize| (get(x[i]), get(dy[i]), get(up[i]));
        let (mut y, mut z) = (vec![E::default(); n], vec![E::default(); n]);
        for function in [Activation::GeluTanh, Activation::Gelu, Activation::Silu, Activation::ReluSquared] {
            with_function!(function, (value, slope) => {
                forward(function, &x, &mut y);
                same(&y, (0..n).map(|i| value(at(i).0)));
                backward(function, &x, &dy, &mut y);
                same(&y, (0..n).map(|i| at(i).1 * slope(at(i).0)));
                gated(function, &x, &up, &mut y);
                same(&y, (0..n).map(|i| value(at(i).0) * at(i).2));
                gated_backward(function, [&x, &up], &dy, &mut y, &mut z);
                same(&y, (0..n).map(|i| at(i).1 * at(i).2 * slope(at(i).0)));
                same(&z, (0..n).map(|i| at(i).1 * value(at(i).0)));
            });
        }
    }

    #[test]
    fn slices_hold_the_functions_of_their_elements_in_every_dtype() {
        slices_hold_the_functions_of_their_elements::<f32>();
        slices_hold_the_functions_of_their_elements::<bf16>();
        slices_hold_the_functions_of_their_elements::<f16>();
    }
}
