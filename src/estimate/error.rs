//! Errors of estimates.

use crate::util::counted;
use std::path::PathBuf;

/// Errors of estimates.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EstimateError {
    /// The ranks cannot be divided evenly among the hosts.
    #[error(
        "{} cannot be divided among {}; give a number of ranks that is a multiple of {hosts}",
        counted(*ranks, "rank"),
        counted(*hosts, "host")
    )]
    Hosts {
        /// The number of ranks in the job.
        ranks: usize,
        /// The number of hosts.
        hosts: usize,
    },
    /// The description of a network cannot be parsed.
    #[error(
        "the network is \"{found}\", but must be a rate and a latency, such as 25Gbit,50us or 3GB/s,1ms: {allowed}"
    )]
    Network {
        /// The description as given.
        found: String,
        /// The allowed form of the part that is wrong.
        allowed: &'static str,
    },
    /// The time of a step is not a finite number above 0.
    #[error("the step takes {found} s, but must take a finite time of more than 0 s")]
    Step {
        /// The time in seconds.
        found: f64,
    },
    /// A metrics file has no steps that can be used.
    #[error(
        "{}: {problem}; give the metrics of a run, as written by train_gpt's --metrics or zerorun finetune's",
        path.display()
    )]
    Metrics {
        /// The file.
        path: PathBuf,
        /// The problem found.
        problem: String,
    },
}
