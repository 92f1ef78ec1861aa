//! Joining the job that the environment names.
//!
//! A process enters the memory that the ranks share once, and stays until it ends: all its engines, at the same time or
//! one after the other, issue their collectives through one queue, in the order in which the program runs them.

use super::env::RankEnv;
use super::shm::Region;
use super::{CommLog, CommReport, Communicator, Pending, Shared, Solo, Wire};
use crate::error::Result;
use crate::precision::Flat;
use crate::util::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// The communicator of a job of one rank or, under `zerorun`, of all its processes. Under `zerorun` all calls of a
/// process give the same one: its engines share its collectives, their counters, and the first error, which ends the
/// job for all of them.
///
/// # Errors
/// Memory that is not this job's; a rank that another process has.
pub fn from_env(env: &RankEnv) -> Result<Arc<dyn Communicator>> {
    match env.shm_fd {
        Some(fd) if env.world_size > 1 => Ok(Arc::new(Member(shared_of_this_process(fd, env)?))),
        _ => Ok(Arc::new(Solo::default())),
    }
}

/// The inherited region and who has entered it. It stays mapped for good: the descriptor can be taken over only once.
#[derive(Default)]
struct Joined {
    region: Option<Arc<Region>>,
    ranks: BTreeMap<usize, Arc<Shared>>,
}

/// The communicator of this process, which enters the region if nobody here has done so. It is never dropped: a rank
/// that left between two engines would be gone for the others. The launcher tells them when the process ends.
fn shared_of_this_process(fd: std::os::fd::RawFd, env: &RankEnv) -> Result<Arc<Shared>> {
    static JOINED: Mutex<Joined> = Mutex::new(Joined { region: None, ranks: BTreeMap::new() });
    let Joined { region, ranks } = &mut *lock(&JOINED);
    if let Some(shared) = ranks.get(&env.rank) {
        return Ok(shared.clone());
    }
    let region = match region {
        Some(region) => region.clone(),
        None => region.insert(Arc::new(Region::inherit(fd, env.world_size)?)).clone(),
    };
    let shared = Arc::new(Shared::new(region, env.rank, env.timeout)?);
    ranks.insert(env.rank, shared.clone());
    Ok(shared)
}

/// A use of the process' communicator.
struct Member(Arc<Shared>);

impl Drop for Member {
    /// What was launched is finished first, because peers count on it, unless this rank panics.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort_in_panic();
        } else {
            self.0.finish_launched();
        }
    }
}

impl Communicator for Member {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.0.gather_bytes(bytes)
    }

    fn abort(&self, why: &str) {
        self.0.abort(why);
    }

    fn all_reduce_as(&self, wire: Wire, input: Flat, tag: u64) -> Pending<Flat> {
        self.0.all_reduce_as(wire, input, tag)
    }

    fn reduce_scatter_as(&self, wire: Wire, input: Flat, tag: u64) -> Pending<Flat> {
        self.0.reduce_scatter_as(wire, input, tag)
    }

    fn all_gather_as(&self, wire: Wire, shard: Flat, tag: u64) -> Pending<Flat> {
        self.0.all_gather_as(wire, shard, tag)
    }

    fn gather_f64(&self, values: Vec<f64>) -> Pending<Vec<Vec<f64>>> {
        self.0.gather_f64(values)
    }

    fn barrier(&self) -> Pending<()> {
        self.0.barrier()
    }

    fn report(&self) -> CommReport {
        self.0.report()
    }

    fn log_into(&self, log: Option<Arc<CommLog>>) {
        self.0.log_into(log);
    }
}
