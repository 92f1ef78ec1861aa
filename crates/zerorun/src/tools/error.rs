//! The errors of zerorun's commands.

use std::path::PathBuf;

/// An error of a zerorun command.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// A setting of `autotuning` has a value that is not allowed.
    #[error("autotuning.{key} is {found}, but must be {allowed}")]
    TuneSetting {
        /// The key.
        key: String,
        /// The value found.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// A folder contains a model or an adapter instead of a checkpoint.
    #[error("{} contains no checkpoint: it is {what}", dir.display())]
    NoCheckpoints {
        /// The folder.
        dir: PathBuf,
        /// The contents of the folder, and the command that accepts it.
        what: &'static str,
    },
    /// The settings of a script cannot be tuned.
    #[error("cannot tune: {problem}")]
    Tune {
        /// The problem and its remedy.
        problem: String,
    },
}
