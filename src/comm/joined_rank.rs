//! A rank's membership in the job: the memory and the links that it shares with the others, its heartbeat, and its end.
//!
//! All communicators of a rank, that of the job and those of groups, share its [`JoinedRank`]. The rank leaves when
//! the last of them is dropped.

use super::abort_signal::AbortSignal;
use super::links::PointToPointLinks;
use super::mpi::MpiRank;
use super::shm::rank_state::PeerFailure;
use super::shm::region::SharedMemoryRegion;
use crate::error::{CommError, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// A rank that has joined the job.
pub(super) struct JoinedRank {
    region: Arc<SharedMemoryRegion>,
    /// This rank's number in the job.
    rank: usize,
    /// This rank's index in the shared memory region.
    local_rank: usize,
    /// The connection to other hosts, if there are any.
    mpi: Option<MpiRank>,
    abort_signal: Arc<AbortSignal>,
    links: PointToPointLinks,
    /// The number of the process's handles to its communicators.
    handles: AtomicUsize,
    heartbeat: Option<HeartbeatThread>,
    timeout: Duration,
}

impl JoinedRank {
    /// Joins the job as `rank`, with the other ranks of this host in `region` and those of other hosts over `mpi`. A
    /// wait of more than `timeout` for a peer is an error.
    ///
    /// # Errors
    /// Fails if the rank is already taken or a thread cannot be started.
    pub(super) fn enter(
        region: Arc<SharedMemoryRegion>,
        rank: usize,
        timeout: Duration,
        mpi: Option<MpiRank>,
    ) -> Result<Arc<Self>> {
        let local_rank = rank - mpi.as_ref().map_or(0, MpiRank::first);
        region.enter(local_rank)?;
        let abort_signal = Arc::new(AbortSignal::new(region.clone(), (rank, local_rank), mpi.clone()));
        // Ranks that are threads need no heartbeat: they end together with the process that would watch them.
        let heartbeat = if region.is_shared_between_processes() {
            let started = HeartbeatThread::start(region.clone(), local_rank);
            Some(started.map_err(|source| abort_signal.thread_not_started(source))?)
        } else {
            None
        };
        let (links, handles) = (PointToPointLinks::default(), AtomicUsize::new(0));
        Ok(Arc::new(Self { region, rank, local_rank, mpi, abort_signal, links, handles, heartbeat, timeout }))
    }

    pub(super) fn region(&self) -> &Arc<SharedMemoryRegion> {
        &self.region
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the total number of ranks of the job.
    pub(super) fn world_size(&self) -> usize {
        self.mpi.as_ref().map_or(self.region.world_size(), MpiRank::world_size)
    }

    /// Returns the number that the first rank of this host has in the job.
    pub(super) fn first(&self) -> usize {
        self.rank - self.local_rank
    }

    /// Returns the connection to other hosts, if there are any.
    pub(super) fn other_hosts(&self) -> Option<&MpiRank> {
        self.mpi.as_ref().filter(|mpi| mpi.world_size() > self.region.world_size())
    }

    pub(super) fn abort_signal(&self) -> &Arc<AbortSignal> {
        &self.abort_signal
    }

    pub(super) fn links(&self) -> &PointToPointLinks {
        &self.links
    }

    pub(super) fn handles(&self) -> &AtomicUsize {
        &self.handles
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the failure of another rank, if one is known, as this rank reports it in `op`.
    pub(super) fn failure(&self, op: &str) -> Option<CommError> {
        if let Some(failure) = self.region.failure_of_other(self.local_rank) {
            return Some(self.error(failure, op));
        }
        let (peer, why) = self.region.remote_death()?;
        Some(CommError::RankAborted { rank: self.rank, peer, why, op: op.to_string() })
    }

    /// Returns a failure as this rank reports it in `op`.
    fn error(&self, failure: PeerFailure, op: &str) -> CommError {
        failure.error(self.first(), self.local_rank, op.to_string(), self.timeout)
    }
}

impl Drop for JoinedRank {
    /// Leaves the job once all launched messages have been sent, because peers depend on them.
    fn drop(&mut self) {
        self.links.close(&self.abort_signal);
        self.region.finish(self.local_rank);
        self.heartbeat.take();
    }
}

/// The thread that shows the other processes that this one is alive.
struct HeartbeatThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HeartbeatThread {
    fn start(region: Arc<SharedMemoryRegion>, rank: usize) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name(format!("heart-{rank}")).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                region.heartbeat(rank).fetch_add(1, Ordering::Relaxed);
                std::thread::park_timeout(Duration::from_millis(250));
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for HeartbeatThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The loop above cannot panic.
            let _ = thread.join();
        }
    }
}
