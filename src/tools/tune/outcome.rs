//! How a candidate's run ended.

use crate::tools::estimate::binary;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The outcome of a candidate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub(super) enum Outcome {
    /// It ran to its end.
    Ran {
        /// Throughput of the measured steps together.
        throughput: f64,
        /// The counted unit: tokens or samples.
        unit: String,
        /// A step on average.
        step_ms: f64,
        /// Peak memory of the rank that used most.
        memory_bytes: Option<u64>,
    },
    /// It ran to its end with more memory than allowed.
    OverLimit { memory_bytes: u64 },
    /// It did not.
    Failed { reason: String },
    /// It did not, for want of memory.
    OutOfMemory { reason: String },
    /// It was ended.
    TimedOut { seconds: u64 },
    /// It need not be run: the model's state alone does not fit.
    TooLarge { needs: u64 },
    /// It need not be run.
    NotRun { reason: String },
}

impl Outcome {
    /// The same under a limit of memory.
    pub(super) fn within(self, limit: u64) -> Self {
        match self {
            Self::Ran { memory_bytes: Some(memory_bytes), .. } if memory_bytes > limit => {
                Self::OverLimit { memory_bytes }
            }
            other => other,
        }
    }

    pub(super) fn is_well(&self) -> bool {
        matches!(self, Self::Ran { .. })
    }

    pub(super) fn has_run(&self) -> bool {
        !matches!(self, Self::NotRun { .. } | Self::TooLarge { .. })
    }

    /// Whether a larger micro batch, which needs more memory, can only do worse.
    pub(super) fn is_too_large(&self) -> bool {
        matches!(self, Self::OverLimit { .. } | Self::OutOfMemory { .. } | Self::TooLarge { .. })
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ran { throughput, unit, step_ms, memory_bytes } => {
                write!(f, "{throughput:.0} {unit}/s, {step_ms:.1} ms a step")?;
                memory_bytes.map_or(Ok(()), |bytes| write!(f, ", {}", binary(bytes)))
            }
            Self::OverLimit { memory_bytes } => write!(f, "over the limit: it used {}", binary(*memory_bytes)),
            Self::Failed { reason } | Self::OutOfMemory { reason } => write!(f, "failed: {reason}"),
            Self::TimedOut { seconds } => write!(f, "failed: it took longer than {seconds} s"),
            Self::TooLarge { needs } => {
                write!(f, "not run: the model's state alone needs {} by the estimate", binary(*needs))
            }
            Self::NotRun { reason } => write!(f, "not run: {reason}"),
        }
    }
}
