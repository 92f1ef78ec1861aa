//! The communicator that the environment of a rank asks for.

use super::{Communicator, RankEnv, Shared, Solo, shm};
use crate::error::Result;
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
fn region_of_this_process(fd: std::os::fd::RawFd, world_size: usize) -> Result<Arc<shm::Region>> {
    static REGION: Mutex<Option<Arc<shm::Region>>> = Mutex::new(None);
    let mut region = crate::util::lock(&REGION);
    match &*region {
        Some(region) => Ok(region.clone()),
        None => Ok(region.insert(Arc::new(shm::Region::inherit(fd, world_size)?)).clone()),
    }
}
