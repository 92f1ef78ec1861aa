//! The state of a check of gradients.

use super::gradient_report::{DirectionSamples, GradientReport, GradientTolerance};
use crate::param::ParamId;
use crate::zero::check::gradient_check_state::DirectionalChange;
use std::cell::Cell;
use std::path::PathBuf;

/// The environment variable that has the first step look at every parameter, write what it finds into the file that it names,
/// and end the run.
#[doc(hidden)]
pub const CHECK_GRADIENTS: &str = "CANDLE_ZERO_CHECK_GRADIENTS";

thread_local! {
    /// The forward of an engine that this thread runs, and which of its repetitions.
    pub(super) static AROUND: Cell<CurrentForward> = const { Cell::new(CurrentForward { forward: 0, repetition: 0 }) };
    pub(super) static FORWARDS: Cell<u64> = const { Cell::new(0) };
}

/// Where in the forward of an engine this thread is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CurrentForward {
    /// Its number; 0: in none.
    pub(super) forward: u64,
    /// 0: the one that counts; else for a check.
    pub(super) repetition: u64,
}

impl CurrentForward {
    pub(super) fn enter<T>(self, run: impl FnOnce() -> T) -> T {
        struct ResetForward(CurrentForward);
        impl Drop for ResetForward {
            fn drop(&mut self) {
                AROUND.set(self.0);
            }
        }
        let _reset = ResetForward(AROUND.replace(self));
        run()
    }
}

/// The check of an engine.
#[derive(Debug, Default)]
pub(super) struct GradientChecker {
    pub(super) phase: CheckPhase,
    /// Every parameter is looked at by itself.
    pub(super) of_each: bool,
    /// Writes the report into this file when it is there, and ends the run.
    pub(super) ends_run: Option<PathBuf>,
    pub(super) tries: u32,
    /// Directions that have been looked along.
    pub(super) looks: u64,
    /// Why there is no verdict.
    pub(super) why_not: Option<String>,
    pub(super) groups: Vec<PerturbedGroup>,
    /// Forwards of this engine inside of another one's: that forward, and the place of the draws where it began.
    pub(super) inside: Option<(CurrentForward, u64, u64)>,
    pub(super) report: Option<GradientReport>,
}

#[derive(Debug, Default)]
pub(super) enum CheckPhase {
    /// Nothing to be done.
    #[default]
    Idle,
    /// Forwards are repeated until a backward comes.
    Armed,
    /// The backward has come; all ranks compare at the coming step. With the factor that gradients have.
    Measured(Vec<DirectionalChange>, Vec<DirectionalDerivative>, f64),
}

/// What is moved together.
#[derive(Debug)]
pub(super) struct PerturbedGroup {
    pub(super) name: String,
    pub(super) params: Vec<ParamId>,
    /// How far, as a part of the size of each parameter; chosen in the first forward.
    pub(super) step: Option<f64>,
    pub(super) looks: DirectionSamples,
}

/// This rank's part of the gradient along a direction.
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

impl GradientChecker {
    /// The groups that need another look, by number.
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

    /// The check of a first step.
    pub(super) fn of_first_step(is_wanted: bool) -> Self {
        let ends_run = std::env::var_os(CHECK_GRADIENTS).map(PathBuf::from);
        let of_each = ends_run.is_some();
        let phase = if is_wanted || of_each { CheckPhase::Armed } else { CheckPhase::Idle };
        Self { phase, of_each, ends_run, ..Self::default() }
    }
}
