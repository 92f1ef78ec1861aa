//! A trial: one combination of parameters, its state and its results.

use super::settings::SweepGoal;
use super::space::TrialParameters;
use serde_json::Value;

/// The state of a trial.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TrialState {
    /// The trial waits at the step that it has reached.
    Paused,
    /// The trial is being trained up to this step.
    Running {
        /// The step.
        to: u64,
    },
    /// The trial has reached its last step.
    Complete,
    /// The scheduler has ended the trial early.
    Stopped,
    /// A branch of a better trial has taken the place of this one.
    Replaced {
        /// The number of the branch.
        by: usize,
    },
    /// The trial has failed, for this reason.
    Failed(String),
}

impl TrialState {
    /// Returns the state in one word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Paused => "paused",
            Self::Running { .. } => "running",
            Self::Complete => "complete",
            Self::Stopped => "stopped",
            Self::Replaced { .. } => "replaced",
            Self::Failed(_) => "failed",
        }
    }
}

/// The beginning of a trial that does not begin at step 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrialBranch {
    /// The trial that the branch continues, with other parameters.
    pub trial: usize,
    /// The step after which the branch begins.
    pub step: u64,
}

/// A trial: one combination of parameters. The parameters never change; population-based training replaces one trial
/// with another.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct SweepTrial {
    /// The number, counted from 1.
    pub number: usize,
    /// The values of the parameters.
    pub parameters: TrialParameters,
    /// The trial that this one continues, if it is a branch.
    pub branch: Option<TrialBranch>,
    /// The metric at each step at which the trial has paused or ended.
    pub results: Vec<(u64, f64)>,
    /// The state.
    pub state: TrialState,
}

impl SweepTrial {
    pub(super) fn new(number: usize, parameters: TrialParameters, branch: Option<TrialBranch>) -> Self {
        Self { number, parameters, branch, results: Vec::new(), state: TrialState::Paused }
    }

    /// Returns the value of a parameter.
    pub fn parameter(&self, name: &str) -> Option<&Value> {
        self.parameters.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// Returns the step that the trial has reached.
    pub fn reached(&self) -> u64 {
        let begin = self.branch.map_or(0, |branch| branch.step);
        self.results.last().map_or(begin, |(step, _)| *step)
    }

    /// Returns the number of steps trained in this trial, without those of the trial from which it branches.
    pub fn steps_done(&self) -> u64 {
        self.reached() - self.branch.map_or(0, |branch| branch.step)
    }

    /// Returns the newest value of the metric.
    pub fn value(&self) -> Option<f64> {
        self.results.last().map(|(_, value)| *value)
    }

    /// Returns the metric at a step.
    pub fn value_at(&self, step: u64) -> Option<f64> {
        self.results.iter().find(|(at, _)| *at == step).map(|(_, value)| *value)
    }

    /// Returns the score of the newest value, which is smaller for better trials.
    pub(super) fn score(&self, goal: SweepGoal) -> f64 {
        self.value().map_or(f64::INFINITY, |value| goal.score(value))
    }
}
