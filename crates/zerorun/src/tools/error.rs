//! Errors of the commands of zerorun.

use std::path::PathBuf;

/// Errors of the commands of zerorun.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// A search for settings that cannot begin as it is asked for.
    #[error("autotuning.{key} is {found}, but must be {allowed}")]
    TuneSetting {
        /// The key.
        key: String,
        /// The value found.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// A folder that holds a model or an adapter, and no checkpoint.
    #[error("{} holds no checkpoint: it is {what}", dir.display())]
    NoCheckpoints {
        /// The folder.
        dir: PathBuf,
        /// What it is, and what takes it.
        what: &'static str,
    },
    /// A script whose settings cannot be searched for.
    #[error("cannot tune: {problem}")]
    Tune {
        /// The finding, and how to fix it.
        problem: String,
    },
}
