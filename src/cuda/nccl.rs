//! Collectives between GPUs, one per rank, with NVIDIA's NCCL, which is loaded at run time.
//!
//! ```text
//!   Candle's stream   ---- writes input ---+                                  +---- uses the result ---->
//!                                          | event                            | event
//!   wire stream       --------------------------- NCCL, sums in rank order ---+
//!                                    launch                              settle
//! ```
//!
//! | file | contents |
//! | --- | --- |
//! | `library.rs` | NCCL's functions |
//! | `member.rs` | a rank's communicator: calls, waits on the host, failures |
//! | `quantized.rs` | collectives that transfer elements as integers |
//! | `pending.rs` | a collective in progress and its buffers |
//! | `error.rs` | errors |
//!
//! Collectives run on a separate stream, concurrently with the model's work. A launch takes a buffer, and
//! [`settle`](PendingNcclCollective::settle) returns it after making Candle's stream wait for the collective. Unless
//! [`wait_on_host`](PendingNcclCollective::wait_on_host) is called, the host waits only in a launch, until NCCL has
//! accepted the call. The wait is longer when NCCL connects two ranks for the first time.
//!
//! The order and the rounding of NCCL's own sums depend on the number of ranks and on their connections. Exact sums
//! have the same bits as the sums of `comm`: NCCL only transfers the elements, and a kernel of this library adds them
//! in rank order in f32 and rounds once. The elements of peers are stored temporarily, one small piece at a time, to limit
//! the memory that they take.
//!
//! Elements that are transferred as integers (ZeRO++) are encoded and decoded by kernels, and NCCL transfers the bytes.
//! These collectives also have the same bits as those through host memory, and need no memory except a buffer for
//! pieces of codes.
//!
//! If a peer dies, the collectives of the other ranks do not end. If ranks on one host communicate through shared
//! memory, NCCL does not even detect that the peer is dead. The host therefore checks NCCL's status and the caller's
//! failure detection whenever it waits for a GPU, and aborts the communicator on a failure.

mod error;
mod library;
mod member;
mod pending;
mod quantized;
#[cfg(test)]
mod tests;

pub(crate) use error::{CallerFailure, NcclError};
pub(crate) use library::NcclLibrary;
pub(crate) use member::WaitAbortConditions;
pub(crate) use pending::PendingNcclCollective;

use super::device_flat::DeviceFlat;
use super::kernel_launch::arguments;
use super::kernel_module::{KernelFunction, KernelModule, launch_over, module, suffix};
use crate::precision::IntFormat;
use crate::util::counted;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;
use candle_core::{CudaDevice, DType};
use library::data_type;
use member::{NcclBufferLimits, NcclLaunch, NcclMember};
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;

type Result<T> = std::result::Result<T, NcclError>;

const KERNELS: KernelModule = module!("nccl_sum");

/// The size in bytes up to which an exact all-reduce is a single exchange. Up to this size, exchanging everything takes
/// less time than a second step.
const SHORT_BYTES: usize = 32 << 10;
/// The size in bytes of the peers' elements that are in memory at a time, large enough for one exchange to use a link
/// well.
const PEER_BUFFER_BYTES: usize = 64 << 20;

/// The method by which sums over ranks are computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum NcclSumMode {
    /// Sums in rank order in f32, rounded once: the same bits as collectives through host memory, for any number of
    /// GPUs.
    #[default]
    Exact,
    /// NCCL's own sums. They need only the buffers, transfer fewer bytes between hosts, and can be computed in the
    /// network if the network supports it.
    Fast,
    /// Like exact sums, but with the elements of the other ranks as integers. This rank's elements are not quantized.
    /// An all-reduce gathers the unquantized sums.
    Coded(IntFormat),
}

/// This rank in a group of ranks whose GPUs communicate.
///
/// All ranks launch the same collectives in the same order, with the same element counts and dtypes. This is not
/// checked: ranks that diverge wait for each other until the timeout.
pub(crate) struct NcclComm(Arc<NcclMember>);

impl NcclComm {
    /// Joins the `size` ranks that have the same `id`, which one of them gets from [`NcclLibrary::unique_id`]. Each
    /// rank has a separate device. If Candle is configured to use one stream per thread, a rank uses the stream of the
    /// thread that launches or settles.
    ///
    /// Ranks that are threads of one process need `NCCL_P2P_DIRECT_DISABLE=1` in the environment. Otherwise NCCL
    /// accesses their buffers from other GPUs, but CUDA's memory pools, which contain Candle's buffers, do not allow
    /// such access.
    ///
    /// # Errors
    /// Returns an error if NCCL reports one, or if a peer does not join within the timeout of `watch`, which applies to
    /// this and every later wait.
    pub fn join(
        library: &NcclLibrary,
        device: &CudaDevice,
        rank: usize,
        size: usize,
        id: [u8; 128],
        watch: WaitAbortConditions,
    ) -> Result<Self> {
        Self::join_within(
            library,
            device,
            (rank, size),
            id,
            watch,
            NcclBufferLimits { short: SHORT_BYTES, scratch: PEER_BUFFER_BYTES },
        )
    }

    fn join_within(
        library: &NcclLibrary,
        device: &CudaDevice,
        rank_and_size: (usize, usize),
        id: [u8; 128],
        watch: WaitAbortConditions,
        limits: NcclBufferLimits,
    ) -> Result<Self> {
        Ok(Self(Arc::new(NcclMember::join(library, device, rank_and_size, id, watch, limits)?)))
    }

    /// Returns this rank, counted from 0.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Concatenates the `shard`s (n elements each) of all ranks in rank order, in the memory of `shard`. With `codes`,
    /// the elements are quantized to integers and decoded again.
    ///
    /// # Errors
    /// Returns an error if the communicator has failed, now or before, or if there is not enough memory.
    pub fn all_gather(&self, codes: Option<IntFormat>, mut shard: DeviceFlat) -> Result<PendingNcclCollective> {
        let (count, dtype) = (shard.len(), shard.dtype());
        self.fail_on_error(shard.resize(count * self.size()))?;
        let own_offset = (self.rank() * count * dtype.size_in_bytes()) as CUdeviceptr;
        self.launch("an all-gather", shard, count * self.size(), |launch, output| {
            // SAFETY: the elements of every rank fit in the buffer, which belongs to this launch. This rank's elements
            // are first copied to their place.
            unsafe {
                launch.copy(output, output + own_offset, count * dtype.size_in_bytes())?;
                match codes {
                    None => launch.all_gather(output + own_offset, output, count, data_type(dtype)),
                    Some(ints) => self.gather_coded(launch, (ints, dtype), count, output),
                }
            }
        })
    }

    /// Sums `input` (size x n elements) over ranks. Rank r receives elements `r * n .. (r + 1) * n`, in the memory of
    /// `input`.
    ///
    /// # Errors
    /// Same as for [`all_gather`](Self::all_gather).
    pub fn reduce_scatter(&self, sums: NcclSumMode, input: DeviceFlat) -> Result<PendingNcclCollective> {
        assert!(
            input.len().is_multiple_of(self.size()),
            "{} in {} equal chunks",
            counted(input.len(), "element"),
            self.size()
        );
        let (count, dtype) = (input.len() / self.size(), input.dtype());
        let own_offset = (self.rank() * count * dtype.size_in_bytes()) as CUdeviceptr;
        let op = "a reduce-scatter";
        self.launch(op, input, count, |launch, input| {
            // SAFETY: the elements for every rank are in the buffer, which belongs to this launch.
            unsafe {
                match sums {
                    NcclSumMode::Fast => {
                        launch.reduce_scatter(input, input + own_offset, count, data_type(dtype))?;
                        launch.copy(input + own_offset, input, count * dtype.size_in_bytes())
                    }
                    NcclSumMode::Exact => self.add_exactly((launch, op), dtype, count, (input, input), |r| r * count),
                    NcclSumMode::Coded(ints) => self.add_coded((launch, op), (ints, dtype), count, (input, input)),
                }
            }
        })
    }

    /// Sums `values` over ranks in place.
    ///
    /// # Errors
    /// Same as for [`all_gather`](Self::all_gather).
    pub fn all_reduce(&self, sums: NcclSumMode, mut values: DeviceFlat) -> Result<PendingNcclCollective> {
        let (len, dtype, op) = (values.len(), values.dtype(), "an all-reduce");
        let chunk = len.div_ceil(self.size());
        if let NcclSumMode::Coded(_) = sums {
            // The chunks are the same as on the host, and blocks are counted from their starts.
            self.fail_on_error(values.extend_zeros(chunk * self.size() - len))?;
        }
        self.launch(op, values, len, |launch, values| {
            // SAFETY: the elements are in the buffer, which belongs to this launch.
            unsafe {
                match sums {
                    NcclSumMode::Fast => launch.all_reduce(values, len, data_type(dtype)),
                    NcclSumMode::Exact => self.all_reduce_exactly(launch, dtype, len, values),
                    NcclSumMode::Coded(ints) => {
                        let own_chunk = values + (self.rank() * chunk * dtype.size_in_bytes()) as CUdeviceptr;
                        self.add_coded((launch, op), (ints, dtype), chunk, (values, own_chunk))?;
                        launch.all_gather(own_chunk, values, chunk, data_type(dtype))
                    }
                }
            }
        })
    }

    /// Returns the number of bytes of device memory for elements from peers.
    pub fn scratch_bytes(&self) -> usize {
        self.0.scratch_bytes()
    }

    /// Sets whether later collectives record [the times](PendingNcclCollective::times) at which they ran.
    pub fn keep_times(&self, keep: bool) {
        self.0.keeps_times.store(keep, Ordering::Relaxed);
    }

    /// Gives up: collectives in progress end without a result, and the other ranks detect the failure.
    pub fn abort(&self) {
        self.0.fail(&NcclError::GaveUp { rank: self.rank() });
    }

    /// Checks a result before a launch. On an error, the communicator fails, so that the other ranks, which wait for
    /// this rank, detect the error.
    fn fail_on_error<T>(&self, result: candle_core::Result<T>) -> Result<T> {
        result.map_err(NcclError::from).inspect_err(|error| self.0.fail(error))
    }

    /// Launches `work` on a buffer whose first `len` elements are the result. `work` receives the buffer's address, and
    /// is not called if the buffer has no elements. Work on the wire stream may use the complete buffer: it belongs to
    /// this launch, and [`PendingNcclCollective`] keeps it until Candle's stream waits for the launch.
    fn launch(
        &self,
        op: &'static str,
        buffer: DeviceFlat,
        len: usize,
        work: impl FnOnce(&mut NcclLaunch<'_>, CUdeviceptr) -> Result<()>,
    ) -> Result<PendingNcclCollective> {
        let NcclMember { device, wire, .. } = &*self.0;
        assert!(buffer.is_of(device), "{op} of a buffer on another device");
        let empty = buffer.len() == 0;
        // The launch owns the buffer from here on. If a later step fails, the buffer is released after the work on the
        // wire stream.
        let mut launched = PendingNcclCollective::new(self.0.clone(), op, buffer, len);
        let mut launch = self.0.begin_launch()?;
        let attempt = || {
            if !empty {
                // Earlier work on Candle's stream has written the input.
                wire.join(&device.cuda_stream()).w()?;
                launched.begin()?;
                let (address, _used) = launched.buffer().address_mut(wire)?;
                work(&mut launch, address)?;
            }
            launched.end()
        };
        let result = attempt();
        launch.end(result)?;
        Ok(launched)
    }

    /// Sums all elements. Either each rank computes a part of the sums and the parts are gathered, or, if that is
    /// faster, every rank computes all sums.
    ///
    /// # Safety
    /// `len` elements are at `values`, used only by this launch.
    unsafe fn all_reduce_exactly(
        &self,
        launch: &mut NcclLaunch<'_>,
        dtype: DType,
        len: usize,
        values: CUdeviceptr,
    ) -> Result<()> {
        let (rank, size, bytes, op) = (self.rank(), self.size(), dtype.size_in_bytes(), "an all-reduce");
        if size == 1 {
            return Ok(());
        }
        let chunk = if len * bytes <= self.0.limits.short { 0 } else { len / size };
        let at = |element: usize| values + (element * bytes) as CUdeviceptr;
        // SAFETY: all chunks and the rest have `len` elements in total.
        unsafe {
            if chunk > 0 {
                let own_chunk = at(rank * chunk);
                self.add_exactly((launch, op), dtype, chunk, (values, own_chunk), |r| r * chunk)?;
                launch.all_gather(own_chunk, values, chunk, data_type(dtype))?;
            }
            let (rest, start) = (len - size * chunk, size * chunk);
            self.add_exactly((launch, op), dtype, rest, (values, at(start)), |_| start)
        }
    }

    /// Sums `count` elements of all ranks in rank order and writes them to `to`. Every rank sends rank r the elements
    /// of its `from` that start at index `place(r)`. `to` may be any of these places, because elements that are summed
    /// have already been sent.
    ///
    /// # Safety
    /// There are `count` elements at `to` and at each place, used only by this launch.
    unsafe fn add_exactly(
        &self,
        (launch, op): (&mut NcclLaunch<'_>, &'static str),
        dtype: DType,
        count: usize,
        (from, to): (CUdeviceptr, CUdeviceptr),
        place: impl Fn(usize) -> usize,
    ) -> Result<()> {
        /// The alignment of each peer's elements at which NCCL copies them fastest.
        const ALIGNMENT: usize = 128;
        if count == 0 {
            return Ok(());
        }
        let (rank, size, bytes) = (self.rank(), self.size(), dtype.size_in_bytes());
        // The kernel is loaded before anything is launched, because loading may wait for the device.
        let add = KERNELS.function(&self.0.device, &format!("sum_in_rank_order_{}", suffix(dtype)))?.on(&self.0.wire);
        let peers = size - 1;
        let max_len = (self.0.limits.scratch / bytes / peers.max(1) / ALIGNMENT).max(1) * ALIGNMENT;
        let stride = count.min(max_len).next_multiple_of(ALIGNMENT);
        let pieces = if peers > 0 { launch.scratch(peers * stride * bytes)? } else { 0 };
        let offset = |elements: usize| (elements * bytes) as CUdeviceptr;
        for start in (0..count).step_by(max_len) {
            let len = max_len.min(count - start);
            // SAFETY: as the caller promises; `pieces` has `stride` elements, at least `len`, for each peer. The wire
            // stream sums a piece before it receives the next in its place, and if `to` is in `from`, it has sent the
            // elements that the sums overwrite.
            unsafe {
                if peers > 0 {
                    launch.exchange(op, len, data_type(dtype), |peer| {
                        let slot = if peer < rank { peer } else { peer - 1 };
                        (from + offset(place(peer) + start), pieces + offset(slot * stride))
                    })?;
                }
                let own = from + offset(place(rank) + start);
                run_sum(&add, len, (to + offset(start), own, pieces), stride, (rank, size))?;
            }
        }
        Ok(())
    }
}

/// # Safety
/// There are `count` elements at the first two addresses, and the same number for each peer, `stride` apart, at the
/// third.
unsafe fn run_sum(
    add: &KernelFunction,
    count: usize,
    (to, own, pieces): (CUdeviceptr, CUdeviceptr, CUdeviceptr),
    stride: usize,
    (rank, size): (usize, usize),
) -> Result<()> {
    let (rank, size) = (rank as c_int, size as c_int);
    // SAFETY: the kernel takes a count, three addresses, a distance, and two ints. The caller vouches for the
    // addresses.
    Ok(unsafe { add.run(launch_over(count), arguments![count, to, own, pieces, stride, rank, size]) }?)
}
