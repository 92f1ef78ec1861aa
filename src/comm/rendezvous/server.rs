//! The rendezvous as run by rank 0: waits for the others, and creates the shared memory.

use super::members::{MembershipEvent, RendezvousMembers};
use super::socket::system;
use crate::comm::rank_env::RankEnv;
use crate::comm::shm::region::SharedMemoryRegion;
use crate::error::{CommError, Result};
use std::sync::Arc;
use std::time::Instant;

/// Waits until all ranks have connected, creates the shared memory, and sends it to them. Returns the memory and the
/// connections.
///
/// # Errors
/// Returns the errors of [`super::meet`]. The ranks that are connected receive the same error.
pub(super) fn admit_all(env: &RankEnv) -> Result<(Arc<SharedMemoryRegion>, RendezvousMembers)> {
    let mut members = RendezvousMembers::open(env.master_port, env.world_size)?;
    let region = await_all(&mut members, env).and_then(|()| {
        let region = SharedMemoryRegion::create(env.world_size)?;
        // Child processes of a rank must not keep the region alive.
        rustix::io::fcntl_setfd(region.as_fd(), rustix::io::FdFlags::CLOEXEC)
            .map_err(|error| system("open the memory that ranks share")(error.into()))?;
        region.mark_all_started();
        members.welcome(region.as_fd())?;
        Ok(region)
    });
    match region {
        Ok(region) => Ok((Arc::new(region), members)),
        Err(error) => {
            members.reject_all(&error.to_string());
            Err(error)
        }
    }
}

fn await_all(members: &mut RendezvousMembers, env: &RankEnv) -> Result<()> {
    let start = Instant::now();
    while !members.is_complete() {
        let remaining = env.timeout.saturating_sub(start.elapsed());
        if remaining.is_zero() {
            return Err(members.incomplete(env.timeout).into());
        }
        for event in members.next(Some(remaining))? {
            match event {
                MembershipEvent::Connected => {}
                MembershipEvent::Disconnected(rank) => return Err(CommError::GoneBeforeStart { rank }.into()),
                MembershipEvent::Rejected(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}
