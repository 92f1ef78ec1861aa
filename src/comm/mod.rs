//! Collectives between ranks.
//!
//! ```text
//!   engine ---- launch(job) ----> queue (comm thread or waiting thread, in issue order) ----> exchange (shared memory)
//!          <--- Pending::wait ---
//! ```
//!
//! [`Communicator`] is what the engine sees: rank, size, and collectives on flat buffers in two halves, launch and
//! wait. [`SoloCommunicator`] is a world of one. [`CpuCommunicator`] carries every other world: ranks as threads of one process
//! ([`threads`]) over anonymous memory, ranks as processes over the memfd that `zerorun` made (`shm`) or that rank 0 of those
//! started one by one did (`rendezvous`), or ranks of several hosts (`mpi`). A program can bring its own.
//!
//! Sums run in rank order in f32, whatever the stage, the bucket size or the number of pieces that a buffer travels
//! in. That is what makes stages 0 to 3 give the same bits.
//!
//! Elements travel as they are, or as small integers with a scale per block, everywhere or between hosts alone: [`WireFormat`].

#[doc(hidden)]
pub mod agree;
mod backend;
#[doc(hidden)]
pub mod clock_skew;
mod collective_kind;
mod collective_queue;
mod default_collectives;
pub(crate) mod engine_call;
pub(crate) mod error;
mod fingerprint;
#[cfg(feature = "cuda")]
pub(crate) mod gpu_collectives;
mod join;
mod mpi;
mod pending;
#[doc(hidden)]
pub mod rank_env;
mod rendezvous;
#[doc(hidden)]
pub mod shm;
mod solo;
#[doc(hidden)]
pub mod stats;
pub mod threads;
mod wire;

pub use collective_kind::CollectiveKind;
pub use collective_queue::CpuCommunicator;
pub(crate) use collective_queue::{GRACE, SHORT_BYTES};
pub(crate) use fingerprint::content_of;
pub use join::from_env;
#[doc(hidden)]
pub use mpi::found_library as mpi_library;
pub(crate) use mpi::{InterHostTransfer, UniformHosts};
pub use pending::Pending;
#[doc(inline)]
pub use rank_env::RankEnv;
#[doc(hidden)]
pub use shm::rank_state::RankFault;
pub use solo::SoloCommunicator;
#[doc(inline)]
pub use stats::bandwidth::Bandwidth;
pub(crate) use stats::bandwidth::{size_text, trimmed_mean};
#[doc(inline)]
pub use stats::comm_log::{CommLog, CommLogRow, CommSummary};
#[doc(inline)]
pub use stats::counters::{CollectiveKindReport, CommReport};
pub use wire::format::WireFormat;
pub use wire::inter_host::InterHostFormat;

use crate::error::CommError;
use crate::precision::Flat;
use default_collectives::DefaultCollectives;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The rank of this process in the job and what it can do together with the others.
///
/// Every method that exchanges data is collective: all ranks call the same methods, in the same order, with the same
/// element counts and dtypes. That is checked; ranks that diverge get an error that shows both sides. `tag`
/// identifies the content (say a hash of the parameters in a bucket) and is checked too.
///
/// # A communicator of your own
/// Four methods are enough: [`rank`](Self::rank), [`size`](Self::size), [`gather_bytes`](Self::gather_bytes) and
/// [`abort`](Self::abort). All others are made of these, with the same bits as over shared memory. Override those that
/// your network does better; of the sums and gathers, those whose names end in `_as`, which the others call.
/// Collectives take place in the order in which they are launched, while results are waited for in any order: a thread
/// of its own that does one after the other is a good communicator.
///
/// ```
/// use candle_zero::comm::{Communicator, Pending};
/// use candle_zero::error::CommError;
/// use std::sync::mpsc::{Receiver, Sender, channel};
///
/// type Message = Vec<u8>;
///
/// /// Ranks as threads that send each other messages.
/// struct Channels {
///     rank: usize,
///     size: usize,
///     jobs: Sender<(Message, Sender<Option<Vec<Message>>>)>,
/// }
///
/// impl Channels {
///     /// `to` and `from`: one channel to and from each rank, this one included.
///     fn new(rank: usize, to: Vec<Sender<Message>>, from: Vec<Receiver<Message>>) -> Self {
///         let (size, (jobs, launched)) = (to.len(), channel::<(Message, Sender<_>)>());
///         std::thread::spawn(move || {
///             for (message, result) in launched {
///                 to.iter().for_each(|rank| _ = rank.send(message.clone()));
///                 // None if a rank is gone.
///                 _ = result.send(from.iter().map(|rank| rank.recv().ok()).collect());
///             }
///         });
///         Self { rank, size, jobs }
///     }
/// }
///
/// impl Communicator for Channels {
///     fn rank(&self) -> usize {
///         self.rank
///     }
///
///     fn size(&self) -> usize {
///         self.size
///     }
///
///     fn gather_bytes(&self, bytes: Message) -> Pending<Vec<Message>> {
///         let (result, receiver) = channel();
///         _ = self.jobs.send((bytes, result));
///         let gone = || CommError::other("a rank is gone").into();
///         Pending::from_fn(move || receiver.recv().ok().flatten().ok_or_else(gone))
///     }
///
///     fn abort(&self, why: &str) {
///         eprintln!("rank {} gives up: {why}", self.rank);
///     }
/// }
/// # let (to, from) = channel();
/// # let comm = Channels::new(0, vec![to], vec![from]);
/// # let sum = comm.all_reduce(candle_zero::precision::Flat::from(vec![1.5]), 0);
/// # assert_eq!(sum.wait()?, candle_zero::precision::Flat::from(vec![1.5]));
/// # Ok::<(), candle_zero::Error>(())
/// ```
pub trait Communicator: Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Every rank receives the bytes of every rank, in rank order. All give the same number of bytes.
    ///
    /// Votes and other control messages travel as they are, without a mark of their call. A network that may lose or
    /// reorder messages numbers them, and fails where ranks are in different calls.
    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>>;

    /// Tells the other ranks that this one gives up, and why. Their collectives return an error with the reason.
    fn abort(&self, why: &str);

    /// Sums `input` over ranks, elementwise and in rank order; every rank receives the whole sum, in the memory of
    /// `input`.
    fn all_reduce(&self, input: Flat, tag: u64) -> Pending<Flat> {
        self.all_reduce_as(WireFormat::Exact, input, tag)
    }

    /// Sums `input` (world size x n elements) over ranks; rank r receives elements `r * n .. (r + 1) * n`, in
    /// the memory of `input` (whose capacity it keeps).
    fn reduce_scatter(&self, input: Flat, tag: u64) -> Pending<Flat> {
        self.reduce_scatter_as(WireFormat::Exact, input, tag)
    }

    /// Concatenates the `shard`s (n elements each) of all ranks in rank order. A `shard` with capacity for the whole is
    /// where the whole will lie; for others memory is allocated.
    fn all_gather(&self, shard: Flat, tag: u64) -> Pending<Flat> {
        self.all_gather_as(WireFormat::Exact, shard, tag)
    }

    /// [`all_reduce`](Self::all_reduce) in which the summands travel as `wire` says. Each element is summed by one
    /// rank, as in [`reduce_scatter_as`](Self::reduce_scatter_as) with chunks of equal length, and the sums travel
    /// exact: both give the same bits.
    fn all_reduce_as(&self, wire: WireFormat, input: Flat, tag: u64) -> Pending<Flat> {
        by_default(self).all_reduce(wire, input, tag)
    }

    /// [`reduce_scatter`](Self::reduce_scatter) in which elements travel as `wire` says. The part that a rank adds to
    /// its own does not travel, and is not rounded.
    fn reduce_scatter_as(&self, wire: WireFormat, input: Flat, tag: u64) -> Pending<Flat> {
        by_default(self).reduce_scatter(wire, input, tag)
    }

    /// [`all_gather`](Self::all_gather) in which elements travel as `wire` says. All ranks receive the same values:
    /// those that they would take from the wire, also of their own shard.
    fn all_gather_as(&self, wire: WireFormat, shard: Flat, tag: u64) -> Pending<Flat> {
        by_default(self).all_gather(wire, shard, tag)
    }

    /// The ranks on this rank's host, itself included: neighbours. By default all.
    fn ranks_here(&self) -> Range<usize> {
        0..self.size()
    }

    /// Concatenates the `shard`s of the ranks of this rank's group, in rank order. Groups have `ranks` neighbours each, the
    /// first from rank 0 on, and all groups gather at a time. A group that lies on one host needs nothing of others.
    fn all_gather_within(&self, ranks: usize, shard: Flat, tag: u64) -> Pending<Flat> {
        self.all_gather_within_as(WireFormat::Exact, ranks, shard, tag)
    }

    /// [`all_gather_within`](Self::all_gather_within) in which elements travel as `wire` says, as in
    /// [`all_gather_as`](Self::all_gather_as).
    fn all_gather_within_as(&self, wire: WireFormat, ranks: usize, shard: Flat, tag: u64) -> Pending<Flat> {
        by_default(self).all_gather_within(wire, ranks, shard, tag)
    }

    /// Sums `input` (`ranks` x n elements) over all ranks, as [`reduce_scatter`](Self::reduce_scatter) does, and divides the
    /// sum among the ranks of each group of `ranks` neighbours: the rank of place p in its group receives elements
    /// `p * n .. (p + 1) * n`, in the memory of `input`. So every group has all of the sum. n is a multiple of the number of
    /// groups; the bits are those of a reduce-scatter.
    fn reduce_to_groups(&self, ranks: usize, input: Flat, tag: u64) -> Pending<Flat> {
        self.reduce_to_groups_as(WireFormat::Exact, ranks, input, tag)
    }

    /// [`reduce_to_groups`](Self::reduce_to_groups) in which the summands travel as `wire` says: each group's part of n
    /// elements is summed by one of the ranks that receive it, as in [`reduce_scatter_as`](Self::reduce_scatter_as), and the
    /// sums travel exact.
    fn reduce_to_groups_as(&self, wire: WireFormat, ranks: usize, input: Flat, tag: u64) -> Pending<Flat> {
        by_default(self).reduce_to_groups(wire, ranks, input, tag)
    }

    /// Every rank receives the values of every rank, in rank order. For a few numbers: votes, norms, metrics.
    fn gather_f64(&self, values: Vec<f64>) -> Pending<Vec<Vec<f64>>> {
        by_default(self).gather_f64(&values)
    }

    /// Waits until every rank has come here.
    fn barrier(&self) -> Pending<()> {
        by_default(self).barrier()
    }

    /// The failure of another rank, as far as this one knows of it by now, without waiting: what ends the wait for something that
    /// the other ranks take part in and that is no collective of this communicator. By default none is known.
    fn failure(&self) -> Option<CommError> {
        None
    }

    /// How long a rank waits for another: also for what [`failure`](Self::failure) is for. By default ten minutes.
    fn timeout(&self) -> Duration {
        Duration::from_secs(600)
    }

    /// Calls and bytes so far; nothing where a communicator does not count.
    fn report(&self) -> CommReport {
        CommReport::default()
    }

    /// From now on, collectives are logged in `log`, or in none. A communicator of your own, and that of a world of
    /// one, need not log.
    fn log_into(&self, log: Option<Arc<CommLog>>) {
        _ = log;
    }
}

/// The collectives that `comm` has by default, all made of its `gather_bytes`.
fn by_default<C: Communicator + ?Sized>(comm: &C) -> DefaultCollectives<impl FnOnce(Vec<u8>) -> Pending<Vec<Vec<u8>>>> {
    DefaultCollectives { rank: comm.rank(), size: comm.size(), gather: |bytes| comm.gather_bytes(bytes) }
}
