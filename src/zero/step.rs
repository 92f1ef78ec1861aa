//! The sharded optimizer step.
//!
//! ```text
//!   vote (norm over all ranks, overflow) -> per sub-group: unscale, clip, update -> publish (all-gather; stages 1, 2)
//!                                           (of what is in files: window by window)
//!
//!   LAMB, between vote and update: a pass that changes nothing, and the norms of every parameter over all ranks
//!   Muon, after the update of all others: whole matrices, each on one rank (`whole.rs`)
//! ```

use super::core::Core;
use super::parcel::Parcel;
use super::sub_group::{GradShare, Pass, Slot, SubGroup};
use super::walk::Part;
use crate::comm::{Pending, Wire};
use crate::error::Result;
use crate::layout::{BucketRule, PACKED_BELOW, shard_len, shard_range};
use crate::memory::{Held, Kind};
use crate::offload::Transfer;
use crate::optim::{Needs, StepContext, Trained};
use crate::param::{ParamId, lock, residency};
use crate::precision::{Flat, sum_of_squares};
use crate::timeline;
use std::collections::VecDeque;
use std::ops::Range;

/// Publications under way before the oldest is waited for.
pub(crate) const IN_FLIGHT: usize = 2;

/// What all ranks agree on before a step.
pub(crate) struct Vote {
    /// Global L2 norm of the gradients as they are, loss scale included; not finite if any gradient is not.
    pub norm: f64,
    /// Ranks that saw something not finite, in their loss or in their share of the gradients.
    pub overflowed: Vec<usize>,
    /// Mean of the losses.
    pub loss: f64,
}

impl Vote {
    /// Whether any rank saw something not finite.
    pub fn has_overflow(&self) -> bool {
        !self.overflowed.is_empty()
    }
}

impl Core {
    /// Collective: norm and overflow over all ranks. Each rank looks at its shard of every gradient, parameter by
    /// parameter, also where it holds the whole; so the sum is formed in the same order at every stage.
    pub fn vote(&self, loss: f64, loss_is_finite: bool) -> Result<Vote> {
        let accumulate = lock(&self.gradients).accumulate_dtype();
        let _span = timeline::span(timeline::Kind::Optimizer, "vote");
        let mut sum = 0f64;
        for group in lock(&self.groups).iter_mut() {
            for slot in 0..group.slots.len() {
                if group.grad_file.is_none() && matches!(group.grads[slot], GradShare::Absent) {
                    group.grads[slot] = GradShare::Memory(group.zeroed_grads(slot, &self.ledger, accumulate));
                }
                if let GradShare::File { writing, .. } = &mut group.grads[slot] {
                    // A disk that fails is noticed before any weight has changed.
                    writing.take().map_or(Ok(()), Transfer::written)?;
                }
                sum += self.squares(group, slot);
            }
        }
        let overflow = !loss_is_finite || !sum.is_finite();
        let votes = self.comm.gather_f64(vec![sum, f64::from(u8::from(overflow)), loss]).wait()?;
        Ok(Vote {
            norm: votes.iter().map(|v| v[0]).sum::<f64>().sqrt(),
            overflowed: votes.iter().enumerate().filter(|(_, v)| v[1] != 0.0).map(|(r, _)| r).collect(),
            loss: votes.iter().map(|v| v[2]).sum::<f64>() / votes.len() as f64,
        })
    }

    /// The first parameter whose gradient is not finite in this rank's shard.
    pub fn non_finite_gradient(&self) -> Option<&str> {
        let groups = lock(&self.groups);
        let mut slots = groups.iter().flat_map(|g| (0..g.slots.len()).map(move |s| (g, s)));
        // A sum of squares is not finite exactly where an element is not.
        slots
            .find(|(group, slot)| !self.squares(group, *slot).is_finite())
            .map(|(group, slot)| self.params[group.slots[slot].param].name.as_str())
    }

    /// Sum of the squares of this rank's shard of a gradient.
    fn squares(&self, group: &SubGroup, slot: usize) -> f64 {
        match &group.grads[slot] {
            GradShare::Absent => 0.0,
            GradShare::Memory(grads) => sum_of_squares(grads.slice(self.own_part(&group.slots[slot]))),
            GradShare::File { squares, .. } => *squares,
        }
    }

    /// This rank's shard of a parameter, counted from the first element that it owns.
    pub fn own_part(&self, Slot { param, owned, .. }: &Slot) -> Range<usize> {
        let shard = shard_range(self.params[*param].numel, self.comm.size(), self.comm.rank());
        shard.start - owned.start..shard.end - owned.start
    }

    /// Updates this rank's share, sub-group by sub-group, and publishes it where parameters are replicated. `trained` says
    /// with what, by parameter group.
    pub fn update(&self, trained: &[Trained<'_>]) -> Result<()> {
        let publishes = self.placement.optim.is_sharded() && !self.placement.params.is_sharded();
        let mut publisher = Publisher::new(self.zero.allgather_bucket_size);
        let mut publish = |slot: &Slot| if publishes { publisher.push(self, slot.param) } else { Ok(()) };
        let mut groups = lock(&self.groups);
        let ratios = self.trust_ratios(&mut groups, trained)?;
        let by_elements: Vec<usize> =
            (0..groups.len()).filter(|g| !matches!(self.needs(&groups[*g], trained), Needs::Whole(_))).collect();
        let update = |slot: &Slot, _: Range<usize>, Part { param, grad, state, half }: Part<'_, '_>| {
            let Trained { optimizer, ctx } = self.trained(slot, trained);
            let ratio = ratios.get(slot.param).copied().unwrap_or(1.0);
            optimizer.update(&StepContext { lr: ctx.lr * ratio, ..ctx }, param, grad, state, half);
        };
        self.pass(&mut groups, &by_elements, Pass::Update, update, &mut publish)?;
        self.update_whole(&mut groups, trained, &mut publish)?;
        drop(groups);
        let _span = timeline::span(timeline::Kind::Optimizer, "publish");
        publisher.finish(self)
    }

    /// What a slot's parameter is trained with.
    pub(super) fn trained<'a>(&self, slot: &Slot, trained: &[Trained<'a>]) -> Trained<'a> {
        trained[self.params[slot.param].group]
    }

    /// What the optimizer of a sub-group needs of its parameters.
    pub(super) fn needs<'a>(&self, group: &SubGroup, trained: &[Trained<'a>]) -> Needs<'a> {
        group.slots.first().map_or(Needs::Elements, |slot| self.trained(slot, trained).optimizer.needs())
    }
}

/// Brings every rank's updated shards to all ranks, `allgather_bucket_size` elements at a time.
struct Publisher {
    rule: BucketRule,
    batch: Vec<ParamId>,
    in_flight: VecDeque<(Parcel, Pending<Flat>, Held)>,
}

impl Publisher {
    fn new(bucket_size: usize) -> Self {
        Self { rule: BucketRule::new(bucket_size), batch: Vec::new(), in_flight: VecDeque::new() }
    }

    /// This rank's shard of a parameter is up to date.
    fn push(&mut self, core: &Core, param: ParamId) -> Result<()> {
        if core.params[param].numel >= PACKED_BELOW {
            return self.launch(core, vec![param]);
        }
        if self.rule.push(core.params[param].numel) {
            let batch = std::mem::take(&mut self.batch);
            self.launch(core, batch)?;
        }
        self.batch.push(param);
        Ok(())
    }

    fn finish(mut self, core: &Core) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        if !batch.is_empty() {
            self.launch(core, batch)?;
        }
        self.install(core, 0)
    }

    fn launch(&mut self, core: &Core, params: Vec<ParamId>) -> Result<()> {
        let (world, rank) = (core.comm.size(), core.comm.rank());
        let parcel = Parcel::new(params, &core.params, world, Wire::Exact);
        let _about = timeline::about(|| core.names(&parcel.params));
        // Room for the chunks of all ranks: the others' arrive in the same buffer.
        let mut chunk = Flat::with_capacity(core.dtype, parcel.chunk * world);
        for p in &parcel.params {
            let numel = core.params[*p].numel;
            let shard = shard_range(numel, world, rank);
            let padding = shard_len(numel, world) - shard.len();
            residency::with_view(&core.params[*p].tensor, |whole| chunk.extend_cast(whole.slice(shard)))?;
            chunk.extend_zeros(padding);
        }
        let held = core.ledger.hold(Kind::Buckets, chunk.size_in_bytes() * world);
        let pending = core.comm.all_gather(chunk, core.tag(&parcel.params));
        self.in_flight.push_back((parcel, pending, held));
        self.install(core, IN_FLIGHT - 1)
    }

    /// Waits for the oldest publications until at most `left` are under way, and puts what has come into the tensors.
    fn install(&mut self, core: &Core, left: usize) -> Result<()> {
        while self.in_flight.len() > left {
            let Some((parcel, pending, held)) = self.in_flight.pop_front() else { break };
            let chunks = pending.wait()?;
            drop(held);
            parcel.unpack(core, chunks, |param, whole| {
                // In the ledger nothing changes: as many elements as before, in another buffer.
                Ok(residency::put(&param.tensor, whole)?)
            })?;
        }
        Ok(())
    }
}
