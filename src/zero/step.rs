//! The sharded optimizer step.
//!
//! ```text
//!   vote (norm over all ranks, overflow) -> per sub-group: unscale, clip, update -> publish (all-gather; stages 1, 2)
//!                                           (of what is in files: window by window)
//!
//!   LAMB, between vote and update: a pass that changes nothing, and the norms of every parameter over all ranks
//! ```

use super::core::Core;
use super::parcel::Parcel;
use super::sub_group::{GradShare, Slot, SubGroup};
use crate::comm::Pending;
use crate::error::Result;
use crate::layout::{BucketRule, PACKED_BELOW, shard_len, shard_range};
use crate::memory::{Held, Kind};
use crate::offload::{Pipeline, Plan, Stream, Transfer, Window, windows};
use crate::optim::{Layerwise, Optimizer, Squares, StepContext};
use crate::param::{ParamId, lock, residency};
use crate::precision::{Flat, FlatMut, FlatRef, sum_of_squares};
use candle_core::DType;
use std::collections::VecDeque;
use std::ops::Range;

/// Publications under way before the oldest is waited for.
pub(crate) const IN_FLIGHT: usize = 2;

/// Parameters whose squares travel in one control message.
pub(crate) const SQUARES_AT_A_TIME: usize = 4096;

/// What all ranks agree on before a step.
pub(crate) struct Vote {
    /// Global L2 norm of the gradients as they are, loss scale included; not finite if any gradient is not.
    pub norm: f64,
    /// Ranks that saw something not finite, in their loss or in their share of the gradients.
    pub overflowed: Vec<usize>,
}

/// The part of a parameter that a pass works on at a time.
struct Part<'a, 's> {
    /// Weights in f32.
    param: &'a mut [f32],
    grad: FlatRef<'a>,
    state: &'a mut [&'s mut [f32]],
    /// Weights in the model's dtype, where `param` holds the master weights.
    half: Option<FlatMut<'a>>,
}

impl Core {
    /// Collective: norm and overflow over all ranks. Each rank looks at its shard of every gradient, parameter by
    /// parameter, also where it holds the whole; so the sum is formed in the same order at every stage.
    pub fn vote(&self, loss_is_finite: bool, accumulate: DType) -> Result<Vote> {
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

    /// Updates this rank's share, sub-group by sub-group, and publishes it where parameters are replicated.
    pub fn update(&self, optimizer: &dyn Optimizer, ctx: &StepContext) -> Result<()> {
        let publishes = self.placement.optim.is_sharded() && !self.placement.params.is_sharded();
        let mut publisher = Publisher::new(self.zero.allgather_bucket_size);
        let mut groups = lock(&self.groups);
        let ratios = match optimizer.layerwise() {
            Some(layerwise) => self.trust_ratios(&mut groups, layerwise, ctx)?,
            None => Vec::new(),
        };
        let update = |slot: &Slot, _: Range<usize>, Part { param, grad, state, half }: Part<'_, '_>| {
            let ratio = ratios.get(slot.param).copied().unwrap_or(1.0);
            optimizer.update(&StepContext { lr: ctx.lr * ratio, ..*ctx }, param, grad, state, half);
        };
        let publish = |slot: &Slot| if publishes { publisher.push(self, slot.param) } else { Ok(()) };
        self.pass(&mut groups, true, update, publish)?;
        drop(groups);
        publisher.finish(self)
    }

    /// Collective: what the learning rate is multiplied by in each parameter. As in [`Core::vote`], each rank sums its
    /// shard of every parameter, also where it holds the whole.
    fn trust_ratios(&self, groups: &mut [SubGroup], layerwise: &dyn Layerwise, ctx: &StepContext) -> Result<Vec<f64>> {
        let mut squares = vec![Squares::default(); self.params.len()];
        let sum = |slot: &Slot, in_slot: Range<usize>, Part { param, grad, state, .. }: Part<'_, '_>| {
            let own = self.own_part(slot);
            let (start, end) = (own.start.max(in_slot.start), own.end.min(in_slot.end));
            if start < end {
                let range = start - in_slot.start..end - in_slot.start;
                let state: Vec<&[f32]> = state.iter().map(|s| &s[range.clone()]).collect();
                let squares = &mut squares[slot.param];
                layerwise.add_squares(ctx, &param[range.clone()], grad.slice(range), &state, squares);
            }
        };
        self.pass(groups, false, sum, |_| Ok(()))?;
        for squares in squares.chunks_mut(SQUARES_AT_A_TIME) {
            let own = squares.iter().flat_map(|s| [s.weights, s.update]).collect();
            let ranks = self.comm.gather_f64(own).wait()?;
            for (i, squares) in squares.iter_mut().enumerate() {
                let sum = |value: usize| ranks.iter().map(|rank| rank[2 * i + value]).sum();
                *squares = Squares { weights: sum(0), update: sum(1) };
            }
        }
        Ok(squares.into_iter().map(|s| layerwise.trust_ratio(s)).collect())
    }

    /// Calls `work` with all parts of this rank's share, in order, with the elements of the slot that each is, and
    /// `complete` when all parts of a slot have been worked on. Of what lies in files, one window after the other is in
    /// memory, and goes back if the pass `changes` it.
    fn pass(
        &self,
        groups: &mut [SubGroup],
        changes: bool,
        mut work: impl FnMut(&Slot, Range<usize>, Part<'_, '_>),
        mut complete: impl FnMut(&Slot) -> Result<()>,
    ) -> Result<()> {
        let (window_len, mut pipeline) = self.pipeline(groups, changes);
        for group in groups.iter_mut() {
            let mut completed = 0;
            let in_files = group.has_files() && group.len > 0;
            let ranges: Vec<_> = if in_files {
                windows(group.len, window_len).collect()
            } else {
                std::iter::once(0..group.len).collect()
            };
            for range in ranges {
                let mut window = match &mut pipeline {
                    Some(pipeline) if in_files => Some(pipeline.next()?),
                    _ => None,
                };
                self.parts(group, &range, window.as_mut(), &mut work)?;
                if let (Some(pipeline), Some(window)) = (&mut pipeline, window) {
                    pipeline.done(window)?;
                }
                for slot in group.slots[completed..].iter().take_while(|s| s.range().end <= range.end) {
                    complete(slot)?;
                    completed += 1;
                }
            }
        }
        pipeline.map_or(Ok(()), Pipeline::finish)
    }

    /// The windows of all sub-groups that have something in files, and the length of one.
    fn pipeline(&self, groups: &[SubGroup], changes: bool) -> (usize, Option<Pipeline<'_>>) {
        let Some(offload) = &self.offload else { return (usize::MAX, None) };
        let largest = groups.iter().map(|g| g.len).max().unwrap_or(0);
        let streams = groups.iter().map(|g| g.streams().len()).max().unwrap_or(0);
        let window_len = offload.window_len(largest, streams);
        let plan = groups.iter().flat_map(|group| {
            let streams: Vec<_> =
                group.streams().into_iter().map(|s| Stream { writes: s.writes && changes, ..s }).collect();
            let ranges = windows(if streams.is_empty() { 0 } else { group.len }, window_len);
            ranges.map(move |range| Plan { range, streams: streams.clone() })
        });
        (window_len, Some(offload.pipeline(&self.ledger, plan.collect())))
    }

    /// Calls `work` with the parts of a sub-group that lie in its elements `range`.
    fn parts(
        &self,
        group: &mut SubGroup,
        range: &Range<usize>,
        mut window: Option<&mut Window>,
        work: &mut impl FnMut(&Slot, Range<usize>, Part<'_, '_>),
    ) -> Result<()> {
        let SubGroup { slots, weights, master, grads, moments, .. } = group;
        for (slot, grads) in slots.iter().zip(grads) {
            let part = slot.at.max(range.start)..slot.range().end.min(range.end);
            if part.is_empty() {
                continue;
            }
            let mut staged = window.as_mut().map_or([].iter_mut(), |w| w.staged.iter_mut());
            let weights = weights.as_mut().map(|home| home.part(&mut staged, part.clone()));
            let master = master.as_mut().map(|home| as_f32(home.part(&mut staged, part.clone())));
            let mut state: Vec<&mut [f32]> =
                moments.iter_mut().map(|home| as_f32(home.part(&mut staged, part.clone()))).collect();
            let in_slot = part.start - slot.at..part.end - slot.at;
            let mut from_file;
            let grad = match grads {
                GradShare::Memory(grads) => grads.slice(in_slot.clone()),
                share => {
                    from_file = staged.next().expect("gradients lie in the window").part(part.clone());
                    if matches!(share, GradShare::Absent) {
                        from_file.fill_zero();
                    }
                    from_file.as_ref()
                }
            };
            let state = &mut state;
            let work = |weights: FlatMut<'_>| {
                let (param, half) = match (master, weights) {
                    (Some(master), half) => (master, Some(half)),
                    (None, FlatMut::F32(weights)) => (weights, None),
                    (None, _) => unreachable!("16-bit parameters have master weights"),
                };
                work(slot, in_slot.clone(), Part { param, grad, state, half });
            };
            match weights {
                Some(weights) => work(weights),
                None => residency::with_values(&self.params[slot.param].tensor, |whole| {
                    let start = slot.owned.start + in_slot.start;
                    work(whole.slice_mut(start..start + in_slot.len()));
                })?,
            }
        }
        Ok(())
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
