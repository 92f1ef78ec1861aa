//! Optimizers whose step in a parameter depends on more of it than this rank's shard.
//!
//! ```text
//!   norms (LAMB)    pass that changes nothing -> sums of squares of all ranks -> trust ratio of each parameter
//!
//!   whole (Muon)    as many parameters at a time as there are ranks, of like cost:
//!     each in turn   shard: momentum, rough direction -> all-gather -> the rank whose turn it is keeps the whole
//!     all at once    every rank finishes the direction that it keeps
//!     each in turn   finished direction -> reduce-scatter (all others add zeros) -> shard: update -> publish
//! ```
//!
//! So the work on whole parameters is divided among the ranks, and none holds more than two of them at a time. The same
//! elements are computed from the same numbers at every stage.

use super::core::Core;
use super::sub_group::{Pass, Slot, SubGroup};
use super::walk::{Part, Span, Walk, as_f32};
use crate::error::Result;
use crate::layout::{shard_len, shard_range};
use crate::memory::{Held, Kind};
use crate::optim::{Needs, Squares, Trained, Wholewise};
use crate::precision::Flat;
use candle_core::DType;
use std::cmp::Reverse;
use std::ops::Range;

/// Parameters whose squares travel in one control message.
pub(crate) const SQUARES_AT_A_TIME: usize = 4096;

/// A parameter whose direction is made of the whole.
#[derive(Clone, Copy)]
struct Item {
    group: usize,
    slot: usize,
}

/// A direction on its way, and its entry in the ledger.
struct Direction {
    values: Flat,
    _held: Held,
}

impl Core {
    /// Collective: what the learning rate is multiplied by in each parameter; nothing where no optimizer needs norms. As in
    /// [`Core::vote`], each rank sums its shard of every parameter, also where it holds the whole.
    pub(super) fn trust_ratios(&self, groups: &mut [SubGroup], trained: &[Trained<'_>]) -> Result<Vec<f64>> {
        let which: Vec<usize> =
            (0..groups.len()).filter(|g| matches!(self.needs(&groups[*g], trained), Needs::Norms(_))).collect();
        if which.is_empty() {
            return Ok(Vec::new());
        }
        let mut squares = vec![Squares::default(); self.params.len()];
        let sum = |slot: &Slot, in_slot: Range<usize>, Part { param, grad, state, .. }: Part<'_, '_>| {
            let Trained { optimizer, ctx } = self.trained(slot, trained);
            let Needs::Norms(layerwise) = optimizer.needs() else { unreachable!("the others are left out") };
            let own = self.own_part(slot);
            let (start, end) = (own.start.max(in_slot.start), own.end.min(in_slot.end));
            if start < end {
                let range = start - in_slot.start..end - in_slot.start;
                let state: Vec<&[f32]> = state.iter().map(|s| &s[range.clone()]).collect();
                let squares = &mut squares[slot.param];
                layerwise.add_squares(&ctx, &param[range.clone()], grad.slice(range), &state, squares);
            }
        };
        self.pass(groups, &which, Pass::Look, sum, |_| Ok(()))?;
        for squares in squares.chunks_mut(SQUARES_AT_A_TIME) {
            let own = squares.iter().flat_map(|s| [s.weights, s.update]).collect();
            let ranks = self.comm.gather_f64(own).wait()?;
            for (i, squares) in squares.iter_mut().enumerate() {
                let sum = |value: usize| ranks.iter().map(|rank| rank[2 * i + value]).sum();
                *squares = Squares { weights: sum(0), update: sum(1) };
            }
        }
        let ratio = |(param, squares): (usize, Squares)| match trained[self.params[param].group].optimizer.needs() {
            Needs::Norms(layerwise) => layerwise.trust_ratio(squares),
            _ => 1.0,
        };
        Ok(squares.into_iter().enumerate().map(ratio).collect())
    }

    /// Collective: updates the parameters whose optimizer needs whole ones. `complete` learns of every slot that is up to
    /// date.
    pub(super) fn update_whole(
        &self,
        groups: &mut [SubGroup],
        trained: &[Trained<'_>],
        mut complete: impl FnMut(&Slot) -> Result<()>,
    ) -> Result<()> {
        let mut items: Vec<(Item, &dyn Wholewise, u128)> = Vec::new();
        for (group, sub_group) in groups.iter().enumerate() {
            let Needs::Whole(wholewise) = self.needs(sub_group, trained) else { continue };
            let slots = sub_group.slots.iter().enumerate();
            items.extend(slots.map(|(slot, Slot { param, .. })| {
                (Item { group, slot }, wholewise, wholewise.cost(self.params[*param].shape.dims()))
            }));
        }
        // Ranks wait for the one that works longest.
        items.sort_by_key(|(.., cost)| Reverse(*cost));
        let world = self.comm.size();
        let span = |(item, ..): &(Item, &dyn Wholewise, u128), pass| Span::of_slot(groups, item.group, item.slot, pass);
        let spans: Vec<[Vec<Span>; 2]> = items
            .chunks(world)
            .map(|batch| [Pass::Moments, Pass::Weights].map(|pass| batch.iter().map(|i| span(i, pass)).collect()))
            .collect();
        let mut walk = Walk::new(self, groups, &spans.iter().flatten().flatten().cloned().collect::<Vec<_>>());
        for (batch, [momentum, update]) in items.chunks(world).zip(&spans) {
            let mut kept = None;
            for (owner, ((item, wholewise, _), span)) in batch.iter().zip(momentum).enumerate() {
                let whole = self.rough_direction(groups, &mut walk, *item, span, trained)?;
                if owner == self.comm.rank() {
                    kept = Some((whole, *wholewise));
                }
            }
            let mut finished = kept.map(|(mut whole, wholewise)| {
                let shape = self.params[self.slot(groups, batch[self.comm.rank()].0).param].shape.dims();
                let _workspace = self.ledger.hold(Kind::Buckets, wholewise.workspace(shape));
                wholewise.finish(as_f32(whole.values.as_mut()), shape);
                whole
            });
            for (owner, ((item, ..), span)) in batch.iter().zip(update).enumerate() {
                let own = if owner == self.comm.rank() { finished.take() } else { None };
                let param = self.slot(groups, *item).param;
                let direction = self.own_direction(param, own)?;
                let mut apply = |slot: &Slot, in_slot: Range<usize>, Part { param, half, .. }: Part<'_, '_>| {
                    let Trained { optimizer, ctx } = self.trained(slot, trained);
                    optimizer.update(&ctx, param, direction.values.slice(in_slot), &mut [], half);
                };
                walk.visit(groups, span, &mut apply, |_| Ok(()))?;
                complete(self.slot(groups, *item))?;
            }
        }
        walk.finish()
    }

    fn slot<'a>(&self, groups: &'a [SubGroup], Item { group, slot }: Item) -> &'a Slot {
        &groups[group].slots[slot]
    }

    /// Collective: updates the momentum of a slot, and gives the rough direction of the whole parameter.
    fn rough_direction(
        &self,
        groups: &mut [SubGroup],
        walk: &mut Walk<'_>,
        item: Item,
        span: &Span,
        trained: &[Trained<'_>],
    ) -> Result<Direction> {
        let world = self.comm.size();
        let Slot { param, owned, .. } = self.slot(groups, item).clone();
        let numel = self.params[param].numel;
        let is_sharded = self.placement.optim.is_sharded();
        // Room for the shards of all ranks, padding included: the others' arrive in the same buffer.
        let room = shard_len(numel, world) * world;
        let mut values = Flat::with_capacity(DType::F32, room);
        let _held = self.ledger.hold(Kind::Buckets, values.capacity_in_bytes());
        values.extend_zeros(owned.len());
        let mut momentum = |slot: &Slot, in_slot: Range<usize>, Part { grad, state, .. }: Part<'_, '_>| {
            let Trained { optimizer, ctx } = self.trained(slot, trained);
            let Needs::Whole(wholewise) = optimizer.needs() else { unreachable!("the others are left out") };
            wholewise.momentum(&ctx, grad, state, as_f32(values.slice_mut(in_slot)));
        };
        walk.visit(groups, span, &mut momentum, |_| Ok(()))?;
        if is_sharded {
            values.extend_zeros(shard_len(numel, world) - owned.len());
            values = self.comm.all_gather(values, self.tag(&[param])).wait()?;
            values.truncate(numel);
        }
        Ok(Direction { values, _held })
    }

    /// Collective: what this rank owns of a finished direction, which one of them has: `whole`.
    fn own_direction(&self, param: usize, whole: Option<Direction>) -> Result<Direction> {
        let (world, rank, numel) = (self.comm.size(), self.comm.rank(), self.params[param].numel);
        let padded = shard_len(numel, world) * world;
        let mut own = whole.unwrap_or_else(|| {
            let values = Flat::zeros(DType::F32, padded);
            Direction { _held: self.ledger.hold(Kind::Buckets, values.capacity_in_bytes()), values }
        });
        if self.placement.optim.is_sharded() {
            own.values.extend_zeros(padded - own.values.len());
            own.values = self.comm.reduce_scatter(own.values, self.tag(&[param])).wait()?;
            own.values.truncate(shard_range(numel, world, rank).len());
        } else {
            own.values.truncate(numel);
            own.values = self.comm.all_reduce(own.values, self.tag(&[param])).wait()?;
        }
        Ok(own)
    }
}
