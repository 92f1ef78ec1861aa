//! Errors of offloading to files.

use std::path::PathBuf;

/// Errors of offloading to files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// `nvme_path` is no folder that state can be offloaded to.
    #[error("cannot offload to {}: {problem}", path.display())]
    Folder {
        /// `nvme_path`.
        path: PathBuf,
        /// The problem, and how to fix it.
        problem: String,
    },
    /// Another job offloads to the same folder.
    #[error(
        "cannot offload to {}: a job that is running uses it already{}; give each job a folder of its own as \
         nvme_path, or stop the other one",
        path.display(),
        owner.map_or(String::new(), |pid| format!(" (process {pid})"))
    )]
    Busy {
        /// `nvme_path`.
        path: PathBuf,
        /// The process that locked it, where the system says.
        owner: Option<u32>,
    },
    /// The disk cannot hold what is to be offloaded.
    #[error(
        "cannot offload to {}: files there need {needed} bytes, and {available} are there: {} bytes are missing; \
         free that space, or name a folder on a larger disk as nvme_path",
        path.display(),
        needed.saturating_sub(*available)
    )]
    Space {
        /// `nvme_path`.
        path: PathBuf,
        /// Bytes of all files on that disk, of all ranks; after the first step, of this rank.
        needed: u64,
        /// Bytes that the file system can give to them, those included that they have.
        available: u64,
    },
    /// The folder lies in memory, which cannot hold what is to be offloaded.
    #[error(
        "cannot offload to {}: it is on tmpfs, so files there stay in memory: they need {needed} bytes or more, and \
         {available} were free; let nvme_path name a folder on a disk",
        path.display()
    )]
    Memory {
        /// `nvme_path`.
        path: PathBuf,
        /// Bytes of all files on that file system, of all ranks; after the first step, of this rank.
        needed: u64,
        /// Bytes of memory that were free when the folder was opened.
        available: u64,
    },
    /// A file of offloaded state could not be read, written or made larger.
    #[error("cannot {action} the file of {what} in {}: {source}; {}", path.display(), fix_of(source))]
    Io {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The content of the file.
        what: &'static str,
        /// `nvme_path`.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A thread for file access could not be started.
    #[error("cannot start a thread for file access: {0}; lower aio.queue_depth or aio.intra_op_parallelism")]
    Thread(std::io::Error),
}

/// The advice about a failed file of offloaded state.
fn fix_of(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            "free space there, or name a folder on a larger disk as nvme_path"
        }
        std::io::ErrorKind::FileTooLarge => {
            "raise the limit of file sizes (`ulimit -f`), or name a folder on a file system that allows larger files \
             as nvme_path"
        }
        _ => "look at the disk's health, or name a folder on another one as nvme_path",
    }
}
