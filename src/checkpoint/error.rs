//! Errors of checkpoints.

use std::path::PathBuf;

/// Errors of checkpoints.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A checkpoint that cannot be written, read or used. Nothing has changed: neither the engine nor other
    /// checkpoints.
    #[error("the checkpoint {} cannot be used: {problem}", path.display())]
    Unusable {
        /// The folder or file.
        path: PathBuf,
        /// The problem, the allowed values, and how to fix it.
        problem: String,
    },
    /// Another job saves into the same folder.
    #[error(
        "cannot save checkpoints into {}: a job that is running saves there already{}; give each job a folder of its \
         own, or stop the other one",
        path.display(),
        owner.map_or(String::new(), |pid| format!(" (process {pid})"))
    )]
    Busy {
        /// The folder.
        path: PathBuf,
        /// The process that locked it, where the system says.
        owner: Option<u32>,
    },
    /// An object store that cannot be written or read. Checkpoints on disk are whole.
    #[error("the object store {url} cannot be used: {problem}")]
    Store {
        /// Its address.
        url: String,
        /// The object, the problem, and how to fix it.
        problem: String,
    },
    /// A checkpoint that DeepSpeed wrote cannot be read.
    #[error("cannot read the DeepSpeed checkpoint {}: {problem}", path.display())]
    DeepSpeed {
        /// The folder, or the file in it.
        path: PathBuf,
        /// The problem, the allowed values, and how to fix it.
        problem: String,
    },
}
