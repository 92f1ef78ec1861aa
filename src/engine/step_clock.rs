//! The calls that make up a micro step, and their durations.

use crate::comm::engine_call::EngineCallGuard;
use crate::profiler::{StepTimings, spans};
use crate::timeline::TimelineSpan;
use std::time::{Duration, Instant};

/// One of the calls that make up a micro step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MicroStepCall {
    Forward,
    Backward,
    Step,
}

/// The guard of a running call. A call that fails is not counted.
pub(super) struct CallGuard {
    pub call: MicroStepCall,
    pub start: Instant,
    /// The seconds spent waiting for collectives before the call.
    pub waited: f64,
    /// The call's span in the profile of `flops_profiler`.
    pub profile: Option<spans::ProfilerSpan>,
    /// The call's span in the timeline.
    pub span: TimelineSpan,
    /// The name of the call, which collectives report if ranks have diverged.
    pub during: EngineCallGuard,
}

/// The times of the current and of the last optimizer step.
#[derive(Default)]
pub(super) struct StepClock {
    pub forward: Duration,
    pub backward: Duration,
    pub step: Duration,
    /// The seconds spent waiting for collectives in the backward pass.
    pub backward_wait: f64,
    /// The seconds spent waiting for collectives and files up to the end of the last optimizer step.
    waited: WaitSeconds,
    pub last: StepTimings,
    pub last_backward_wait_ms: f64,
}

/// The seconds spent waiting since the start.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct WaitSeconds {
    pub collectives: f64,
    pub files: f64,
}

impl StepClock {
    /// Ends an optimizer step.
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
