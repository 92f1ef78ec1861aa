//! The delayed update of parameters (ZeRO-Offload, arXiv 2101.06840, section 5.2): the optimizer works on the host while the GPU
//! computes the next step, with weights that are one update old.
//!
//! ```text
//!   step t     update t - 1 is waited for, its weights go to the GPU and to all ranks | vote on gradients t | update t begins
//!   thread                                                                                                  | update t ...
//!   training                                                                                                | forward, backward t + 1
//! ```
//!
//! The thread has the states and the gradients, and makes new weights in memory of its own: what computes and what is gathered keeps
//! the old ones. States are back as soon as something reads them; weights at the next step, or where all ranks read or change state.

use super::away::{Away, Place};
use super::core::Core;
use super::publish::Publisher;
use super::sub_group::{Delayed, GradShare, Home, Pass, Slot, SubGroup};
use super::walk::{Part, pass};
use crate::error::Result;
use crate::memory::{Kind, Tracked};
use crate::optim::{GroupStep, Role, StepContext};
use crate::precision::{Elements, FlatRef};
use crate::tensor::flat_buffer::FlatBuffer;
use crate::tensor::part::with_part;
use crate::timeline::{self, Lane};
use crate::util::{lock, pieces};
use std::ops::Range;
use std::sync::Arc;

impl Core {
    /// Begins an update; `contexts` are those of each parameter.
    pub(super) fn begin_update(self: &Arc<Self>, contexts: Vec<StepContext>) -> Result<()> {
        let mut delayed = lock(&self.delayed);
        assert!(matches!(*delayed, Delayed::None), "an update ends before the next one begins");
        let mut shadows = Vec::new();
        for group in lock(&self.groups).iter_mut().filter(|group| group.class.is_trained()) {
            let dtype = group.class.weights.dtype(self.dtype);
            let mut weights = FlatBuffer::zeros(&FlatBuffer::host(), dtype, group.len)?;
            if group.master.is_none() {
                self.copy_weights(group, &mut weights)?;
            }
            let absent = group.slots.iter().map(|_| GradShare::Absent).collect();
            shadows.push(SubGroup {
                class: group.class,
                slots: group.slots.clone(),
                len: group.len,
                weights: Some(Home::Memory(Tracked::new(&self.ledger, Kind::Staging, weights))),
                master: group.master.take(),
                grads: std::mem::replace(&mut group.grads, absent),
                grad_file: None,
                moments: std::mem::take(&mut group.moments),
            });
        }
        let (core, carried) = (self.clone(), timeline::carry());
        let update = move || {
            let _here = carried.enter(Lane::DelayedUpdate);
            let optimizer = core.share_plan.grouping.optimizer(Role::Main);
            let update = |slot: &Slot, _: Range<usize>, Part { param, grad, state, half }: Part<'_, '_>| {
                if let Some(optimizer) = optimizer {
                    optimizer.update(&contexts[slot.param], param, grad, state, half);
                }
            };
            let all: Vec<usize> = (0..shadows.len()).collect();
            pass(&*core, &mut shadows, &all, Pass::Update, update, |_| Ok(()))?;
            Ok(shadows)
        };
        let thread = std::thread::Builder::new().name("delayed-update".into()).spawn(update);
        let failed = |error| candle_core::Error::Msg(format!("no thread for the delayed update: {error}"));
        *delayed = Delayed::Running(thread.map_err(failed)?);
        Ok(())
    }

    /// Whether this update is delayed.
    pub(super) fn delays_update(&self, steps: &[GroupStep<'_>]) -> bool {
        let after = self.zero.offload_optimizer.as_ref().and_then(|offload| offload.delayed_update_after);
        let step = steps.first().map_or(0, |group| group.ctx.step);
        after.is_some_and(|after| step > after) && self.hindrance_to_delay().is_none()
    }

    /// Waits for the update that has begun, if one has: its states are where they belong then.
    pub(super) fn land_states(&self) -> Result<()> {
        let mut delayed = lock(&self.delayed);
        let thread = match std::mem::take(&mut *delayed) {
            Delayed::Running(thread) => thread,
            other => {
                *delayed = other;
                return Ok(());
            }
        };
        let _span = timeline::span(timeline::Kind::Wait, "delayed update");
        let shadows = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let mut ready = Vec::new();
        let mut groups = lock(&self.groups);
        for (group, shadow) in groups.iter_mut().filter(|group| group.class.is_trained()).zip(shadows) {
            (group.master, group.moments) = (shadow.master, shadow.moments);
            match shadow.weights {
                Some(Home::Memory(weights)) => ready.push(weights),
                _ => unreachable!("new weights are made in memory"),
            }
        }
        *delayed = Delayed::Ready(ready);
        Ok(())
    }

    /// Collective: the weights of the update that has begun, if one has, are those of the model.
    pub fn end_update(&self) -> Result<()> {
        self.land_states()?;
        let Delayed::Ready(ready) = std::mem::take(&mut *lock(&self.delayed)) else { return Ok(()) };
        let mut publisher = Publisher::new(self.zero.allgather_bucket_size);
        let mut groups = lock(&self.groups);
        for (group, ready) in groups.iter_mut().filter(|group| group.class.is_trained()).zip(ready) {
            self.put_weights(group, ready.buffer())?;
            group.slots.iter().try_for_each(|slot| publisher.push(self, slot.param))?;
        }
        drop(groups);
        publisher.finish(self)?;
        self.refresh()
    }

    /// The weights of a sub-group as they are.
    fn copy_weights(&self, group: &SubGroup, to: &mut FlatBuffer) -> Result<()> {
        for slot in &group.slots {
            let own = |values: FlatRef<'_>| to.slice_mut(slot.range()).copy_cast(values);
            match &group.weights {
                Some(Home::Memory(weights)) => weights.buffer().read(slot.range(), own)?,
                Some(Home::File(_)) => unreachable!("an update of what lies in files is not delayed"),
                None => with_part(&self.params[slot.param].tensor, slot.owned.clone(), own)?,
            }
        }
        Ok(())
    }

    /// Puts new weights of a sub-group in their place, piece by piece.
    fn put_weights(&self, group: &mut SubGroup, new: &FlatBuffer) -> Result<()> {
        let SubGroup { slots, weights, .. } = group;
        let (mut away, mut here) = Away::of(self, weights, Pass::Update, true);
        for slot in slots.iter() {
            let piece = away.as_ref().map_or(usize::MAX, Away::piece);
            for part in pieces(slot.owned.len(), piece) {
                let in_group = slot.at + part.start..slot.at + part.end;
                let in_tensor = slot.owned.start + part.start..slot.owned.start + part.end;
                let values = new.slice(in_group.clone());
                match (&mut away, &mut here) {
                    (Some(away), _) => {
                        let place = Place { param: slot.param, in_tensor, in_group };
                        away.visit(place, |to| to.copy_cast(values))?;
                    }
                    (None, Some(Home::Memory(home))) => home.buffer_mut().write(in_group, values)?,
                    (None, _) => unreachable!("a model on a GPU has its weights there, or shards in memory"),
                }
            }
        }
        away.map_or(Ok(()), Away::finish)
    }
}
