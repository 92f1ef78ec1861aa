//! The delayed update of parameters (ZeRO-Offload, arXiv 2101.06840, section 5.2): the optimizer works on the host
//! while the GPU computes the next step, with weights that are one update old.
//!
//! ```text
//!   step t     wait for update t - 1, its weights -> GPU and all ranks | vote on gradients t | begin update t
//!   thread                                                                                   | update t ...
//!   training                                                                                 | forward, backward t + 1
//! ```
//!
//! The thread has the states and the gradients, and computes new weights in separate memory: the model computes with
//! the old weights, and gathers use them too. States return to their sub-groups before anything reads them, and
//! whatever reads weights as state gets the new weights. The model gets the new weights at the next step, or before all
//! ranks save, load or change state.

use super::state_sweep::{ParamSlice, sweep};
use super::weight_publisher::WeightPublisher;
use crate::error::{Result, without_backtrace};
use crate::memory::{MemoryKind, TrackedBuffer};
use crate::optim::{GroupStepSettings, ParameterGrouping, StepContext};
use crate::precision::{ElementBuffer, FlatRef};
use crate::tensor::flat_buffer::FlatBuffer;
use crate::tensor::host_slice::with_host_slice;
use crate::timeline::{self, TimelineLane};
use crate::util::{lock, pieces};
use crate::zero::gpu::host_step_weights::{HostStepWeights, WeightRange};
use crate::zero::rank_core::{DelayedUpdate, RankCore};
use crate::zero::share::state_storage::StateStorage;
use crate::zero::share::sub_group::{GradientShare, SubGroup, SubGroupPosition, SweepMode};
use std::ops::Range;
use std::sync::{Arc, MutexGuard};

impl DelayedUpdate {
    /// Returns the new weights of a sub-group if the model does not have them yet.
    pub(in crate::zero) fn weights(&self, group: usize) -> Option<&FlatBuffer> {
        let Self::Ready(ready) = self else { return None };
        ready[group].as_ref().map(TrackedBuffer::buffer)
    }
}

impl RankCore {
    /// Begins an update. `contexts` contains the context of each parameter.
    pub(super) fn begin_update(self: &Arc<Self>, contexts: Vec<StepContext>) -> Result<()> {
        let mut delayed = lock(&self.delayed);
        assert!(matches!(*delayed, DelayedUpdate::None), "an update ends before the next one begins");
        let mut shadows = Vec::new();
        for group in lock(&self.groups).iter_mut().filter(|group| group.class.is_trained()) {
            let dtype = group.class.weights.dtype(self.dtype);
            let mut weights = FlatBuffer::zeros(&FlatBuffer::host(), dtype, group.len)?;
            if group.master.is_none() {
                self.copy_weights(group, &mut weights)?;
            }
            let absent = group.slots.iter().map(|_| GradientShare::Absent).collect();
            shadows.push(SubGroup {
                class: group.class,
                slots: group.slots.clone(),
                len: group.len,
                weights: Some(StateStorage::Memory(TrackedBuffer::new(&self.ledger, MemoryKind::Staging, weights))),
                master: group.master.take(),
                grads: std::mem::replace(&mut group.grads, absent),
                grad_file: None,
                moments: std::mem::take(&mut group.moments),
                // The updates of an optimizer with factored states are not delayed.
                factored: Vec::new(),
                // The outer states stay where they are.
                outer: Vec::new(),
            });
        }
        let (core, carried) = (self.clone(), timeline::carry());
        let update = move || {
            let _guard = carried.enter(TimelineLane::DelayedUpdate);
            let update = |slot: &SubGroupPosition,
                          _: Range<usize>,
                          ParamSlice { param, grad, state, half }: ParamSlice<'_, '_>| {
                let role = ParameterGrouping::role(core.params[slot.param].group);
                if let Some(optimizer) = core.share_plan.grouping.optimizer(role) {
                    optimizer.update(&contexts[slot.param], param, grad, state, half);
                }
            };
            let all: Vec<usize> = (0..shadows.len()).collect();
            sweep(&*core, &mut shadows, &all, SweepMode::Update, update, |_| Ok(()))?;
            shadows.iter_mut().for_each(|shadow| shadow.grads.clear());
            Ok(shadows)
        };
        let thread = std::thread::Builder::new().name("delayed-update".into()).spawn(update);
        let failed = |error| candle_core::Error::Msg(format!("cannot start the thread of the delayed update: {error}"));
        *delayed = DelayedUpdate::Running(thread.map_err(failed)?);
        Ok(())
    }

    /// Returns whether an update with the settings `steps` is delayed.
    pub(super) fn delays_update(&self, steps: &[GroupStepSettings<'_>]) -> bool {
        let after = self.zero.offload_optimizer.as_ref().and_then(|offload| offload.delayed_update_after);
        let step = steps.first().map_or(0, |group| group.ctx.step);
        after.is_some_and(|after| step > after) && self.reason_not_to_delay().is_none()
    }

    /// Waits for the thread of the update that has begun, if one has.
    pub(in crate::zero) fn join_update(&self) -> MutexGuard<'_, DelayedUpdate> {
        let mut delayed = lock(&self.delayed);
        let thread = match std::mem::take(&mut *delayed) {
            DelayedUpdate::Running(thread) => thread,
            other => {
                *delayed = other;
                return delayed;
            }
        };
        let _span = timeline::span(timeline::EventCategory::Wait, "delayed update");
        *delayed = match thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
            Ok(shadows) => DelayedUpdate::Ready(self.take_back(shadows)),
            Err(error) => DelayedUpdate::Failed(without_backtrace(&error.to_string())),
        };
        delayed
    }

    /// Returns the states of an update to their sub-groups, and its weights to the caller.
    fn take_back(&self, shadows: Vec<SubGroup<RankCore>>) -> Vec<Option<TrackedBuffer<FlatBuffer>>> {
        let (mut shadows, mut groups) = (shadows.into_iter(), lock(&self.groups));
        let ready = groups.iter_mut().map(|group| {
            let shadow = group.class.is_trained().then(|| shadows.next()).flatten()?;
            (group.master, group.moments) = (shadow.master, shadow.moments);
            match shadow.weights {
                Some(StateStorage::Memory(weights)) => Some(weights),
                _ => unreachable!("new weights are created in memory"),
            }
        });
        ready.collect()
    }

    /// Waits for the update that has begun, if one has, before states are read or changed. Afterwards, the states are
    /// in their sub-groups. The guard gives access to the new weights that the model does not have yet.
    pub(in crate::zero) fn wait_for_update(&self) -> Result<MutexGuard<'_, DelayedUpdate>> {
        let delayed = self.join_update();
        match &*delayed {
            DelayedUpdate::Failed(why) => {
                Err(candle_core::Error::Msg(format!("a delayed update failed: {why}")).into())
            }
            _ => Ok(delayed),
        }
    }

    /// Collective: gives the model the weights of the update that has begun, if one has.
    pub fn end_update(&self) -> Result<()> {
        let mut delayed = self.wait_for_update()?;
        let DelayedUpdate::Ready(ready) = &*delayed else { return Ok(()) };
        let mut publisher = WeightPublisher::new(self.zero.allgather_bucket_size);
        let mut groups = lock(&self.groups);
        for (group, new) in groups.iter_mut().zip(ready) {
            if let Some(new) = new {
                self.put_weights(group, new.buffer())?;
                group.slots.iter().try_for_each(|slot| publisher.push(self, slot.param))?;
            }
        }
        // Until this point, readers of a weight find it among the new weights.
        *delayed = DelayedUpdate::None;
        drop((groups, delayed));
        publisher.finish(self)?;
        self.refresh()
    }

    /// Copies the current weights of a sub-group.
    fn copy_weights(&self, group: &SubGroup<RankCore>, target: &mut FlatBuffer) -> Result<()> {
        for slot in &group.slots {
            let copy = |values: FlatRef<'_>| target.slice_mut(slot.range()).copy_cast(values);
            match &group.weights {
                Some(StateStorage::Memory(weights)) => weights.buffer().read(slot.range(), copy)?,
                Some(StateStorage::File(_)) => unreachable!("an update of states in files is not delayed"),
                None => with_host_slice(&self.params[slot.param].tensor, slot.owned.clone(), copy)?,
            }
        }
        Ok(())
    }

    /// Puts new weights of a sub-group in place, piece by piece.
    fn put_weights(&self, group: &mut SubGroup<RankCore>, new: &FlatBuffer) -> Result<()> {
        let SubGroup { slots, weights, .. } = group;
        let (mut host_step, mut storage) = HostStepWeights::for_weights(self, weights, SweepMode::Update, true);
        for slot in slots.iter() {
            let piece = host_step.as_ref().map_or(usize::MAX, HostStepWeights::piece);
            for part in pieces(slot.owned.len(), piece) {
                let in_group = slot.offset + part.start..slot.offset + part.end;
                let in_tensor = slot.owned.start + part.start..slot.owned.start + part.end;
                let values = new.slice(in_group.clone());
                match (&mut host_step, &mut storage) {
                    (Some(host_step), _) => {
                        let range = WeightRange { param: slot.param, in_tensor, in_group };
                        host_step.visit(range, |weights| weights.copy_cast(values))?;
                    }
                    (None, Some(StateStorage::Memory(storage))) => storage.buffer_mut().write(in_group, values)?,
                    (None, _) => unreachable!("a model on a GPU has its weights there, or shards in memory"),
                }
            }
        }
        host_step.map_or(Ok(()), HostStepWeights::finish)
    }
}
