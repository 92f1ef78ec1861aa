//! The state of a gradient check.

use super::gradient_check_report::{DirectionSamples, GradientReport, GradientTolerance};
use crate::param::ParamId;
use crate::zero::check::gradient_check_state::DirectionalChange;
use std::cell::Cell;
use std::path::PathBuf;

/// The environment variable that makes the first step check every parameter, write the report into the file that the
/// variable names, and end the run.
#[doc(hidden)]
pub const CHECK_GRADIENTS: &str = "CANDLE_ZERO_CHECK_GRADIENTS";

thread_local! {
    /// The engine's forward pass that this thread is running, and the index of its repetition.
    pub(super) static CURRENT_FORWARD: Cell<CurrentForward> = const { Cell::new(CurrentForward { forward: 0, repetition: 0 }) };
    pub(super) static FORWARDS: Cell<u64> = const { Cell::new(0) };
}

/// The position of this thread relative to an engine's forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CurrentForward {
    /// The index of the forward pass, counted from 1; 0 outside any forward pass.
    pub(super) forward: u64,
    /// 0 for the real forward pass; otherwise the index of the repetition for a check, counted from 1.
    pub(super) repetition: u64,
}

impl CurrentForward {
    pub(super) fn enter<T>(self, run: impl FnOnce() -> T) -> T {
        struct CurrentForwardGuard(CurrentForward);
        impl Drop for CurrentForwardGuard {
            fn drop(&mut self) {
                CURRENT_FORWARD.set(self.0);
            }
        }
        let _reset = CurrentForwardGuard(CURRENT_FORWARD.replace(self));
        run()
    }
}

/// The state of an engine's gradient check.
#[derive(Debug, Default)]
pub(super) struct EngineCheckState {
    pub(super) phase: CheckPhase,
    /// Whether every parameter is checked separately.
    pub(super) of_each: bool,
    /// The file to which the report is written after each compared step. The run ends when the check is over.
    pub(super) ends_run: Option<PathBuf>,
    pub(super) tries: u32,
    /// The number of directions checked so far.
    pub(super) looks: u64,
    /// The reason why there is no verdict.
    pub(super) why_not: Option<String>,
    pub(super) groups: Vec<PerturbedGroup>,
    /// Forward passes of this engine inside a forward pass of another engine: the other engine's pass, and the random
    /// stream positions of this engine's first and next pass.
    pub(super) inside: Option<(CurrentForward, u64, u64)>,
    pub(super) report: Option<GradientReport>,
}

#[derive(Debug, Default)]
pub(super) enum CheckPhase {
    /// Nothing is checked.
    #[default]
    Idle,
    /// Forward passes are repeated until a backward pass follows.
    Armed,
    /// The backward pass has run; all ranks compare in the step that follows. The last field is the factor that
    /// gradients contain.
    Measured(Vec<DirectionalChange>, Vec<DirectionalDerivative>, f64),
}

/// A group of parameters that are perturbed together.
#[derive(Debug)]
pub(super) struct PerturbedGroup {
    pub(super) name: String,
    pub(super) params: Vec<ParamId>,
    /// The perturbation relative to the size of each parameter; chosen in the first forward pass.
    pub(super) step: Option<f64>,
    pub(super) looks: DirectionSamples,
}

/// This rank's contribution to the gradient along a direction.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct DirectionalDerivative {
    pub(super) product: f64,
    pub(super) squares: f64,
}

impl PerturbedGroup {
    pub(super) fn new(name: String, params: Vec<ParamId>) -> Self {
        Self { name, params, step: None, looks: DirectionSamples::default() }
    }
}

impl EngineCheckState {
    /// Returns the indices of the groups that need another check.
    pub(super) fn open(&self, limits: &GradientTolerance) -> Vec<usize> {
        let is_open = |group: &PerturbedGroup| group.looks.verdict(limits).is_none();
        (0..self.groups.len()).filter(|number| is_open(&self.groups[*number])).collect()
    }

    pub(super) fn report_of(
        &self,
        step: u64,
        not_judged: Option<String>,
        limits: &GradientTolerance,
    ) -> GradientReport {
        let rows = self.groups.iter().map(|group| group.looks.row(group.name.clone(), limits));
        GradientReport { step, rows: rows.collect(), not_judged }
    }

    /// Returns the state before the first step, in which the gradients are checked if `is_wanted` or the environment
    /// requests it.
    pub(super) fn of_first_step(is_wanted: bool) -> Self {
        let ends_run = std::env::var_os(CHECK_GRADIENTS).map(PathBuf::from);
        let of_each = ends_run.is_some();
        let phase = if is_wanted || of_each { CheckPhase::Armed } else { CheckPhase::Idle };
        Self { phase, of_each, ends_run, ..Self::default() }
    }
}
