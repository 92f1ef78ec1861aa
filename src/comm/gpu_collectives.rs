//! Collectives between the GPUs of ranks over NCCL, in addition to the communicator that the ranks always have.
//!
//! ```text
//!   launch    NCCL's collective on its own stream + a few words over the communicator: which collective this is
//!   wait      the words of all ranks are equal -> NCCL is done, or the communicator reports a rank that has failed
//! ```
//!
//! NCCL compares nothing and does not notice a dead peer. A rank therefore waits for NCCL only if all ranks have
//! launched the same collective, and while it waits, it checks with the communicator that all ranks are alive.

use super::agree::gather_u64;
use super::fingerprint::CollectiveFingerprint;
use super::{CollectiveKind, Communicator, Pending, WireFormat};
use crate::cuda::DeviceFlat;
use crate::cuda::nccl::{
    self, NcclComm, NcclError, NcclLibrary, NcclSumMode, PendingNcclCollective, WaitAbortConditions,
};
use crate::error::{CommError, Error, Result};
use crate::memory::{MemoryKind as Purpose, MemoryLedger, MemoryLedgerEntry, MemoryTier};
use crate::notice::emit;
use crate::timeline::{self, CarriedContext, TimelineLane};
use crate::util::{fnv1a, lock};
use candle_core::cuda_backend::WrapErr;
use candle_core::{CudaDevice, DType};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The variable that selects how ranks sum data on their GPUs: `exact`, `fast` or `off`.
const NCCL_MODE: &str = "CANDLE_ZERO_NCCL";
/// The variable that, if 1, keeps NCCL from accessing other threads' memory directly: CUDA's memory pools, which hold
/// the tensors, are not accessible to other GPUs.
const P2P_DIRECT_DISABLE: &str = "NCCL_P2P_DIRECT_DISABLE";
/// The maximum time for which an NCCL error is held back until it is known which rank failed.
const FAILED_RANK_TIMEOUT: Duration = Duration::from_secs(2);

/// This rank's GPU among those of all ranks.
pub(crate) struct GpuCollectives {
    nccl: Arc<NcclComm>,
    comm: Arc<dyn Communicator>,
    sums: NcclSumMode,
    /// The number of collectives so far.
    sequence: AtomicU64,
    /// The ledger entry for the memory in which other ranks' elements wait to be summed.
    receive_memory: Mutex<MemoryLedgerEntry>,
}

/// The capabilities that a rank reports before NCCL is used.
#[derive(Clone, Copy, PartialEq, Eq)]
struct NcclCapability {
    /// Whether the library is available and this rank is configured to use it.
    usable: bool,
    fast: bool,
    /// Whether ranks that are threads of one process may use NCCL.
    allows_threads: bool,
    host: u64,
    process: u64,
    gpu: [u64; 2],
}

impl NcclCapability {
    fn to_words(self) -> [u64; 5] {
        let flags = u64::from(self.usable) | u64::from(self.fast) << 1 | u64::from(self.allows_threads) << 2;
        [flags, self.host, self.process, self.gpu[0], self.gpu[1]]
    }

    fn from_words(words: &[u64]) -> Self {
        let is = |bit: u64| words[0] >> bit & 1 == 1;
        let (host, process, gpu) = (words[1], words[2], [words[3], words[4]]);
        Self { usable: is(0), fast: is(1), allows_threads: is(2), host, process, gpu }
    }

    fn shares_gpu_with(&self, other: &Self) -> bool {
        (self.host, self.gpu) == (other.host, other.gpu)
    }
}

/// Returns the reason not to use NCCL, given the capabilities of all ranks, or `None` if it can be used.
fn unusable_reason(capabilities: &[NcclCapability]) -> Option<&'static str> {
    let pairs = || (0..capabilities.len()).flat_map(|b| (0..b).map(move |a| (&capabilities[a], &capabilities[b])));
    if capabilities.iter().any(|capability| !capability.usable) {
        Some("it is off or not found on a rank")
    } else if pairs().any(|(a, b)| a.fast != b.fast) {
        Some("CANDLE_ZERO_NCCL is fast on some ranks and exact on others")
    } else if pairs().any(|(a, b)| a.shares_gpu_with(b)) {
        Some("ranks share a GPU")
    } else if pairs()
        .any(|(a, b)| (a.host, a.process) == (b.host, b.process) && !(a.allows_threads && b.allows_threads))
    {
        Some("ranks are threads of one process, and NCCL_P2P_DIRECT_DISABLE is not 1")
    } else {
        None
    }
}

impl GpuCollectives {
    /// Collective: joins this rank's GPU with those of all ranks. Returns `None` if there is only one rank or NCCL
    /// cannot be used. A rank whose share is not on a GPU has no `device`.
    ///
    /// # Errors
    /// Fails if a variable has an invalid value, NCCL fails, or a rank has failed.
    pub fn join(
        comm: &Arc<dyn Communicator>,
        device: Option<&CudaDevice>,
        ledger: &MemoryLedger,
    ) -> Result<Option<Self>> {
        if comm.size() == 1 {
            return Ok(None);
        }
        let (rank, choice) = (comm.rank(), NcclMode::of(std::env::var(NCCL_MODE).ok())?);
        let library = device.filter(|_| choice != NcclMode::Off).map(|_| NcclLibrary::find());
        let uuid = match device {
            Some(device) => device.cuda_stream().context().uuid().w()?.bytes.map(|byte| byte as u8),
            None => [0; 16],
        };
        let half = |at: usize| u64::from_le_bytes(uuid[at..at + 8].try_into().expect("eight bytes"));
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        // Process IDs of different containers may be equal.
        let pid_namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let process = format!("{} {}", pid_namespace.display(), std::process::id());
        let own = NcclCapability {
            usable: matches!(library, Some(Ok(_))),
            fast: choice == NcclMode::Fast,
            allows_threads: std::env::var(P2P_DIRECT_DISABLE).as_deref() == Ok("1"),
            host: fnv1a(&boot),
            process: fnv1a(process.as_bytes()),
            gpu: [half(0), half(8)],
        };
        let capabilities = gather_u64(&**comm, &own.to_words())?;
        let capabilities: Vec<NcclCapability> =
            capabilities.iter().map(|words| NcclCapability::from_words(words)).collect();
        if let Some(why) = unusable_reason(&capabilities) {
            if let (0, Some(library)) = (rank, library) {
                let reason = library.err().map_or_else(|| why.to_string(), |error| error.to_string());
                emit(&format!("collectives between GPUs pass through the host, without NCCL: {reason}"));
            }
            return Ok(None);
        }
        let (Some(library), Some(device)) = (library, device) else { unreachable!("every rank has both") };
        let library = library.map_err(|error| error_of(error, rank, &**comm))?;
        if rank == 0 {
            let sum_kind = if choice == NcclMode::Fast { "its own sums" } else { "sums in rank order" };
            emit(&format!("collectives between GPUs use NCCL {}, with {sum_kind}", library.name()));
        }
        let id = if rank == 0 { library.unique_id() } else { Ok([0; 128]) };
        let id = id.map_err(|error| error_of(error, rank, &**comm))?;
        let id = comm.gather_bytes(id.to_vec()).wait()?.swap_remove(0);
        let watched_comm = comm.clone();
        let is_failed = move || watched_comm.failure().map(|error| -> nccl::CallerFailure { Arc::new(error) });
        let watch = WaitAbortConditions { timeout: comm.timeout(), is_failed: Box::new(is_failed) };
        let id = id.try_into().expect("128 bytes");
        let nccl = NcclComm::join(&library, device, rank, comm.size(), id, watch);
        let gpus = Self {
            nccl: Arc::new(nccl.map_err(|error| error_of(error, rank, &**comm))?),
            comm: comm.clone(),
            sums: if choice == NcclMode::Fast { NcclSumMode::Fast } else { NcclSumMode::Exact },
            sequence: AtomicU64::new(0),
            receive_memory: Mutex::new(ledger.hold_in(MemoryTier::Device, Purpose::Buckets, 0)),
        };
        gpus.connect_peers(device)?;
        Ok(Some(gpus))
    }

    /// Collective: runs one small collective of each kind. NCCL connects GPUs at their first exchange, which takes
    /// time, and memory that may not be free in the middle of a step.
    fn connect_peers(&self, device: &CudaDevice) -> Result<()> {
        for kind in [CollectiveKind::AllReduce, CollectiveKind::ReduceScatter, CollectiveKind::AllGather] {
            let buffer = DeviceFlat::zeros(device, DType::F32, self.comm.size())?;
            self.launch(kind, WireFormat::Exact, buffer, 0)?.wait()?;
        }
        Ok(())
    }

    /// Begins an all-reduce, a reduce-scatter or an all-gather, whose result is in the memory of `buffer`. All ranks
    /// launch the same collectives in the same order, which is checked when a rank waits for them. Elements are sent
    /// unchanged or as integers; a format that applies only between hosts is handled by the communicator instead.
    ///
    /// # Errors
    /// Fails if NCCL fails or a rank has failed.
    pub fn launch(
        &self,
        kind: CollectiveKind,
        wire: WireFormat,
        buffer: DeviceFlat,
        tag: u64,
    ) -> Result<PendingGpuCollective> {
        let (sums, codes) = match wire {
            WireFormat::Exact => (self.sums, None),
            WireFormat::Blocks(ints) => (NcclSumMode::Coded(ints), Some(ints)),
            WireFormat::BetweenHosts(_) => unreachable!("the communicator handles {wire:?}"),
        };
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed) + 1;
        let mine = CollectiveFingerprint::new(sequence, kind, wire, buffer.dtype(), buffer.len(), tag);
        let bytes = (buffer.len() * buffer.dtype().size_in_bytes()) as u64;
        self.nccl.keep_times(timeline::is_recording());
        let fingerprints = self.comm.gather_bytes(mine.words().map(u64::to_le_bytes).concat());
        let launched = match kind {
            CollectiveKind::AllReduce => self.nccl.all_reduce(sums, buffer),
            CollectiveKind::ReduceScatter => self.nccl.reduce_scatter(sums, buffer),
            CollectiveKind::AllGather => self.nccl.all_gather(codes, buffer),
            CollectiveKind::Control | CollectiveKind::Barrier | CollectiveKind::Send | CollectiveKind::Receive => {
                unreachable!("{} has no elements on a GPU", kind.name())
            }
        };
        lock(&self.receive_memory).resize(self.nccl.scratch_bytes());
        let launched = launched.map_err(|error| error_of(error, self.comm.in_job(self.comm.rank()), &*self.comm))?;
        let timeline_entry = (kind, bytes, timeline::carry());
        Ok(PendingGpuCollective {
            nccl: self.nccl.clone(),
            comm: self.comm.clone(),
            mine,
            fingerprints,
            launched,
            timeline_entry,
        })
    }

    /// Aborts all NCCL collectives in progress, because this rank gives up.
    pub fn abort(&self) {
        self.nccl.abort();
    }
}

/// A collective in progress.
pub(crate) struct PendingGpuCollective {
    nccl: Arc<NcclComm>,
    comm: Arc<dyn Communicator>,
    mine: CollectiveFingerprint,
    /// The fingerprints of the collectives that all ranks have launched.
    fingerprints: Pending<Vec<Vec<u8>>>,
    launched: PendingNcclCollective,
    /// The entry for the timeline.
    timeline_entry: (CollectiveKind, u64, CarriedContext),
}

impl PendingGpuCollective {
    /// Waits for the result.
    ///
    /// # Errors
    /// Fails if ranks have launched different collectives, a rank has failed (the error names it), or NCCL fails.
    pub fn wait(self) -> Result<DeviceFlat> {
        let Self { nccl, comm, mine, fingerprints, launched, timeline_entry: (kind, bytes, timeline_context) } = self;
        let _span = timeline::span(timeline::EventCategory::Wait, "wait").with_subject_of(&timeline_context);
        let (rank, abort_with) = (comm.in_job(comm.rank()), |error: Error| {
            nccl.abort();
            error
        });
        for (peer, bytes) in fingerprints.wait().map_err(abort_with)?.iter().enumerate() {
            let word = |at: usize| u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().expect("eight bytes"));
            let theirs = CollectiveFingerprint::from_words(std::array::from_fn(word));
            if theirs != mine {
                let (here, there, peer) = (mine.to_string(), theirs.to_string(), comm.in_job(peer));
                return Err(abort_with(CommError::Diverged { rank, here, peer, there }.into()));
            }
        }
        let settle = || {
            launched.wait_on_host()?;
            if let Some(times) = launched.times()? {
                timeline_context.record_finished(
                    TimelineLane::BetweenGpus,
                    timeline::EventCategory::Collective,
                    kind.name(),
                    times,
                    ("bytes", bytes),
                );
            }
            launched.settle()
        };
        settle().map_err(|error| error_of(error, rank, &*comm))
    }
}

/// Returns an error that names the failed rank, if it is known.
fn error_of(error: NcclError, rank: usize, comm: &dyn Communicator) -> Error {
    match error {
        NcclError::CallerFailure(failure) => match failure.downcast_ref::<CommError>() {
            Some(error) => error.clone().into(),
            None => CommError::Other(failure).into(),
        },
        // The text is kept because it may report a lack of memory.
        NcclError::Device(error) => Error::Candle(candle_core::Error::Msg(error.to_string())),
        NcclError::AsyncError { .. } | NcclError::PeerTimeout { .. } | NcclError::CallFailed { .. } => {
            // NCCL notices that a rank has failed before this rank can determine which one.
            let deadline = Instant::now() + FAILED_RANK_TIMEOUT;
            loop {
                match comm.failure() {
                    Some(failure) => return failure.into(),
                    None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                    None => return CommError::Gpus { rank, why: error.to_string() }.into(),
                }
            }
        }
        error => CommError::Gpus { rank, why: error.to_string() }.into(),
    }
}

/// The user's choice of how NCCL is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NcclMode {
    Exact,
    Fast,
    Off,
}

impl NcclMode {
    fn of(found: Option<String>) -> Result<Self, CommError> {
        match found.as_deref() {
            None | Some("" | "exact") => Ok(Self::Exact),
            Some("fast") => Ok(Self::Fast),
            Some("off") => Ok(Self::Off),
            Some(found) => Err(CommError::NcclChoice { found: found.into() }),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn capability(process: u64, gpu: u64) -> NcclCapability {
        NcclCapability { usable: true, fast: false, allows_threads: false, host: 1, process, gpu: [0, gpu] }
    }

    #[test]
    fn ranks_use_nccl_where_each_has_a_gpu_and_all_want_the_same() {
        assert_eq!(unusable_reason(&[capability(1, 1), capability(2, 2)]), None);
        let other_host = NcclCapability { host: 2, ..capability(1, 1) };
        assert_eq!(unusable_reason(&[capability(1, 1), other_host]), None);
        assert_eq!(unusable_reason(&[capability(1, 1), capability(2, 1)]), Some("ranks share a GPU"));
        let without = NcclCapability { usable: false, ..capability(2, 2) };
        assert_eq!(unusable_reason(&[capability(1, 1), without]), Some("it is off or not found on a rank"));
        let fast = NcclCapability { fast: true, ..capability(2, 2) };
        assert_eq!(
            unusable_reason(&[capability(1, 1), fast]),
            Some("CANDLE_ZERO_NCCL is fast on some ranks and exact on others")
        );
        assert!(unusable_reason(&[capability(1, 1), capability(1, 2)]).unwrap().contains("threads of one process"));
        let allows_threads = |gpu| NcclCapability { allows_threads: true, ..capability(1, gpu) };
        assert_eq!(unusable_reason(&[allows_threads(1), allows_threads(2)]), None);
        assert!(
            NcclCapability::from_words(&fast.to_words()) == fast
                && NcclCapability::from_words(&allows_threads(7).to_words()) == allows_threads(7)
        );
    }

    #[test]
    fn another_choice_than_the_three_is_an_error() {
        assert_eq!(NcclMode::of(Some(String::new())).unwrap(), NcclMode::Exact);
        assert_eq!(NcclMode::of(Some("fast".into())).unwrap(), NcclMode::Fast);
        assert_eq!(NcclMode::of(Some("off".into())).unwrap(), NcclMode::Off);
        insta::assert_snapshot!(NcclMode::of(Some("quick".into())).unwrap_err(), @r#"CANDLE_ZERO_NCCL is "quick", but must be exact (sums in rank order, bit for bit as on the host), fast (NCCL's own sums) or off (collectives pass through the host)"#);
    }
}
