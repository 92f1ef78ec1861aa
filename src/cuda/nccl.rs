//! Collectives between GPUs, one of each rank, by NVIDIA's NCCL, which is found when the program runs.
//!
//! ```text
//!   Candle's stream   ---- writes input ---+                                  +---- uses the result ---->
//!                                          | event                            | event
//!   wire stream       --------------------------- NCCL, sums in rank order ---+
//!                                    launch                              settle
//! ```
//!
//! | file | what it is |
//! | --- | --- |
//! | `library.rs` | the library's functions |
//! | `member.rs` | a rank's communicator: calls, waits on the host, failures |
//! | `quantized.rs` | collectives whose elements travel as integers |
//! | `pending.rs` | a collective under way and its buffers |
//! | `error.rs` | errors |
//!
//! Collectives run on a stream of their own, beside the model's work. Buffers go into a launch and come out of its
//! [`settle`](PendingNcclCollective::settle), where Candle's stream is told to wait for the collective; the host waits for nothing but, in a
//! launch, for NCCL to take the call, which is longer where it connects two ranks for the first time.
//!
//! NCCL's own sums have an order and roundings that depend on the number of ranks and on how they are connected. Exact sums are
//! those of `comm`, bit for bit: NCCL moves the elements alone, and a kernel of this library adds them in rank order in f32 and
//! rounds once. What comes from peers lies in memory meanwhile, in pieces of so many elements that it stays small.
//!
//! Elements that travel as integers (ZeRO++) are coded and decoded by kernels, and NCCL moves the bytes: these collectives, too, have the
//! bits of those through the host, and no more memory than a room for pieces of codes.
//!
//! A peer that dies ends no collective of the others by itself: where ranks of one host share memory, NCCL does not even see it.
//! So the host looks at what NCCL knows and at what the caller knows whenever it waits for a GPU, and ends the communicator.

mod error;
mod library;
mod member;
mod pending;
mod quantized;
#[cfg(test)]
mod tests;

pub(crate) use error::{CallerFailure, NcclError};
pub(crate) use library::NcclLibrary;
pub(crate) use member::FailureWatch;
pub(crate) use pending::PendingNcclCollective;

use super::device_flat::DeviceFlat;
use super::kernel_launch::arguments;
use super::kernel_module::{KernelFunction, KernelModule, module, over, suffix};
use crate::precision::IntFormat;
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

/// An exchange of this size is over sooner than the second step that a longer all-reduce takes.
const SHORT_BYTES: usize = 32 << 10;
/// Peers' elements that lie in memory at a time: enough for one exchange to use a link well.
const ROOM_BYTES: usize = 64 << 20;

/// How sums over ranks are formed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum NcclSumMode {
    /// In rank order in f32, rounded once: the bits of collectives through host memory, at any number of GPUs.
    #[default]
    Exact,
    /// As NCCL does it: no more memory than the buffers, fewer bytes between hosts, and sums in the network where that can add.
    Fast,
    /// As exact ones, of this rank's elements and those of the others as integers; an all-reduce gathers the sums as they are.
    Coded(IntFormat),
}

/// This rank among those whose GPUs work together.
///
/// All ranks launch the same collectives in the same order, with the same element counts and dtypes. That is not checked:
/// ranks that diverge wait for each other until the time is over.
pub(crate) struct NcclComm(Arc<NcclMember>);

impl NcclComm {
    /// Joins the `size` ranks that have the same `id`, which one of them has from [`NcclLibrary::unique_id`], each with a device of
    /// its own. Its stream is that of the thread that launches or settles, where Candle has it so.
    ///
    /// Ranks that are threads of one process need `NCCL_P2P_DIRECT_DISABLE=1` in the environment: else NCCL reads and writes
    /// their buffers from other GPUs, to which CUDA's pools of memory, where Candle's buffers lie, are not open.
    ///
    /// # Errors
    /// The library's; a peer does not come within the time of `watch`, which watches this and every later wait.
    pub fn join(
        library: &NcclLibrary,
        device: &CudaDevice,
        rank: usize,
        size: usize,
        id: [u8; 128],
        watch: FailureWatch,
    ) -> Result<Self> {
        Self::join_within(
            library,
            device,
            (rank, size),
            id,
            watch,
            NcclBufferLimits { short: SHORT_BYTES, room: ROOM_BYTES },
        )
    }

    fn join_within(
        library: &NcclLibrary,
        device: &CudaDevice,
        place: (usize, usize),
        id: [u8; 128],
        watch: FailureWatch,
        limits: NcclBufferLimits,
    ) -> Result<Self> {
        Ok(Self(Arc::new(NcclMember::join(library, device, place, id, watch, limits)?)))
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Concatenates the `shard`s (n elements each) of all ranks in rank order, in the memory of `shard`: as they are, or what they
    /// come to as integers.
    ///
    /// # Errors
    /// The communicator has failed, now or before; no memory.
    pub fn all_gather(&self, codes: Option<IntFormat>, mut shard: DeviceFlat) -> Result<PendingNcclCollective> {
        let (count, dtype) = (shard.len(), shard.dtype());
        self.counted_on(shard.resize(count * self.size()))?;
        let own = (self.rank() * count * dtype.size_in_bytes()) as CUdeviceptr;
        self.launch("an all-gather", shard, count * self.size(), |launch, whole| {
            // SAFETY: so many elements lie there for every rank, which are this launch's. This rank's go to their place first.
            unsafe {
                launch.copy(whole, whole + own, count * dtype.size_in_bytes())?;
                match codes {
                    None => launch.all_gather(whole + own, whole, count, data_type(dtype)),
                    Some(ints) => self.gather_coded(launch, (ints, dtype), count, whole),
                }
            }
        })
    }

    /// Sums `input` (size x n elements) over ranks; rank r receives elements `r * n .. (r + 1) * n`, in the memory of `input`.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn reduce_scatter(&self, sums: NcclSumMode, input: DeviceFlat) -> Result<PendingNcclCollective> {
        assert!(input.len().is_multiple_of(self.size()), "{} elements in {} equal chunks", input.len(), self.size());
        let (count, dtype) = (input.len() / self.size(), input.dtype());
        let own = (self.rank() * count * dtype.size_in_bytes()) as CUdeviceptr;
        let op = "a reduce-scatter";
        self.launch(op, input, count, |launch, input| {
            // SAFETY: so many elements lie there for every rank, which are this launch's.
            unsafe {
                match sums {
                    NcclSumMode::Fast => {
                        launch.reduce_scatter(input, input + own, count, data_type(dtype))?;
                        launch.copy(input + own, input, count * dtype.size_in_bytes())
                    }
                    NcclSumMode::Exact => self.add_exactly((launch, op), dtype, count, (input, input), |r| r * count),
                    NcclSumMode::Coded(ints) => self.add_coded((launch, op), (ints, dtype), count, (input, input)),
                }
            }
        })
    }

    /// Sums `values` over ranks, in their place.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_reduce(&self, sums: NcclSumMode, mut values: DeviceFlat) -> Result<PendingNcclCollective> {
        let (len, dtype, op) = (values.len(), values.dtype(), "an all-reduce");
        let chunk = len.div_ceil(self.size());
        if let NcclSumMode::Coded(_) = sums {
            // Chunks as they are on the host, from whose starts blocks are counted.
            self.counted_on(values.extend_zeros(chunk * self.size() - len))?;
        }
        self.launch(op, values, len, |launch, values| {
            // SAFETY: so many elements lie there, which are this launch's.
            unsafe {
                match sums {
                    NcclSumMode::Fast => launch.all_reduce(values, len, data_type(dtype)),
                    NcclSumMode::Exact => self.all_reduce_exactly(launch, dtype, len, values),
                    NcclSumMode::Coded(ints) => {
                        let own = values + (self.rank() * chunk * dtype.size_in_bytes()) as CUdeviceptr;
                        self.add_coded((launch, op), (ints, dtype), chunk, (values, own))?;
                        launch.all_gather(own, values, chunk, data_type(dtype))
                    }
                }
            }
        })
    }

    /// Bytes of device memory for what comes from peers.
    pub fn room_bytes(&self) -> usize {
        self.0.room_bytes()
    }

    /// Whether collectives from now on know [when](PendingNcclCollective::times) they have run.
    pub fn keep_times(&self, keep: bool) {
        self.0.keeps_times.store(keep, Ordering::Relaxed);
    }

    /// Gives up: what is under way ends without a result, and the other ranks find out.
    pub fn abort(&self) {
        self.0.fail(&NcclError::GaveUp { rank: self.rank() });
    }

    /// What comes before a launch, without which the others, who count on this rank, find out.
    fn counted_on<T>(&self, result: candle_core::Result<T>) -> Result<T> {
        result.map_err(NcclError::from).inspect_err(|error| self.0.fail(error))
    }

    /// Launches `work` on a buffer, of which `len` elements are the result. It is told the buffer's address; nothing where that has
    /// no elements. Work on the wire stream may use all of it: it is this launch's, and [`PendingNcclCollective`] keeps it until Candle's stream
    /// waits for it.
    fn launch(
        &self,
        op: &'static str,
        buffer: DeviceFlat,
        len: usize,
        work: impl FnOnce(&mut NcclLaunch<'_>, CUdeviceptr) -> Result<()>,
    ) -> Result<PendingNcclCollective> {
        let NcclMember { device, wire, .. } = &*self.0;
        assert!(buffer.is_of(device), "{op} of a buffer of another device");
        let empty = buffer.len() == 0;
        // From here on it has the buffer: whatever of this fails, that is let go behind what is on the wire stream.
        let mut launched = PendingNcclCollective::new(self.0.clone(), op, buffer, len);
        let mut launch = self.0.begin_launch()?;
        let attempt = || {
            if !empty {
                // Whatever is on Candle's stream has written what is given.
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

    /// The sums of all, each formed by one rank and gathered, or each formed by every rank where that is sooner.
    ///
    /// # Safety
    /// `len` elements lie at `values`, for this launch alone.
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
        // SAFETY: all chunks and the rest are `len` elements.
        unsafe {
            if chunk > 0 {
                let own = at(rank * chunk);
                self.add_exactly((launch, op), dtype, chunk, (values, own), |r| r * chunk)?;
                launch.all_gather(own, values, chunk, data_type(dtype))?;
            }
            let (rest, start) = (len - size * chunk, size * chunk);
            self.add_exactly((launch, op), dtype, rest, (values, at(start)), |_| start)
        }
    }

    /// Sums `count` elements of all ranks in rank order and writes them to `to`. Every rank gives rank r those from the element
    /// `place(r)` of its `from`; `to` may be any of these places: what is summed at a time has been sent.
    ///
    /// # Safety
    /// There are as many elements at `to` and from each place on, for this launch alone.
    unsafe fn add_exactly(
        &self,
        (launch, op): (&mut NcclLaunch<'_>, &'static str),
        dtype: DType,
        count: usize,
        (from, to): (CUdeviceptr, CUdeviceptr),
        place: impl Fn(usize) -> usize,
    ) -> Result<()> {
        /// Elements that each peer's begin at a multiple of, as NCCL copies them the fastest.
        const ALIGNMENT: usize = 128;
        if count == 0 {
            return Ok(());
        }
        let (rank, size, bytes) = (self.rank(), self.size(), dtype.size_in_bytes());
        // Before anything is launched: loading may wait for the device.
        let add = KERNELS.function(&self.0.device, &format!("sum_in_rank_order_{}", suffix(dtype)))?.on(&self.0.wire);
        let peers = size - 1;
        let most = (self.0.limits.room / bytes / peers.max(1) / ALIGNMENT).max(1) * ALIGNMENT;
        let stride = count.min(most).next_multiple_of(ALIGNMENT);
        let pieces = if peers > 0 { launch.room(peers * stride * bytes)? } else { 0 };
        let offset = |elements: usize| (elements * bytes) as CUdeviceptr;
        for start in (0..count).step_by(most) {
            let len = most.min(count - start);
            // SAFETY: as the caller promises; in the room there are `stride` elements, no fewer than `len`, for each peer. The
            // wire stream sums a piece before it receives the next in its place, and where `to` is in `from`, it has sent what
            // the sums are written over.
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
/// There are `count` elements at the first two addresses, and for each peer so many, `stride` apart, at the third.
unsafe fn run_sum(
    add: &KernelFunction,
    count: usize,
    (to, own, pieces): (CUdeviceptr, CUdeviceptr, CUdeviceptr),
    stride: usize,
    (rank, size): (usize, usize),
) -> Result<()> {
    let (rank, size) = (rank as c_int, size as c_int);
    // SAFETY: the kernel takes a count, three addresses, a distance, and two ints; as the caller promises.
    Ok(unsafe { add.run(over(count), arguments![count, to, own, pieces, stride, rank, size]) }?)
}
