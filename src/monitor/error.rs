//! Errors of monitors and the timeline.

use std::path::PathBuf;

/// Errors of monitors and the timeline.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MonitorError {
    /// Listening on the port for Prometheus fails.
    #[error(
        "cannot serve metrics for Prometheus on 127.0.0.1, port {port}: {source}; give another port, or 0 for a free \
         one"
    )]
    PrometheusPort {
        /// The requested port.
        port: u16,
        /// The system's error.
        source: std::io::Error,
    },
    /// The environment variable for the Prometheus port does not contain a port number.
    #[error("environment variable {name} is `{value}`; it must be a port number from 0 to 65535")]
    PrometheusVariable {
        /// The name of the variable.
        name: &'static str,
        /// The value of the variable.
        value: String,
    },
    /// The environment variable for the id of a Weights & Biases run does not contain a valid id.
    #[error(
        "environment variable WANDB_RUN_ID is `{value}`; give 1 to 64 ASCII letters, digits, `-` or `_`, or remove it"
    )]
    WandbRunId {
        /// The value of the variable.
        value: String,
    },
    /// Another job is writing metrics to the same file.
    #[error(
        "cannot write metrics to {}: a running job is already writing them there{}; give each job its own file, or \
         stop the other one",
        path.display(),
        owner.map_or(String::new(), |pid| format!(" (process {pid})"))
    )]
    MetricsBusy {
        /// The file.
        path: PathBuf,
        /// The process that locked the file, if the system reports it.
        owner: Option<u32>,
    },
    /// The timeline of a job cannot be written.
    #[error("cannot write the timeline {}: {problem}", path.display())]
    Timeline {
        /// The file.
        path: PathBuf,
        /// The problem, and how to fix it.
        problem: String,
    },
}
