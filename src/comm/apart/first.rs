//! Rank 0: waits for the others, and makes the memory.

use super::gathering::{Gathering, News};
use super::socket::system;
use crate::comm::env::RankEnv;
use crate::comm::shm::Region;
use crate::error::{CommError, Result};
use std::sync::Arc;
use std::time::Instant;

/// The memory, which all ranks have been given.
///
/// # Errors
/// As [`super::meet`]. Ranks that are there are told the same.
pub(super) fn gather(env: &RankEnv) -> Result<(Arc<Region>, Gathering)> {
    let mut gathering = Gathering::open(env.master_port, env.world_size)?;
    let met = await_all(&mut gathering, env).and_then(|()| {
        let region = Region::create(env.world_size)?;
        // Helpers that a rank starts must not keep it.
        rustix::io::fcntl_setfd(region.as_fd(), rustix::io::FdFlags::CLOEXEC)
            .map_err(|error| system("open")(error.into()))?;
        region.let_in();
        gathering.welcome(region.as_fd())?;
        Ok(region)
    });
    match met {
        Ok(region) => Ok((Arc::new(region), gathering)),
        Err(error) => {
            gathering.turn_away(&error.to_string());
            Err(error)
        }
    }
}

fn await_all(gathering: &mut Gathering, env: &RankEnv) -> Result<()> {
    let began = Instant::now();
    while !gathering.is_complete() {
        let left = env.timeout.saturating_sub(began.elapsed());
        if left.is_zero() {
            return Err(gathering.incomplete(env.timeout).into());
        }
        for news in gathering.next(Some(left))? {
            match news {
                News::Came => {}
                News::Gone(rank) => return Err(CommError::GoneBeforeStart { rank }.into()),
                News::Unfit(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}
