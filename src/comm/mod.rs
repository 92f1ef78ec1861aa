//! Collectives between ranks.
//!
//! ```text
//!   engine ---- launch(job) ----> queue (comm thread or waiting thread, in issue order) ----> exchange (shared memory)
//!          <--- Pending::wait ---
//! ```
//!
//! [`Communicator`] is what the engine sees: rank, size, and collectives on flat buffers in two halves, launch and
//! wait. [`Solo`] is a world of one. [`Shared`] carries every other world of one machine: ranks as threads of one
//! process ([`threads`]) over anonymous memory, or ranks as processes over the memfd that `zerorun` made ([`shm`]).
//!
//! Sums run in rank order in f32, whatever the stage, the bucket size or the number of pieces that a buffer travels
//! in. That is what makes stages 0 to 3 give the same bits.
//!
//! Elements travel as they are, or as small integers with a scale per block: [`Wire`].

mod bandwidth;
mod collectives;
mod counters;
mod exchange;
mod fingerprint;
mod log;
mod pieces;
mod queue;
pub mod shm;
mod solo;
mod state;
mod stream;
pub mod threads;
mod wire;

pub use bandwidth::{Bandwidth, size_text, trimmed_mean};
pub use counters::{CommReport, KindReport};
pub use fingerprint::Kind;
pub use log::{CommLog, CommLogRow, CommSummary};
pub use queue::{Pending, Shared};
pub use solo::Solo;
pub use wire::Wire;

use crate::error::Result;
use crate::precision::Flat;
use std::sync::{Arc, Mutex};

/// The rank of this process in the job and what it can do together with the others.
///
/// Every method that exchanges data is collective: all ranks call the same methods, in the same order, with the same
/// element counts and dtypes. That is checked; ranks that diverge get an error that shows both sides. `tag`
/// identifies the content (say a hash of the parameters in a bucket) and is checked too.
pub trait Communicator: Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Sums `input` over ranks, elementwise and in rank order; every rank receives the whole sum, in the memory of
    /// `input`.
    fn all_reduce(&self, input: Flat, tag: u64) -> Pending<Flat> {
        self.all_reduce_as(Wire::Exact, input, tag)
    }

    /// Sums `input` (world size x n elements) over ranks; rank r receives elements `r * n .. (r + 1) * n`, in
    /// the memory of `input` (whose capacity it keeps).
    fn reduce_scatter(&self, input: Flat, tag: u64) -> Pending<Flat> {
        self.reduce_scatter_as(Wire::Exact, input, tag)
    }

    /// Concatenates the `shard`s (n elements each) of all ranks in rank order. A `shard` with capacity for the whole is
    /// where the whole will lie; for others memory is allocated.
    fn all_gather(&self, shard: Flat, tag: u64) -> Pending<Flat> {
        self.all_gather_as(Wire::Exact, shard, tag)
    }

    /// [`all_reduce`](Self::all_reduce) in which the summands travel as `wire` says. Each element is summed by one
    /// rank, as in [`reduce_scatter_as`](Self::reduce_scatter_as) with chunks of equal length, and the sums travel exact:
    /// both give the same bits.
    fn all_reduce_as(&self, wire: Wire, input: Flat, tag: u64) -> Pending<Flat>;

    /// [`reduce_scatter`](Self::reduce_scatter) in which elements travel as `wire` says. What a rank adds to its own
    /// part does not travel, and is not rounded.
    fn reduce_scatter_as(&self, wire: Wire, input: Flat, tag: u64) -> Pending<Flat>;

    /// [`all_gather`](Self::all_gather) in which elements travel as `wire` says. All ranks receive the same values: what
    /// they would take from the wire, also of their own shard.
    fn all_gather_as(&self, wire: Wire, shard: Flat, tag: u64) -> Pending<Flat>;

    /// Every rank receives the values of every rank, in rank order. For a few numbers: votes, norms, metrics.
    fn gather_f64(&self, values: Vec<f64>) -> Pending<Vec<Vec<f64>>>;

    /// Waits until every rank has come here.
    fn barrier(&self) -> Pending<()>;

    /// Tells the other ranks that this one gives up, and why. Their collectives return an error that says so.
    fn abort(&self, why: &str);

    /// Calls and bytes so far.
    fn report(&self) -> CommReport;

    /// From now on, collectives are logged in `log`, or in none. A communicator of your own, and that of a world of one,
    /// need not log.
    fn log_into(&self, log: Option<Arc<CommLog>>) {
        _ = log;
    }
}

/// The communicator of a job of one rank or, under `zerorun`, of all its processes.
///
/// # Errors
/// Memory that is not this job's; a rank that has joined before, also where that was this process.
pub fn from_env(env: &crate::launch::RankEnv) -> Result<Arc<dyn Communicator>> {
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
    let mut region = REGION.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    match &*region {
        Some(region) => Ok(region.clone()),
        None => Ok(region.insert(Arc::new(shm::Region::inherit(fd, world_size)?)).clone()),
    }
}
