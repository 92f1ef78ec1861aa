//! The sum of two tensors.

use crate::graph::OpInputs;
use crate::kernels::add::add_into;
#[cfg(feature = "cuda")]
use crate::nn::on_gpu;
use crate::tensor::element::{TensorElement, with_all, with_element};
use candle_core::{Result, Tensor, bail};

/// Computes a + b, elementwise, in f32 and rounded once.
///
/// The sum is that of Candle's `+`, but its gradient does not pass through Candle's graph. To add the result of a
/// linear layer to a residual stream, prefer [`crate::nn::linear_with_epilogue`], which needs no separate pass.
///
/// # Errors
/// Tensors of different shapes or dtypes.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const NAME: &str = "add";
    if a.shape() != b.shape() {
        bail!("add: the operands have different shapes, {:?} and {:?}", a.dims(), b.dims())
    }
    #[cfg(feature = "cuda")]
    if let Some(sum) = on_gpu::add::add(a, b)? {
        return Ok(sum);
    }
    if !a.device().is_cpu() {
        return a + b;
    }
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    let inputs = OpInputs::of([Some(&a), Some(&b)])?;
    let shape = a.shape().clone();
    with_element!(a.dtype(), NAME, E => {
        let y = with_all([Some(&a), Some(&b)], NAME, |[a, b]| {
            let mut y = a.unwrap_or_default().to_vec();
            add_into::<E>(&mut y, b.unwrap_or_default());
            Ok(y)
        })?;
        inputs.result(NAME, E::storage(y), shape, |grad, [to_a, to_b]| {
            if to_a.is_wanted() && to_b.is_wanted() {
                to_a.deliver(grad.copy()?)?;
            } else {
                return if to_a.is_wanted() { to_a.deliver(grad) } else { to_b.deliver(grad) };
            }
            to_b.deliver(grad)
        })
    })
}
