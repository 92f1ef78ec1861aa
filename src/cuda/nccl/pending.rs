//! The second half of a collective between GPUs: its buffer, which is the wire stream's until it is done.

use super::error::NcclError;
use super::member::NcclMember;
use crate::cuda::{DeviceFlat, TimedEvent};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use std::sync::Arc;
use std::time::Instant;

/// A collective under way, with the memory that it reads and writes.
///
/// Nothing else can use or free that memory: this value owns it and hands it out, or lets it go, after the stream of Candle's
/// device has been told to wait for the collective. What runs there later, the release of the memory included, runs after it.
#[must_use = "a collective's result is waited for"]
pub(crate) struct PendingNcclCollective {
    member: Arc<NcclMember>,
    op: &'static str,
    buffer: Option<DeviceFlat>,
    /// Elements of the result, with which the buffer begins.
    len: usize,
    /// The end of the collective on the wire stream; nothing if it has not been launched to its end.
    done: Option<CudaEvent>,
    /// Its beginning and its end there, where times are kept.
    events: [Option<TimedEvent>; 2],
}

impl PendingNcclCollective {
    pub(super) fn new(member: Arc<NcclMember>, op: &'static str, buffer: DeviceFlat, len: usize) -> Self {
        Self { member, op, buffer: Some(buffer), len, done: None, events: [None, None] }
    }

    /// The buffer, for the launch.
    pub(super) fn buffer(&mut self) -> &mut DeviceFlat {
        self.buffer.as_mut().expect("a collective has its buffer until it is settled")
    }

    /// Marks the beginning of the work.
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

    /// Waits on the host until the collective is done. [`settle`](Self::settle) follows, which then waits for nothing.
    ///
    /// A host that waits for the device in another way, before this, waits for ever where a peer has failed.
    ///
    /// # Errors
    /// A peer is lost, silent or in another collective, or the caller's own detection says so; the communicator is gone then,
    /// and every other collective fails likewise.
    pub fn wait_on_host(&self) -> Result<(), NcclError> {
        match &self.done {
            Some(done) => self.member.wait_for(done, self.op),
            None => Ok(()),
        }
    }

    /// When it began and ended, once it is done; nothing where times were not kept, or there was nothing to do.
    ///
    /// # Errors
    /// The driver's.
    pub fn times(&self) -> Result<Option<[Instant; 2]>, NcclError> {
        let [Some(begin), Some(end)] = &self.events else { return Ok(None) };
        Ok(Some(TimedEvent::when([begin, end], &self.member.idle)?))
    }

    /// Hands out the result, in the order of the stream of Candle's device: what is launched there from now on sees it. The host
    /// does not wait.
    ///
    /// On a failure after this, the stream goes on with a result that is none: the next collective tells.
    ///
    /// # Errors
    /// The communicator has failed before; the driver's.
    pub fn settle(mut self) -> Result<DeviceFlat, NcclError> {
        drop(self.member.begin_launch()?);
        self.order()?;
        let mut result = self.buffer.take().expect("a collective has its buffer until it is settled");
        result.truncate(self.len);
        Ok(result)
    }

    /// Lets the stream of Candle's device wait for the collective.
    fn order(&self) -> Result<(), NcclError> {
        let compute = self.member.device.cuda_stream();
        Ok(match &self.done {
            Some(done) => compute.wait(done),
            // It has ended before its end: whatever is on the wire stream.
            None => compute.join(&self.member.wire),
        }
        .w()?)
    }
}

impl Drop for PendingNcclCollective {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        // cudarc frees in the order of the stream that it has allocated on, which is Candle's, or waits for that stream first. Where
        // the stream cannot be made to wait, the memory is never freed: the wire stream may still write to it.
        if self.order().is_err() {
            std::mem::forget(buffer);
        }
    }
}
