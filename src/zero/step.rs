//! The sharded optimizer step.
//!
//! ```text
//!   vote (norm over all ranks, overflow) -> per sub-group: unscale, clip, update -> publish (all-gather; stages 1, 2)
//! ```

use super::core::Core;
use super::parcel::Parcel;
use super::sub_group::{Slot, SubGroup};
use crate::comm::Pending;
use crate::error::Result;
use crate::layout::{BucketRule, PACKED_BELOW, shard_len, shard_range};
use crate::memory::{Held, Kind};
use crate::optim::{Optimizer, StepContext};
use crate::param::{ParamId, lock, residency};
use crate::precision::{Flat, FlatMut, FlatRef, has_non_finite, sum_of_squares};
use candle_core::DType;
use std::collections::VecDeque;

/// Publications under way before the oldest is waited for.
const IN_FLIGHT: usize = 2;

/// What all ranks agree on before a step.
pub(crate) struct Vote {
    /// Global L2 norm of the gradients as they are, loss scale included; not finite if any gradient is not.
    pub norm: f64,
    /// Ranks that saw something not finite, in their loss or in their share of the gradients.
    pub overflowed: Vec<usize>,
}

impl Core {
    /// Collective: norm and overflow over all ranks. Each rank looks at its shard of every gradient, parameter by
    /// parameter, also where it holds the whole; so the sum is formed in the same order at every stage.
    pub fn vote(&self, loss_is_finite: bool, accumulate: DType) -> Result<Vote> {
        let mut sum = 0f64;
        for group in lock(&self.groups).iter_mut() {
            for slot in 0..group.slots.len() {
                group.grads(slot, &self.ledger, accumulate);
                sum += sum_of_squares(self.own_gradient(group, slot));
            }
        }
        let overflow = !loss_is_finite || !sum.is_finite();
        let votes = self.comm.gather_f64(vec![sum, f64::from(u8::from(overflow))]).wait()?;
        Ok(Vote {
            norm: votes.iter().map(|v| v[0]).sum::<f64>().sqrt(),
            overflowed: votes.iter().enumerate().filter(|(_, v)| v[1] != 0.0).map(|(r, _)| r).collect(),
        })
    }

    /// The first parameter whose gradient is not finite in this rank's shard.
    pub fn non_finite_gradient(&self) -> Option<&str> {
        let groups = lock(&self.groups);
        let mut slots = groups.iter().flat_map(|g| (0..g.slots.len()).map(move |s| (g, s)));
        slots
            .find(|(group, slot)| has_non_finite(self.own_gradient(group, *slot)))
            .map(|(group, slot)| self.params[group.slots[slot].param].name.as_str())
    }

    /// This rank's shard of a gradient.
    fn own_gradient<'g>(&self, group: &'g SubGroup, slot: usize) -> FlatRef<'g> {
        let Slot { param, owned, .. } = &group.slots[slot];
        let shard = shard_range(self.params[*param].numel, self.comm.size(), self.comm.rank());
        let grads = group.grads[slot].as_ref().expect("gradients were allocated by the vote");
        grads.slice(shard.start - owned.start..shard.end - owned.start)
    }

    /// Updates this rank's share, sub-group by sub-group, and publishes it where parameters are replicated.
    pub fn update(&self, optimizer: &dyn Optimizer, ctx: &StepContext) -> Result<()> {
        let publishes = self.placement.optim.is_sharded() && !self.placement.params.is_sharded();
        let mut publisher = Publisher::new(self.zero.allgather_bucket_size);
        let mut groups = lock(&self.groups);
        for group in groups.iter_mut() {
            let SubGroup { slots, weights, master, grads, moments, .. } = group;
            for (slot, grads) in slots.iter().zip(grads) {
                let range = slot.range();
                let grad = grads.as_ref().expect("gradients were allocated by the vote").slice(0..range.len());
                let mut state: Vec<&mut [f32]> =
                    moments.iter_mut().map(|m| as_f32(m.slice_mut(range.clone()))).collect();
                let master = master.as_mut().map(|m| as_f32(m.slice_mut(range.clone())));
                let apply = |weights: FlatMut<'_>| match (master, weights) {
                    (Some(master), half) => optimizer.update(ctx, master, grad, &mut state, Some(half)),
                    (None, FlatMut::F32(w)) => optimizer.update(ctx, w, grad, &mut state, None),
                    (None, _) => unreachable!("16-bit parameters have master weights"),
                };
                match weights {
                    Some(weights) => apply(weights.slice_mut(range)),
                    None => residency::with_values(&self.params[slot.param].tensor, |whole| {
                        apply(whole.slice_mut(slot.owned.clone()));
                    })?,
                }
                if publishes {
                    publisher.push(self, slot.param)?;
                }
            }
        }
        drop(groups);
        publisher.finish(self)
    }
}

fn as_f32(flat: FlatMut<'_>) -> &mut [f32] {
    match flat {
        FlatMut::F32(v) => v,
        _ => unreachable!("master weights and moments are f32"),
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
        let parcel = Parcel::new(params, &core.params, world);
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
