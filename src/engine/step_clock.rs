//! The calls of a micro step, and the time that they take.

use crate::comm::engine_call::EngineCallGuard;
use crate::profiler::{StepTimings, spans};
use crate::timeline::TimelineSpan;
use std::time::{Duration, Instant};

/// A call of a micro step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MicroStepCall {
    Forward,
    Backward,
    Step,
}

/// A call under way. One that fails is not counted.
pub(super) struct CallGuard {
    pub call: MicroStepCall,
    pub start: Instant,
    /// Seconds waited for collectives until then.
    pub waited: f64,
    /// The span of `flops_profiler`.
    pub profile: Option<spans::ProfilerSpan>,
    /// The span in the timeline.
    pub span: TimelineSpan,
    /// The call, for what its collectives say where ranks have diverged.
    pub during: EngineCallGuard,
}

/// Times of the optimizer step under way, and of the last one.
#[derive(Default)]
pub(super) struct StepClock {
    pub forward: Duration,
    pub backward: Duration,
    pub step: Duration,
    /// Seconds waited for collectives in backward.
    pub backward_wait: f64,
    /// Seconds waited for collectives, and for files, until the last boundary.
    waited: WaitSeconds,
    pub last: StepTimings,
    pub last_backward_wait_ms: f64,
}

/// Seconds waited since the start.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct WaitSeconds {
    pub collectives: f64,
    pub files: f64,
}

impl StepClock {
    /// An optimizer step is over.
    pub fn boundary(&mut self, waited: WaitSeconds) {
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        self.last = StepTimings {
            forward_ms: ms(self.forward),
            backward_ms: ms(self.backward),
            step_ms: ms(self.step),
            comm_ms: (waited.collectives - self.waited.collectives) * 1e3,
            disk_ms: (waited.files - self.waited.files) * 1e3,
        };
        let last_backward_wait_ms = self.backward_wait * 1e3;
        *self = Self { waited, last: self.last, last_backward_wait_ms, ..Self::default() };
    }
}
