//! Activation functions over slices, computed in f32 and rounded once: GELU by its tanh approximation, SiLU, and
//! SwiGLU.

use crate::kernels::element::{Element, Kind};
use crate::kernels::math;
use crate::kernels::par::{Chunks, for_each_part};
use crate::kernels::wide::{self, get, put, vectorized};

/// Elements that one task computes.
const CHUNK: usize = 1 << 14;
/// Elements of 16 bits that are widened, computed and narrowed together where there are two results.
const BLOCK: usize = 128;

/// y = gelu(x) by its tanh approximation.
///
/// Panics if the lengths differ; so do all functions here.
pub fn gelu_tanh<E: Element>(x: &[E], y: &mut [E]) {
    map(x, y, math::gelu_tanh_odds, math::gated_by_odds);
}

/// dx = dy gelu'(x).
pub fn gelu_tanh_backward<E: Element>(x: &[E], dy: &[E], dx: &mut [E]) {
    map2(
        x,
        dy,
        dx,
        #[inline(always)]
        |x, dy| dy * math::gelu_tanh_slope(x),
    );
}

/// y = x sigmoid(x).
pub fn silu<E: Element>(x: &[E], y: &mut [E]) {
    map(x, y, math::silu_odds, math::gated_by_odds);
}

/// dx = dy silu'(x).
pub fn silu_backward<E: Element>(x: &[E], dy: &[E], dx: &mut [E]) {
    map2(
        x,
        dy,
        dx,
        #[inline(always)]
        |x, dy| dy * math::silu_slope(x),
    );
}

/// y = silu(gate) up, the gated activation of SwiGLU (Shazeer 2020).
pub fn swiglu<E: Element>(gate: &[E], up: &[E], y: &mut [E]) {
    map2(
        gate,
        up,
        y,
        #[inline(always)]
        |gate, up| math::silu(gate) * up,
    );
}

/// dgate = dy up silu'(gate) and dup = dy silu(gate).
pub fn swiglu_backward<E: Element>(gate: &[E], up: &[E], dy: &[E], dgate: &mut [E], dup: &mut [E]) {
    let n = gate.len();
    assert_eq!([up.len(), dy.len(), dgate.len(), dup.len()], [n; 4], "elements of swiglu's gradients");
    let parts = (Chunks::new(dgate, CHUNK), Chunks::new(dup, CHUNK));
    for_each_part(n.div_ceil(CHUNK), parts, |i, (dgate, dup)| {
        let [gate, up, dy] = [gate, up, dy].map(|x| &x[i * CHUNK..][..dgate.len()]);
        vectorized!({
            if E::KIND == Kind::F32 {
                return swiglu_slopes(gate, up, dy, dgate, dup);
            }
            let mut room = [[0f32; BLOCK]; 5];
            for start in (0..dgate.len()).step_by(BLOCK) {
                let range = start..dgate.len().min(start + BLOCK);
                let [to_gate, to_up, mut rooms @ ..] = room.each_mut().map(|room| &mut room[..range.len()]);
                for (room, x) in rooms.iter_mut().zip([gate, up, dy]) {
                    wide::widen(&x[range.clone()], room);
                }
                let [gate, up, dy] = rooms;
                swiglu_slopes(gate, up, dy, to_gate, to_up);
                wide::narrow(to_gate, &mut dgate[range.clone()]);
                wide::narrow(to_up, &mut dup[range]);
            }
        });
    });
}

/// One loop for both: they share their exponential.
#[inline(always)]
fn swiglu_slopes<E: Element>(gate: &[E], up: &[E], dy: &[E], dgate: &mut [E], dup: &mut [E]) {
    for ((((dgate, dup), gate), up), dy) in dgate.iter_mut().zip(dup).zip(gate).zip(up).zip(dy) {
        let (x, dy) = (get(*gate), get(*dy));
        *dgate = put(dy * get(*up) * math::silu_slope(x));
        *dup = put(dy * math::silu(x));
    }
}

/// y = second(x, first(x)).
fn map<E: Element>(x: &[E], y: &mut [E], first: impl Fn(f32) -> f32 + Sync, second: impl Fn(f32, f32) -> f32 + Sync) {
    assert_eq!(x.len(), y.len(), "elements of an activation");
    for_each_part(x.len().div_ceil(CHUNK), Chunks::new(y, CHUNK), |i, y| {
        let x = &x[i * CHUNK..][..y.len()];
        vectorized!(wide::map_in_steps(
            x,
            y,
            #[inline(always)]
            |x| first(x),
            #[inline(always)]
            |x, between| second(x, between),
        ));
    });
}

/// y = f(a, b).
fn map2<E: Element>(a: &[E], b: &[E], y: &mut [E], f: impl Fn(f32, f32) -> f32 + Sync) {
    assert_eq!([a.len(), b.len()], [y.len(); 2], "elements of an activation");
    for_each_part(y.len().div_ceil(CHUNK), Chunks::new(y, CHUNK), |i, y| {
        let [a, b] = [a, b].map(|x| &x[i * CHUNK..][..y.len()]);
        vectorized!(wide::map_long(
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

    /// Over several tasks, with a short last one.
    fn slices_hold_the_functions_of_their_elements<E: Element>() {
        let n = 2 * CHUNK + 37;
        let (x, dy, up) = (numbers::<E>(n, 1), numbers::<E>(n, 2), numbers::<E>(n, 3));
        let at = |i: usize| (get(x[i]), get(dy[i]), get(up[i]));
        let (mut y, mut z) = (vec![E::default(); n], vec![E::default(); n]);
        gelu_tanh(&x, &mut y);
        same(&y, (0..n).map(|i| math::gelu_tanh(at(i).0)));
        silu(&x, &mut y);
        same(&y, (0..n).map(|i| math::silu(at(i).0)));
        gelu_tanh_backward(&x, &dy, &mut y);
        same(&y, (0..n).map(|i| at(i).1 * math::gelu_tanh_slope(at(i).0)));
        silu_backward(&x, &dy, &mut y);
        same(&y, (0..n).map(|i| at(i).1 * math::silu_slope(at(i).0)));
        swiglu(&x, &up, &mut y);
        same(&y, (0..n).map(|i| math::silu(at(i).0) * at(i).2));
        swiglu_backward(&x, &up, &dy, &mut y, &mut z);
        same(&y, (0..n).map(|i| at(i).1 * at(i).2 * math::silu_slope(at(i).0)));
        same(&z, (0..n).map(|i| at(i).1 * math::silu(at(i).0)));
    }

    #[test]
    fn slices_hold_the_functions_of_their_elements_in_every_dtype() {
        slices_hold_the_functions_of_their_elements::<f32>();
        slices_hold_the_functions_of_their_elements::<bf16>();
        slices_hold_the_functions_of_their_elements::<f16>();
    }
}
