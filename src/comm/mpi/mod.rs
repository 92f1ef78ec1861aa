//! Ranks of several hosts: shared memory inside of each host, MPI between them.
//!
//! ```text
//!   mpirun, srun or zerorun starts every rank -> join: library found -> MPI_Init_thread -> who is on which host -> each host's memory
//!   queue -> hierarchical -> direct_reduce, chain_reduce, host_sum_reduce, all_gather -> inter_host: exchange of this host's ranks + messages of link to other hosts
//!   end of the process: the others are told, MPI ends
//! ```
//!
//! Where no launcher of this library watches the hosts, the ranks do: see [`heartbeat`].
//!
//! The library is loaded only where an MPI launcher has started the ranks. Whatever MPI reports is an error value here; a
//! rank that waits for another host looks meanwhile for ranks that have given up.

mod abi;
mod all_gather;
mod chain_reduce;
mod chain_roles;
mod direct_reduce;
mod heartbeat;
mod hierarchical;
mod host_sum_reduce;
mod inter_host;
mod intra_host;
mod library;
mod link;
mod message_bench;
mod partial_sum;
mod peer_status;
mod preflight;
mod topology;
mod traffic;
mod traffic_plan;

pub(super) use hierarchical::HierarchicalCollectives;
pub(crate) use traffic_plan::{InterHostTransfer, UniformHosts};

use super::rank_env::RankEnv;
use super::shm::exchange::ShmExchange;
use super::shm::rank_state::RankFault;
use super::shm::region::SharedMemoryRegion;
use crate::error::{CommError, Error, Result};
use heartbeat::HostHeartbeat;
use inter_host::InterHostExchange;
use link::MpiLink;
use peer_status::PeerStatus;
use std::sync::{Arc, Mutex, OnceLock};
use topology::HostTopology;

/// The library that would be used here: its file, and what it says of its version.
///
/// # Errors
/// None is found, it cannot be loaded, or it lacks a function.
#[doc(hidden)]
pub fn found_library() -> std::result::Result<String, CommError> {
    Ok(library::MpiLibrary::find()?.name())
}

/// This process among the ranks of all hosts.
#[derive(Clone)]
pub(super) struct MpiRank {
    link: Arc<MpiLink>,
    hosts: Arc<HostTopology>,
    peer_status: Arc<PeerStatus>,
    region: Arc<SharedMemoryRegion>,
    /// Where this rank watches other hosts.
    heartbeat: Arc<Mutex<Option<HostHeartbeat>>>,
}

/// The rank that leaves when the process ends.
static ENTERED: OnceLock<MpiRank> = OnceLock::new();

impl MpiRank {
    /// Begins MPI and meets the other ranks: this rank, and the memory of this host's ranks. Once per process.
    ///
    /// # Errors
    /// No library, another one than that of the launcher, hosts whose ranks are mixed, MPI's and the system's.
    pub(super) fn enter(env: &RankEnv) -> Result<(Self, Arc<SharedMemoryRegion>)> {
        let link = MpiLink::start()?;
        if (link.rank(), link.size()) != (env.rank, env.world_size) {
            let (rank, world) = (env.rank, env.world_size);
            let (mpi_rank, mpi_world, library) = (link.rank(), link.size(), link.library());
            return Err(CommError::MpiForeign { rank, world, mpi_rank, mpi_world, library }.into());
        }
        // Launchers of several hosts compare them before they start ranks.
        let compared = env.shm_fd.is_some();
        let hosts = HostTopology::meet(&link).and_then(|hosts| {
            if !compared {
                preflight::check(&link, &hosts)?;
            }
            Ok(hosts)
        });
        let hosts = hosts.inspect_err(|error| {
            // Every rank finds these, of what all have told. One that ended outside MPI's order would take others with it before
            // they have been told themselves.
            if matches!(error, Error::Comm(CommError::HostsMixed { .. } | CommError::ProgramsDiffer { .. })) {
                link.end();
            }
        })?;
        let region = match env.shm_fd {
            // Zerorun's, which it has made for the ranks that it starts on this host.
            Some(fd) => Arc::new(SharedMemoryRegion::inherit(fd, hosts.here().len())?),
            None => topology::share_region(&link, &hosts, env.rank)?,
        };
        let link = Arc::new(link);
        let peer_status = Arc::new(PeerStatus::listen(link.clone(), &hosts, region.clone())?);
        let hosts = Arc::new(hosts);
        // Launchers of several hosts watch each other.
        let watches = env.shm_fd.is_none() && link.rank() == hosts.here().start;
        let start = || HostHeartbeat::start(link.clone(), &hosts, peer_status.clone(), region.clone());
        let heartbeat = Arc::new(Mutex::new(watches.then(start).transpose()?));
        let mpi = Self { link, hosts, peer_status, region: region.clone(), heartbeat };
        if ENTERED.set(mpi.clone()).is_ok() {
            // SAFETY: the function unwinds nowhere, and only calls MPI.
            unsafe { atexit(leave) };
        }
        Ok((mpi, region))
    }

    /// The first rank of this host.
    pub(super) fn first(&self) -> usize {
        self.hosts.here().start
    }

    /// All ranks.
    pub(super) fn world_size(&self) -> usize {
        self.hosts.world_size()
    }

    pub(super) fn collectives(&self, local: ShmExchange, timeout: std::time::Duration) -> HierarchicalCollectives {
        HierarchicalCollectives::new(InterHostExchange::new(
            local,
            self.link.clone(),
            self.hosts.clone(),
            self.peer_status.clone(),
            timeout,
        ))
    }

    /// Waits until those of other hosts have left too, as MPI's end would, unless one of them gives up.
    fn wait_for_others(&self) {
        while !self.link.has_failed() {
            match (self.peer_status.all_told(), self.peer_status.failure()) {
                (Ok(true), Ok(None)) => return,
                (Ok(false), Ok(None)) => std::thread::sleep(std::time::Duration::from_millis(1)),
                _ => self.link.fail(),
            }
        }
    }

    /// Tells the ranks of other hosts that this one gives up.
    pub(super) fn abort(&self, why: &str) {
        self.link.fail();
        // Others are told of the first failure, not of its echo.
        match self.region.first_failure() {
            // Only of these there is a text; what a rank says of others' failures names them.
            Some((rank, fault @ (RankFault::Died | RankFault::GaveUp))) if self.first() + rank != self.link.rank() => {
                self.peer_status.give_up(&self.hosts, self.first() + rank, &self.region.explained(rank, fault));
            }
            _ => self.peer_status.give_up(&self.hosts, self.link.rank(), why),
        }
    }
}

/// This process, once it has joined.
pub(super) fn entered() -> Option<&'static MpiRank> {
    ENTERED.get()
}

unsafe extern "C" {
    /// The C library's: the function is called when the process ends by `exit` or by returning from `main`.
    fn atexit(function: extern "C" fn()) -> std::ffi::c_int;
}

/// Tells the others that this rank leaves, and ends MPI.
extern "C" fn leave() {
    if let Some(mpi) = ENTERED.get() {
        mpi.region.finish(mpi.link.rank() - mpi.first());
        mpi.peer_status.leave(&mpi.hosts);
        mpi.wait_for_others();
        let heartbeat = crate::util::lock(&mpi.heartbeat).take();
        if !mpi.link.has_failed() {
            // Nothing of MPI's may be called while it ends.
            heartbeat.into_iter().for_each(|heartbeat| heartbeat.stop(&mpi.link));
        }
        mpi.link.end();
    }
}
