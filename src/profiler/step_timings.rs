//! The durations of an optimizer step.

/// The milliseconds that the last optimizer step took on this rank, including accumulation.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct StepTimings {
    /// The milliseconds in `forward`.
    pub forward_ms: f64,
    /// The milliseconds in `backward`.
    pub backward_ms: f64,
    /// The milliseconds in `step`.
    pub step_ms: f64,
    /// The milliseconds spent waiting for collectives. This time is included in the first three times.
    pub comm_ms: f64,
    /// The milliseconds spent waiting for files. This time is included in the first three times.
    pub disk_ms: f64,
}
