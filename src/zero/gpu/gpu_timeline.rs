//! The timeline of the model's work on a GPU: the times at which it runs there, which are later than its launch by the
//! host.

use crate::cuda::TimedEvent;
use crate::error::Result;
use crate::timeline::{self, EventCategory, TimelineLane};
use crate::zero::rank_core::RankCore;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use std::sync::Arc;

/// Work on the stream of Candle's device.
pub(in crate::zero) struct GpuTimelineSpan {
    stream: Arc<CudaStream>,
    events: [TimedEvent; 2],
}

impl GpuTimelineSpan {
    /// Begins a span of the work that is launched from now on. Returns `None` if the model is not on a GPU, or nothing
    /// is recorded.
    ///
    /// # Errors
    /// A driver error.
    pub fn begin(core: &RankCore) -> Result<Option<Self>> {
        let Some(device) = core.model_location.gpu().filter(|_| timeline::is_recording()) else { return Ok(None) };
        let stream = device.cuda_stream();
        let events = [TimedEvent::record_on(&stream)?, TimedEvent::record_on(&stream)?];
        Ok(Some(Self { stream, events }))
    }

    /// Ends the span: all its work has been launched.
    ///
    /// # Errors
    /// A driver error.
    pub fn end(mut self) -> Result<Self> {
        self.events[1] = TimedEvent::record_on(&self.stream)?;
        Ok(self)
    }

    /// Waits for the GPU and records the span.
    ///
    /// # Errors
    /// A driver error.
    pub fn record(self, name: &'static str) -> Result<()> {
        let [begin, end] = &self.events;
        let times = TimedEvent::host_times([begin, end], &self.stream)?;
        timeline::carry().record_finished(TimelineLane::Gpu, EventCategory::Engine, name, times, ("", 0));
        Ok(())
    }
}
