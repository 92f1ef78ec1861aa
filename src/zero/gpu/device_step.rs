//! The optimizer step of a share that is on a GPU, performed by that GPU's kernels.

use crate::cuda::DeviceFlatMut;
use crate::cuda::optimizer::MultiTensorStep;
use crate::error::Result;
use crate::optim::GroupStepSettings;
use crate::tensor::device_elements::change;
use crate::tensor::flat_buffer::BufferDevice;
use crate::timeline;
use crate::zero::rank_core::RankCore;
use crate::zero::share::share_storage::ShareStorage;
use crate::zero::share::state_storage::StateStorage;
use crate::zero::share::sub_group::{GradientShare, SubGroup};
use crate::zero::step::hyperparameters::Hyperparameters;
use std::ops::Range;

/// Updates a sub-group if it is on a GPU. Returns whether it is.
pub(in crate::zero) fn update(
    core: &RankCore,
    group: &mut SubGroup<RankCore>,
    hyperparameters: &Hyperparameters<'_>,
) -> Result<bool> {
    let BufferDevice::Device(device) = core.share_location() else { return Ok(false) };
    let _span = timeline::span(timeline::EventCategory::Optimizer, "sub-group").with("elements", group.len as u64);
    let SubGroup { slots, weights, master, grads, moments, .. } = group;
    let mut steps = MultiTensorStep::new(device);
    for (slot, grads) in slots.iter().zip(grads).filter(|(slot, _)| !slot.owned.is_empty()) {
        let GroupStepSettings { optimizer, ctx } = hyperparameters(slot.param);
        let rule = optimizer.elementwise(&ctx).expect("a share is on a GPU only if kernels can update it");
        let GradientShare::Memory(grads) = grads else { unreachable!("after a vote, no gradient is absent") };
        let grad = grads.buffer().on_device().slice(0..slot.owned.len())?;
        let moments = moments.iter_mut().map(|moment| moment.storage.on_device(slot.range()));
        let moments = moments.collect::<candle_core::Result<Vec<_>>>()?;
        let weights = weights.as_mut().map(|storage| storage.on_device(slot.range())).transpose()?;
        let master = master.as_mut().map(|storage| storage.on_device(slot.range())).transpose()?;
        let add = |weights: DeviceFlatMut<'_>| {
            let (param, half) = match master {
                Some(master) => (master, Some(weights)),
                None => (weights, None),
            };
            // SAFETY: the steps run below. Until then, this function owns the buffers, and the core owns the tensors of
            // parameters, whose memory only this engine replaces. Slots share no elements. All this memory is used on
            // Candle's stream, or by collectives, which wait for that stream and for which that stream waits. Use of a
            // tensor on another stream is announced below.
            unsafe { steps.add(&rule, param, &grad, moments, half) }
        };
        match weights {
            Some(weights) => add(weights)?,
            None => change(&core.params[slot.param].tensor, |mut values| add(values.slice_mut(slot.owned.clone())?))?,
        }
    }
    steps.run()?;
    if weights.is_none() {
        // Tensors may be used on streams other than candle-zero's. Those streams wait for the work launched so far.
        let stream = device.cuda_stream();
        for slot in slots.iter().filter(|slot| !slot.owned.is_empty()) {
            change(&core.params[slot.param].tensor, |mut values| {
                values.address(&stream);
                Ok(())
            })?;
        }
    }
    Ok(true)
}

impl StateStorage<RankCore> {
    /// Returns elements `range` of the sub-group, which must be on a GPU.
    fn on_device(&mut self, range: Range<usize>) -> candle_core::Result<DeviceFlatMut<'_>> {
        match self {
            Self::Memory(buffer) => buffer.buffer_mut().on_device_mut().slice_mut(range),
            Self::File(_) => unreachable!("states on a GPU are not offloaded"),
        }
    }
}
