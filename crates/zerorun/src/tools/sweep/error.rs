//! The errors of `zerorun sweep`.

use candle_zero::Error;
use std::path::PathBuf;

/// An error of a sweep.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SweepToolError {
    /// A key of the sweep's definition is unknown or missing, or its value cannot be used.
    #[error("{origin}: {problem}")]
    Definition {
        /// The sweep file, or the command line.
        origin: String,
        /// The problem and its remedy.
        problem: String,
    },
    /// The folder holds a sweep with another definition.
    #[error(
        "{}: the sweep in it was begun with different settings: {differences}; continue it with `zerorun sweep resume \
         {}`, or give another folder with --out",
        folder.display(),
        folder.display()
    )]
    OtherSweep {
        /// The folder.
        folder: PathBuf,
        /// The keys that differ, with their values.
        differences: String,
    },
    /// The folder has no sweep that can be read, contains something other than a sweep, or is in use by another
    /// process.
    #[error("{}: {problem}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The problem and its remedy.
        problem: String,
    },
    /// The journal is damaged, or does not belong to the sweep.
    #[error("{}: line {line} {problem}", path.display())]
    Journal {
        /// The journal.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The problem and its remedy.
        problem: String,
    },
    /// A trial recorded no value of the metric in the steps of a job.
    #[error("metric is {metric}, but trial {trial} recorded no such value in {}; {found}",
        if first == last { format!("step {last}") } else { format!("steps {first} to {last}") })]
    NoMetric {
        /// The name of the metric.
        metric: String,
        /// The trial.
        trial: usize,
        /// The first step in which the value can be recorded.
        first: u64,
        /// The last step in which the value can be recorded.
        last: u64,
        /// The recorded names and the remedy.
        found: String,
    },
    /// Trials cannot run on a host of the hostfile.
    #[error("host {host}: {problem}")]
    Host {
        /// The host.
        host: String,
        /// The problem and its remedy.
        problem: String,
    },
    /// All hosts of the hostfile are lost.
    #[error(
        "all hosts are lost; the last one was {host}: {why}; when hosts can be reached again, or with another \
         --hostfile, continue the sweep with `zerorun sweep resume {}`",
        folder.display()
    )]
    NoHostLeft {
        /// The host that was lost last.
        host: String,
        /// The reason why it counts as lost.
        why: String,
        /// The folder of the sweep.
        folder: PathBuf,
    },
    /// Too many trials have failed.
    #[error(
        "the number of failed trials is {failures}, and max_failures is {most}; the last one failed with: {last}; \
         correct the command and begin again with another --out, or continue with a larger --max_failures"
    )]
    TooManyFailures {
        /// The number of failed trials.
        failures: usize,
        /// The maximum number of failed trials.
        most: usize,
        /// The message of the last failed trial.
        last: String,
    },
}

impl From<SweepToolError> for Error {
    fn from(error: SweepToolError) -> Self {
        Self::other(error)
    }
}
