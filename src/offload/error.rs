//! Errors of offloading to files.

use crate::util::{counted, is_or_are};
use std::path::PathBuf;

/// Errors of offloading to files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// A value of `nvme_path` to which state cannot be offloaded.
    #[error("cannot offload to {}: {problem}", path.display())]
    Folder {
        /// The folder that `nvme_path` names.
        path: PathBuf,
        /// The problem, and how to fix it.
        problem: String,
    },
    /// A folder to which another job is already offloading.
    #[error(
        "cannot offload to {}: a running job is already using it{}; give each job its own folder as nvme_path, or stop \
         the other one",
        path.display(),
        owner.map_or(String::new(), |pid| format!(" (process {pid})"))
    )]
    Busy {
        /// The folder that `nvme_path` names.
        path: PathBuf,
        /// The process that holds the lock, if the system reports the process.
        owner: Option<u32>,
    },
    /// A disk that cannot hold the offloaded state.
    #[error(
        "cannot offload to {}: files there need {needed} bytes, but {available} are available: {} {} needed; \
         free that much space, or set nvme_path to a folder on a larger disk",
        path.display(),
        counted(needed.saturating_sub(*available), "more byte"),
        is_or_are(needed.saturating_sub(*available))
    )]
    Space {
        /// The folder that `nvme_path` names.
        path: PathBuf,
        /// The bytes that the files of all ranks on that disk need; after the first step, the bytes that this rank's
        /// files need.
        needed: u64,
        /// The bytes that the file system can give to these files, including those that they already have.
        available: u64,
    },
    /// A folder in memory, which cannot hold the offloaded state.
    #[error(
        "cannot offload to {}: it is on tmpfs, so files there stay in memory, and they need {needed} bytes or more, \
         but {available} were free; set nvme_path to a folder on a disk",
        path.display()
    )]
    Memory {
        /// The folder that `nvme_path` names.
        path: PathBuf,
        /// The bytes that the files of all ranks on that file system need; after the first step, the bytes that this
        /// rank's files need.
        needed: u64,
        /// The bytes of memory that were free when the folder was opened.
        available: u64,
    },
    /// A file of offloaded state that could not be read, written or enlarged.
    #[error("cannot {action} the file of {what} in {}: {source}; {}", path.display(), fix_of(source))]
    Io {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The content of the file.
        what: &'static str,
        /// The folder that `nvme_path` names.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A thread for file access that could not be started.
    #[error("cannot start a thread for file access: {0}; lower aio.queue_depth or aio.intra_op_parallelism")]
    Thread(std::io::Error),
}

/// Returns advice about a failed operation on a file of offloaded state.
fn fix_of(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            "free space there, or set nvme_path to a folder on a larger disk"
        }
        std::io::ErrorKind::FileTooLarge => {
            "raise the limit on file sizes (`ulimit -f`), or set nvme_path to a folder on a file system that allows \
             larger files"
        }
        _ => "check the disk's health, or set nvme_path to a folder on another disk",
    }
}
