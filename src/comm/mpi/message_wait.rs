//! Waiting for messages to or from ranks of other hosts. A wait ends with an error if a rank has failed, the awaited
//! rank has left, or the time limit is exceeded.

use super::link::MpiTransfer;
use super::peer_exit_notices::PeerExitNotices;
use super::topology::HostTopology;
use crate::comm::shm::piece_slots::SpinLimits;
use crate::comm::shm::region::SharedMemoryRegion;
use crate::error::CommError;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time for which a thread sleeps between checks of an awaited message, once its spin limit is exceeded.
pub(super) const POLL_SLEEP: Duration = Duration::from_micros(50);
/// The interval at which a wait checks for failed ranks.
const FAILURE_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// The number of checks of the message after which a wait reads a clock.
const POLLS_PER_CLOCK_READ: u32 = 200;

/// The state that a wait for another host watches: the ranks of this host, and the exit notices of the ranks of
/// other hosts.
#[derive(Clone)]
pub(super) struct MessageWait {
    pub region: Arc<SharedMemoryRegion>,
    pub peer_exit_notices: Arc<PeerExitNotices>,
    /// The hosts of all ranks of the job.
    pub hosts: Arc<HostTopology>,
    /// This rank's number in the job.
    pub rank: usize,
    pub timeout: Duration,
}

impl MessageWait {
    /// Waits for a message to or from `peer`, a rank of the job, while this rank is in `op`.
    pub(super) fn finish(
        &self,
        peer: usize,
        mut transfer: MpiTransfer,
        SpinLimits { spins, yields }: SpinLimits,
        op: &dyn Fn() -> String,
    ) -> Result<Vec<u8>, CommError> {
        let (mut polls, mut waited, mut last) = (0u32, Duration::ZERO, None::<Instant>);
        while !transfer.is_done()? {
            polls += 1;
            match polls {
                poll if poll < spins => std::hint::spin_loop(),
                poll if poll < spins + yields => std::thread::yield_now(),
                _ => std::thread::sleep(POLL_SLEEP),
            }
            if polls.is_multiple_of(POLLS_PER_CLOCK_READ) {
                let now = Instant::now();
                let passed = now.duration_since(*last.get_or_insert(now));
                if passed >= FAILURE_CHECK_INTERVAL {
                    // A check counts for at most 1 s, so that the time for which the job was suspended does not count
                    // toward the limit (as in the waits on shared memory).
                    waited += passed.min(Duration::from_secs(1));
                    last = Some(now);
                    if let Err(error) = self.check_ranks(peer, op) {
                        // A peer that sent its message and then failed or left has done its part.
                        if transfer.is_done()? {
                            break;
                        }
                        return Err(error);
                    }
                    if waited > self.timeout {
                        let (rank, limit) = (self.rank, self.timeout);
                        return Err(CommError::Timeout { rank, peer, op: op(), limit });
                    }
                }
            }
        }
        Ok(transfer.into_bytes())
    }

    /// Checks for failed ranks while `peer` is awaited.
    fn check_ranks(&self, peer: usize, op: &dyn Fn() -> String) -> Result<(), CommError> {
        let first = self.hosts.local_ranks().start;
        if let Some(failure) = self.region.failure_of_other(self.rank - first) {
            return Err(failure.error(first, self.rank - first, op(), self.timeout));
        }
        if let Some((from, why)) = self.peer_exit_notices.failure()? {
            return Err(self.aborted(from, &why, op()));
        }
        if self.peer_exit_notices.has_left(peer) {
            return Err(CommError::RankLeft { rank: self.rank, peer, op: op() });
        }
        Ok(())
    }

    /// Returns the error that reports that rank `from` of another host has given up.
    pub(super) fn aborted(&self, from: usize, why: &str, op: String) -> CommError {
        let why = format!("on host {}: {why}", self.hosts.name_of(from));
        CommError::RankAborted { rank: self.rank, peer: from, why, op }
    }
}
