//! The outcomes of a candidate's run.

use candle_zero::util::format_bytes;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The outcome of a candidate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub(super) enum TrialOutcome {
    /// The run succeeded.
    Ran {
        /// The throughput over all measured steps.
        throughput: f64,
        /// The counted unit: tokens or samples.
        unit: String,
        /// The average time of a step.
        step_ms: f64,
        /// The peak memory of the rank that used the most.
        memory_bytes: Option<u64>,
    },
    /// The run succeeded, but used more memory than allowed.
    OverLimit { memory_bytes: u64 },
    /// The run failed.
    Failed { reason: String },
    /// The run failed for lack of memory.
    OutOfMemory { reason: String },
    /// The run took too long and was stopped.
    TimedOut { seconds: u64 },
    /// The run was skipped because the model's state alone does not fit.
    TooLarge {
        #[serde(rename = "needs")]
        needed_bytes: u64,
    },
    /// The run was skipped.
    NotRun { reason: String },
}

impl TrialOutcome {
    /// Applies a memory limit to the outcome.
    pub(super) fn apply_memory_limit(self, limit: u64) -> Self {
        match self {
            Self::Ran { memory_bytes: Some(memory_bytes), .. } if memory_bytes > limit => {
                Self::OverLimit { memory_bytes }
            }
            other => other,
        }
    }

    pub(super) fn is_success(&self) -> bool {
        matches!(self, Self::Ran { .. })
    }

    pub(super) fn has_run(&self) -> bool {
        !matches!(self, Self::NotRun { .. } | Self::TooLarge { .. })
    }

    /// Returns whether a larger micro batch, which needs more memory, can only do worse.
    pub(super) fn is_too_large(&self) -> bool {
        matches!(self, Self::OverLimit { .. } | Self::OutOfMemory { .. } | Self::TooLarge { .. })
    }
}

/// Several runs of one candidate.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RepeatedTrials {
    /// The median run, with the largest memory use of all successful runs.
    pub(super) median: TrialOutcome,
    /// The difference between the best and the worst throughput, as a fraction of the median.
    pub(super) spread: f64,
    /// The number of successful runs.
    pub(super) count: usize,
}

impl RepeatedTrials {
    /// Summarizes the successful runs. Returns `None` if there are none.
    pub(super) fn of(runs: &[TrialOutcome]) -> Option<Self> {
        let mut successful: Vec<(f64, &TrialOutcome)> =
            runs.iter().filter_map(|run| Some((run.throughput()?, run))).collect();
        successful.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (slowest, fastest) = (successful.first()?.0, successful.last()?.0);
        let (throughput, mut median) =
            successful.get(successful.len() / 2).map(|(speed, run)| (*speed, (*run).clone()))?;
        let max_memory = successful.iter().filter_map(|(_, run)| run.memory()).max();
        if let TrialOutcome::Ran { memory_bytes, .. } = &mut median {
            *memory_bytes = max_memory;
        }
        Some(Self { median, spread: (fastest - slowest) / throughput, count: successful.len() })
    }
}

impl TrialOutcome {
    /// Returns the tokens or samples per second of a successful run.
    pub(super) fn throughput(&self) -> Option<f64> {
        match self {
            Self::Ran { throughput, .. } => Some(*throughput),
            _ => None,
        }
    }

    fn memory(&self) -> Option<u64> {
        match self {
            Self::Ran { memory_bytes, .. } => *memory_bytes,
            _ => None,
        }
    }
}

impl fmt::Display for TrialOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ran { throughput, unit, step_ms, memory_bytes } => {
                write!(f, "{throughput:.0} {unit}/s, {step_ms:.1} ms a step")?;
                memory_bytes.map_or(Ok(()), |bytes| write!(f, ", {}", format_bytes(bytes)))
            }
            Self::OverLimit { memory_bytes } => write!(f, "over the limit: it used {}", format_bytes(*memory_bytes)),
            Self::Failed { reason } | Self::OutOfMemory { reason } => write!(f, "failed: {reason}"),
            Self::TimedOut { seconds } => write!(f, "failed: it took longer than {seconds} s"),
            Self::TooLarge { needed_bytes } => {
                let needed = format_bytes(*needed_bytes);
                write!(f, "not run: according to the estimate, the model's state alone needs {needed}")
            }
            Self::NotRun { reason } => write!(f, "not run: {reason}"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn of_several_runs_the_middle_one_counts_and_their_spread_is_told() {
        let ran = |throughput: f64, memory| TrialOutcome::Ran {
            throughput,
            unit: "tokens".into(),
            step_ms: 1e3 / throughput,
            memory_bytes: Some(memory),
        };
        let failed = TrialOutcome::Failed { reason: "x".into() };
        let runs = RepeatedTrials::of(&[ran(100.0, 7), ran(80.0, 9), failed.clone(), ran(90.0, 8)]).unwrap();
        assert_eq!((runs.median, runs.count), (ran(90.0, 9), 3));
        assert!((runs.spread - 20.0 / 90.0).abs() < 1e-12);
        assert_eq!(RepeatedTrials::of(&[failed]), None);
        assert_eq!(RepeatedTrials::of(&[ran(5.0, 1)]).unwrap().spread, 0.0);
    }
}
