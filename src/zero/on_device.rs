//! Gradients that lie on a GPU, as they will travel: cast, scaled and packed there, and brought to the host at once.
//!
//! The arithmetic is that of [`super::gradients`] on the host, with its bits.

use super::core::Core;
use super::gradients::{Arrival, ReducePlan};
use super::parcel::Parcel;
use super::rank::Rank;
use crate::cuda::DeviceFlat;
use crate::error::Result;
use crate::graph::Grad;
use crate::precision::Flat;
use crate::tensor::on_device::with_each;
use candle_core::CudaDevice;

/// The GPU on which all of these gradients lie.
pub(super) fn gpu_of(grads: &[Arrival<Grad>]) -> Option<CudaDevice> {
    let first = grads.first()?.grad.gpu()?.clone();
    let here = |arrived: &Arrival<Grad>| arrived.grad.gpu().is_some_and(|gpu| gpu.id() == first.id());
    grads.iter().all(here).then_some(first)
}

/// One gradient with its padding.
pub(super) fn prepare(device: &CudaDevice, plan: &ReducePlan, padded: usize, grad: Grad) -> Result<Flat> {
    let tensor = grad.on_device(device)?;
    Ok(with_each([&tensor], "pack", |[values]| {
        DeviceFlat::scaled(device, plan.dtype, values, plan.before)?.to_host(padded)
    })?)
}

/// Small gradients, piece by piece. Each is dropped when it has been copied.
pub(super) fn pack_small(
    device: &CudaDevice,
    core: &Core,
    plan: &ReducePlan,
    parcel: &Parcel,
    grads: Vec<Arrival<Grad>>,
) -> Result<Flat> {
    let (division, padded) = (core.division(), parcel.chunk * core.world_size());
    let mut bucket = DeviceFlat::zeros(device, plan.dtype, padded)?;
    for (Arrival { param, grad, held }, offset) in grads.into_iter().zip(&parcel.offsets) {
        let tensor = grad.on_device(device)?;
        with_each([&tensor], "pack", |[values]| {
            (0..division.world_size()).try_for_each(|number| {
                let piece = division.piece(core.params()[param].cut(), number);
                let start = number * parcel.chunk + offset;
                bucket.copy_scaled(start..start + piece.len(), &values.slice(piece), plan.before)
            })
        })?;
        drop(held);
    }
    Ok(bucket.to_host(padded)?)
}
