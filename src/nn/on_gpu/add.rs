//! The sum of two tensors.

use super::supported_device;
use crate::graph::{Grad, OpInputs};
use crate::tensor::device_elements::take;
use candle_core::{Result, Tensor};

/// Computes a + b for tensors of the same shape.
pub(in crate::nn) fn add(a: &Tensor, b: &Tensor) -> Result<Option<Tensor>> {
    let Some(device) = supported_device(&[a, b]).filter(|_| a.dtype() == b.dtype() && a.elem_count() > 0) else {
        return Ok(None);
    };
    let inputs = OpInputs::of([Some(a), Some(b)])?;
    let sum = take(&(a.detach() + b.detach())?)?;
    let sum = inputs.result("add", sum, a.shape().clone(), move |grad, [to_a, to_b]| {
        if !to_a.is_wanted() || !to_b.is_wanted() {
            return if to_a.is_wanted() { to_a.deliver(grad) } else { to_b.deliver(grad) };
        }
        let grad = grad.on_device(&device)?;
        to_a.deliver(Grad::Shared(grad.clone()))?;
        to_b.deliver(Grad::Shared(grad))
    })?;
    Ok(Some(sum))
}
