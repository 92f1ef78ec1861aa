//! Ranks on several hosts: shared memory within each host, MPI between them.
//!
//! ```text
//!   start   mpirun, srun or zerorun starts every rank
//!           -> find the MPI library -> MPI_Init_thread -> find the host of each rank -> create each host's memory
//!   run     queue -> hierarchical -> direct_reduce, chain_reduce, host_sum_reduce, all_gather
//!           -> inter_host: exchange among this host's ranks + messages to other hosts (link)
//!   end     notify the other ranks, finalize MPI
//! ```
//!
//! If no launcher of this library watches the hosts, the ranks do: see [`heartbeat`].
//!
//! The MPI library is loaded only for ranks that an MPI launcher has started, or that `zerorun` connects by MPI. Every
//! error that MPI reports becomes an error value; a rank that waits for another host also checks for ranks that have
//! given up.

mod abi;
mod all_gather;
mod chain_reduce;
mod chain_roles;
mod direct_reduce;
mod group_link;
mod heartbeat;
mod hierarchical;
mod host_sum_reduce;
mod inter_host;
mod intra_host;
mod library;
mod link;
mod message_bench;
mod message_wait;
mod partial_sum;
mod peer_exit_notices;
mod point_to_point;
mod preflight;
mod topology;
mod traffic_estimate;
mod traffic_model;

pub(super) use hierarchical::HierarchicalCollectives;
pub(super) use point_to_point::MpiPointToPoint;
pub(crate) use traffic_estimate::{InterHostTransferEstimate, UniformHosts};

use super::rank_env::RankEnv;
use super::shm::exchange::ShmExchange;
use super::shm::rank_state::RankFault;
use super::shm::region::SharedMemoryRegion;
use crate::error::{CommError, Error, Result};
use group_link::GroupLink;
use heartbeat::HostHeartbeat;
use inter_host::InterHostExchange;
use link::MpiLink;
use message_wait::MessageWait;
use peer_exit_notices::PeerExitNotices;
use std::sync::{Arc, Mutex, OnceLock};
use topology::HostTopology;

/// Returns the library that would be used here: its file and its version text.
///
/// # Errors
/// Fails if no library is found, or if the library cannot be loaded or lacks a required function.
#[doc(hidden)]
pub fn found_library() -> std::result::Result<String, CommError> {
    Ok(library::MpiLibrary::find()?.name())
}

/// This process as a rank of a job on several hosts.
#[derive(Clone)]
pub(super) struct MpiRank {
    link: Arc<MpiLink>,
    hosts: Arc<HostTopology>,
    peer_exit_notices: Arc<PeerExitNotices>,
    region: Arc<SharedMemoryRegion>,
    /// The heartbeat, if this rank watches other hosts.
    heartbeat: Arc<Mutex<Option<HostHeartbeat>>>,
}

/// The rank of this process, which leaves the job when the process ends.
static JOINED_RANK: OnceLock<MpiRank> = OnceLock::new();

impl MpiRank {
    /// Initializes MPI, connects to the other ranks, and returns this rank and the memory of this host's ranks. This
    /// function is called once per process.
    ///
    /// # Errors
    /// Fails if no library is found, the library is not the launcher's, a host's ranks are not consecutive, hosts run
    /// different programs, or MPI or the system fails.
    pub(super) fn enter(env: &RankEnv) -> Result<(Self, Arc<SharedMemoryRegion>)> {
        let link = MpiLink::start()?;
        if (link.rank(), link.size()) != (env.rank, env.world_size) {
            let (rank, world) = (env.rank, env.world_size);
            let (mpi_rank, mpi_world, library) = (link.rank(), link.size(), link.library());
            return Err(CommError::MpiForeign { rank, world, mpi_rank, mpi_world, library }.into());
        }
        // zerorun's launchers compare the hosts before they start ranks.
        let already_compared = env.shm_fd.is_some();
        let hosts = HostTopology::exchange(&link).and_then(|hosts| {
            if !already_compared {
                preflight::check(&link, &hosts)?;
            }
            Ok(hosts)
        });
        let hosts = hosts.inspect_err(|error| {
            // Every rank finds these errors in the data of all ranks. A rank that ended without finalizing MPI would
            // end others before they had found the error themselves.
            if matches!(error, Error::Comm(CommError::HostsMixed { .. } | CommError::ProgramsDiffer { .. })) {
                link.end();
            }
        })?;
        let region = match env.shm_fd {
            // This is the memory that zerorun has created for the ranks that it starts on this host.
            Some(fd) => Arc::new(SharedMemoryRegion::inherit(fd, hosts.local_ranks().len())?),
            None => topology::share_region(&link, &hosts, env.rank)?,
        };
        let link = Arc::new(link);
        let peer_exit_notices = Arc::new(PeerExitNotices::listen(link.clone(), &hosts, region.clone())?);
        let hosts = Arc::new(hosts);
        // zerorun's launchers watch each other.
        let watches = env.shm_fd.is_none() && link.rank() == hosts.local_ranks().start;
        let start = || HostHeartbeat::start(link.clone(), &hosts, peer_exit_notices.clone(), region.clone());
        let heartbeat = Arc::new(Mutex::new(watches.then(start).transpose()?));
        let mpi = Self { link, hosts, peer_exit_notices, region: region.clone(), heartbeat };
        if JOINED_RANK.set(mpi.clone()).is_ok() {
            // SAFETY: `leave` has the type that `atexit` expects, and never unwinds.
            unsafe { atexit(leave) };
        }
        Ok((mpi, region))
    }

    /// Returns the first rank of this host.
    pub(super) fn first(&self) -> usize {
        self.hosts.local_ranks().start
    }

    /// Returns the total number of ranks.
    pub(super) fn world_size(&self) -> usize {
        self.hosts.world_size()
    }

    pub(super) fn collectives(&self, local: ShmExchange, timeout: std::time::Duration) -> HierarchicalCollectives {
        let link = GroupLink::of_job(self.link.clone());
        HierarchicalCollectives::new(InterHostExchange::new(local, link, self.hosts.clone(), self.wait(timeout)))
    }

    /// Returns the collectives of the group `members`, which are ranks of several hosts and use `channel`.
    pub(super) fn group_collectives(
        &self,
        local: ShmExchange,
        members: Arc<[usize]>,
        channel: usize,
        timeout: std::time::Duration,
    ) -> HierarchicalCollectives {
        let hosts = Arc::new(self.hosts.within(&members));
        let link = GroupLink::of_group(self.link.clone(), members, channel);
        HierarchicalCollectives::new(InterHostExchange::new(local, link, hosts, self.wait(timeout)))
    }

    /// Returns this rank's end of a channel for messages to or from `peer`, a rank of another host.
    pub(super) fn messages(&self, channel: usize, peer: usize, timeout: std::time::Duration) -> MpiPointToPoint {
        MpiPointToPoint::new(self.link.clone(), self.wait(timeout), channel, peer)
    }

    fn wait(&self, timeout: std::time::Duration) -> MessageWait {
        let (region, peer_exit_notices, hosts) =
            (self.region.clone(), self.peer_exit_notices.clone(), self.hosts.clone());
        MessageWait { region, peer_exit_notices, hosts, rank: self.link.rank(), timeout }
    }

    /// Waits until the ranks of other hosts have left too, as finalizing MPI would, unless one of them gives up.
    fn wait_for_others(&self) {
        while !self.link.has_failed() {
            match (self.peer_exit_notices.all_exchanged(), self.peer_exit_notices.failure()) {
                (Ok(true), Ok(None)) => return,
                (Ok(false), Ok(None)) => std::thread::sleep(std::time::Duration::from_millis(1)),
                _ => self.link.fail(),
            }
        }
    }

    /// Notifies the ranks of other hosts that this one gives up.
    pub(super) fn abort(&self, why: &str) {
        self.link.fail();
        // The others are notified of the first failure, not of its consequence.
        match self.region.first_failure() {
            // Only these faults have a text, which may come from another rank of this host: the notice names that rank.
            Some((rank, fault @ (RankFault::Died | RankFault::GaveUp))) if self.first() + rank != self.link.rank() => {
                self.peer_exit_notices.give_up(
                    &self.hosts,
                    self.first() + rank,
                    &self.region.failure_text(rank, fault),
                );
            }
            _ => self.peer_exit_notices.give_up(&self.hosts, self.link.rank(), why),
        }
    }
}

/// Returns this process's MPI rank, once it has joined.
pub(super) fn mpi_rank() -> Option<&'static MpiRank> {
    JOINED_RANK.get()
}

unsafe extern "C" {
    /// The C library's `atexit`: the function is called when the process ends by `exit` or by returning from `main`.
    fn atexit(function: extern "C" fn()) -> std::ffi::c_int;
}

/// Notifies the other ranks that this rank leaves, and ends MPI.
extern "C" fn leave() {
    if let Some(mpi) = JOINED_RANK.get() {
        mpi.region.finish(mpi.link.rank() - mpi.first());
        mpi.peer_exit_notices.leave(&mpi.hosts);
        mpi.wait_for_others();
        let heartbeat = crate::util::lock(&mpi.heartbeat).take();
        if !mpi.link.has_failed() {
            // No MPI function may be called while MPI ends.
            heartbeat.into_iter().for_each(|heartbeat| heartbeat.stop(&mpi.link));
        }
        mpi.link.end();
    }
}
