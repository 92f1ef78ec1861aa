//! Joining the job that the environment names.

use super::env::RankEnv;
use super::shm::Region;
use super::{Communicator, Shared, Solo};
use crate::error::Result;
use crate::util::lock;
use std::sync::{Arc, Mutex};

/// The communicator of a job of one rank or, under `zerorun`, of all its processes.
///
/// # Errors
/// Memory that is not this job's; a rank that has joined before, also where that was this process.
pub fn from_env(env: &RankEnv) -> Result<Arc<dyn Communicator>> {
    match env.shm_fd {
        Some(fd) if env.world_size > 1 => {
            let region = region_of_this_process(fd, env.world_size)?;
            Ok(Arc::new(Shared::new(region, env.rank, env.timeout)?))
        }
        _ => Ok(Arc::new(Solo::default())),
    }
}

/// The inherited region. It stays mapped for good: the descriptor can be taken over only once, and whoever asks again
/// must learn that the rank is taken rather than find a closed or a foreign descriptor.
fn region_of_this_process(fd: std::os::fd::RawFd, world_size: usize) -> Result<Arc<Region>> {
    static REGION: Mutex<Option<Arc<Region>>> = Mutex::new(None);
    let mut region = lock(&REGION);
    match &*region {
        Some(region) => Ok(region.clone()),
        None => Ok(region.insert(Arc::new(Region::inherit(fd, world_size)?)).clone()),
    }
}
