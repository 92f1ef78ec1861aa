//! Errors of estimates.

use std::path::PathBuf;

/// Errors of estimates.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EstimateError {
    /// Ranks that cannot be divided among the hosts.
    #[error(
        "{ranks} ranks cannot be divided among {hosts} hosts; give a number of ranks that is a multiple of {hosts}"
    )]
    Hosts {
        /// The ranks of the job.
        ranks: usize,
        /// The hosts.
        hosts: usize,
    },
    /// A network that is written in a way that is not known.
    #[error(
        "the network is \"{found}\", but must be a rate and a latency, such as 25Gbit,50us or 3GB/s,1ms: {allowed}"
    )]
    Network {
        /// The text.
        found: String,
        /// What is allowed in place of the wrong part.
        allowed: &'static str,
    },
    /// A step that takes no time, or a time that is no number.
    #[error("the step takes {found} s, but must take more than 0 s")]
    Step {
        /// The seconds.
        found: f64,
    },
    /// A file of metrics without steps that could be used.
    #[error("{}: {problem}; give the metrics of a run, as train_gpt's --metrics writes them", path.display())]
    Metrics {
        /// The file.
        path: PathBuf,
        /// What was found.
        problem: String,
    },
}
