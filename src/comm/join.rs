//! Joining the job that the environment describes.
//!
//! A process joins the ranks' shared memory once, and stays until it ends: all its engines, concurrent or
//! successive, issue their collectives through one queue, in the order in which the program runs them.

use super::cpu_communicator::GroupCommunicator;
use super::mpi::MpiRank;
use super::rank_env::RankEnv;
use super::shm::region::SharedMemoryRegion;
use super::{CommLog, CommReport, Communicator, CpuCommunicator, Pending, SoloCommunicator, WireFormat, rendezvous};
use crate::error::{CommError, Result};
use crate::precision::Flat;
use crate::util::lock;
use candle_core::DType;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Returns the communicator of a job of one rank or, if `zerorun`, an MPI launcher or torchrun's variables describe a
/// larger job, of all its processes. For a larger job, all calls of a process return the same communicator: the
/// process's engines share the collectives, their counters, and the first error, which ends the job for all of them.
///
/// # Errors
/// Fails if the shared memory is not this job's, another process has the same rank, or the system fails. If MPI
/// connects the ranks ([`RankEnv::mpi`]), also fails if no MPI library is found, the library is not the launcher's, MPI
/// fails, a host's ranks are not consecutive, or hosts run different programs; with torchrun's variables, also fails if
/// ranks do not connect within [`RankEnv::timeout`] or disagree about the job.
pub fn from_env(env: &RankEnv) -> Result<Arc<dyn Communicator>> {
    match env.shm_fd {
        _ if env.world_size > 1 && env.mpi => Ok(Arc::new(CommunicatorHandle::new(joined_by_mpi(env)?))),
        Some(fd) if env.world_size > 1 => Ok(Arc::new(CommunicatorHandle::new(communicator_of_process(fd, env)?))),
        None if env.world_size > 1 => Ok(Arc::new(CommunicatorHandle::new(joined_by_rendezvous(env)?))),
        _ => Ok(Arc::new(SoloCommunicator::default())),
    }
}

/// The inherited region and the ranks that have entered it. The region stays mapped, because the descriptor can be
/// taken over only once.
#[derive(Default)]
struct JoinedJob {
    region: Option<Arc<SharedMemoryRegion>>,
    ranks: BTreeMap<usize, Arc<CpuCommunicator>>,
}

/// Returns the communicator of this process, which enters the region on the first call. The communicator is never
/// dropped: a rank that left between two engines would be gone for the others. The launcher notifies them when the
/// process ends.
fn communicator_of_process(fd: std::os::fd::RawFd, env: &RankEnv) -> Result<Arc<CpuCommunicator>> {
    static JOINED: Mutex<JoinedJob> = Mutex::new(JoinedJob { region: None, ranks: BTreeMap::new() });
    let JoinedJob { region, ranks } = &mut *lock(&JOINED);
    if let Some(communicator) = ranks.get(&env.rank) {
        return Ok(communicator.clone());
    }
    let region = match region {
        Some(region) => region.clone(),
        None => region.insert(Arc::new(SharedMemoryRegion::inherit(fd, env.world_size)?)).clone(),
    };
    let communicator = Arc::new(CpuCommunicator::new(region, env.rank, env.timeout)?);
    ranks.insert(env.rank, communicator.clone());
    Ok(communicator)
}

/// Returns the communicator of this process if MPI joins the ranks.
fn joined_by_mpi(env: &RankEnv) -> Result<Arc<CpuCommunicator>> {
    static JOINED: Mutex<Option<Arc<CpuCommunicator>>> = Mutex::new(None);
    let mut joined = lock(&JOINED);
    if let Some(communicator) = &*joined {
        return Ok(communicator.clone());
    }
    let (mpi, region) = MpiRank::enter(env)?;
    share_cores(region.world_size());
    let communicator = Arc::new(CpuCommunicator::across_hosts(region, env.rank, env.timeout, mpi)?);
    Ok(joined.insert(communicator).clone())
}

/// Returns the communicator of this process if the ranks of one host were started individually and meet at a
/// rendezvous.
fn joined_by_rendezvous(env: &RankEnv) -> Result<Arc<CpuCommunicator>> {
    static JOINED: Mutex<Option<Arc<CpuCommunicator>>> = Mutex::new(None);
    let mut joined = lock(&JOINED);
    if let Some(communicator) = &*joined {
        return Ok(communicator.clone());
    }
    let region = rendezvous::meet(env)?;
    share_cores(region.world_size());
    let communicator = Arc::new(CpuCommunicator::new(region, env.rank, env.timeout)?);
    Ok(joined.insert(communicator).clone())
}

/// Divides a host's cores among the rayon threads of its ranks, unless the environment sets the number of threads or
/// this process may use only some of the cores, as when the launcher binds each rank to its own. Ranks that each use
/// all cores are many times slower.
fn share_cores(ranks: usize) {
    let is_set = std::env::var_os("RAYON_NUM_THREADS").is_some_and(|value| !value.is_empty());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    if !is_set && cores >= cpus_of(&online) {
        // If the program has already used rayon, its threads stay as they are.
        _ = rayon::ThreadPoolBuilder::new().num_threads((cores / ranks.max(1)).max(1)).build_global();
    }
}

/// Returns how many processors a list such as `0-3,8` names.
fn cpus_of(list: &str) -> usize {
    let count = |entry: &str| {
        let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
        Some(last.trim().parse::<usize>().ok()?.checked_sub(first.trim().parse().ok()?)? + 1)
    };
    list.split(',').filter_map(count).sum()
}

/// A handle to the process's communicator, or to that of a group of the job's ranks.
struct CommunicatorHandle(Arc<CpuCommunicator>);

impl CommunicatorHandle {
    fn new(comm: Arc<CpuCommunicator>) -> Self {
        comm.presence().handles().fetch_add(1, Ordering::Relaxed);
        Self(comm)
    }
}

impl Drop for CommunicatorHandle {
    /// Unless this rank is panicking, finishes launched collectives first, because peers depend on them. The last
    /// handle also waits until launched messages are sent. An earlier handle must not wait, because a message may
    /// depend on what this rank does next.
    fn drop(&mut self) {
        let is_last = self.0.presence().handles().fetch_sub(1, Ordering::Relaxed) == 1;
        if std::thread::panicking() {
            return self.0.abort_in_panic();
        }
        self.0.finish_launched();
        if is_last {
            self.0.presence().links().finish_sends();
        }
    }
}

impl Communicator for CommunicatorHandle {
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

    fn all_reduce_as(&self, wire: WireFormat, input: Flat, tag: u64) -> Pending<Flat> {
        self.0.all_reduce_as(wire, input, tag)
    }

    fn reduce_scatter_as(&self, wire: WireFormat, input: Flat, tag: u64) -> Pending<Flat> {
        self.0.reduce_scatter_as(wire, input, tag)
    }

    fn all_gather_as(&self, wire: WireFormat, shard: Flat, tag: u64) -> Pending<Flat> {
        self.0.all_gather_as(wire, shard, tag)
    }

    fn ranks_here(&self) -> Range<usize> {
        self.0.ranks_here()
    }

    fn all_gather_within_as(&self, wire: WireFormat, ranks: usize, shard: Flat, tag: u64) -> Pending<Flat> {
        self.0.all_gather_within_as(wire, ranks, shard, tag)
    }

    fn reduce_to_groups_as(&self, wire: WireFormat, ranks: usize, input: Flat, tag: u64) -> Pending<Flat> {
        self.0.reduce_to_groups_as(wire, ranks, input, tag)
    }

    fn gather_f64(&self, values: Vec<f64>) -> Pending<Vec<Vec<f64>>> {
        self.0.gather_f64(values)
    }

    fn barrier(&self) -> Pending<()> {
        self.0.barrier()
    }

    fn send(&self, to: usize, data: Flat, tag: u64) -> Pending<()> {
        self.0.send(to, data, tag)
    }

    fn receive(&self, from: usize, dtype: DType, len: usize, tag: u64) -> Pending<Flat> {
        self.0.receive(from, dtype, len, tag)
    }

    fn in_job(&self, rank: usize) -> usize {
        self.0.in_job(rank)
    }

    fn group(&self, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>> {
        Ok(match self.0.group_of(groups)? {
            GroupCommunicator::Several(group) => Arc::new(Self::new(group)),
            GroupCommunicator::Alone(group) => group,
        })
    }

    fn timeout(&self) -> Duration {
        self.0.timeout()
    }

    fn failure(&self) -> Option<CommError> {
        self.0.failure()
    }

    fn report(&self) -> CommReport {
        self.0.report()
    }

    fn log_into(&self, log: Option<Arc<CommLog>>) {
        self.0.log_into(log);
    }
}
