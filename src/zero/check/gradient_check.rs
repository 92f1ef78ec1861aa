//! A check of gradients, as far as the core goes: parameters that are moved for a forward and put back, and what a backward
//! brings along the way.
//!
//! ```text
//!   forward    each unit's parameters moved up while it runs | moved down | as they are
//!   backward   an output has its gradient v: v times half of the difference that the moves made
//!              a parameter has its gradient g: g times half of the difference that was made to it
//! ```
//!
//! Summed up, both are the change of the loss along one direction, if every operation's backward is true. No collective is
//! needed for them, beyond those of two more forwards.

use super::perturbation::{DirectionalGradient, PerturbationDirection};
use crate::error::Result;
use crate::graph::{Grad, node_of};
use crate::memory::{LedgerEntry, MemoryKind, MemoryTier};
use crate::param::{ParamId, ROOT, UnitId};
use crate::precision::Flat;
use crate::tensor::residency;
use crate::util::lock;
use crate::zero::rank_core::RankCore;
use candle_core::Tensor;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

thread_local! {
    static TOGETHER: Cell<u64> = const { Cell::new(0) };
}

/// What this thread has done so far that all ranks do together while a model runs.
pub(crate) fn done_together() -> u64 {
    TOGETHER.get()
}

/// One thing more.
pub(in crate::zero) fn count_together() {
    TOGETHER.set(TOGETHER.get() + 1);
}

/// What a forward is run with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Perturbation<'a> {
    /// 1: up, -1: down, 0: as they are.
    pub sign: f32,
    /// How far, as a part of the size of each parameter.
    pub size: f64,
    /// The parameters; all that are trained, if there is no list.
    pub only: Option<&'a [ParamId]>,
}

impl Perturbation<'_> {
    /// Everything stays where it is.
    pub const NONE: Self = Self { sign: 0.0, size: 0.0, only: None };

    /// The other way.
    pub fn down(self) -> Self {
        Self { sign: -self.sign, ..self }
    }
}

/// The state of a check.
#[derive(Default)]
pub(crate) struct GradientCheck {
    /// Forwards are looked at: what they change is kept, and their outputs give their gradients.
    armed: AtomicBool,
    /// A forward runs with other values of parameters.
    shifts: AtomicBool,
    /// The backward under way is measured.
    measures: AtomicBool,
    state: Mutex<GradientCheckState>,
}

#[derive(Default)]
struct GradientCheckState {
    /// How far parameters are moved, as a part of the size of each.
    relative: f64,
    seed: u64,
    /// 1: up, -1: down.
    sign: f32,
    /// The parameters that are moved; all of them, if there is no list.
    only: Option<Vec<ParamId>>,
    /// The direction of each parameter that has been moved.
    directions: Vec<Option<PerturbationDirection>>,
    /// The parameters that are moved now, with their own values.
    kept: Vec<(ParamId, Flat, LedgerEntry)>,
    /// What the backward has brought, by parameter.
    along: Vec<DirectionalGradient>,
    /// What it has brought of outputs, by group of parameters.
    outputs: Vec<DirectionalChange>,
    /// Outputs without a probe had a gradient.
    unprobed: bool,
}

/// How an output, or the loss, changes along a direction.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DirectionalChange {
    /// Half of the difference between both moves.
    pub difference: f64,
    /// How far the mean of both moves is from the value between them.
    pub bend: f64,
    /// The sum of the squares of the terms of `bend`, one for each element of an output.
    pub bend_squares: f64,
    /// What rounding of the output may make of the difference.
    pub noise: f64,
}

/// How an output changes when groups of parameters are moved.
pub(crate) struct OutputProbe {
    pub groups: Vec<OutputDifference>,
    /// What the output's format loses of its largest element.
    pub rounding: f64,
}

/// An output's elements along one direction.
#[derive(Default)]
pub(crate) struct OutputDifference {
    /// Half of the difference between both moves.
    pub difference: Vec<f32>,
    /// How far their mean is from the value between them.
    pub bend: Vec<f32>,
}

/// What a measured backward has brought.
pub(crate) struct MeasuredGradients {
    /// By group of parameters.
    pub outputs: Vec<DirectionalChange>,
    /// By parameter.
    pub along: Vec<DirectionalGradient>,
    /// A part of the loss comes from an output that was not probed.
    pub unprobed: bool,
}

impl OutputDifference {
    /// How an output changes between `down` and `up`.
    pub fn between(value: &[f32], up: &[f32], down: &[f32]) -> Self {
        let difference = up.iter().zip(down).map(|(up, down)| (up - down) / 2.0).collect();
        let bend = value.iter().zip(up.iter().zip(down));
        Self { difference, bend: bend.map(|(value, (up, down))| ((up - value) + (down - value)) / 2.0).collect() }
    }
}

impl GradientCheck {
    pub(super) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed)
    }

    pub(in crate::zero) fn is_measuring(&self) -> bool {
        self.measures.load(Ordering::Relaxed)
    }

    /// The gradient of an output has come.
    pub(super) fn output_arrived(&self, probe: Option<&OutputProbe>, grad: &Grad) -> candle_core::Result<()> {
        let mut state = lock(&self.state);
        let Some(probe) = probe else {
            state.unprobed = true;
            return Ok(());
        };
        let mut wide = Flat::with_capacity(candle_core::DType::F32, grad.len());
        grad.view(|values| wide.extend_cast(values))?;
        let Flat::F32(grad) = wide else { unreachable!("it was made so") };
        let sums = |change: &[f32]| {
            let terms = grad.iter().zip(change).map(|(grad, change)| f64::from(*grad) * f64::from(*change));
            terms.fold((0.0, 0.0), |(sum, squares), term| (sum + term, squares + term * term))
        };
        let length = grad.iter().map(|grad| f64::from(*grad).powi(2)).sum::<f64>().sqrt();
        state.outputs.resize(probe.groups.len(), DirectionalChange::default());
        for (change, moved) in state.outputs.iter_mut().zip(&probe.groups) {
            let (bend, bend_squares) = sums(&moved.bend);
            change.difference += sums(&moved.difference).0;
            change.bend += bend;
            change.bend_squares += bend_squares;
            change.noise += length * probe.rounding;
        }
        Ok(())
    }
}

/// Methods for the engine.
impl RankCore {
    /// From now on outputs of forwards give their gradients to the check, along the direction that `seed` chooses.
    pub fn arm_check(&self, seed: u64) {
        *lock(&self.check.state) = GradientCheckState { seed, ..GradientCheckState::default() };
        self.check.armed.store(true, Ordering::Relaxed);
    }

    /// Whether a forward runs for a check: as training, but nothing comes of it.
    pub fn is_checking(&self) -> bool {
        self.check.shifts.load(Ordering::Relaxed)
    }

    /// Runs a forward with parameters moved. Everything is as it was afterwards, and nothing can be differentiated.
    ///
    /// # Errors
    /// That of `run`; a failed collective.
    pub fn forward_again(
        self: &Arc<Self>,
        &Perturbation { sign, size, only }: &Perturbation<'_>,
        run: impl FnOnce() -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        {
            let mut state = lock(&self.check.state);
            (state.relative, state.sign) = (size, sign);
            state.only = only.map(<[_]>::to_vec);
            state.directions.resize(self.params.len(), None);
        }
        let buffers = self.buffers.all()?;
        let traces = lock(&self.gather).exchange_traces(Default::default());
        // With a graph, as the model may differentiate something in its forward; it goes before the forward that counts.
        let output = {
            let _shifted = PerturbedParams::begin(self);
            self.forward(run).map(|output| output.detach())
        };
        self.evaluating.store(true, Ordering::Relaxed);
        let released = self.release_all();
        self.evaluating.store(false, Ordering::Relaxed);
        lock(&self.gather).exchange_traces(traces);
        self.buffers.exchange(&buffers)?;
        released?;
        output
    }

    /// The coming backward is measured.
    pub fn begin_measuring(&self) {
        let mut state = lock(&self.check.state);
        state.along = vec![DirectionalGradient::default(); self.params.len()];
        state.directions.resize(self.params.len(), None);
        self.check.measures.store(true, Ordering::Relaxed);
    }

    /// It is over; so is the check.
    pub fn end_measuring(&self) -> MeasuredGradients {
        self.check.measures.store(false, Ordering::Relaxed);
        self.check.armed.store(false, Ordering::Relaxed);
        let GradientCheckState { outputs, along, unprobed, .. } = std::mem::take(&mut *lock(&self.check.state));
        MeasuredGradients { outputs, along, unprobed }
    }
}

/// Methods for units and parameters.
impl RankCore {
    /// A unit's parameters are in memory and about to be used.
    pub(in crate::zero) fn shift_unit(&self, unit: UnitId) -> Result<()> {
        // Where parameters stay whole, a unit's may be used outside of it too.
        let all = !self.shards_params();
        if !self.is_checking() || (all && unit != ROOT) {
            return Ok(());
        }
        let mut state = lock(&self.check.state);
        if state.sign == 0.0 {
            return Ok(());
        }
        for (id, param) in self.params.iter().enumerate() {
            let is_meant = state.only.as_ref().is_none_or(|only| only.contains(&id));
            let is_moved = || state.kept.iter().any(|(kept, ..)| *kept == id);
            if (param.unit != unit && !all)
                || !param.is_trained()
                || param.numel == 0
                || !is_meant
                || is_moved()
                || !param.is_whole()
            {
                continue;
            }
            let (relative, seed, sign) = (state.relative, state.seed, state.sign);
            let still = node_of(&param.tensor).map_or(0..0, |node| node.still);
            let (direction, kept) = residency::with_values(&param.tensor, |values| {
                let kept = values.clone();
                let direction =
                    PerturbationDirection::new((&param.name, seed), &param.shape, values.as_ref(), relative);
                let direction = direction.without(still);
                direction.shift(values.as_mut(), sign);
                (direction, kept)
            })?;
            let held = self.ledger.hold_in(MemoryTier::Host, MemoryKind::GradientCheck, kept.capacity_in_bytes());
            state.directions[id] = Some(direction);
            state.kept.push((id, kept, held));
        }
        Ok(())
    }

    /// A unit has run: its parameters have their own values again.
    pub(in crate::zero) fn unshift_unit(&self, unit: UnitId) -> Result<()> {
        let all = !self.shards_params();
        if !self.is_checking() || (all && unit != ROOT) {
            return Ok(());
        }
        self.put_back(|param| all || self.params[param].unit == unit)
    }

    /// A backward that the model itself runs in its forward no longer needs a parameter. Those of the root still run.
    pub(in crate::zero) fn unshift_passed(&self, param: ParamId) -> Result<()> {
        match self.is_checking() && self.params[param].unit != ROOT {
            true => self.put_back(|kept| kept == param),
            false => Ok(()),
        }
    }

    fn put_back(&self, which: impl Fn(ParamId) -> bool) -> Result<()> {
        let mut state = lock(&self.check.state);
        let (back, kept) = std::mem::take(&mut state.kept).into_iter().partition(|(param, ..)| which(*param));
        state.kept = kept;
        let back: Vec<(ParamId, Flat, LedgerEntry)> = back;
        for (param, values, _held) in back {
            let param = &self.params[param];
            if param.is_whole() {
                residency::with_values(&param.tensor, |moved| *moved = values)?;
            }
        }
        Ok(())
    }

    /// A parameter's gradient has come in the backward that is measured.
    pub(in crate::zero) fn measure(&self, param: ParamId, grad: &Grad) -> candle_core::Result<()> {
        let mut state = lock(&self.check.state);
        let Some(direction) = state.directions.get(param).copied().flatten() else { return Ok(()) };
        let about = &self.params[param];
        let found = grad.view(|grad| match about.is_whole() {
            true => residency::with_view(&about.tensor, |values| direction.along(grad, Some(values))),
            false => Ok(direction.along(grad, None)),
        })??;
        let along = &mut state.along[param];
        along.product += found.product;
        along.squares += found.squares;
        Ok(())
    }
}

/// Parameters are moved; whatever happens, they are put back.
struct PerturbedParams<'a>(&'a RankCore);

impl<'a> PerturbedParams<'a> {
    fn begin(core: &'a RankCore) -> Self {
        core.check.shifts.store(true, Ordering::Relaxed);
        Self(core)
    }
}

impl Drop for PerturbedParams<'_> {
    fn drop(&mut self) {
        // What cannot be put back was not taken out.
        let _ = self.0.put_back(|_| true);
        self.0.check.shifts.store(false, Ordering::Relaxed);
    }
}
