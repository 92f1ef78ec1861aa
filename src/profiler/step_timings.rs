//! How long a step took.

/// Milliseconds that the last optimizer step took on this rank, accumulation included.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct StepTimings {
    /// Milliseconds in `forward`.
    pub forward_ms: f64,
    /// Milliseconds in `backward`.
    pub backward_ms: f64,
    /// Milliseconds in `step`.
    pub step_ms: f64,
    /// Waiting for collectives, a part of the others.
    pub comm_ms: f64,
    /// Waiting for files, a part of the others.
    pub disk_ms: f64,
}
