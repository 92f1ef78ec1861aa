//! The notice of a rank that gives up.

use super::mpi::MpiRank;
use super::shm::region::SharedMemoryRegion;
use crate::error::{CommError, without_backtrace};
use std::sync::{Arc, OnceLock};

/// The signal to the other ranks that this rank gives up, sent at most once. The training thread and the comm thread
/// share it.
pub(super) struct AbortSignal {
    region: Arc<SharedMemoryRegion>,
    rank: usize,
    /// This rank's number in the shared memory region.
    local_rank: usize,
    /// The connection to other hosts, if there are any.
    mpi: Option<MpiRank>,
    /// The reason that this rank has reported.
    why: OnceLock<String>,
}

impl AbortSignal {
    /// Returns the signal of `rank`, which is `local_rank` in the region.
    pub(super) fn new(
        region: Arc<SharedMemoryRegion>,
        (rank, local_rank): (usize, usize),
        mpi: Option<MpiRank>,
    ) -> Self {
        Self { region, rank, local_rank, mpi, why: OnceLock::new() }
    }

    /// Notifies the other ranks that this one gives up because of `why`, unless it has already given them a reason.
    pub(super) fn abort(&self, why: &str) {
        // A backtrace would clutter the other ranks' own messages.
        let why = without_backtrace(why);
        if self.why.set(why.clone()).is_ok() {
            self.region.abort(self.local_rank, &why);
            self.mpi.iter().for_each(|mpi| mpi.abort(&why));
        }
    }

    /// Notifies the other ranks that this one could not start a thread, and returns the error for this rank.
    pub(super) fn thread_not_started(&self, source: std::io::Error) -> CommError {
        self.abort("it could not start a thread");
        CommError::Region { action: "start a communication thread", source: Arc::new(source) }
    }

    /// Returns the error of every collective of this rank after it has given up.
    pub(super) fn error(&self) -> Option<CommError> {
        self.why.get().map(|why| CommError::GaveUp { rank: self.rank, why: why.clone() })
    }
}
