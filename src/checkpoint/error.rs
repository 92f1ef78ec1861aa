//! Errors of checkpoints.

use std::path::PathBuf;

/// Errors of checkpoints.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A checkpoint that cannot be written, read or used. Neither the engine nor other checkpoints have changed.
    #[error("the checkpoint {} cannot be used: {problem}", path.display())]
    Unusable {
        /// The folder or file.
        path: PathBuf,
        /// The problem, the allowed values, and how to fix it.
        problem: String,
    },
    /// Another job is saving into the same folder.
    #[error(
        "cannot save checkpoints to {}: a running job is already saving there{}; give each job its own folder, or stop \
         the other one",
        path.display(),
        owner.map_or(String::new(), |pid| format!(" (process {pid})"))
    )]
    Busy {
        /// The folder.
        path: PathBuf,
        /// The process that holds the lock, if the system reports it.
        owner: Option<u32>,
    },
    /// An object store that cannot be written to or read from. Checkpoints on disk are complete.
    #[error("the object store {url} cannot be used: {problem}")]
    Store {
        /// The store's address.
        url: String,
        /// The object, the problem, and how to fix it.
        problem: String,
    },
    /// A DeepSpeed checkpoint that cannot be read.
    #[error("cannot read the DeepSpeed checkpoint {}: {problem}", path.display())]
    DeepSpeed {
        /// The folder, or the file in it.
        path: PathBuf,
        /// The problem, the allowed values, and how to fix it.
        problem: String,
    },
}
