//! Limits the elements of a tensor.

use crate::graph::{OpInputs, SavedTensor};
use crate::kernels::buffer;
use crate::kernels::f32_access::{get, put};
use crate::kernels::parallel::{ParallelChunks, for_each_part};
use crate::tensor::element::{TensorElement, with_element, with_elements};
use candle_core::{Result, Tensor, bail};

const NAME: &str = "clamped";
/// The number of elements that one task computes.
const CHUNK: usize = 1 << 14;

/// Limits every element of `x` to the range from `-limit` to `limit` (OLMoE's `clip_qkv`). The gradient passes through
/// the elements within the range, its ends included, as in PyTorch.
///
/// # Errors
/// A limit that is not above 0.
pub fn clamp(x: &Tensor, limit: f64) -> Result<Tensor> {
    if limit.is_nan() || limit <= 0.0 {
        bail!("{NAME}: the limit is {limit}; it must be above 0")
    }
    if !x.device().is_cpu() {
        let is_within = x.detach().abs()?.le(limit)?;
        return is_within.where_cond(x, &x.detach().clamp(-limit, limit)?);
    }
    let x = x.contiguous()?;
    let inputs = OpInputs::of([Some(&x)])?;
    let (shape, limit) = (x.shape().clone(), limit as f32);
    with_element!(x.dtype(), NAME, E => {
        let mut y = buffer::<E>(x.elem_count());
        with_elements::<E, _>(&x, NAME, |x| {
            for_each_part(x.len().div_ceil(CHUNK), ParallelChunks::new(&mut y, CHUNK), |task, y| {
                for (y, x) in y.iter_mut().zip(&x[task * CHUNK..]) {
                    let wide = get(*x);
                    // NaN remains NaN.
                    *y = if wide > limit { put(limit) } else if wide < -limit { put(-limit) } else { *x };
                }
            });
            Ok(())
        })?;
        let saved = SavedTensor::of(&x);
        inputs.result(NAME, E::storage(y), shape, move |grad, [to_x]| {
            to_x.make::<E>(grad.len(), |dx| {
                with_elements::<E, _>(&saved.get()?, NAME, |x| grad.read::<E, _>(NAME, |dy| {
                    for_each_part(x.len().div_ceil(CHUNK), ParallelChunks::new(dx, CHUNK), |task, dx| {
                        let from = task * CHUNK;
                        for ((dx, x), dy) in dx.iter_mut().zip(&x[from..]).zip(&dy[from..]) {
                            *dx = if get(*x).abs() > limit { put(0.0) } else { *dy };
                        }
                    });
                    Ok(())
                }))
            })
        })
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn elements_are_limited_and_only_those_within_the_limits_have_a_gradient() {
        let x = Var::new(&[-3f32, -2.0, -0.5, 0.0, 1.9, 2.0, 2.1, f32::INFINITY], &Device::Cpu).unwrap();
        let y = clamp(&x, 2.0).unwrap();
        assert_eq!(y.to_vec1::<f32>().unwrap(), [-2.0, -2.0, -0.5, 0.0, 1.9, 2.0, 2.0, 2.0]);
        let weights = Tensor::new(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], &Device::Cpu).unwrap();
        let grads = (y * weights).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>().unwrap(), [0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0]);
        let nan = clamp(&Tensor::new(&[f32::NAN], &Device::Cpu).unwrap(), 1.0).unwrap();
        assert!(nan.to_vec1::<f32>().unwrap()[0].is_nan());
        let error = clamp(&Tensor::new(&[1f32], &Device::Cpu).unwrap(), 0.0).unwrap_err().to_string();
        let error = crate::error::without_backtrace(&error);
        insta::assert_snapshot!(error, @"clamped: the limit is 0; it must be above 0");
    }
}
