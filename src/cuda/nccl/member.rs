//! What a rank's collectives share: NCCL's communicator, the stream that they run on, memory for what comes from peers, and the
//! error that has ended them.

use super::error::{CallerFailure, NcclError};
use super::library::{IN_PROGRESS, NcclConfig, NcclLibrary, NcclUniqueId, RawNcclComm, SUCCESS, SUM};
use crate::cuda::TimedEvent;
use crate::util::lock;
use candle_core::CudaDevice;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::result as driver;
use candle_core::cuda_backend::cudarc::driver::sys::{CUdeviceptr, CUstream};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, NcclError>;

/// How long a wait looks without a pause: a short collective is done by then.
const BUSY: Duration = Duration::from_micros(200);
/// The longest pause between two looks.
const PAUSE: Duration = Duration::from_micros(200);
/// The longest wait for the peers of a communicator that is dropped.
const LEAVE: Duration = Duration::from_secs(10);

/// What ends a wait for a peer that does not come.
pub(crate) struct FailureWatch {
    /// The longest that the host waits for one collective.
    pub timeout: Duration,
    /// The caller's own detection of failures. It is asked in turns of at most some milliseconds while the host waits.
    pub is_failed: Box<dyn Fn() -> Option<CallerFailure> + Send + Sync>,
}

/// Where a collective takes another way.
#[derive(Clone, Copy)]
pub(super) struct NcclBufferLimits {
    /// Bytes up to which an exact all-reduce is one exchange of the whole.
    pub short: usize,
    /// Bytes of peers' elements, or of codes, that lie in memory at a time.
    pub room: usize,
}

pub(super) struct NcclMember {
    pub library: NcclLibrary,
    pub device: CudaDevice,
    pub rank: usize,
    pub size: usize,
    pub limits: NcclBufferLimits,
    /// Collectives run here, in the order of their launches.
    pub wire: Arc<CudaStream>,
    /// Nothing runs here: it shows what time the GPU has.
    pub idle: Arc<CudaStream>,
    pub keeps_times: AtomicBool,
    watch: FailureWatch,
    state: Mutex<NcclCommState>,
}

struct NcclCommState {
    comm: Option<OwnedNcclComm>,
    /// Why there is no communicator any more.
    failure: Option<NcclError>,
    /// What has come from peers and is not yet summed, and codes. On the wire stream alone, where one collective follows the other.
    room: Option<CudaSlice<u8>>,
}

struct OwnedNcclComm(RawNcclComm);

// SAFETY: NCCL's communicators belong to no thread; calls are made one at a time, under the lock of the state.
unsafe impl Send for OwnedNcclComm {}

impl NcclMember {
    /// # Errors
    /// The library's; a peer that does not come.
    pub fn join(
        library: &NcclLibrary,
        device: &CudaDevice,
        (rank, size): (usize, usize),
        id: [u8; 128],
        watch: FailureWatch,
        limits: NcclBufferLimits,
    ) -> Result<Self> {
        // A context of cudarc's own beside Candle's, of the same device and primary context: with a second stream in Candle's,
        // cudarc would record events around every kernel of the model.
        let context = CudaContext::new(device.cuda_stream().context().ordinal()).w()?;
        let (wire, idle) = (context.new_stream().w()?, context.new_stream().w()?);
        context.bind_to_thread().w()?;
        let state = Mutex::new(NcclCommState { comm: None, failure: None, room: None });
        let (library, device, keeps_times) = (library.clone(), device.clone(), AtomicBool::new(false));
        let member = Self { library, device, rank, size, limits, wire, idle, keeps_times, watch, state };
        let library = &member.library;
        let mut comm: RawNcclComm = std::ptr::null_mut();
        let (ranks, place) = (size as c_int, rank as c_int);
        // SAFETY: the library writes a communicator, and reads the configuration before it returns.
        let code = unsafe {
            (library.init_rank_config)(&mut comm, ranks, NcclUniqueId(id), place, &mut { NcclConfig::NOT_BLOCKING })
        };
        if comm.is_null() {
            library.check("ncclCommInitRankConfig", code)?;
        }
        let mut launch = NcclLaunch { member: &member, state: lock(&member.state), comm };
        launch.state.comm = Some(OwnedNcclComm(comm));
        let joined = launch.done("ncclCommInitRankConfig", "the meeting", code);
        launch.end(joined)?;
        Ok(member)
    }

    /// The communicator for one launch.
    ///
    /// # Errors
    /// There is none any more.
    pub fn begin_launch(&self) -> Result<NcclLaunch<'_>> {
        let state = lock(&self.state);
        match (&state.failure, &state.comm) {
            (None, Some(OwnedNcclComm(comm))) => Ok(NcclLaunch { member: self, comm: *comm, state }),
            (failure, _) => Err(failure.clone().unwrap_or(NcclError::GaveUp { rank: self.rank })),
        }
    }

    /// A place among the work on the wire stream, where times are kept.
    ///
    /// # Errors
    /// The driver's.
    pub fn timed_event(&self) -> Result<Option<TimedEvent>> {
        let keeps = self.keeps_times.load(Ordering::Relaxed);
        Ok(if keeps { Some(TimedEvent::behind(&self.wire)?) } else { None })
    }

    /// Waits on the host for what is before an event on the wire stream.
    ///
    /// # Errors
    /// What has failed, now or before; the time is over. The communicator is gone then.
    pub fn wait_for(&self, event: &CudaEvent, op: &'static str) -> Result<()> {
        self.wire.context().bind_to_thread().w()?;
        let waited = self.poll(op, self.watch.timeout, || {
            // First: what an abort has let go on is seen after its failure.
            let done = event.try_is_complete().w()?;
            let launch = self.begin_launch()?;
            if !done {
                self.state_of(launch.comm, op)?;
            }
            Ok(done)
        });
        waited.inspect_err(|why| self.fail(why))
    }

    /// Ends the communicator and all that is under way, for the reason given if there is none yet. Streams go on, without
    /// results.
    pub fn fail(&self, why: &NcclError) {
        self.fail_locked(&mut lock(&self.state), why);
    }

    fn fail_locked(&self, state: &mut NcclCommState, why: &NcclError) {
        state.failure.get_or_insert_with(|| why.clone());
        if let Some(OwnedNcclComm(comm)) = state.comm.take() {
            // SAFETY: a living communicator, taken out of its only place.
            unsafe { (self.library.abort)(comm) };
        }
    }

    /// Whether the communicator has done what it was called for.
    fn state_of(&self, comm: RawNcclComm, op: &'static str) -> Result<bool> {
        let mut code = SUCCESS;
        // SAFETY: a living communicator and a place for a number.
        let answer = unsafe { (self.library.async_error)(comm, &mut code) };
        self.library.check("ncclCommGetAsyncError", answer)?;
        match code {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            code => Err(NcclError::Lost { rank: self.rank, op, why: self.library.text(code) }),
        }
    }

    /// Bytes of the memory for what comes from peers.
    pub fn room_bytes(&self) -> usize {
        lock(&self.state).room.as_ref().map_or(0, CudaSlice::len)
    }

    fn poll(&self, op: &'static str, limit: Duration, mut is_done: impl FnMut() -> Result<bool>) -> Result<()> {
        let (since, mut pause) = (Instant::now(), Duration::from_micros(20));
        while !is_done()? {
            let waited = since.elapsed();
            if waited < BUSY {
                std::thread::yield_now();
                continue;
            }
            if let Some(why) = (self.watch.is_failed)() {
                return Err(NcclError::Told(why));
            }
            if waited > limit {
                return Err(NcclError::Silent { rank: self.rank, op, waited: limit });
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSE);
        }
        Ok(())
    }

    /// Leaves the communicator once everything on the wire is done.
    fn leave(&self, comm: RawNcclComm) -> Result<()> {
        const OP: &str = "the farewell";
        self.wire.context().bind_to_thread().w()?;
        let limit = self.watch.timeout.min(LEAVE);
        let last = self.wire.record_event(None).w()?;
        self.poll(OP, limit, || {
            let done = last.try_is_complete().w()?;
            if !done {
                self.state_of(comm, OP)?;
            }
            Ok(done)
        })?;
        // SAFETY: a living communicator, for which nothing is under way.
        let code = unsafe { (self.library.finalize)(comm) };
        self.library.check("ncclCommFinalize", code)?;
        self.poll(OP, limit, || self.state_of(comm, OP))
    }
}

impl Drop for NcclMember {
    fn drop(&mut self) {
        let Some(OwnedNcclComm(comm)) = lock(&self.state).comm.take() else { return };
        // SAFETY: a living communicator, taken out of its only place. Without others' collectives under way a destroy is short;
        // where those have not ended, a peer has failed, or this rank panics, an abort is.
        unsafe {
            match std::thread::panicking() || self.leave(comm).is_err() {
                false => (self.library.destroy)(comm),
                true => (self.library.abort)(comm),
            };
        }
    }
}

/// A launch: the communicator, for one thread alone.
pub(super) struct NcclLaunch<'a> {
    pub member: &'a NcclMember,
    state: MutexGuard<'a, NcclCommState>,
    comm: RawNcclComm,
}

impl NcclLaunch<'_> {
    /// Whether the launch has gone well; else no rank can know which collectives this one takes part in, and it ends.
    pub fn end<T>(mut self, result: Result<T>) -> Result<T> {
        if let Err(why) = &result {
            self.member.fail_locked(&mut self.state, why);
        }
        result
    }

    /// Memory for so many bytes of peers' elements or of codes. It is written and read on the wire stream alone, so that what follows there
    /// may use it again.
    pub fn room(&mut self, bytes: usize) -> Result<CUdeviceptr> {
        let wire = &self.member.wire;
        if self.state.room.as_ref().is_none_or(|room| room.len() < bytes) {
            // Given back first, in the order of the wire stream: it is not there twice.
            self.state.room = None;
            // SAFETY: what is read there has been received or coded before.
            self.state.room = Some(unsafe { wire.alloc(bytes) }.w()?);
        }
        Ok(self.state.room.as_ref().map_or(0, |room| room.device_ptr(wire).0))
    }

    /// Sums `count` elements of every rank's `from` for each rank, in whatever order. `to` may be this rank's part of `from`.
    ///
    /// # Safety
    /// As [`all_gather`](Self::all_gather), with size x count elements at `from` and count at `to`.
    pub unsafe fn reduce_scatter(&self, from: CUdeviceptr, to: CUdeviceptr, count: usize, kind: c_int) -> Result<()> {
        // SAFETY: as the caller promises; a living communicator.
        let code = unsafe { (self.library().reduce_scatter)(from, to, count, kind, SUM, self.comm, self.stream()) };
        self.done("ncclReduceScatter", "a reduce-scatter", code)
    }

    /// Sums `count` elements of every rank in place, in whatever order.
    ///
    /// # Safety
    /// As [`all_gather`](Self::all_gather), with count elements.
    pub unsafe fn all_reduce(&self, values: CUdeviceptr, count: usize, kind: c_int) -> Result<()> {
        // SAFETY: as the caller promises; a living communicator.
        let code = unsafe { (self.library().all_reduce)(values, values, count, kind, SUM, self.comm, self.stream()) };
        self.done("ncclAllReduce", "an all-reduce", code)
    }

    /// Gathers `count` elements of every rank. `from` may be this rank's part of `to`.
    ///
    /// # Safety
    /// There are as many elements of the kind at `from`, and size x count at `to`, in memory of the device that nothing else
    /// writes, and that stays until what is on the wire stream is done.
    pub unsafe fn all_gather(&self, from: CUdeviceptr, to: CUdeviceptr, count: usize, kind: c_int) -> Result<()> {
        // SAFETY: as the caller promises; a living communicator.
        let code = unsafe { (self.library().all_gather)(from, to, count, kind, self.comm, self.stream()) };
        self.done("ncclAllGather", "an all-gather", code)
    }

    /// Copies bytes inside of this device.
    ///
    /// # Safety
    /// As [`all_gather`](Self::all_gather), with so many bytes at both addresses, which are the same or do not overlap.
    pub unsafe fn copy(&self, from: CUdeviceptr, to: CUdeviceptr, bytes: usize) -> Result<()> {
        if from == to || bytes == 0 {
            return Ok(());
        }
        // SAFETY: as the caller promises.
        Ok(unsafe { driver::memcpy_dtod_async(to, from, bytes, self.stream()) }.w()?)
    }

    /// Sends and receives `count` elements to and from every peer, each at its address, all at a time.
    ///
    /// # Safety
    /// As [`all_gather`](Self::all_gather), with count elements at each address.
    pub unsafe fn exchange(
        &self,
        op: &'static str,
        count: usize,
        kind: c_int,
        addresses: impl Fn(usize) -> (CUdeviceptr, CUdeviceptr),
    ) -> Result<()> {
        let library = self.library();
        let peers = (0..self.member.size).filter(|peer| *peer != self.member.rank);
        // SAFETY: as the caller promises; a living communicator. A group that has begun ends, whatever happens in it.
        let (messages, end) = unsafe {
            library.check("ncclGroupStart", (library.group_start)())?;
            let mut messages = peers.map(|peer| {
                let (from, to) = addresses(peer);
                let peer = peer as c_int;
                let code = (library.send)(from, count, kind, peer, self.comm, self.stream());
                library.check("ncclSend", code)?;
                let code = (library.receive)(to, count, kind, peer, self.comm, self.stream());
                library.check("ncclRecv", code)
            });
            (messages.try_for_each(|sent| sent), (library.group_end)())
        };
        messages?;
        self.done("ncclGroupEnd", op, end)
    }

    fn library(&self) -> &NcclLibrary {
        &self.member.library
    }

    fn stream(&self) -> CUstream {
        self.member.wire.cu_stream()
    }

    /// After a call: the collective is on the stream when this returns.
    fn done(&self, call: &'static str, op: &'static str, code: c_int) -> Result<()> {
        self.library().check(call, code)?;
        if code == IN_PROGRESS { self.until_ready(op) } else { Ok(()) }
    }

    fn until_ready(&self, op: &'static str) -> Result<()> {
        self.member.poll(op, self.member.watch.timeout, || self.member.state_of(self.comm, op))
    }
}
