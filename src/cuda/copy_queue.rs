//! Copies between the memory of a GPU and ordinary host memory, concurrently with the model's work on the GPU.
//!
//! ```text
//!   Candle's stream   ... the source is written | event
//!   the queue's stream                           \-> piece 0 | piece 1 | piece 2 | ...
//!   the queue's thread                                     \-> staging buffer 0 to its place | staging buffer 1 ...
//! ```
//!
//! The diagram shows a copy to the host. For a copy to the GPU, the thread fills a staging buffer, and the stream
//! copies it to the GPU.
//!
//! A GPU copies concurrently with other work only from and to page-locked memory, which is scarce and slow to allocate.
//! A queue therefore has two page-locked staging buffers, through which all data passes piece by piece: the GPU copies
//! one while the thread empties or fills the other. Without `pin_memory`, staging buffers are ordinary memory, and the
//! driver blocks the thread during each copy.
//!
//! A copy owns its source and its destination until it is waited for, so nothing else can access or free either.

use super::DeviceFlat;
use crate::precision::Flat;
use crate::timeline::{self, CarriedContext, EventCategory, TimelineLane};
use crate::util::pieces;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::result as driver;
use candle_core::cuda_backend::cudarc::driver::sys::{CUdeviceptr, CUevent_flags};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, PinnedHostSlice};
use candle_core::{CudaDevice, Error, Result};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// The number of staging buffers of a queue.
const STAGING_BUFFERS: usize = 2;
/// The flags of events on which a waiting thread sleeps instead of spinning.
const BLOCKING_SYNC: Option<CUevent_flags> = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);

/// A thread and a stream that execute one copy after the other.
pub(crate) struct CopyQueue {
    jobs: Option<Sender<CopyJob>>,
    thread: Option<JoinHandle<()>>,
}

/// The source and the destination of a copy, which have the same dtype.
enum CopyRequest {
    /// A copy to host memory that the thread allocates.
    Down(DeviceFlat),
    Up(Flat, DeviceFlat),
}

/// The result of a copy. A copy to the host also returns its source.
enum CompletedCopy {
    OnHost(Flat, DeviceFlat),
    OnDevice(DeviceFlat),
}

struct CopyJob {
    request: CopyRequest,
    /// An event after the preceding work on Candle's stream.
    after: CudaEvent,
    timeline_context: CarriedContext,
    done: Sender<Result<CompletedCopy>>,
}

/// A copy in progress.
#[must_use = "the result of a copy must be awaited"]
pub(crate) struct PendingCopy<T> {
    done: Receiver<Result<CompletedCopy>>,
    take: fn(CompletedCopy) -> Option<T>,
}

impl<T> PendingCopy<T> {
    /// Waits for the copy and returns its result.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn wait(self) -> Result<T> {
        let copied = self.done.recv().map_err(|_| thread_ended())??;
        (self.take)(copied).ok_or_else(thread_ended)
    }
}

fn thread_ended() -> Error {
    Error::Msg("the thread that copies between the GPU and the host has ended".into())
}

impl CopyQueue {
    /// Creates a queue for a device. Its staging buffers have `bytes` bytes in total, and are page-locked if `pinned`
    /// is set. The timeline shows its copies in `lane`.
    ///
    /// # Errors
    /// Returns an error if the driver cannot lock that much memory, or if the thread cannot be started.
    pub fn new(device: &CudaDevice, bytes: usize, pinned: bool, lane: TimelineLane) -> Result<Self> {
        // The queue has a separate cudarc context with the same primary context as Candle's, because a second stream in
        // Candle's context would make cudarc record events around every kernel of the model.
        let context = CudaContext::new(device.cuda_stream().context().ordinal()).w()?;
        let staging_buffers = (0..STAGING_BUFFERS)
            .map(|_| StagingBuffer::new(&context, bytes / STAGING_BUFFERS, pinned))
            .collect::<Result<Vec<_>>>()?;
        let mut copier = CopyThread { stream: context.new_stream().w()?, staging_buffers };
        let (jobs, receiver) = channel::<CopyJob>();
        let thread = std::thread::Builder::new().name("gpu-copies".into()).spawn(move || {
            // The context is needed even if nothing is copied, because this thread releases the page-locked memory.
            // Each copy binds it again and reports any error.
            let _ = context.bind_to_thread();
            for CopyJob { request, after, timeline_context, done } in receiver {
                let _here = timeline_context.enter(lane);
                // If the copy was abandoned, no one waits for its result.
                let _ = done.send(copier.execute(request, &after));
            }
        });
        let start_error =
            |error| Error::Msg(format!("cannot start the thread that copies between GPU and host: {error}"));
        let thread = thread.map_err(start_error)?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }

    /// Starts to copy a buffer to the host.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn down(&self, from: DeviceFlat) -> Result<PendingCopy<Flat>> {
        let device = from.device().clone();
        self.begin(&device, CopyRequest::Down(from), |copied| match copied {
            CompletedCopy::OnHost(to, from) => {
                // The source is dropped in the calling thread, so that its memory is freed in the order of that
                // thread's launches.
                drop(from);
                Some(to)
            }
            CompletedCopy::OnDevice(_) => None,
        })
    }

    /// Starts to copy a buffer to a GPU, where the copy has room for `capacity` elements.
    ///
    /// # Errors
    /// Returns an error if the GPU is out of memory or the driver reports another error.
    pub fn up(&self, device: &CudaDevice, from: Flat, capacity: usize) -> Result<PendingCopy<DeviceFlat>> {
        let mut to = DeviceFlat::with_capacity(device, from.dtype(), capacity.max(from.len()))?;
        to.resize(from.len())?;
        self.begin(device, CopyRequest::Up(from, to), |copied| match copied {
            CompletedCopy::OnDevice(to) => Some(to),
            CompletedCopy::OnHost(..) => None,
        })
    }

    fn begin<T>(
        &self,
        device: &CudaDevice,
        request: CopyRequest,
        take: fn(CompletedCopy) -> Option<T>,
    ) -> Result<PendingCopy<T>> {
        let after = device.cuda_stream().record_event(BLOCKING_SYNC).w()?;
        let (done, receiver) = channel();
        let job = CopyJob { request, after, timeline_context: timeline::carry(), done };
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if sent { Ok(PendingCopy { done: receiver, take }) } else { Err(thread_ended()) }
    }
}

impl Drop for CopyQueue {
    /// Finishes the copies in progress.
    fn drop(&mut self) {
        drop(self.jobs.take());
        // A panic of the thread has already been reported.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The state of a queue's thread.
struct CopyThread {
    stream: Arc<CudaStream>,
    staging_buffers: Vec<StagingBuffer>,
}

impl CopyThread {
    /// Executes a copy to completion once Candle's stream has reached `after`.
    fn execute(&mut self, request: CopyRequest, after: &CudaEvent) -> Result<CompletedCopy> {
        self.stream.wait(after).w()?;
        if timeline::is_recording() {
            // The span starts when the copy does.
            after.synchronize().w()?;
        }
        let (copied, result) = match request {
            CopyRequest::Down(mut from) => {
                let mut to = Flat::zeros(from.dtype(), from.len());
                let result = self.down(&mut from, to.as_bytes_mut());
                (CompletedCopy::OnHost(to, from), result)
            }
            CopyRequest::Up(from, mut to) => {
                let result = self.up(from.as_bytes(), &mut to);
                (CompletedCopy::OnDevice(to), result)
            }
        };
        // The stream is awaited even after an error, so that no memory is released while the GPU may still use it.
        let idle = self.stream.synchronize().w();
        result.and(idle).map(|()| copied)
    }

    fn down(&mut self, from: &mut DeviceFlat, to: &mut [u8]) -> Result<()> {
        let Self { stream, staging_buffers } = self;
        let _span = timeline::span(EventCategory::Copy, "to the host").with("bytes", to.len() as u64);
        let (address, _used) = from.address_mut(stream)?;
        let mut in_flight: [Option<(CudaEvent, Range<usize>)>; STAGING_BUFFERS] = [const { None }; STAGING_BUFFERS];
        // The last steps, which have no piece, only empty the staging buffers.
        let steps =
            pieces(to.len(), staging_buffers[0].len()).map(Some).chain(std::iter::repeat_n(None, STAGING_BUFFERS));
        for (number, piece) in steps.enumerate() {
            let (staging, in_flight) =
                (&mut staging_buffers[number % STAGING_BUFFERS], &mut in_flight[number % STAGING_BUFFERS]);
            if let Some((done, previous)) = in_flight.take() {
                done.synchronize().w()?;
                let len = previous.len();
                to[previous].copy_from_slice(&staging.bytes()?[..len]);
            }
            let Some(piece) = piece else { continue };
            let bytes = &mut staging.bytes_mut()?[..piece.len()];
            // SAFETY: the buffer, which the copy owns, contains all bytes of the piece, and nothing else uses the
            // staging buffer until the event after this copy, or the stream at the end of `execute`, has been waited
            // for.
            unsafe { driver::memcpy_dtoh_async(bytes, address + piece.start as CUdeviceptr, stream.cu_stream()) }
                .w()?;
            *in_flight = Some((stream.record_event(BLOCKING_SYNC).w()?, piece));
        }
        Ok(())
    }

    fn up(&mut self, from: &[u8], to: &mut DeviceFlat) -> Result<()> {
        let Self { stream, staging_buffers } = self;
        let _span = timeline::span(EventCategory::Copy, "to the GPU").with("bytes", from.len() as u64);
        let (address, _used) = to.address_mut(stream)?;
        let mut in_flight: [Option<CudaEvent>; STAGING_BUFFERS] = [const { None }; STAGING_BUFFERS];
        for (number, piece) in pieces(from.len(), staging_buffers[0].len()).enumerate() {
            let (staging, in_flight) =
                (&mut staging_buffers[number % STAGING_BUFFERS], &mut in_flight[number % STAGING_BUFFERS]);
            if let Some(previous) = in_flight.take() {
                previous.synchronize().w()?;
            }
            let bytes = &mut staging.bytes_mut()?[..piece.len()];
            bytes.copy_from_slice(&from[piece.clone()]);
            // SAFETY: same as in `down`.
            unsafe { driver::memcpy_htod_async(address + piece.start as CUdeviceptr, bytes, stream.cu_stream()) }
                .w()?;
            *in_flight = Some(stream.record_event(BLOCKING_SYNC).w()?);
        }
        Ok(())
    }
}

/// Host memory from and to which a queue's stream copies.
enum StagingBuffer {
    Pinned(PinnedHostSlice<u8>),
    Ordinary(Vec<u8>),
}

impl StagingBuffer {
    fn new(context: &Arc<CudaContext>, bytes: usize, pinned: bool) -> Result<Self> {
        if !pinned {
            return Ok(Self::Ordinary(vec![0; bytes]));
        }
        // The driver's error text would claim that the GPU is out of memory.
        let lock_error = |error: DriverError| {
            Error::Msg(format!(
                "the system cannot lock {bytes} bytes of memory for copies between the GPU and the host (CUDA error \
                 {}); free host memory, raise the container's limit, or set \"pin_memory\": false in \
                 offload_optimizer and offload_param",
                error.0 as u32
            ))
        };
        // SAFETY: bytes are valid whatever their values, and each is written before it is read. Memory that the
        // processor reads must not be write-combined.
        Ok(Self::Pinned(unsafe { context.alloc_pinned_with_flags(bytes, 0) }.map_err(lock_error)?))
    }

    fn len(&self) -> usize {
        match self {
            Self::Pinned(staging) => staging.len(),
            Self::Ordinary(staging) => staging.len(),
        }
    }

    fn bytes(&self) -> Result<&[u8]> {
        match self {
            Self::Pinned(staging) => staging.as_slice().w(),
            Self::Ordinary(staging) => Ok(staging),
        }
    }

    fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        match self {
            Self::Pinned(staging) => staging.as_mut_slice().w(),
            Self::Ordinary(staging) => Ok(staging),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::DType;
    use candle_core::backend::BackendDevice;

    const BYTES: usize = 64 << 10;

    fn numbers(dtype: DType, len: usize) -> Flat {
        Flat::from_f32((0..len).map(|i| (i % 251) as f32 - 125.0).collect(), dtype)
    }

    #[test]
    fn loads_of_any_length_come_back_as_they_went() {
        let Ok(device) = CudaDevice::new(0) else { return };
        for pinned in [true, false] {
            let up = CopyQueue::new(&device, BYTES, pinned, TimelineLane::Updates).unwrap();
            let down = CopyQueue::new(&device, BYTES, pinned, TimelineLane::Gradients).unwrap();
            let staging = BYTES / 8;
            let lengths =
                [0, 1, 1000, staging - 1, staging, staging + 1, 2 * staging, 2 * staging + 1, 5 * staging + 7];
            let all: Vec<Flat> = lengths.map(|len| numbers(DType::F32, len)).into_iter().collect();
            // All copies are in progress before the first is waited for.
            let uploads: Vec<_> =
                all.iter().map(|flat| up.up(&device, flat.clone(), flat.len() + 5).unwrap()).collect();
            let on_device: Vec<_> = uploads.into_iter().map(|upload| upload.wait().unwrap()).collect();
            assert!(on_device.iter().zip(&all).all(|(copy, flat)| copy.capacity_in_bytes() == 4 * (flat.len() + 5)));
            let downloads: Vec<_> = on_device.into_iter().map(|flat| down.down(flat).unwrap()).collect();
            for (download, flat) in downloads.into_iter().zip(&all) {
                let elements = crate::util::counted(flat.len(), "element");
                assert!(download.wait().unwrap() == *flat, "{elements}, pinned: {pinned}");
            }
        }
    }

    #[test]
    fn a_load_leaves_as_it_is_when_what_was_launched_before_it_has_run() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let queue = CopyQueue::new(&device, BYTES, true, TimelineLane::Gradients).unwrap();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let mut flat = DeviceFlat::of(&device, numbers(dtype, 70_001).as_ref()).unwrap();
            flat.scale(2.0).unwrap();
            let mut doubled = numbers(dtype, 70_001);
            doubled.as_mut().scale(2.0);
            assert!(queue.down(flat).unwrap().wait().unwrap() == doubled, "{dtype:?}");
        }
    }

    #[test]
    fn memory_that_the_system_does_not_lock_is_an_error_that_says_what_to_do() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let message = CopyQueue::new(&device, 1 << 60, true, TimelineLane::Gradients).err().unwrap().to_string();
        assert!(message.contains("host memory") && message.contains("pin_memory"), "{message}");
        // Otherwise the error would claim that the GPU is out of memory.
        assert!(!message.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{message}");
    }

    #[test]
    fn loads_that_nobody_waits_for_end_with_the_queue() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let queue = CopyQueue::new(&device, BYTES, true, TimelineLane::Gradients).unwrap();
        for _ in 0..3 {
            drop(queue.down(DeviceFlat::zeros(&device, DType::F32, 1000).unwrap()).unwrap());
        }
        drop(queue);
    }
}
