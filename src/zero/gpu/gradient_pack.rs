//! Packs gradients of a model on a GPU for a collective: they are cast, scaled and packed on the GPU.
//!
//! The arithmetic, and the resulting bits, are those of `reduce/engine_gradient_backend.rs` on the host.

use crate::cuda::DeviceFlat;
use crate::error::Result;
use crate::graph::Grad;
use crate::tensor::device_elements::with_each;
use candle_core::{CudaDevice, DType};
use std::ops::Range;

/// The format of gradients in a collective: multiplied by the factor, then rounded to this dtype.
#[derive(Clone, Copy)]
pub(in crate::zero) struct GradientPackFormat {
    pub dtype: DType,
    pub factor: f32,
}

/// Prepares one gradient and pads it with zeros to `padded` elements.
pub(in crate::zero) fn prepare(
    device: &CudaDevice,
    GradientPackFormat { dtype, factor }: GradientPackFormat,
    padded: usize,
    grad: Grad,
) -> Result<DeviceFlat> {
    let tensor = grad.on_device(device)?;
    Ok(with_each([&tensor], "pack", |[values]| DeviceFlat::scaled(device, dtype, values, factor, padded))?)
}

/// Packs a bucket of `len` elements. Each gradient comes with its pieces, and the offset of each in the bucket.
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
                bucket.copy_scaled(start..start + piece.len(), &values.slice(piece)?, factor)
            })
        })?;
    }
    Ok(bucket)
}
