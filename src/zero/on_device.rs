//! Gradients that lie on a GPU, as they will travel: cast, scaled and packed there, and brought to the host at once.
//!
//! The arithmetic is that of [`super::gradients`] on the host, with its bits.

use crate::cuda::DeviceFlat;
use crate::error::Result;
use crate::graph::Grad;
use crate::precision::Flat;
use crate::tensor::on_device::with_each;
use candle_core::{CudaDevice, DType};
use std::ops::Range;

/// The GPU on which all of these gradients lie.
pub(super) fn gpu_of<'a>(mut grads: impl Iterator<Item = &'a Grad>) -> Option<CudaDevice> {
    let first = grads.next()?.gpu()?.clone();
    grads.all(|grad| grad.gpu().is_some_and(|gpu| gpu.id() == first.id())).then_some(first)
}

/// How gradients travel: rounded to this dtype, when they have been multiplied with the factor.
#[derive(Clone, Copy)]
pub(super) struct Travel {
    pub dtype: DType,
    pub factor: f32,
}

/// One gradient, with zeros behind it up to `padded` elements.
pub(super) fn prepare(
    device: &CudaDevice,
    Travel { dtype, factor }: Travel,
    padded: usize,
    grad: Grad,
) -> Result<Flat> {
    let tensor = grad.on_device(device)?;
    Ok(with_each([&tensor], "pack", |[values]| DeviceFlat::scaled(device, dtype, values, factor)?.to_host(padded))?)
}

/// A bucket of `len` elements. Each gradient comes with its pieces, and where each of them begins in the bucket.
pub(super) fn pack<P: Iterator<Item = (usize, Range<usize>)>>(
    device: &CudaDevice,
    Travel { dtype, factor }: Travel,
    len: usize,
    grads: impl Iterator<Item = (Grad, P)>,
) -> Result<Flat> {
    let mut bucket = DeviceFlat::zeros(device, dtype, len)?;
    for (grad, mut pieces) in grads {
        let tensor = grad.on_device(device)?;
        with_each([&tensor], "pack", |[values]| {
            pieces.try_for_each(|(start, piece)| {
                bucket.copy_scaled(start..start + piece.len(), &values.part(piece)?, factor)
            })
        })?;
    }
    Ok(bucket.to_host(len)?)
}
