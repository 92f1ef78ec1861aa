//! The optimizer step of a share that lies on a GPU, by that GPU's kernels.

use super::core::Core;
use super::rank::Rank;
use super::recipe::Recipe;
use super::sub_group::{GradShare, Home, SubGroup};
use crate::cuda::{self, DeviceMut};
use crate::error::Result;
use crate::optim::GroupStep;
use crate::tensor::flat_buffer::BufferPlace;
use crate::tensor::on_device::change;
use crate::timeline;
use std::ops::Range;

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
