//! Errors of a sweep's settings and results.

/// A setting of a sweep that cannot be used, or a result that does not belong to a running trial.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SweepError {
    /// A setting has a value that is not allowed.
    #[error("{key} is {found}; {allowed}")]
    Setting {
        /// The setting.
        key: String,
        /// The value.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// Two settings exclude each other, or one needs another.
    #[error("{problem}")]
    Conflict {
        /// The problem and its remedy.
        problem: String,
    },
    /// A result was added for a trial that is not running.
    #[error("trial {trial} is not running, but a result was added for it; call Sweep::tell once for each job")]
    NotRunning {
        /// The number of the trial.
        trial: usize,
    },
}

impl SweepError {
    /// Returns the error about a setting.
    pub(super) fn setting(key: impl Into<String>, found: impl ToString, allowed: impl Into<String>) -> Self {
        Self::Setting { key: key.into(), found: found.to_string(), allowed: allowed.into() }
    }
}
