//! Collectives between ranks.
//!
//! ```text
//!   engine ---- launch(job) ----> queue (comm thread or waiting thread, in issue order) ----> exchange (shared memory)
//!          <--- Pending::wait ---
//! ```
//!
//! [`Communicator`] is the engine's interface: rank, size, and collectives on flat buffers, each split into a launch
//! and a wait. [`SoloCommunicator`] is a world of one rank. [`CpuCommunicator`] serves every other world: ranks that
//! are threads of one process ([`threads`]) over memory that only this process can access, ranks that are processes
//! over a memfd created by `zerorun` (`shm`) or, if they were started individually, by rank 0 (`rendezvous`), or ranks
//! on several hosts (`mpi`). A program can provide its own communicator.
//!
//! Sums run in rank order in f32 (with [`WireFormat::BetweenHosts`], in rank order within each host and then in host
//! order), whatever the stage, the bucket size or the number of pieces in which a buffer is sent. Stages 0 to 3
//! therefore give the same bits.
//!
//! Elements are sent unchanged, as small integers with a scale per block (everywhere or only between hosts), or,
//! between hosts, as bf16 or f16: see [`WireFormat`].

mod abort_signal;
#[doc(hidden)]
pub mod agree;
mod backend;
#[doc(hidden)]
pub mod clock_skew;
mod collective_kind;
mod collective_queue;
mod cpu_communicator;
mod default_collectives;
pub(crate) mod engine_call;
pub(crate) mod error;
mod fingerprint;
#[cfg(feature = "cuda")]
pub(crate) mod gpu_collectives;
mod join;
mod joined_rank;
mod links;
mod message_fingerprint;
mod mpi;
mod pending;
mod point_to_point;
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
pub(crate) use collective_queue::{MAX_QUEUE_DELAY, SHORT_BYTES};
pub use cpu_communicator::CpuCommunicator;
pub(crate) use fingerprint::content_of;
pub use join::from_env;
#[doc(hidden)]
pub use mpi::found_library as mpi_library;
pub(crate) use mpi::{InterHostTransferEstimate, UniformHosts};
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

use crate::error::{CommError, Result};
use crate::precision::Flat;
use crate::util::counted;
use candle_core::DType;
use default_collectives::DefaultCollectives;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The rank of this process in the job, and its collectives with the other ranks.
///
/// Every method that exchanges data, except [`send`](Self::send) and [`receive`](Self::receive), is collective: all
/// ranks call the same methods, in the same order, with the same dtypes and element counts (with matching counts in
/// [`all_to_all`](Self::all_to_all)). This is checked; ranks that diverge receive an error that shows both sides. `tag`
/// identifies the content (for example a hash of the parameters in a bucket) and is checked too.
///
/// # Implementing a communicator
/// Four methods are enough: [`rank`](Self::rank), [`size`](Self::size), [`gather_bytes`](Self::gather_bytes) and
/// [`abort`](Self::abort). The sums, the gathers and the barrier are built on these, with the same bits as over shared
/// memory; only pipelines and groups of ranks also need [`send`](Self::send), [`receive`](Self::receive) and
/// [`group`](Self::group). Override those methods that your network can implement more efficiently; of the sums and
/// gathers, override the methods whose names end in `_as`, which the others call. Collectives run in the order in which
/// they are launched, while results may be waited for in any order: a separate thread that runs one collective after
/// another works well.
///
/// ```
/// use candle_zero::comm::{Communicator, Pending};
/// use candle_zero::error::CommError;
/// use std::sync::mpsc::{Receiver, Sender, channel};
///
/// type Message = Vec<u8>;
///
/// /// Ranks that are threads and send each other messages.
/// struct Channels {
///     rank: usize,
///     size: usize,
///     jobs: Sender<(Message, Sender<Option<Vec<Message>>>)>,
/// }
///
/// impl Channels {
///     /// `to` and `from` have one channel to and from each rank, this one included.
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
    /// Returns this rank, counted from 0.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn size(&self) -> usize;

    /// Gathers the bytes of all ranks on every rank, in rank order. All ranks pass the same number of bytes.
    ///
    /// Votes and other control messages are sent without a fingerprint of their call. A network that may lose or
    /// reorder messages must number them, and fail if ranks are in different calls.
    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>>;

    /// Notifies the other ranks that this one gives up, and why. Their collectives return an error with the reason.
    fn abort(&self, why: &str);

    /// Sums `input` over ranks, elementwise and in rank order; every rank receives the complete sum, in the memory of
    /// `input`.
    fn all_reduce(&self, input: Flat, tag: u64) -> Pending<Flat> {
        self.all_reduce_as(WireFormat::Exact, input, tag)
    }

    /// Sums `input` (world size x n elements) over ranks; rank r receives elements `r * n .. (r + 1) * n`, in
    /// the memory of `input`, whose capacity is kept.
    fn reduce_scatter(&self, input: Flat, tag: u64) -> Pending<Flat> {
        self.reduce_scatter_as(WireFormat::Exact, input, tag)
    }

    /// Concatenates the `shard`s (n elements each) of all ranks in rank order. The result is in the memory of `shard`
    /// if its capacity suffices; otherwise memory is allocated.
    fn all_gather(&self, shard: Flat, tag: u64) -> Pending<Flat> {
        self.all_gather_as(WireFormat::Exact, shard, tag)
    }

    /// Does the same as [`all_reduce`](Self::all_reduce), with summands sent in the format `wire`. Each element is
    /// summed by one rank, as in [`reduce_scatter_as`](Self::reduce_scatter_as) with chunks of equal length, and the
    /// sums are sent unchanged: both give the same bits.
    fn all_reduce_as(&self, wire: WireFormat, input: Flat, tag: u64) -> Pending<Flat> {
        by_default(self).all_reduce(wire, input, tag)
    }

    /// Does the same as [`reduce_scatter`](Self::reduce_scatter), with elements sent in the format `wire`. The part
    /// that a rank adds to its own chunk is not sent, and is not rounded.
    fn reduce_scatter_as(&self, wire: WireFormat, input: Flat, tag: u64) -> Pending<Flat> {
        by_default(self).reduce_scatter(wire, input, tag)
    }

    /// Does the same as [`all_gather`](Self::all_gather), with elements sent in the format `wire`. All ranks receive
    /// the same values: those decoded from the wire format, even for their own shard.
    fn all_gather_as(&self, wire: WireFormat, shard: Flat, tag: u64) -> Pending<Flat> {
        by_default(self).all_gather(wire, shard, tag)
    }

    /// Returns the ranks on this rank's host, itself included, which have consecutive numbers. By default, these are
    /// all ranks.
    fn ranks_here(&self) -> Range<usize> {
        0..self.size()
    }

    /// Concatenates the `shard`s of the ranks of this rank's group, in rank order. Groups consist of `ranks`
    /// consecutive ranks each, starting at rank 0, and all groups gather at the same time. Nothing needs to be sent
    /// between hosts if each group is on one host.
    fn all_gather_within(&self, ranks: usize, shard: Flat, tag: u64) -> Pending<Flat> {
        self.all_gather_within_as(WireFormat::Exact, ranks, shard, tag)
    }

    /// Does the same as [`all_gather_within`](Self::all_gather_within), with elements sent in the format `wire`, as in
    /// [`all_gather_as`](Self::all_gather_as).
    fn all_gather_within_as(&self, wire: WireFormat, ranks: usize, shard: Flat, tag: u64) -> Pending<Flat> {
        by_default(self).all_gather_within(wire, ranks, shard, tag)
    }

    /// Sums `input` (`ranks` x n elements) over all ranks, as [`reduce_scatter`](Self::reduce_scatter) does, and
    /// divides the sum among the ranks of each group of `ranks` consecutive ranks: the rank at position p in its group
    /// receives elements `p * n .. (p + 1) * n`, in the memory of `input`. Every group thus has the complete sum. n is
    /// a multiple of the number of groups; the bits are those of a reduce-scatter.
    fn reduce_to_groups(&self, ranks: usize, input: Flat, tag: u64) -> Pending<Flat> {
        self.reduce_to_groups_as(WireFormat::Exact, ranks, input, tag)
    }

    /// Does the same as [`reduce_to_groups`](Self::reduce_to_groups), with summands sent in the format `wire`: each
    /// group's part of n elements is summed by one of the ranks that receive it, as in
    /// [`reduce_scatter_as`](Self::reduce_scatter_as), and the sums are sent unchanged.
    fn reduce_to_groups_as(&self, wire: WireFormat, ranks: usize, input: Flat, tag: u64) -> Pending<Flat> {
        by_default(self).reduce_to_groups(wire, ranks, input, tag)
    }

    /// Gathers the values of all ranks on every rank, in rank order. This is meant for a few numbers: votes, norms,
    /// metrics.
    fn gather_f64(&self, values: Vec<f64>) -> Pending<Vec<Vec<f64>>> {
        by_default(self).gather_f64(&values)
    }

    /// Waits until every rank has called this method.
    fn barrier(&self) -> Pending<()> {
        by_default(self).barrier()
    }

    /// Sends `data` to rank `to`, which calls [`receive`](Self::receive) with the same dtype, number of elements and
    /// `tag`. Messages from one rank to another arrive in the order of these calls; messages between different ranks,
    /// and collectives, are independent of each other. The result is available when `data` is on its way, possibly only
    /// after the other rank has called `receive`: before waiting for the result, launch everything that the other rank
    /// waits for.
    ///
    /// # Errors
    /// The default implementation returns an error, because messages cannot be built on collectives: a custom
    /// communicator must implement them for pipelines, and for experts that are divided among ranks.
    fn send(&self, to: usize, data: Flat, tag: u64) -> Pending<()> {
        _ = (to, data, tag);
        Pending::from_fn(|| Err(not_implemented("send").into()))
    }

    /// Receives `len` elements from rank `from`, which calls [`send`](Self::send).
    ///
    /// # Errors
    /// The default implementation returns an error, as for [`send`](Self::send).
    fn receive(&self, from: usize, dtype: DType, len: usize, tag: u64) -> Pending<Flat> {
        _ = (from, dtype, len, tag);
        Pending::from_fn(|| Err(not_implemented("receive").into()))
    }

    /// Sends a part of `input` to every rank and receives a part from every rank: `sent[r]` elements go to rank r and
    /// `received[r]` elements come from it. The parts are adjacent, in rank order, in `input` and in the result. Every
    /// rank passes counts that match those of the others, and the same `tag`.
    ///
    /// # Errors
    /// Fails if the ranks' counts do not match, because the ranks have then diverged.
    ///
    /// # Panics
    /// Panics if `sent` or `received` does not have one number for each rank, if the numbers in `sent` do not add up to
    /// the length of `input`, or if this rank's own parts in `sent` and `received` differ.
    fn all_to_all(&self, input: Flat, sent: &[usize], received: &[usize], tag: u64) -> Pending<Flat> {
        all_to_all(self, input, sent, received, tag)
    }

    /// Returns the job-wide number of rank `rank` of this communicator, for use in error messages. The two differ only
    /// if this is the communicator of a group.
    fn in_job(&self, rank: usize) -> usize {
        rank
    }

    /// Collective: divides the job into `groups`, each a list of ranks, and returns the communicator of this rank's
    /// group, in which ranks are counted from 0 in ascending order. Every rank passes the same groups, and is in one of
    /// them. A failure of any rank of the job ends the collectives of all groups. Calling this again with the same
    /// groups returns the same communicator.
    ///
    /// # Errors
    /// Fails if the groups are not a partition of the ranks, other ranks pass different groups, or the job has been
    /// divided into groups in too many ways. The default implementation returns an error, because groups cannot be
    /// built on collectives of all ranks.
    fn group(&self, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>> {
        _ = groups;
        Err(not_implemented("group").into())
    }

    /// Returns the failure of another rank, if one has been detected, without waiting. The engine polls this method
    /// while it waits for operations that involve the other ranks but are not collectives of this communicator. By
    /// default, no failure is reported.
    fn failure(&self) -> Option<CommError> {
        None
    }

    /// Returns how long a rank waits for another, including when it polls [`failure`](Self::failure). The default is
    /// ten minutes.
    fn timeout(&self) -> Duration {
        Duration::from_secs(600)
    }

    /// Returns the calls and bytes so far, or an empty report if a communicator does not count them.
    fn report(&self) -> CommReport {
        CommReport::default()
    }

    /// Logs collectives in `log` from now on, or not at all if it is `None`. A user-defined communicator, and that of a
    /// world of one rank, need not log.
    fn log_into(&self, log: Option<Arc<CommLog>>) {
        _ = log;
    }
}

/// Returns the error of a method that a user-defined communicator does not implement.
fn not_implemented(method: &str) -> CommError {
    CommError::other(format!(
        "this communicator has no Communicator::{method}, which pipelines and groups of ranks need; implement it, or \
         start the ranks with zerorun, mpirun or srun"
    ))
}

/// Implements `Communicator::all_to_all` with one message to and from each other rank.
fn all_to_all<C: Communicator + ?Sized>(
    comm: &C,
    input: Flat,
    sent: &[usize],
    received: &[usize],
    tag: u64,
) -> Pending<Flat> {
    let (rank, size, dtype) = (comm.rank(), comm.size(), input.dtype());
    assert!(
        sent.len() == size && received.len() == size,
        "all_to_all on rank {rank}: `sent` and `received` need {}, one for each rank, but have {} and {}",
        counted(size, "number"),
        sent.len(),
        received.len()
    );
    let total: usize = sent.iter().sum();
    assert_eq!(
        total,
        input.len(),
        "all_to_all on rank {rank}: the numbers in `sent` must add up to the input's length"
    );
    assert_eq!(sent[rank], received[rank], "all_to_all on rank {rank}: a rank receives what it sends to itself");
    let mut start = 0;
    let mut own = Flat::zeros(dtype, 0);
    let mut sends = Vec::new();
    for (to, len) in sent.iter().enumerate() {
        let part = input.slice(start..start + len).to_flat();
        start += len;
        if to == rank { own = part } else { sends.push(comm.send(to, part, tag)) }
    }
    let others = (0..size).filter(|from| *from != rank);
    let receives: Vec<_> = others.map(|from| comm.receive(from, dtype, received[from], tag)).collect();
    let len = received.iter().sum();
    Pending::from_fn(move || {
        let mut output = Flat::with_capacity(dtype, len);
        let (mut own, mut receives) = (Some(own), receives.into_iter());
        for from in 0..size {
            let part = if from == rank { own.take() } else { receives.next().map(Pending::wait).transpose()? };
            output.extend_cast(part.as_ref().map(Flat::as_ref).expect("a part from every rank"));
        }
        sends.into_iter().try_for_each(Pending::wait)?;
        Ok(output)
    })
}

/// Returns the default collectives of `comm`, all built on its `gather_bytes`.
fn by_default<C: Communicator + ?Sized>(comm: &C) -> DefaultCollectives<impl FnOnce(Vec<u8>) -> Pending<Vec<Vec<u8>>>> {
    DefaultCollectives { rank: comm.rank(), size: comm.size(), gather: |bytes| comm.gather_bytes(bytes) }
}
