//! Ranks of several hosts: shared memory inside of each host, MPI between them.
//!
//! ```text
//!   mpirun, srun or zerorun starts every rank -> join: library found -> MPI_Init_thread -> who is on which host -> each host's memory
//!   queue -> tiers -> raw, chain, host_sums, gather -> crossing: exchange of this host's ranks + messages of link to other hosts
//!   end of the process: the others are told, MPI ends
//! ```
//!
//! Where no launcher of this library watches the hosts, the ranks do: see [`pulse`].
//!
//! The library is loaded only where an MPI launcher has started the ranks. Whatever MPI reports is an error value here; a
//! rank that waits for another host looks meanwhile for ranks that have given up.

mod abi;
mod chain;
mod crossing;
mod gather;
mod here;
mod host_sums;
mod hosts;
mod library;
mod link;
mod notices;
mod partial;
mod passage;
#[cfg(feature = "cli")]
mod probe;
mod pulse;
mod raw;
mod roles;
mod sameness;
mod tiers;
mod traffic;

pub(crate) use passage::{EvenHosts, Passage};
pub(super) use tiers::Tiers;

use super::env::RankEnv;
use super::exchange::Exchange;
use super::shm::Region;
use super::state::Fault;
use crate::error::{CommError, Error, Result};
use crossing::Crossing;
use hosts::Hosts;
use link::Link;
use notices::Notices;
use pulse::Pulse;
use std::sync::{Arc, Mutex, OnceLock};

/// The library that would be used here: its file, and what it says of its version.
///
/// # Errors
/// None is found, it cannot be loaded, or it lacks a function.
#[cfg(feature = "cli")]
pub(crate) fn found_library() -> std::result::Result<String, CommError> {
    Ok(library::Library::find()?.name())
}

/// This process' place among the ranks of all hosts.
#[derive(Clone)]
pub(super) struct Place {
    link: Arc<Link>,
    hosts: Arc<Hosts>,
    notices: Arc<Notices>,
    region: Arc<Region>,
    /// Where this rank watches other hosts.
    pulse: Arc<Mutex<Option<Pulse>>>,
}

/// The place that is given up when the process ends.
static ENTERED: OnceLock<Place> = OnceLock::new();

impl Place {
    /// Begins MPI and meets the other ranks: this place, and the memory of this host's ranks. Once per process.
    ///
    /// # Errors
    /// No library, another one than that of the launcher, hosts whose ranks are mixed, MPI's and the system's.
    pub(super) fn enter(env: &RankEnv) -> Result<(Self, Arc<Region>)> {
        let link = Link::start()?;
        if (link.rank(), link.size()) != (env.rank, env.world_size) {
            let (rank, world) = (env.rank, env.world_size);
            let (mpi_rank, mpi_world, library) = (link.rank(), link.size(), link.library());
            return Err(CommError::MpiForeign { rank, world, mpi_rank, mpi_world, library }.into());
        }
        // Launchers of several hosts compare them before they start ranks.
        let compared = env.shm_fd.is_some();
        let hosts = Hosts::meet(&link).and_then(|hosts| {
            if !compared {
                sameness::check(&link, &hosts)?;
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
            Some(fd) => Arc::new(Region::inherit(fd, hosts.here().len())?),
            None => hosts::share_region(&link, &hosts, env.rank)?,
        };
        let link = Arc::new(link);
        let notices = Arc::new(Notices::listen(link.clone(), &hosts, region.clone())?);
        let hosts = Arc::new(hosts);
        // Launchers of several hosts watch each other.
        let watches = env.shm_fd.is_none() && link.rank() == hosts.here().start;
        let start = || Pulse::start(link.clone(), &hosts, notices.clone(), region.clone());
        let pulse = Arc::new(Mutex::new(watches.then(start).transpose()?));
        let place = Self { link, hosts, notices, region: region.clone(), pulse };
        if ENTERED.set(place.clone()).is_ok() {
            // SAFETY: the function unwinds nowhere, and only calls MPI.
            unsafe { atexit(leave) };
        }
        Ok((place, region))
    }

    /// The first rank of this host.
    pub(super) fn first(&self) -> usize {
        self.hosts.here().start
    }

    /// All ranks.
    pub(super) fn world_size(&self) -> usize {
        self.hosts.world_size()
    }

    pub(super) fn tiers(&self, local: Exchange, timeout: std::time::Duration) -> Tiers {
        Tiers::new(Crossing::new(local, self.link.clone(), self.hosts.clone(), self.notices.clone(), timeout))
    }

    /// Waits until those of other hosts have left too, as MPI's end would, unless one of them gives up.
    fn wait_for_others(&self) {
        while !self.link.has_failed() {
            match (self.notices.all_told(), self.notices.failure()) {
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
            Some((rank, fault @ (Fault::Died | Fault::GaveUp))) if self.first() + rank != self.link.rank() => {
                self.notices.give_up(&self.hosts, self.first() + rank, &self.region.explained(rank, fault));
            }
            _ => self.notices.give_up(&self.hosts, self.link.rank(), why),
        }
    }
}

/// This process' place, once it has joined.
#[cfg(feature = "cli")]
pub(super) fn entered() -> Option<&'static Place> {
    ENTERED.get()
}

unsafe extern "C" {
    /// The C library's: the function is called when the process ends by `exit` or by returning from `main`.
    fn atexit(function: extern "C" fn()) -> std::ffi::c_int;
}

/// Tells the others that this rank leaves, and ends MPI.
extern "C" fn leave() {
    if let Some(place) = ENTERED.get() {
        place.region.finish(place.link.rank() - place.first());
        place.notices.leave(&place.hosts);
        place.wait_for_others();
        let pulse = crate::util::lock(&place.pulse).take();
        if !place.link.has_failed() {
            // Nothing of MPI's may be called while it ends.
            pulse.into_iter().for_each(|pulse| pulse.stop(&place.link));
        }
        place.link.end();
    }
}
