//! One guard over a call of a micro step: its time, its events in timeline and profile, its memory lines.

use super::Engine;
use crate::profiler::StepTimings;
use crate::profiler::spans::{self, Half};
use crate::timeline::{self, Recorder, Span};
use std::time::{Duration, Instant};

/// A call of a micro step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    Forward,
    Backward,
    Step,
}

/// A call under way. One that fails is not counted.
pub(super) struct Watch {
    call: Call,
    start: Instant,
    /// Seconds waited for collectives until then.
    waited: f64,
    /// For `flops_profiler`.
    profile: Option<spans::Span>,
    /// In the timeline.
    _span: Span,
}

/// Times of the optimizer step under way, and of the last one.
#[derive(Default)]
pub(super) struct Clock {
    forward: Duration,
    backward: Duration,
    step: Duration,
    /// Seconds waited for collectives in backward.
    backward_wait: f64,
    /// Seconds waited for collectives, and for files, until the last boundary.
    waited: Waited,
    pub last: StepTimings,
    pub last_backward_wait_ms: f64,
}

/// Seconds waited since the start.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Waited {
    pub collectives: f64,
    pub files: f64,
}

impl Clock {
    /// An optimizer step is over.
    pub fn boundary(&mut self, waited: Waited) {
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

impl<M> Engine<M> {
    /// Watches a call until [`end_watch`](Self::end_watch).
    pub(super) fn watch(&mut self, call: Call) -> Watch {
        if call == Call::Forward {
            self.tell_memory("before forward", self.global_steps + 1);
        }
        let start = Instant::now();
        let (name, half) = match call {
            Call::Forward => ("forward", Some(Half::Forward)),
            Call::Backward => ("backward", Some(Half::Backward)),
            Call::Step => ("step", None),
        };
        if call == Call::Forward {
            self.telling.micro_step = Some(start);
        }
        let _span = self.span(name);
        let profile = half.and_then(|half| self.record(half));
        Watch { call, start, waited: self.core.comm().report().waited_s, profile, _span }
    }

    /// The call has succeeded.
    pub(super) fn end_watch(&mut self, Watch { call, start, waited, profile, _span }: Watch) {
        drop(profile);
        let took = start.elapsed();
        match call {
            Call::Forward => {
                self.clock.forward += took;
                self.tell_memory("after forward", self.global_steps + 1);
            }
            Call::Backward => {
                self.clock.backward += took;
                self.clock.backward_wait += self.core.comm().report().waited_s - waited;
                self.tell_memory("after backward", self.global_steps + 1);
            }
            Call::Step => {
                self.clock.step += took;
                if self.is_gradient_accumulation_boundary() {
                    self.tell_memory("after step", self.global_steps);
                }
                self.end_micro_step();
            }
        }
    }

    /// A call in the timeline, from now on.
    pub(super) fn span(&self, name: &'static str) -> Span {
        let span = Recorder::span(self.recorder.as_ref(), timeline::Kind::Engine, name);
        span.with("step", self.global_steps).with("micro_step", self.micro_steps)
    }

    /// Records a half of a micro step for `flops_profiler`, until the result is dropped.
    fn record(&self, half: Half) -> Option<spans::Span> {
        let profiler = self.config.monitoring.flops_profiler.as_ref()?;
        let first = self.micro_steps.is_multiple_of(self.config.batch.gradient_accumulation_steps as u64);
        if self.rank() != 0 || profiler.profile_step != self.global_steps {
            return None;
        }
        if first && half == Half::Forward {
            spans::clear();
        }
        Some(spans::record(half))
    }
}
