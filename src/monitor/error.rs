//! Errors of monitors and the timeline.

use std::path::PathBuf;

/// Errors of monitors and the timeline.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MonitorError {
    /// The port for Prometheus cannot be listened on.
    #[error(
        "cannot serve metrics for Prometheus on port {port} of 127.0.0.1: {source}; give another port, or 0 for a free \
         one"
    )]
    PrometheusPort {
        /// The port that was asked for.
        port: u16,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The environment variable that asks for a port for Prometheus holds something else.
    #[error("environment variable {name} is `{value}`; it must be a port number from 0 to 65535")]
    PrometheusVariable {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// Another job writes metrics into the same file.
    #[error(
        "cannot write metrics to {}: a job that is running writes them there already{}; give each job a file of its \
         own, or stop the other one",
        path.display(),
        owner.map_or(String::new(), |pid| format!(" (process {pid})"))
    )]
    MetricsBusy {
        /// The file.
        path: PathBuf,
        /// The process that locked it, where the system says.
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
