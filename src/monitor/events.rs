//! The monitor trait, its events, and the milestones of a run.

use crate::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A value of a scalar that is tracked over a run.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MonitorEvent {
    /// The name of the scalar, such as `Train/Samples/lr`.
    pub tag: String,
    /// The value.
    pub value: f64,
    /// The position on the x axis. The engine's own events use the number of samples of all ranks so far.
    pub step: u64,
}

impl MonitorEvent {
    /// Creates an event with a value of `tag` at `step`.
    pub fn new(tag: impl Into<String>, value: f64, step: u64) -> Self {
        Self { tag: tag.into(), value, step }
    }
}

/// A destination for events: files, a port, or a custom implementation.
///
/// The constructor of a monitor should open the files or ports that it writes to, so that a folder that is not writable
/// causes an error before the first step. A monitor that fails later is dropped with one message, and training
/// continues.
pub trait Monitor: Send {
    /// Writes events, in the order in which they happened. They must be visible outside the process when this
    /// method returns, because the process may be killed at any time.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io), or another error that names what cannot be written.
    fn write(&mut self, events: &[MonitorEvent]) -> Result<()>;

    /// Notes a milestone of the run. The default does nothing.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    fn note(&mut self, milestone: &RunMilestone<'_>) -> Result<()> {
        _ = milestone;
        Ok(())
    }
}

/// A milestone of a run, as passed to [`Monitor::note`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum RunMilestone<'a> {
    /// Training begins or continues. This precedes all events; a program that only evaluates has no milestones.
    Begins(&'a RunDescription),
    /// A checkpoint was loaded after the run began, so events of samples after the checkpoint are repeated.
    Loaded {
        /// The number of samples in the checkpoint.
        samples: u64,
    },
    /// A checkpoint is complete.
    Saved {
        /// The folder of checkpoints.
        folder: &'a Path,
    },
    /// The run ends.
    Ends(RunEnding),
}

/// The facts about a run that are known when it begins. Passwords and tokens are replaced.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct RunDescription {
    /// The name of the run, or of the program.
    pub name: String,
    /// The id of the job, which stays the same when the launcher restarts the job.
    pub job: String,
    /// The number of times that the launcher has restarted the job.
    pub restart: u64,
    /// The number of ranks.
    pub world_size: usize,
    /// The resolved configuration.
    pub configuration: Value,
    /// The settings of the program that are not part of the configuration.
    pub settings: Value,
    /// The number of steps of the complete run, if it is known.
    pub total_steps: Option<u64>,
    /// The folder of checkpoints from which a checkpoint was loaded, if any.
    pub loaded_from: Option<PathBuf>,
    /// The number of samples of all ranks before the first step.
    pub samples: u64,
}

/// The outcome of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum RunEnding {
    /// The program ended the run normally.
    Finished,
    /// A signal, or a request from the dashboard, asked the run to end.
    Stopped,
    /// An error ended the run.
    Failed,
}

impl RunEnding {
    /// Returns the name of the outcome.
    pub fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        }
    }
}
