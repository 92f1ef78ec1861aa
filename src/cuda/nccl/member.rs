//! The state that a rank's collectives share: NCCL's communicator, their stream, memory for elements from peers, and
//! the error that ended the communicator.

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

/// The time for which a wait polls without a pause. A short collective is complete by then.
const SPIN_TIME: Duration = Duration::from_micros(200);
/// The longest pause between two polls.
const MAX_POLL_SLEEP: Duration = Duration::from_micros(200);
/// The longest wait for peers when a communicator is dropped.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// The conditions that end a wait for a missing peer.
pub(crate) struct WaitAbortConditions {
    /// The longest time that the host waits for one collective.
    pub timeout: Duration,
    /// The caller's own failure detection. While the host waits, it is called at intervals of at most a few
    /// milliseconds.
    pub is_failed: Box<dyn Fn() -> Option<CallerFailure> + Send + Sync>,
}

/// The sizes that determine how a collective exchanges elements.
#[derive(Clone, Copy)]
pub(super) struct NcclBufferLimits {
    /// The size in bytes up to which an exact all-reduce is one exchange of all elements.
    pub short: usize,
    /// The size in bytes of the peers' elements, or of the codes, that are in memory at a time.
    pub scratch: usize,
}

pub(super) struct NcclMember {
    pub library: NcclLibrary,
    pub device: CudaDevice,
    pub rank: usize,
    pub size: usize,
    pub limits: NcclBufferLimits,
    /// The stream on which collectives run, in the order of their launches.
    pub wire: Arc<CudaStream>,
    /// A stream without work: an event on it has the GPU's current time.
    pub idle: Arc<CudaStream>,
    pub keeps_times: AtomicBool,
    watch: WaitAbortConditions,
    state: Mutex<NcclCommState>,
}

struct NcclCommState {
    comm: Option<OwnedNcclComm>,
    /// The reason why the communicator no longer exists.
    failure: Option<NcclError>,
    /// Elements from peers that have not been summed yet, and codes. Used only by the wire stream, on which collectives
    /// run one after the other.
    scratch: Option<CudaSlice<u8>>,
}

struct OwnedNcclComm(RawNcclComm);

// SAFETY: NCCL's communicators are not bound to a thread; calls are made one at a time, under the lock of the state.
unsafe impl Send for OwnedNcclComm {}

impl NcclMember {
    /// Joins the ranks that have the same `id`.
    ///
    /// # Errors
    /// Returns an error if the library reports one or a peer does not join.
    pub fn join(
        library: &NcclLibrary,
        device: &CudaDevice,
        (rank, size): (usize, usize),
        id: [u8; 128],
        watch: WaitAbortConditions,
        limits: NcclBufferLimits,
    ) -> Result<Self> {
        // The streams are in a separate cudarc context with the same device and primary context as Candle's. A second
        // stream in Candle's context would make cudarc record events around every kernel of the model.
        let context = CudaContext::new(device.cuda_stream().context().ordinal()).w()?;
        let (wire, idle) = (context.new_stream().w()?, context.new_stream().w()?);
        context.bind_to_thread().w()?;
        let state = Mutex::new(NcclCommState { comm: None, failure: None, scratch: None });
        let (library, device, keeps_times) = (library.clone(), device.clone(), AtomicBool::new(false));
        let member = Self { library, device, rank, size, limits, wire, idle, keeps_times, watch, state };
        let library = &member.library;
        let mut comm: RawNcclComm = std::ptr::null_mut();
        let (ranks, place) = (size as c_int, rank as c_int);
        // SAFETY: the library writes a communicator, and reads the configuration before it returns.
        let code = unsafe {
            (library.init_rank_config)(&mut comm, ranks, NcclUniqueId(id), place, &mut { NcclConfig::NONBLOCKING })
        };
        if comm.is_null() {
            library.check("ncclCommInitRankConfig", code)?;
        }
        let mut launch = NcclLaunch { member: &member, state: lock(&member.state), comm };
        launch.state.comm = Some(OwnedNcclComm(comm));
        let joined = launch.check_call("ncclCommInitRankConfig", "the rendezvous", code);
        launch.end(joined)?;
        Ok(member)
    }

    /// Returns the communicator for one launch.
    ///
    /// # Errors
    /// Returns an error if the communicator no longer exists.
    pub fn begin_launch(&self) -> Result<NcclLaunch<'_>> {
        let state = lock(&self.state);
        match (&state.failure, &state.comm) {
            (None, Some(OwnedNcclComm(comm))) => Ok(NcclLaunch { member: self, comm: *comm, state }),
            (failure, _) => Err(failure.clone().unwrap_or(NcclError::GaveUp { rank: self.rank })),
        }
    }

    /// Records an event on the wire stream, if times are measured.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn timed_event(&self) -> Result<Option<TimedEvent>> {
        let keeps_times = self.keeps_times.load(Ordering::Relaxed);
        Ok(if keeps_times { Some(TimedEvent::record_on(&self.wire)?) } else { None })
    }

    /// Waits on the host for the work before an event on the wire stream.
    ///
    /// # Errors
    /// Returns an error if the communicator fails or has failed before, or if the timeout expires. In these cases, the
    /// communicator no longer exists.
    pub fn wait_for(&self, event: &CudaEvent, op: &'static str) -> Result<()> {
        self.wire.context().bind_to_thread().w()?;
        let result = self.poll(op, self.watch.timeout, || {
            // The event is queried before the failure is checked: work that an abort released appears complete only
            // after the failure is set.
            let done = event.try_is_complete().w()?;
            let launch = self.begin_launch()?;
            if !done {
                self.is_call_complete(launch.comm, op)?;
            }
            Ok(done)
        });
        result.inspect_err(|why| self.fail(why))
    }

    /// Ends the communicator and everything in progress. `why` is the reason, unless there is an earlier one. Work on
    /// the streams continues, but its results are meaningless.
    pub fn fail(&self, why: &NcclError) {
        self.fail_locked(&mut lock(&self.state), why);
    }

    fn fail_locked(&self, state: &mut NcclCommState, why: &NcclError) {
        state.failure.get_or_insert_with(|| why.clone());
        if let Some(OwnedNcclComm(comm)) = state.comm.take() {
            // SAFETY: the communicator exists. It was taken out of the only place that holds it, so nothing uses it
            // afterwards.
            unsafe { (self.library.abort)(comm) };
        }
    }

    /// Returns whether the communicator has completed its last call.
    fn is_call_complete(&self, comm: RawNcclComm, op: &'static str) -> Result<bool> {
        let mut code = SUCCESS;
        // SAFETY: the communicator exists, and the pointer points to a number.
        let answer = unsafe { (self.library.async_error)(comm, &mut code) };
        self.library.check("ncclCommGetAsyncError", answer)?;
        match code {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            code => Err(NcclError::AsyncError { rank: self.rank, op, why: self.library.text(code) }),
        }
    }

    /// Returns the size in bytes of the memory for elements from peers.
    pub fn scratch_bytes(&self) -> usize {
        lock(&self.state).scratch.as_ref().map_or(0, CudaSlice::len)
    }

    fn poll(&self, op: &'static str, limit: Duration, mut is_done: impl FnMut() -> Result<bool>) -> Result<()> {
        let (since, mut pause) = (Instant::now(), Duration::from_micros(20));
        while !is_done()? {
            let waited = since.elapsed();
            if waited < SPIN_TIME {
                std::thread::yield_now();
                continue;
            }
            if let Some(why) = (self.watch.is_failed)() {
                return Err(NcclError::CallerFailure(why));
            }
            if waited > limit {
                return Err(NcclError::PeerTimeout { rank: self.rank, op, waited: limit });
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(MAX_POLL_SLEEP);
        }
        Ok(())
    }

    /// Leaves the communicator once all work on the wire stream is complete.
    fn leave(&self, comm: RawNcclComm) -> Result<()> {
        const OP: &str = "the shutdown";
        self.wire.context().bind_to_thread().w()?;
        let limit = self.watch.timeout.min(SHUTDOWN_TIMEOUT);
        let last = self.wire.record_event(None).w()?;
        self.poll(OP, limit, || {
            let done = last.try_is_complete().w()?;
            if !done {
                self.is_call_complete(comm, OP)?;
            }
            Ok(done)
        })?;
        // SAFETY: the communicator exists and has no work in progress.
        let code = unsafe { (self.library.finalize)(comm) };
        self.library.check("ncclCommFinalize", code)?;
        self.poll(OP, limit, || self.is_call_complete(comm, OP))
    }
}

impl Drop for NcclMember {
    fn drop(&mut self) {
        let Some(OwnedNcclComm(comm)) = lock(&self.state).comm.take() else { return };
        // SAFETY: the communicator exists. It was taken out of the only place that holds it, so nothing uses it
        // afterwards. If no collective is in progress, destroying it is quick. If collectives have not ended, if a peer
        // has failed or if this rank panics, it is aborted, which is quick too.
        unsafe {
            match std::thread::panicking() || self.leave(comm).is_err() {
                false => (self.library.destroy)(comm),
                true => (self.library.abort)(comm),
            };
        }
    }
}

/// A launch. It holds the lock of the communicator, so that no other thread uses the communicator.
pub(super) struct NcclLaunch<'a> {
    pub member: &'a NcclMember,
    state: MutexGuard<'a, NcclCommState>,
    comm: RawNcclComm,
}

impl NcclLaunch<'_> {
    /// Ends the launch. After a failed launch, it is unknown in which collectives this rank takes part, so the
    /// communicator ends.
    pub fn end<T>(mut self, result: Result<T>) -> Result<T> {
        if let Err(why) = &result {
            self.member.fail_locked(&mut self.state, why);
        }
        result
    }

    /// Returns memory for `bytes` bytes of peers' elements or of codes. Only the wire stream writes and reads it, so
    /// later work on that stream may reuse it.
    pub fn scratch(&mut self, bytes: usize) -> Result<CUdeviceptr> {
        let wire = &self.member.wire;
        if self.state.scratch.as_ref().is_none_or(|scratch| scratch.len() < bytes) {
            // The old memory is released first, in the order of the wire stream, so that it and the new memory do not
            // exist at the same time.
            self.state.scratch = None;
            // SAFETY: all bytes that are read there have been received or encoded before.
            self.state.scratch = Some(unsafe { wire.alloc(bytes) }.w()?);
        }
        Ok(self.state.scratch.as_ref().map_or(0, |scratch| scratch.device_ptr(wire).0))
    }

    /// Sums `from` over all ranks, in any order, and gives each rank `count` elements of the sum. `to` may be this
    /// rank's part of `from`.
    ///
    /// # Safety
    /// Same as for [`all_gather`](Self::all_gather), with size x count elements at `from` and count at `to`.
    pub unsafe fn reduce_scatter(&self, from: CUdeviceptr, to: CUdeviceptr, count: usize, kind: c_int) -> Result<()> {
        // SAFETY: as the caller promises; the communicator exists.
        let code = unsafe { (self.library().reduce_scatter)(from, to, count, kind, SUM, self.comm, self.stream()) };
        self.check_call("ncclReduceScatter", "a reduce-scatter", code)
    }

    /// Sums `count` elements of every rank in place, in any order.
    ///
    /// # Safety
    /// Same as for [`all_gather`](Self::all_gather), with count elements.
    pub unsafe fn all_reduce(&self, values: CUdeviceptr, count: usize, kind: c_int) -> Result<()> {
        // SAFETY: as the caller promises; the communicator exists.
        let code = unsafe { (self.library().all_reduce)(values, values, count, kind, SUM, self.comm, self.stream()) };
        self.check_call("ncclAllReduce", "an all-reduce", code)
    }

    /// Gathers `count` elements of every rank. `from` may be this rank's part of `to`.
    ///
    /// # Safety
    /// There are `count` elements of type `kind` at `from`, and size x count at `to`, both in device memory. Nothing
    /// else writes to this memory, and it stays valid until the work on the wire stream is complete.
    pub unsafe fn all_gather(&self, from: CUdeviceptr, to: CUdeviceptr, count: usize, kind: c_int) -> Result<()> {
        // SAFETY: as the caller promises; the communicator exists.
        let code = unsafe { (self.library().all_gather)(from, to, count, kind, self.comm, self.stream()) };
        self.check_call("ncclAllGather", "an all-gather", code)
    }

    /// Copies bytes within this device.
    ///
    /// # Safety
    /// Same as for [`all_gather`](Self::all_gather), with `bytes` bytes at both addresses, which are the same or do not
    /// overlap.
    pub unsafe fn copy(&self, from: CUdeviceptr, to: CUdeviceptr, bytes: usize) -> Result<()> {
        if from == to || bytes == 0 {
            return Ok(());
        }
        // SAFETY: as the caller promises.
        Ok(unsafe { driver::memcpy_dtod_async(to, from, bytes, self.stream()) }.w()?)
    }

    /// Sends `count` elements to every peer and receives as many from every peer, all concurrently. For a peer,
    /// `addresses` returns the address of the elements to send and that of the elements to receive.
    ///
    /// # Safety
    /// Same as for [`all_gather`](Self::all_gather), with count elements at each address.
    pub unsafe fn exchange(
        &self,
        op: &'static str,
        count: usize,
        kind: c_int,
        addresses: impl Fn(usize) -> (CUdeviceptr, CUdeviceptr),
    ) -> Result<()> {
        let library = self.library();
        let peers = (0..self.member.size).filter(|peer| *peer != self.member.rank);
        // SAFETY: as the caller promises; the communicator exists. A group that was started is ended, whatever happens
        // in it.
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
        self.check_call("ncclGroupEnd", op, end)
    }

    fn library(&self) -> &NcclLibrary {
        &self.member.library
    }

    fn stream(&self) -> CUstream {
        self.member.wire.cu_stream()
    }

    /// Checks the result of a call. The collective is on the stream when this function returns.
    fn check_call(&self, call: &'static str, op: &'static str, code: c_int) -> Result<()> {
        self.library().check(call, code)?;
        if code == IN_PROGRESS { self.until_ready(op) } else { Ok(()) }
    }

    fn until_ready(&self, op: &'static str) -> Result<()> {
        self.member.poll(op, self.member.watch.timeout, || self.member.is_call_complete(self.comm, op))
    }
}
