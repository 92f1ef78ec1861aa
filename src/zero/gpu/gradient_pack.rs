//! Gradients of a model on a GPU, as they will travel: cast, scaled and packed there.
//!
//! The arithmetic is that of [`crate::zero::reduce::gradient_reducer`] on the host, with its bits.

use crate::cuda::DeviceFlat;
use crate::error::Result;
use crate::graph::Grad;
use crate::tensor::device_elements::with_each;
use candle_core::{CudaDevice, DType};
use std::ops::Range;

/// How gradients travel: rounded to this dtype, when they have been multiplied with the factor.
#[derive(Clone, Copy)]
pub(in crate::zero) struct GradientPackFormat {
    pub dtype: DType,
    pub factor: f32,
}

/// One gradient, with zeros behind it up to `padded` elements.
pub(in crate::zero) fn prepare(
    device: &CudaDevice,
    GradientPackFormat { dtype, factor }: GradientPackFormat,
    padded: usize,
    grad: Grad,
) -> Result<DeviceFlat> {
    let tensor = grad.on_device(device)?;
    Ok(with_each([&tensor], "pack", |[values]| DeviceFlat::scaled(device, dtype, values, factor, padded))?)
}

/// A bucket of `len` elements. Each gradient comes with its pieces, and where each of them begins in the bucket.
pub(in crate::zero) fn pack<P: Iterator<Item = (usize, Range<usize>)>>(
    device: &CudaDevice,
    GradientPackFormat { dtype, factor }: GradientPackFormat,
    len: usize,
    grads: impl Iterator<Item = (Grad, P)>,
) -> Result<DeviceFlat> {
    let mut bucket = DeviceFlat::zeros(device, dtype, len)?;
    for (grad, mut pieces) in grads {
        let tensor = grad.on_device(device)?;
        with_each([&tensor], "pack", |[values]| {
            pieces.try_for_each(|(start, piece)| {
                bucket.copy_scaled(start..start + piece.len(), &values.part(piece)?, factor)
            })
        })?;
    }
    Ok(bucket)
}
