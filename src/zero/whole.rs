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

use super::rank::Rank;
use super::recipe::{Recipe, needs};
use super::sub_group::{Pass, Slot, SubGroup};
use super::travel::Collective;
use super::walk::{Carrier, Part, Span, Walk, as_f32, pass};
use crate::comm::WireFormat;
use crate::error::Result;
use crate::memory::{Held, Kind};
use crate::optim::{GroupStep, Needs, Squares, Wholewise};
use crate::precision::ElementBuffer;
use candle_core::DType;
use std::cmp::Reverse;
use std::ops::Range;

/// Parameters whose squares travel in one control message.
const SQUARES_AT_A_TIME: usize = 4096;

/// A parameter whose direction is made of the whole.
#[derive(Clone, Copy)]
struct Item {
    group: usize,
    slot: usize,
}

/// A direction on its way, and its entry in the ledger.
struct Direction<B> {
    values: B,
    _held: Held,
}

/// Collective: what the learning rate is multiplied by in each parameter; nothing where no optimizer needs norms. As in
/// a vote, each rank sums its piece of every parameter, also where it holds more.
pub(super) fn trust_ratios<C: Carrier>(core: &C, groups: &mut [SubGroup<C>], recipe: &Recipe<'_>) -> Result<Vec<f64>> {
    let which: Vec<usize> =
        (0..groups.len()).filter(|g| matches!(needs(&groups[*g], recipe), Some(Needs::Norms(_)))).collect();
    if which.is_empty() {
        return Ok(Vec::new());
    }
    let mut squares = vec![Squares::default(); core.params().len()];
    let sum = |slot: &Slot, in_slot: Range<usize>, Part { param, grad, state, .. }: Part<'_, '_>| {
        let GroupStep { optimizer, ctx } = recipe(slot.param);
        let Needs::Norms(layerwise) = optimizer.needs() else { unreachable!("the others are left out") };
        let (start, end) = (slot.piece.start.max(in_slot.start), slot.piece.end.min(in_slot.end));
        if start < end {
            let range = start - in_slot.start..end - in_slot.start;
            let state: Vec<&[f32]> = state.iter().map(|s| &s[range.clone()]).collect();
            let squares = &mut squares[slot.param];
            layerwise.add_squares(&ctx, &param[range.clone()], grad.slice(range), &state, squares);
        }
    };
    pass(core, groups, &which, Pass::Look, sum, |_| Ok(()))?;
    for squares in squares.chunks_mut(SQUARES_AT_A_TIME) {
        let own = squares.iter().flat_map(|s| [s.weights, s.update]).collect();
        let ranks = core.division().by_piece(core.gather_f64(own)?);
        for (i, squares) in squares.iter_mut().enumerate() {
            let sum = |value: usize| ranks.iter().map(|rank| rank[2 * i + value]).sum();
            *squares = Squares { weights: sum(0), update: sum(1) };
        }
    }
    let ratio = |(param, squares): (usize, Squares)| match recipe(param).optimizer.needs() {
        Needs::Norms(layerwise) => layerwise.trust_ratio(squares),
        _ => 1.0,
    };
    Ok(squares.into_iter().enumerate().map(ratio).collect())
}

/// Collective: updates the parameters whose optimizer needs whole ones. `complete` learns of every slot that is up to
/// date.
pub(super) fn update_whole<C: Carrier>(
    core: &C,
    groups: &mut [SubGroup<C>],
    recipe: &Recipe<'_>,
    mut complete: impl FnMut(&Slot) -> Result<()>,
) -> Result<()> {
    let shape = |param: usize| core.params()[param].shape.dims();
    let mut items: Vec<(Item, &dyn Wholewise, u128)> = Vec::new();
    for (group, sub_group) in groups.iter().enumerate() {
        let Some(Needs::Whole(wholewise)) = needs(sub_group, recipe) else { continue };
        let slots = sub_group.slots.iter().enumerate();
        items.extend(
            slots.map(|(slot, Slot { param, .. })| (Item { group, slot }, wholewise, wholewise.cost(shape(*param)))),
        );
    }
    // Ranks wait for the one that works longest.
    items.sort_by_key(|(.., cost)| Reverse(*cost));
    let (world, rank) = (core.world_size(), core.rank());
    let span = |(item, ..): &(Item, &dyn Wholewise, u128), pass| Span::of_slot(groups, item.group, item.slot, pass);
    let spans: Vec<[Vec<Span>; 2]> = items
        .chunks(world)
        .map(|batch| [Pass::Moments, Pass::Weights].map(|pass| batch.iter().map(|i| span(i, pass)).collect()))
        .collect();
    let mut walk = Walk::new(core, groups, &spans.iter().flatten().flatten().cloned().collect::<Vec<_>>());
    for (batch, [momentum, update]) in items.chunks(world).zip(&spans) {
        let mut kept = None;
        for (owner, ((item, wholewise, _), span)) in batch.iter().zip(momentum).enumerate() {
            let whole = rough_direction(core, groups, &mut walk, *item, span, recipe)?;
            if owner == rank {
                kept = Some((whole, slot_of(groups, *item).param, *wholewise));
            }
        }
        let mut finished = kept.map(|(mut whole, param, wholewise)| {
            let _workspace = core.ledger().hold(Kind::Buckets, wholewise.workspace(shape(param)));
            if let Some(values) = whole.values.values_mut() {
                wholewise.finish(as_f32(values), shape(param));
            }
            whole
        });
        for (owner, ((item, ..), span)) in batch.iter().zip(update).enumerate() {
            let own = if owner == rank { finished.take() } else { None };
            let direction = own_direction(core, slot_of(groups, *item).param, own)?;
            let mut apply = |slot: &Slot, in_slot: Range<usize>, Part { param, half, .. }: Part<'_, '_>| {
                let GroupStep { optimizer, ctx } = recipe(slot.param);
                if let Some(direction) = direction.values.values() {
                    optimizer.update(&ctx, param, direction.slice(in_slot), &mut [], half);
                }
            };
            walk.visit(groups, span, &mut apply, |_| Ok(()))?;
            complete(slot_of(groups, *item))?;
        }
    }
    walk.finish()
}

fn slot_of<R: Rank>(groups: &[SubGroup<R>], Item { group, slot }: Item) -> &Slot {
    &groups[group].slots[slot]
}

/// Collective: updates the momentum of a slot, and gives the rough direction of the whole parameter.
fn rough_direction<C: Carrier>(
    core: &C,
    groups: &mut [SubGroup<C>],
    walk: &mut Walk<'_, C>,
    item: Item,
    span: &Span,
    recipe: &Recipe<'_>,
) -> Result<Direction<C::Buffer>> {
    let division = core.division();
    let Slot { param, owned, .. } = slot_of(groups, item).clone();
    let (numel, shard_len) = (core.params()[param].numel, core.params()[param].shard_len(division));
    // Room for all shards, padding included: the others' arrive in the same buffer.
    let room = shard_len * division.shards();
    let mut values = C::Buffer::with_capacity(core.home(), DType::F32, room)?;
    let _held = core.hold(Kind::Buckets, &values);
    values.extend_zeros(owned.len())?;
    let mut momentum = |slot: &Slot, in_slot: Range<usize>, Part { grad, state, .. }: Part<'_, '_>| {
        let GroupStep { optimizer, ctx } = recipe(slot.param);
        let Needs::Whole(wholewise) = optimizer.needs() else { unreachable!("the others are left out") };
        if let Some(values) = values.values_mut() {
            wholewise.momentum(&ctx, grad, state, as_f32(values.slice(in_slot)));
        }
    };
    walk.visit(groups, span, &mut momentum, |_| Ok(()))?;
    if core.placement().optim.is_sharded() {
        values.extend_zeros(shard_len - owned.len())?;
        values = core.wait(core.gather(WireFormat::Exact, values, &[param])?)?;
        values.truncate(numel);
    }
    Ok(Direction { values, _held })
}

/// Collective: what this rank owns of a finished direction, which one of them has: `whole`.
fn own_direction<C: Carrier>(core: &C, id: usize, whole: Option<Direction<C::Buffer>>) -> Result<Direction<C::Buffer>> {
    let (division, param) = (core.division(), &core.params()[id]);
    let (numel, padded) = (param.numel, param.shard_len(division) * division.shards());
    let mut own = match whole {
        Some(whole) => whole,
        None => {
            let values = C::Buffer::zeros(core.home(), DType::F32, padded)?;
            Direction { _held: core.hold(Kind::Buckets, &values), values }
        }
    };
    let (pending, owned) = match core.placement().optim.is_sharded() {
        true => {
            own.values.extend_zeros(padded - own.values.len())?;
            let owned = param.shard(division, division.shard_of(core.rank())).len();
            (core.reduce(WireFormat::Exact, own.values, &[id])?, owned)
        }
        false => {
            own.values.truncate(numel);
            (core.launch(Collective::AllReduce, WireFormat::Exact, own.values, &[id])?, numel)
        }
    };
    own.values = core.wait(pending)?;
    own.values.truncate(owned);
    Ok(own)
}
