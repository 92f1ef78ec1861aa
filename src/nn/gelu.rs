//! GELU by its tanh approximation (Hendrycks and Gimpel 2016), GPT-2's activation.

use crate::nn::composed;
use crate::nn::element::{Element, elements, with_element, with_elements};
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

fn value(x: f32) -> f32 {
    0.5 * x * (1.0 + (SCALE * (x + CUBIC * x * x * x)).tanh())
}

fn slope(x: f32) -> f32 {
    let t = (SCALE * (x + CUBIC * x * x * x)).tanh();
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * SCALE * (1.0 + 3.0 * CUBIC * x * x)
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
