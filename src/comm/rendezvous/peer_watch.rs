//! Detection of dead ranks: rank 0 watches the others, and they watch rank 0, through the connections between them.

use super::members::{MembershipEvent, RendezvousMembers};
use super::socket::system;
use crate::comm::shm::rank_state::RankState;
use crate::comm::shm::region::SharedMemoryRegion;
use crate::error::CommError;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// The cause of death recorded for a rank that did not report one.
const UNREPORTED_DEATH: &str = "its process ended without a message";

/// Runs on rank 0: watches the others, and rejects processes that connect too late.
///
/// # Errors
/// Fails if a system call fails.
pub(super) fn watch_others(region: Arc<SharedMemoryRegion>, mut members: RendezvousMembers) -> Result<(), CommError> {
    watch(move || {
        // After a system error, deaths are detected only by missing heartbeats.
        while let Ok(all) = members.next(None) {
            for event in all {
                if let MembershipEvent::Disconnected(rank) = event {
                    handle_exit(&region, rank);
                }
            }
        }
    })
}

/// Runs on the other ranks: watches rank 0.
///
/// # Errors
/// Fails if a system call fails.
pub(super) fn watch_rank_0(region: Arc<SharedMemoryRegion>, mut stream: UnixStream) -> Result<(), CommError> {
    stream.set_read_timeout(None).map_err(system("wait on the socket of a rank"))?;
    watch(move || {
        // Rank 0 sends nothing: the read returns when rank 0 is gone.
        while stream.read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::Interrupted) {}
        handle_exit(&region, 0);
    })
}

fn watch(run: impl FnOnce() + Send + 'static) -> Result<(), CommError> {
    let spawned = std::thread::Builder::new().name("watches ranks".into()).spawn(run);
    spawned.map(drop).map_err(system("start the thread that watches a rank"))
}

/// Handles the end of a rank's process: notifies the ranks that wait for that rank, unless it had already left, given
/// up or been recorded as dead.
fn handle_exit(region: &SharedMemoryRegion, rank: usize) {
    let is_reported = matches!(region.state(rank), RankState::Finished | RankState::Aborted(_) | RankState::Dead(_));
    // All other ranks notice the end of rank 0, but only one of them records it.
    if !is_reported && region.claims_cause(rank) {
        region.mark_dead(rank, UNREPORTED_DEATH);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_has_left_is_not_dead_and_of_a_dead_one_one_writes() {
        let region = SharedMemoryRegion::anonymous(3).unwrap();
        (0..3).for_each(|rank| region.start(rank).unwrap());
        region.finish(1);
        handle_exit(&region, 1);
        assert_eq!((region.state(1), region.first_failure()), (RankState::Finished, None));
        assert!(region.claims_cause(2));
        handle_exit(&region, 2);
        assert_eq!(region.state(2), RankState::Running, "another rank records its death");
        handle_exit(&region, 0);
        assert_eq!(region.state(0), RankState::Dead(UNREPORTED_DEATH.into()));
    }
}
