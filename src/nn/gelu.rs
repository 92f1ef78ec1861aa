//! GELU by its tanh approximation (Hendrycks and Gimpel 2016), GPT-2's activation.

use crate::nn::composed;
use crate::nn::element::{Element, elements, with_element, with_elements};
use crate::nn::exp::exp;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

/// sqrt(2 / pi).
pub(super) const SCALE: f32 = 0.797_884_6;
pub(super) const CUBIC: f32 = 0.044_715;

/// Elements that one task computes.
const CHUNK: usize = 4096;

/// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), elementwise, computed in f32.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    if x.device().is_cpu() { x.contiguous()?.apply_op1(GeluOp) } else { composed::gelu_tanh(x) }
}

struct GeluOp;

const NAME: &str = "gelu_tanh";

/// exp(-2 u) for the tanh's argument u: (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)). One exponential, and no cancellation
/// where the tanh comes near to -1.
#[inline(always)]
fn odds(x: f32) -> f32 {
    exp(-2.0 * SCALE * (x + CUBIC * x * x * x))
}

#[inline(always)]
fn value(x: f32) -> f32 {
    x / (1.0 + odds(x))
}

#[inline(always)]
fn slope(x: f32) -> f32 {
    // Finite, so that the products below are; the slope is 0 there. Nan passes.
    let odds = odds(x);
    let odds = if odds > 1e30 { 1e30 } else { odds };
    let gate = 1.0 / (1.0 + odds);
    gate + x * gate * (odds * gate) * (2.0 * SCALE * (1.0 + 3.0 * CUBIC * x * x))
}

/// `f(a[i], b[i])` for every element, in f32, rounded once.
fn map2<E: Element>(a: &[E], b: &[E], f: impl Fn(f32, f32) -> f32 + Sync) -> Vec<E> {
    let mut out = vec![E::default(); a.len()];
    out.par_chunks_mut(CHUNK).zip(a.par_chunks(CHUNK)).zip(b.par_chunks(CHUNK)).for_each(|((out, a), b)| {
        let (mut wide_a, mut wide_b) = ([0f32; CHUNK], [0f32; CHUNK]);
        let (wide_a, wide_b) = (&mut wide_a[..a.len()], &mut wide_b[..a.len()]);
        E::widen(a, wide_a);
        E::widen(b, wide_b);
        wide_a.iter_mut().zip(wide_b).for_each(|(a, b)| *a = f(*a, *b));
        E::narrow(wide_a, out);
    });
    out
}

impl CustomOp1 for GeluOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let storage = with_element!(x.dtype(), NAME, E => {
            let x = elements::<E>(x, layout, NAME)?;
            Ok(E::storage(map2(x, x, |x, _| value(x))))
        })?;
        Ok((storage, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        with_element!(x.dtype(), NAME, E => {
            let data = with_elements::<E, _>(x, NAME, |x| {
                with_elements::<E, _>(&grad, NAME, |g| Ok(map2(x, g, |x, g| g * slope(x))))
            })?;
            Ok(Some(Tensor::from_vec(data, x.shape(), x.device())?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_and_slope_are_those_of_the_tanh_formula_in_f64() {
        for i in -3000..=3000 {
            let x = i as f32 / 200.0;
            let (wide, scale, cubic) = (f64::from(x), f64::from(SCALE), f64::from(CUBIC));
            let t = (scale * (wide + cubic * wide.powi(3))).tanh();
            let inner = scale * (1.0 + 3.0 * cubic * wide * wide);
            // 1 + tanh, without its cancellation far to the left.
            let gate = 2.0 / (1.0 + (-2.0 * scale * (wide + cubic * wide.powi(3))).exp());
            assert!((gate - (1.0 + t)).abs() < 1e-15);
            let want = (0.5 * wide * gate, 0.5 * gate + 0.5 * wide * (1.0 - t * t) * inner);
            let error = |got: f32, want: f64| (f64::from(got) - want).abs();
            let accuracy = 1e-6 * (1.0 + wide * wide) * want.0.abs();
            assert!(error(value(x), want.0) <= accuracy.max(1e-30), "{x}: {} {}", value(x), want.0);
            assert!(error(slope(x), want.1) <= 3e-7, "{x}: {} {}", slope(x), want.1);
        }
    }
}
