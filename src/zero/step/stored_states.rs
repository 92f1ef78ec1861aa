//! The states of a part of a parameter, in f32 during a step: in place, or in a separate buffer of the step.
//!
//! ```text
//!   f32             worked on in place
//!   anything else   a piece becomes f32 -> the optimizer -> rounded, and written back
//! ```

use crate::param::ParamId;
use crate::precision::stochastic_rounding::RoundingDice;
use crate::precision::{FlatMut, FlatRef};
use crate::zero::rank_core::RankCore;
use crate::zero::share::optim_state::{OptimStateView, round};
use crate::zero::share::sub_group::{SubGroup, SweepMode};
use crate::zero::step_executor::StepExecutor;
use candle_core::DType;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The number of elements that are converted to f32 at a time: a multiple of the block of every format.
const PIECE: usize = 256 * 1024;

/// The part of a parameter that a sweep works on at a time. States that a sweep does not load have no elements.
pub(crate) struct ParamSlice<'a, 's> {
    /// Weights in f32.
    pub param: &'a mut [f32],
    pub grad: FlatRef<'a>,
    pub state: &'a mut [&'s mut [f32]],
    /// The weights in the model's dtype, if `param` holds the master weights.
    pub half: Option<FlatMut<'a>>,
}

/// The states of a part of a parameter, in their storage formats.
pub(super) struct StoredStates<'a> {
    /// Master weights.
    pub master: Option<&'a mut [f32]>,
    /// The weights in the model's dtype; `None` if a sweep has none.
    pub weights: Option<FlatMut<'a>>,
    pub moments: Vec<OptimStateView<'a>>,
    /// The gradients; empty if a sweep has none.
    pub grad: FlatRef<'a>,
}

/// The rounding of the states of a part.
#[derive(Clone, Copy)]
pub(super) struct StateRounding<'a> {
    pub core: &'a RankCore,
    pub param: ParamId,
    /// The parameter's element at which the part begins.
    pub first: usize,
    /// Whether the sweep changes weights or optimizer states. If not, the f32 copies are not written back.
    pub changes: bool,
}

/// Returns the number of bytes of f32 copies that a sweep through `elements` elements of a sub-group needs for states
/// in other formats.
pub(in crate::zero) fn room<R: StepExecutor>(
    group: &SubGroup<R>,
    mode: SweepMode,
    dtype: DType,
    elements: usize,
) -> usize {
    let weights = mode.has_weights() && group.master.is_none() && dtype != DType::F32;
    let moments = group.moments.iter().filter(|moment| OptimStateView::needs_scratch(moment.format)).count();
    let states = usize::from(weights) + if mode.has_moments() { moments } else { 0 };
    states * elements.min(PIECE) * size_of::<f32>()
}

impl StoredStates<'_> {
    /// Calls `work` with all elements, piece by piece if some states are not kept in f32.
    pub fn visit(self, rounding: StateRounding<'_>, mut work: impl FnMut(Range<usize>, ParamSlice<'_, '_>)) {
        let Self { mut master, mut weights, mut moments, grad } = self;
        let is_f32 = |weights: &FlatMut<'_>| matches!(weights, FlatMut::F32(_));
        let in_place = master.is_some() || weights.as_ref().is_none_or(is_f32);
        let len = match (&weights, moments.first()) {
            (Some(weights), _) => weights.len(),
            (None, Some(moment)) => moment.len(),
            (None, None) => grad.len(),
        };
        if in_place && moments.iter().all(OptimStateView::is_f32) {
            let mut state: Vec<&mut [f32]> = moments.into_iter().map(OptimStateView::into_f32).collect();
            let (param, half) = param_and_copy(master, weights);
            return work(0..len, ParamSlice { param, grad, state: &mut state, half });
        }
        let new_room = |is_f32: bool| vec![0f32; if is_f32 { 0 } else { len.min(PIECE) }];
        let mut rooms: Vec<Vec<f32>> = moments.iter().map(|moment| new_room(moment.is_f32())).collect();
        let mut weights_room = new_room(in_place);
        for start in (0..len).step_by(PIECE) {
            let range = start..len.min(start + PIECE);
            let mut state = Vec::with_capacity(moments.len());
            for (moment, room) in moments.iter_mut().zip(&mut rooms) {
                state.push(moment.in_f32(range.clone(), room));
            }
            let grad = if grad.is_empty() { grad } else { grad.slice(range.clone()) };
            let stored = weights.as_mut().map(|weights| weights.reborrow().slice(range.clone()));
            if in_place {
                let (param, half) = param_and_copy(master.as_mut().map(|master| &mut master[range.clone()]), stored);
                work(range.clone(), ParamSlice { param, grad, state: &mut state, half });
            } else if let Some(stored) = stored {
                let param = &mut weights_room[..range.len()];
                FlatMut::F32(param).copy_cast(stored.as_ref());
                work(range.clone(), ParamSlice { param, grad, state: &mut state, half: None });
                if rounding.changes {
                    round(stored, param, rounding.chance(0, range.start));
                }
            }
            if rounding.changes {
                for (i, (moment, room)) in moments.iter_mut().zip(&rooms).enumerate() {
                    if !moment.is_f32() {
                        moment.narrow(range.clone(), &room[..range.len()], rounding.chance(i + 1, range.start));
                    }
                }
            }
        }
    }
}

/// Returns the weights that an optimizer updates, and their copy in the model's dtype.
fn param_and_copy<'a>(
    master: Option<&'a mut [f32]>,
    weights: Option<FlatMut<'a>>,
) -> (&'a mut [f32], Option<FlatMut<'a>>) {
    match (master, weights) {
        (Some(master), half) => (master, half),
        (None, Some(FlatMut::F32(weights))) => (weights, None),
        (None, _) => (&mut [], None),
    }
}

impl StateRounding<'_> {
    /// Returns the random numbers for rounding a state (0: the weights), beginning with element `start` of the part;
    /// `None` for rounding to nearest.
    fn chance(&self, state: usize, start: usize) -> Option<(RoundingDice, usize)> {
        let RankCore { update, params, .. } = self.core;
        let step = update.load(Ordering::Relaxed);
        let seed = self.core.rounding_seed()?;
        Some((RoundingDice::new(seed, &params[self.param].name, state as u64, step), self.first + start))
    }
}
