//! Dropout.

use super::supported_device;
use crate::cuda::dropout as kernel;
use crate::graph::{Grad, OpInputs};
use crate::tensor::device_elements::with_each;
use candle_core::{Result, Tensor};

const NAME: &str = "dropout";

/// Computes [`crate::nn::dropout()`]; `offset` is the offset of the draw's first random number.
pub(in crate::nn) fn dropout(x: &Tensor, p: f32, seed: u64, offset: u64) -> Result<Option<Tensor>> {
    let Some(device) = supported_device(&[x]) else { return Ok(None) };
    let x = x.contiguous()?;
    let inputs = OpInputs::of([Some(&x)])?;
    let y = with_each([&x], NAME, |[x]| kernel::dropout(&device, x, p, seed, offset))?;
    let y = inputs.result(NAME, y, x.shape().clone(), move |grad, [to_x]| {
        let (len, dy) = (grad.len(), grad.on_device(&device)?);
        if !to_x.is_wanted() {
            return Ok(());
        }
        let dx = with_each([&dy], NAME, |[dy]| kernel::dropout(&device, dy, p, seed, offset))?;
        to_x.deliver(Grad::of_storage(dx, len))
    })?;
    Ok(Some(y))
}
