//! What a GPU does with its model's state: gradients packed as they will travel, and the share updated where it lies.
//!
//! The arithmetic is that of [`super::gradients`] on the host, with its bits.

use super::core::Core;
use super::rank::Rank;
use super::recipe::Recipe;
use super::sub_group::{GradShare, Home, SubGroup};
use crate::cuda::{self, DeviceFlat, DeviceMut};
use crate::error::Result;
use crate::graph::Grad;
use crate::optim::GroupStep;
use crate::tensor::flat_buffer::BufferPlace;
use crate::tensor::on_device::{change, with_each};
use crate::timeline;
use candle_core::{CudaDevice, DType};
use std::ops::Range;

/// The GPU where gradients are packed: that of the rank's share, or the one on which all of these lie.
pub(super) fn gpu_of<'a>(home: &BufferPlace, mut grads: impl Iterator<Item = &'a Grad>) -> Option<CudaDevice> {
    if let BufferPlace::Device(device) = home {
        return Some(device.clone());
    }
    let first = grads.next()?.gpu()?.clone();
    grads.all(|grad| grad.gpu().is_some_and(|gpu| gpu.id() == first.id())).then_some(first)
}

/// How gradients travel: rounded to this dtype, when they have been multiplied with the factor.
#[derive(Clone, Copy)]
pub(super) struct Form {
    pub dtype: DType,
    pub factor: f32,
}

/// One gradient, with zeros behind it up to `padded` elements.
pub(super) fn prepare(
    device: &CudaDevice,
    Form { dtype, factor }: Form,
    padded: usize,
    grad: Grad,
) -> Result<DeviceFlat> {
    let tensor = grad.on_device(device)?;
    Ok(with_each([&tensor], "pack", |[values]| DeviceFlat::scaled(device, dtype, values, factor, padded))?)
}

/// A bucket of `len` elements. Each gradient comes with its pieces, and where each of them begins in the bucket.
pub(super) fn pack<P: Iterator<Item = (usize, Range<usize>)>>(
    device: &CudaDevice,
    Form { dtype, factor }: Form,
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

/// Updates a sub-group, if it lies on a GPU.
pub(super) fn update(core: &Core, group: &mut SubGroup, recipe: &Recipe<'_>) -> Result<bool> {
    let BufferPlace::Device(device) = core.home() else { return Ok(false) };
    let _span = timeline::span(timeline::Kind::Optimizer, "sub-group").with("elements", group.len as u64);
    let SubGroup { slots, weights, master, grads, moments, .. } = group;
    for (slot, grads) in slots.iter().zip(grads).filter(|(slot, _)| !slot.owned.is_empty()) {
        let GroupStep { optimizer, ctx } = recipe(slot.param);
        let rule = optimizer.elementwise(&ctx).expect("a share lies on a GPU where kernels can update it");
        let GradShare::Memory(grads) = grads else { unreachable!("a vote leaves no gradient absent") };
        let grad = grads.buffer().on_device().part(0..slot.owned.len())?;
        let moments = moments.iter_mut().map(|moment| moment.home.on_device(slot.range()));
        let moments = moments.collect::<candle_core::Result<Vec<_>>>()?;
        let weights = weights.as_mut().map(|home| home.on_device(slot.range())).transpose()?;
        let master = master.as_mut().map(|home| home.on_device(slot.range())).transpose()?;
        let step = |weights: DeviceMut<'_>| match master {
            Some(master) => cuda::optimizer::step(device, &rule, master, &grad, moments, Some(weights)),
            None => cuda::optimizer::step(device, &rule, weights, &grad, moments, None),
        };
        match weights {
            Some(weights) => step(weights)?,
            None => change(&core.params[slot.param].tensor, |mut whole| step(whole.part(slot.owned.clone())?))?,
        }
    }
    Ok(true)
}

impl Home {
    /// Elements `range` of the sub-group, which lies on a GPU.
    fn on_device(&mut self, range: Range<usize>) -> candle_core::Result<DeviceMut<'_>> {
        match self {
            Self::Memory(buffer) => buffer.buffer_mut().on_device_mut().part_mut(range),
            Self::File(_) => unreachable!("what lies on a GPU is not offloaded"),
        }
    }
}
