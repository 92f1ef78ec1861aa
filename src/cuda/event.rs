//! The times of GPU events on the host's clock, so that a timeline shows how long the GPU took rather than how long the
//! host took.

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use std::time::{Duration, Instant};

/// An event in the order of a stream's work, with the time at which the GPU reached it.
#[derive(Debug)]
pub(crate) struct TimedEvent(CudaEvent);

impl TimedEvent {
    /// Records an event after the work on a stream.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn record_on(stream: &CudaStream) -> Result<Self> {
        stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w().map(Self)
    }

    /// Returns the times at which the GPU reached these events. Waits for them and for the work on `stream`, which must
    /// belong to the same context.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn host_times<const N: usize>(events: [&Self; N], stream: &CudaStream) -> Result<[Instant; N]> {
        let last = Self::record_on(stream)?;
        last.0.synchronize().w()?;
        let now = Instant::now();
        let mut times = [now; N];
        for (time, Self(event)) in times.iter_mut().zip(events) {
            let ago = Duration::try_from_secs_f32(event.elapsed_ms(&last.0).w()? / 1e3).unwrap_or_default();
            *time = now.checked_sub(ago).unwrap_or(now);
        }
        Ok(times)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::CudaDevice;
    use candle_core::backend::BackendDevice;

    #[test]
    fn moments_are_in_order_and_between_those_of_the_host() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let stream = device.cuda_stream();
        let before = Instant::now();
        let first = TimedEvent::record_on(&stream).unwrap();
        let numbers = stream.alloc_zeros::<f32>(1 << 16).unwrap();
        let second = TimedEvent::record_on(&stream).unwrap();
        let [first, second] = TimedEvent::host_times([&first, &second], &stream).unwrap();
        // The GPU's clock counts in steps of half a microsecond.
        assert!(before <= first + Duration::from_millis(1) && first <= second && second <= Instant::now());
        drop(numbers);
    }
}
