//! Steps of optimizers that need more of a parameter than this rank's shard.
//!
//! ```text
//!   norms (LAMB and LARS)   sweep that changes nothing -> sums of squares of all ranks -> each parameter's trust ratio
//!
//!   whole (Muon)    as many parameters at a time as there are ranks, of similar cost:
//!     each in turn   shard: momentum, rough direction -> all-gather -> the rank whose turn it is keeps the result
//!     all together   every rank finishes the direction that it keeps
//!     each in turn   finished direction -> reduce-scatter (all others add zeros) -> shard: update -> publish
//! ```
//!
//! In this way, the work on whole parameters is divided among the ranks, and no rank holds more than two of them at a
//! time. The same elements are computed from the same numbers at every stage.

use super::hyperparameters::{Hyperparameters, needs};
use super::state_sweep::{ParamSlice, StateSweep, StepBackend, SweepSpan, as_f32, sweep};
use crate::comm::WireFormat;
use crate::error::Result;
use crate::memory::{MemoryKind, MemoryLedgerEntry};
use crate::optim::{GroupStepSettings, OptimizerNeeds, SquareSums, WholeParameterOptimizer};
use crate::precision::ElementBuffer;
use crate::zero::share::sub_group::{SubGroup, SubGroupPosition, SweepMode};
use crate::zero::step_executor::StepExecutor;
use crate::zero::transfer::pending_collective::CollectiveOp;
use candle_core::DType;
use std::cmp::Reverse;
use std::ops::Range;

/// The number of parameters whose sums of squares share one control message.
const SQUARES_PER_MESSAGE: usize = 4096;

/// The sub-group and slot of a parameter whose direction is computed from the full parameter.
#[derive(Clone, Copy)]
struct SlotIndex {
    group: usize,
    slot: usize,
}

/// An update direction in progress, and its entry in the ledger.
struct DirectionBuffer<B> {
    values: B,
    _held: MemoryLedgerEntry,
}

/// Collective: returns the factor of the learning rate for each parameter, or an empty list if no optimizer needs
/// norms. As in the vote before a step (`sharded_step.rs`), each rank sums its piece of every parameter, even if it
/// holds more.
pub(super) fn trust_ratios<C: StepBackend>(
    core: &C,
    groups: &mut [SubGroup<C>],
    hyperparameters: &Hyperparameters<'_>,
) -> Result<Vec<f64>> {
    let selected: Vec<usize> = (0..groups.len())
        .filter(|g| matches!(needs(&groups[*g], hyperparameters), Some(OptimizerNeeds::Norms(_))))
        .collect();
    if selected.is_empty() {
        return Ok(Vec::new());
    }
    let mut squares = vec![SquareSums::default(); core.params().len()];
    let sum =
        |slot: &SubGroupPosition, in_slot: Range<usize>, ParamSlice { param, grad, state, .. }: ParamSlice<'_, '_>| {
            let GroupStepSettings { optimizer, ctx } = hyperparameters(slot.param);
            let OptimizerNeeds::Norms(layerwise) = optimizer.needs() else { unreachable!("the others are left out") };
            let (start, end) = (slot.piece.start.max(in_slot.start), slot.piece.end.min(in_slot.end));
            if start < end {
                let range = start - in_slot.start..end - in_slot.start;
                let state: Vec<&[f32]> = state.iter().map(|s| &s[range.clone()]).collect();
                let squares = &mut squares[slot.param];
                layerwise.add_squares(&ctx, &param[range.clone()], grad.slice(range), &state, squares);
            }
        };
    sweep(core, groups, &selected, SweepMode::Read, sum, |_| Ok(()))?;
    sum_of_ranks(core, &mut squares)?;
    let ratio = |(param, squares): (usize, SquareSums)| {
        let GroupStepSettings { optimizer, ctx } = hyperparameters(param);
        match optimizer.needs() {
            OptimizerNeeds::Norms(layerwise) if ctx.trust_ratio => layerwise.trust_ratio(&ctx, squares),
            _ => 1.0,
        }
    };
    Ok(squares.into_iter().enumerate().map(ratio).collect())
}

/// Collective: replaces each rank's sums of squares, by parameter, with those of all ranks, added up in the order of
/// their pieces.
pub(super) fn sum_of_ranks<C: StepBackend>(core: &C, squares: &mut [SquareSums]) -> Result<()> {
    for squares in squares.chunks_mut(SQUARES_PER_MESSAGE) {
        let sums = squares.iter().flat_map(|s| [s.weights, s.update]).collect();
        let ranks = core.mesh().by_piece(core.gather_f64(sums)?);
        for (i, squares) in squares.iter_mut().enumerate() {
            let sum = |value: usize| ranks.iter().map(|rank| rank[2 * i + value]).sum();
            *squares = SquareSums { weights: sum(0), update: sum(1) };
        }
    }
    Ok(())
}

/// Collective: updates the parameters whose optimizer needs the full parameters. `complete` is called for each slot
/// once it is up to date.
pub(super) fn update_whole<C: StepBackend>(
    core: &C,
    groups: &mut [SubGroup<C>],
    hyperparameters: &Hyperparameters<'_>,
    mut complete: impl FnMut(&SubGroupPosition) -> Result<()>,
) -> Result<()> {
    let shape = |param: usize| core.params()[param].shape.dims();
    let mut items: Vec<(SlotIndex, &dyn WholeParameterOptimizer, u128)> = Vec::new();
    for (group, sub_group) in groups.iter().enumerate() {
        let Some(OptimizerNeeds::WholeParameter(whole_optimizer)) = needs(sub_group, hyperparameters) else { continue };
        let slots = sub_group.slots.iter().enumerate();
        items.extend(slots.map(|(slot, SubGroupPosition { param, .. })| {
            (SlotIndex { group, slot }, whole_optimizer, whole_optimizer.cost(shape(*param)))
        }));
    }
    // Parameters of similar cost form a batch, because all ranks wait for the rank that works longest.
    items.sort_by_key(|(.., cost)| Reverse(*cost));
    let (world, rank) = (core.world_size(), core.rank());
    let span = |(item, ..): &(SlotIndex, &dyn WholeParameterOptimizer, u128), mode| {
        SweepSpan::of_slot(groups, item.group, item.slot, mode)
    };
    let spans: Vec<[Vec<SweepSpan>; 2]> = items
        .chunks(world)
        .map(|batch| [SweepMode::Moments, SweepMode::Weights].map(|mode| batch.iter().map(|i| span(i, mode)).collect()))
        .collect();
    let mut sweep = StateSweep::new(core, groups, &spans.iter().flatten().flatten().cloned().collect::<Vec<_>>());
    for (batch, [momentum, update]) in items.chunks(world).zip(&spans) {
        let mut rough = None;
        for (owner, ((item, whole_optimizer, _), span)) in batch.iter().zip(momentum).enumerate() {
            let direction = rough_direction(core, groups, &mut sweep, *item, span, hyperparameters)?;
            if owner == rank {
                rough = Some((direction, slot_of(groups, *item).param, *whole_optimizer));
            }
        }
        let mut finished = rough.map(|(mut direction, param, whole_optimizer)| {
            let _workspace = core.ledger().hold(MemoryKind::Buckets, whole_optimizer.workspace(shape(param)));
            if let Some(values) = direction.values.values_mut() {
                whole_optimizer.finish(as_f32(values), shape(param));
            }
            direction
        });
        for (owner, ((item, ..), span)) in batch.iter().zip(update).enumerate() {
            let full = if owner == rank { finished.take() } else { None };
            let direction = own_direction(core, slot_of(groups, *item).param, full)?;
            let mut apply =
                |slot: &SubGroupPosition, in_slot: Range<usize>, ParamSlice { param, half, .. }: ParamSlice<'_, '_>| {
                    let GroupStepSettings { optimizer, ctx } = hyperparameters(slot.param);
                    if let Some(direction) = direction.values.values() {
                        optimizer.update(&ctx, param, direction.slice(in_slot), &mut [], half);
                    }
                };
            sweep.visit(groups, span, &mut apply, |_| Ok(()))?;
            complete(slot_of(groups, *item))?;
        }
    }
    sweep.finish()
}

fn slot_of<R: StepExecutor>(groups: &[SubGroup<R>], SlotIndex { group, slot }: SlotIndex) -> &SubGroupPosition {
    &groups[group].slots[slot]
}

/// Collective: updates the momentum of a slot, and returns the rough direction of the full parameter.
fn rough_direction<C: StepBackend>(
    core: &C,
    groups: &mut [SubGroup<C>],
    sweep: &mut StateSweep<'_, C>,
    item: SlotIndex,
    span: &SweepSpan,
    hyperparameters: &Hyperparameters<'_>,
) -> Result<DirectionBuffer<C::Buffer>> {
    let mesh = core.mesh();
    let SubGroupPosition { param, owned, .. } = slot_of(groups, item).clone();
    let (numel, shard_len) = (core.params()[param].numel, core.params()[param].shard_len(mesh));
    // Room for all shards, padding included: the other ranks' shards arrive in the same buffer.
    let room = shard_len * mesh.shards();
    let mut values = C::Buffer::with_capacity(core.share_location(), DType::F32, room)?;
    let _held = core.hold(MemoryKind::Buckets, &values);
    values.extend_zeros(owned.len())?;
    let mut momentum =
        |slot: &SubGroupPosition, in_slot: Range<usize>, ParamSlice { grad, state, .. }: ParamSlice<'_, '_>| {
            let GroupStepSettings { optimizer, ctx } = hyperparameters(slot.param);
            let OptimizerNeeds::WholeParameter(whole_optimizer) = optimizer.needs() else {
                unreachable!("the others are left out")
            };
            if let Some(values) = values.values_mut() {
                whole_optimizer.momentum(&ctx, grad, state, as_f32(values.slice(in_slot)));
            }
        };
    sweep.visit(groups, span, &mut momentum, |_| Ok(()))?;
    if core.placement().optim.is_sharded() {
        values.extend_zeros(shard_len - owned.len())?;
        values = core.wait(core.gather(WireFormat::Exact, values, &[param])?)?;
        values.truncate(numel);
    }
    Ok(DirectionBuffer { values, _held })
}

/// Collective: returns this rank's part of a finished direction. The rank that has the full direction passes it as
/// `full`; the others pass `None`.
fn own_direction<C: StepBackend>(
    core: &C,
    id: usize,
    full: Option<DirectionBuffer<C::Buffer>>,
) -> Result<DirectionBuffer<C::Buffer>> {
    let (mesh, param) = (core.mesh(), &core.params()[id]);
    let (numel, padded) = (param.numel, param.shard_len(mesh) * mesh.shards());
    let mut direction = match full {
        Some(full) => full,
        None => {
            let values = C::Buffer::zeros(core.share_location(), DType::F32, padded)?;
            DirectionBuffer { _held: core.hold(MemoryKind::Buckets, &values), values }
        }
    };
    let (pending, owned) = match core.placement().optim.is_sharded() {
        true => {
            direction.values.extend_zeros(padded - direction.values.len())?;
            let owned = param.shard(mesh, mesh.shard_of(core.rank())).len();
            (core.reduce(WireFormat::Exact, direction.values, &[id])?, owned)
        }
        false => {
            direction.values.truncate(numel);
            (core.launch(CollectiveOp::AllReduce, WireFormat::Exact, direction.values, &[id])?, numel)
        }
    };
    direction.values = core.wait(pending)?;
    direction.values.truncate(owned);
    Ok(direction)
}
