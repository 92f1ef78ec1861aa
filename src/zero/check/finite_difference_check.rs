//! The core's part of a gradient check: parameters are moved for a forward pass and put back, and a backward pass
//! measures its gradients along the directions of the moves.
//!
//! ```text
//!   forward    each unit's parameters moved up while it runs | moved down | unchanged
//!   backward   for each output with gradient v: the sum of v times half of the difference between the moved outputs
//!              for each parameter with gradient g: the sum of g times half of the difference between its moved values
//! ```
//!
//! If every operation's backward pass is correct, each of these sums is the change in the loss along one direction. The
//! sums need no collectives beyond those of two more forward passes.

use super::gradient_check_state::{GradientCheckState, MeasuredGradients, Perturbation};
use super::perturbation_direction::{DirectionalGradient, PerturbationDirection};
use crate::error::Result;
use crate::graph::{Grad, node_of};
use crate::memory::{MemoryKind, MemoryLedgerEntry, MemoryTier};
use crate::param::{ParamId, ROOT, UnitId};
use crate::precision::Flat;
use crate::tensor::residency;
use crate::util::lock;
use crate::zero::rank_core::RankCore;
use candle_core::Tensor;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Methods for the engine.
impl RankCore {
    /// Arms the check: from now on, the outputs of forward passes report their gradients to it. `seed` determines the
    /// direction in which parameters are moved.
    pub fn arm_check(&self, seed: u64) {
        *lock(&self.check.state) = GradientCheckState { seed, ..GradientCheckState::default() };
        self.check.armed.store(true, Ordering::Relaxed);
    }

    /// Returns whether a forward pass is running for a check. Such a pass does the same as a training forward pass, but
    /// without lasting effects.
    pub fn is_checking(&self) -> bool {
        self.check.shifts.load(Ordering::Relaxed)
    }

    /// Returns whether layers keep the discrete choices of a check's first forward pass for the later passes. The first
    /// pass must then leave the parameters unmoved, because the gradient is computed with the choices of that pass.
    pub fn holds_choices(&self) -> bool {
        self.check.holds_choices.load(Ordering::Relaxed)
    }

    /// Reports that a layer keeps its choices, and returns whether the check's current forward pass moves parameters.
    pub(crate) fn report_held_choices(&self) -> bool {
        self.check.holds_choices.store(true, Ordering::Relaxed);
        lock(&self.check.state).sign != 0.0
    }

    /// Runs a forward pass with parameters moved, and then restores everything. The returned output cannot be
    /// differentiated.
    ///
    /// # Errors
    /// Errors of `run`; a failed collective.
    pub fn forward_again(
        self: &Arc<Self>,
        &Perturbation { sign, size, params }: &Perturbation<'_>,
        run: impl FnOnce() -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        {
            let mut state = lock(&self.check.state);
            (state.relative_step, state.sign) = (size, sign);
            state.params = params.map(<[_]>::to_vec);
            state.directions.resize(self.params.len(), None);
        }
        let buffers = self.buffers.all()?;
        let traces = lock(&self.gather).exchange_traces(Default::default());
        // The forward pass builds a graph, because the model may differentiate something in its forward pass. The graph
        // is dropped before the real forward pass.
        let output = {
            let _shifted = PerturbedParamsGuard::begin(self);
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

    /// Begins to measure the next backward pass.
    pub fn begin_measuring(&self) {
        let mut state = lock(&self.check.state);
        state.gradients = vec![DirectionalGradient::default(); self.params.len()];
        state.directions.resize(self.params.len(), None);
        self.check.measures.store(true, Ordering::Relaxed);
    }

    /// Ends the measurement, and the check with it.
    pub fn end_measuring(&self) -> MeasuredGradients {
        self.check.measures.store(false, Ordering::Relaxed);
        self.check.armed.store(false, Ordering::Relaxed);
        let GradientCheckState { outputs, gradients, unprobed, .. } = std::mem::take(&mut *lock(&self.check.state));
        MeasuredGradients { outputs, gradients, unprobed }
    }
}

/// Methods for units and parameters.
impl RankCore {
    /// Moves a unit's parameters, which are in memory and about to be used.
    pub(in crate::zero) fn shift_unit(&self, unit: UnitId) -> Result<()> {
        // If parameters are not sharded, a unit's parameters may be used outside the unit too.
        let all = !self.shards_params();
        if !self.is_checking() || (all && unit != ROOT) {
            return Ok(());
        }
        let mut state = lock(&self.check.state);
        if state.sign == 0.0 {
            return Ok(());
        }
        for (id, param) in self.params.iter().enumerate() {
            let is_selected = state.params.as_ref().is_none_or(|params| params.contains(&id));
            let is_moved = || state.originals.iter().any(|(moved, ..)| *moved == id);
            if (param.unit != unit && !all)
                || !param.is_trained()
                || param.numel == 0
                || !is_selected
                || is_moved()
                || !param.is_whole()
            {
                continue;
            }
            let (relative_step, seed, sign) = (state.relative_step, state.seed, state.sign);
            let unmoved = node_of(&param.tensor).map_or(0..0, |node| node.unchecked);
            let (direction, original) = residency::with_values(&param.tensor, |values| {
                let original = values.clone();
                let direction =
                    PerturbationDirection::new((&param.name, seed), &param.shape, values.as_ref(), relative_step);
                let direction = direction.without(unmoved);
                direction.shift(values.as_mut(), sign);
                (direction, original)
            })?;
            let held = self.ledger.hold_in(MemoryTier::Host, MemoryKind::GradientCheck, original.capacity_in_bytes());
            state.directions[id] = Some(direction);
            state.originals.push((id, original, held));
        }
        Ok(())
    }

    /// Restores the values of a unit's parameters after it has run.
    pub(in crate::zero) fn unshift_unit(&self, unit: UnitId) -> Result<()> {
        let all = !self.shards_params();
        if !self.is_checking() || (all && unit != ROOT) {
            return Ok(());
        }
        self.put_back(|param| all || self.params[param].unit == unit)
    }

    /// Restores a parameter that a backward pass inside the model's forward pass no longer needs. The root's parameters
    /// are still in use.
    pub(in crate::zero) fn unshift_passed(&self, param: ParamId) -> Result<()> {
        match self.is_checking() && self.params[param].unit != ROOT {
            true => self.put_back(|moved| moved == param),
            false => Ok(()),
        }
    }

    fn put_back(&self, which: impl Fn(ParamId) -> bool) -> Result<()> {
        let mut state = lock(&self.check.state);
        let originals = std::mem::take(&mut state.originals);
        let (restored, remaining) = originals.into_iter().partition(|(param, ..)| which(*param));
        state.originals = remaining;
        let restored: Vec<(ParamId, Flat, MemoryLedgerEntry)> = restored;
        for (param, values, _held) in restored {
            let param = &self.params[param];
            if param.is_whole() {
                residency::with_values(&param.tensor, |moved| *moved = values)?;
            }
        }
        Ok(())
    }

    /// Measures a parameter's gradient, which has arrived in the measured backward pass.
    pub(in crate::zero) fn measure(&self, param: ParamId, grad: &Grad) -> candle_core::Result<()> {
        let mut state = lock(&self.check.state);
        let Some(direction) = state.directions.get(param).copied().flatten() else { return Ok(()) };
        let parameter = &self.params[param];
        let measured = grad.view(|grad| match parameter.is_whole() {
            true => residency::with_view(&parameter.tensor, |values| direction.along(grad, Some(values))),
            false => Ok(direction.along(grad, None)),
        })??;
        let sum = &mut state.gradients[param];
        sum.product += measured.product;
        sum.squares += measured.squares;
        Ok(())
    }
}

/// A guard for moved parameters: it puts them back even after an error or a panic.
struct PerturbedParamsGuard<'a>(&'a RankCore);

impl<'a> PerturbedParamsGuard<'a> {
    fn begin(core: &'a RankCore) -> Self {
        core.check.shifts.store(true, Ordering::Relaxed);
        Self(core)
    }
}

impl Drop for PerturbedParamsGuard<'_> {
    fn drop(&mut self) {
        // An error is ignored: a parameter that cannot be put back was never moved.
        let _ = self.0.put_back(|_| true);
        self.0.check.shifts.store(false, Ordering::Relaxed);
    }
}
