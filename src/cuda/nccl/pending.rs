//! A collective between GPUs that has been started. Its buffer belongs to the wire stream until the collective is
//! complete.

use super::error::NcclError;
use super::member::NcclMember;
use crate::cuda::{DeviceFlat, TimedEvent};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use std::sync::Arc;
use std::time::Instant;

/// A collective in progress, with the memory that it reads and writes.
///
/// Nothing else can use or free that memory. This value owns it, and returns or releases it only after it has made the
/// stream of Candle's device wait for the collective. Later work on that stream, including the release of the memory,
/// runs after the collective.
#[must_use = "the result of a collective must be awaited"]
pub(crate) struct PendingNcclCollective {
    member: Arc<NcclMember>,
    op: &'static str,
    buffer: Option<DeviceFlat>,
    /// The number of elements of the result, at the start of the buffer.
    len: usize,
    /// The end of the collective on the wire stream, or `None` if the launch is incomplete.
    done: Option<CudaEvent>,
    /// The start and the end of the collective on the wire stream, if times are kept.
    events: [Option<TimedEvent>; 2],
}

impl PendingNcclCollective {
    pub(super) fn new(member: Arc<NcclMember>, op: &'static str, buffer: DeviceFlat, len: usize) -> Self {
        Self { member, op, buffer: Some(buffer), len, done: None, events: [None, None] }
    }

    /// Returns the buffer, for the launch.
    pub(super) fn buffer(&mut self) -> &mut DeviceFlat {
        self.buffer.as_mut().expect("a collective keeps its buffer until it completes")
    }

    /// Marks the start of the work.
    pub(super) fn begin(&mut self) -> Result<(), NcclError> {
        self.events[0] = self.member.timed_event()?;
        Ok(())
    }

    /// Marks the end of the launch.
    pub(super) fn end(&mut self) -> Result<(), NcclError> {
        self.events[1] = self.member.timed_event()?;
        self.done = Some(self.member.wire.record_event(None).w()?);
        Ok(())
    }

    /// Waits on the host until the collective is complete. A later [`settle`](Self::settle) does not have to wait.
    ///
    /// The host must call this method before it waits for the device in any other way: if a peer has failed, such a
    /// wait never ends.
    ///
    /// # Errors
    /// Returns an error if a peer is lost, does not respond or is in another collective, or if the caller's own
    /// detection reports a failure. The communicator no longer exists then, and every other collective fails too.
    pub fn wait_on_host(&self) -> Result<(), NcclError> {
        match &self.done {
            Some(done) => self.member.wait_for(done, self.op),
            None => Ok(()),
        }
    }

    /// Waits until the collective is complete, and returns when it started and ended, or `None` if times were not kept
    /// or there was no work.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn times(&self) -> Result<Option<[Instant; 2]>, NcclError> {
        let [Some(begin), Some(end)] = &self.events else { return Ok(None) };
        Ok(Some(TimedEvent::host_times([begin, end], &self.member.idle)?))
    }

    /// Returns the result, in the order of the stream of Candle's device: work that is launched there afterwards sees
    /// the result. The host does not wait.
    ///
    /// After a later failure, the stream continues with an invalid result. The next collective reports the failure.
    ///
    /// # Errors
    /// Returns an error if the communicator has already failed or the driver reports an error.
    pub fn settle(mut self) -> Result<DeviceFlat, NcclError> {
        drop(self.member.begin_launch()?);
        self.make_candle_wait()?;
        let mut result = self.buffer.take().expect("a collective keeps its buffer until it completes");
        result.truncate(self.len);
        Ok(result)
    }

    /// Makes the stream of Candle's device wait for the collective.
    fn make_candle_wait(&self) -> Result<(), NcclError> {
        let compute = self.member.device.cuda_stream();
        Ok(match &self.done {
            Some(done) => compute.wait(done),
            // The launch is incomplete, so wait for all work on the wire stream.
            None => compute.join(&self.member.wire),
        }
        .w()?)
    }
}

impl Drop for PendingNcclCollective {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        // cudarc frees memory in the order of the stream on which it was allocated, which is Candle's, or waits for
        // that stream first. If the stream cannot be made to wait, the memory is never freed, because the wire stream
        // may still write to it.
        if self.make_candle_wait().is_err() {
            std::mem::forget(buffer);
        }
    }
}
