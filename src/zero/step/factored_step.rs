//! Steps of optimizers with factored states (Adafactor).
//!
//! ```text
//!   sweep that changes nothing -> sums over rows and columns, of all ranks -> new factored states, equal on all ranks
//!   sweep that changes nothing -> sums of squares of all ranks
//!   sweep that updates
//! ```
//!
//! As in the vote before a step (`sharded_step.rs`), each rank adds up its piece of every parameter, even if it holds
//! more. The same numbers are thus added in the same order at every stage.

use super::hyperparameters::{Hyperparameters, needs};
use super::state_sweep::{ParamSlice, StepBackend, as_f32, sweep};
use super::whole_param_step::sum_of_ranks;
use crate::error::Result;
use crate::memory::{MemoryKind, TrackedBuffer};
use crate::optim::{
    FactoredOptimizer, FactoredSlice, GroupStepSettings, OptimizerNeeds, SlicePosition, SquareSums, StepContext,
};
use crate::param::ParamId;
use crate::precision::{ElementBuffer, FlatRef};
use crate::zero::share::share_storage::ShareStorage;
use crate::zero::share::sub_group::{SubGroup, SubGroupPosition, SweepMode};
use std::collections::BTreeMap;
use std::ops::Range;

/// The number of sums that share one control message.
const SUMS_PER_MESSAGE: usize = 8192;

/// The factored states of the parameters that have any.
type FactoredStates<C> = BTreeMap<ParamId, TrackedBuffer<<C as ShareStorage>::Buffer>>;

/// Collective: updates the parameters whose optimizer has factored states. `complete` is called for each slot once it
/// is up to date.
pub(super) fn update_factored<C: StepBackend>(
    core: &C,
    groups: &mut [SubGroup<C>],
    hyperparameters: &Hyperparameters<'_>,
    complete: impl FnMut(&SubGroupPosition) -> Result<()>,
) -> Result<()> {
    let selected: Vec<usize> = (0..groups.len())
        .filter(|g| matches!(needs(&groups[*g], hyperparameters), Some(OptimizerNeeds::Factors(_))))
        .collect();
    if selected.is_empty() {
        return Ok(());
    }
    // A sweep borrows the sub-groups mutably, so their factored states are kept outside them during the sweeps.
    let mut states = FactoredStates::<C>::new();
    for group in &mut *groups {
        let params = group.slots.iter().map(|slot| slot.param);
        states.extend(params.zip(std::mem::take(&mut group.factored)));
    }
    let result = update_with(core, groups, &selected, hyperparameters, &mut states, complete);
    for group in groups {
        group.factored = group.slots.iter().filter_map(|slot| states.remove(&slot.param)).collect();
    }
    result
}

fn update_with<C: StepBackend>(
    core: &C,
    groups: &mut [SubGroup<C>],
    selected: &[usize],
    hyperparameters: &Hyperparameters<'_>,
    states: &mut FactoredStates<C>,
    complete: impl FnMut(&SubGroupPosition) -> Result<()>,
) -> Result<()> {
    take_sums(core, groups, selected, hyperparameters, states)?;
    let mut squares = vec![SquareSums::default(); core.params().len()];
    let sum = |slot: &SubGroupPosition, in_slot: Range<usize>, slice: ParamSlice<'_, '_>| {
        let (optimizer, ctx) = factored_optimizer(hyperparameters, slot.param);
        let range = in_piece(slot, &in_slot);
        if range.is_empty() {
            return;
        }
        let ParamSlice { param, grad, state, .. } = slice;
        let mut state: Vec<&mut [f32]> = state.iter_mut().map(|state| &mut state[range.clone()]).collect();
        let slice = FactoredSlice {
            param: &mut param[range.clone()],
            grad: grad.slice(range.clone()),
            state: &mut state,
            factored: values_of::<C>(states, slot.param),
        };
        let at = position(core, slot, in_slot.start + range.start);
        optimizer.add_squares(&ctx, at, slice, &mut squares[slot.param]);
    };
    sweep(core, groups, selected, SweepMode::Read, sum, |_| Ok(()))?;
    sum_of_ranks(core, &mut squares)?;
    let update = |slot: &SubGroupPosition, in_slot: Range<usize>, slice: ParamSlice<'_, '_>| {
        let (optimizer, ctx) = factored_optimizer(hyperparameters, slot.param);
        let ParamSlice { param, grad, state, half } = slice;
        let slice = FactoredSlice { param, grad, state, factored: values_of::<C>(states, slot.param) };
        optimizer.update(&ctx, position(core, slot, in_slot.start), slice, squares[slot.param], half);
    };
    sweep(core, groups, selected, SweepMode::Update, update, complete)
}

/// Collective: updates the factored states with the gradients of all ranks.
fn take_sums<C: StepBackend>(
    core: &C,
    groups: &mut [SubGroup<C>],
    selected: &[usize],
    hyperparameters: &Hyperparameters<'_>,
    states: &mut FactoredStates<C>,
) -> Result<()> {
    let mut total = 0;
    let ranges: BTreeMap<ParamId, Range<usize>> = states
        .iter()
        .map(|(param, states)| {
            let start = total;
            total += states.buffer().len();
            (*param, start..total)
        })
        .collect();
    let selected: Vec<usize> = selected
        .iter()
        .copied()
        .filter(|g| groups[*g].slots.iter().any(|slot| ranges.contains_key(&slot.param)))
        .collect();
    if selected.is_empty() {
        return Ok(());
    }
    let _held = core.ledger().hold(MemoryKind::Buckets, total * size_of::<f64>());
    let mut sums = vec![0f64; total];
    let sum = |slot: &SubGroupPosition, in_slot: Range<usize>, ParamSlice { grad, .. }: ParamSlice<'_, '_>| {
        let (optimizer, ctx) = factored_optimizer(hyperparameters, slot.param);
        let range = in_piece(slot, &in_slot);
        if let (false, Some(sums_range)) = (range.is_empty(), ranges.get(&slot.param)) {
            let at = position(core, slot, in_slot.start + range.start);
            optimizer.add_sums(&ctx, at, grad.slice(range), &mut sums[sums_range.clone()]);
        }
    };
    sweep(core, groups, &selected, SweepMode::Read, sum, |_| Ok(()))?;
    for sums in sums.chunks_mut(SUMS_PER_MESSAGE) {
        let ranks = core.mesh().by_piece(core.gather_f64(sums.to_vec())?);
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = ranks.iter().map(|rank| rank[i]).sum();
        }
    }
    for (param, range) in ranges {
        let (optimizer, ctx) = factored_optimizer(hyperparameters, param);
        if let Some(values) = states.get_mut(&param).and_then(|states| states.buffer_mut().values_mut()) {
            optimizer.take_sums(&ctx, core.params()[param].shape.dims(), &sums[range], as_f32(values));
        }
    }
    Ok(())
}

fn factored_optimizer<'a>(
    hyperparameters: &Hyperparameters<'a>,
    param: ParamId,
) -> (&'a dyn FactoredOptimizer, StepContext) {
    let GroupStepSettings { optimizer, ctx } = hyperparameters(param);
    let OptimizerNeeds::Factors(factored) = optimizer.needs() else { unreachable!("the others are left out") };
    (factored, ctx)
}

/// Returns the factored states of a parameter; an empty slice if it has none, or in a rehearsal, which has no values.
fn values_of<C: StepBackend>(states: &FactoredStates<C>, param: ParamId) -> &[f32] {
    match states.get(&param).and_then(|states| states.buffer().values()) {
        Some(FlatRef::F32(values)) => values,
        _ => &[],
    }
}

/// Returns the part of a slice that belongs to this rank's piece of the parameter. `in_slot` is the range of the slice
/// in the slot.
fn in_piece(slot: &SubGroupPosition, in_slot: &Range<usize>) -> Range<usize> {
    let (start, end) = (slot.piece.start.max(in_slot.start), slot.piece.end.min(in_slot.end));
    if start < end { start - in_slot.start..end - in_slot.start } else { 0..0 }
}

/// Returns the position in its parameter of the slice that begins at element `start` of a slot.
fn position<'a, C: StepBackend>(core: &'a C, slot: &SubGroupPosition, start: usize) -> SlicePosition<'a> {
    SlicePosition { shape: core.params()[slot.param].shape.dims(), first: slot.owned.start + start }
}
