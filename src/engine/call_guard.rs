//! A guard around each call of a micro step: its duration, its timeline and profile events, and its memory report.

use super::Engine;
use super::step_clock::{CallGuard, MicroStepCall};
use crate::comm::engine_call::during;
use crate::profiler::spans::{self, MicroStepHalf};
use crate::timeline::{self, TimelineRecorder, TimelineSpan};
use std::time::Instant;

impl<M> Engine<M> {
    /// Starts watching a call, until [`end_watch`](Self::end_watch).
    pub(super) fn watch(&mut self, call: MicroStepCall) -> CallGuard {
        if call == MicroStepCall::Forward {
            self.report_memory("before forward", self.global_steps + 1);
        }
        let start = Instant::now();
        let (name, half) = match call {
            MicroStepCall::Forward => ("forward", Some(MicroStepHalf::Forward)),
            MicroStepCall::Backward => ("backward", Some(MicroStepHalf::Backward)),
            MicroStepCall::Step => ("step", None),
        };
        if call == MicroStepCall::Forward {
            self.reporter.micro_step = Some(start);
        }
        let during = during(name);
        let span = self.span(name);
        let profile = half.and_then(|half| self.record(half));
        CallGuard { call, start, waited: self.core.comm().report().waited_s, profile, span, during }
    }

    /// Stops watching a call that has succeeded.
    pub(super) fn end_watch(
        &mut self,
        CallGuard { call, start, waited, profile, span: _span, during: _during }: CallGuard,
    ) {
        drop(profile);
        let elapsed = start.elapsed();
        match call {
            MicroStepCall::Forward => {
                self.clock.forward += elapsed;
                self.report_memory("after forward", self.global_steps + 1);
            }
            MicroStepCall::Backward => {
                self.clock.backward += elapsed;
                self.clock.backward_wait += self.core.comm().report().waited_s - waited;
                self.report_memory("after backward", self.global_steps + 1);
            }
            MicroStepCall::Step => {
                self.clock.step += elapsed;
                if self.is_gradient_accumulation_boundary() {
                    self.report_memory("after step", self.global_steps);
                }
                self.end_micro_step();
            }
        }
    }

    /// Starts a call's span in the timeline.
    pub(super) fn span(&self, name: &'static str) -> TimelineSpan {
        let span = TimelineRecorder::span(self.recorder.as_ref(), timeline::EventCategory::Engine, name);
        span.with("step", self.global_steps).with("micro_step", self.micro_steps)
    }

    /// Records a forward or backward pass for `flops_profiler`, until the result is dropped.
    fn record(&self, half: MicroStepHalf) -> Option<spans::ProfilerSpan> {
        let profiler = self.config.monitoring.flops_profiler.as_ref()?;
        let is_first = self.accumulation.micro_steps == 0;
        if self.job().rank() != 0 || profiler.profile_step != self.global_steps {
            return None;
        }
        if is_first && half == MicroStepHalf::Forward {
            spans::clear();
        }
        Some(spans::record(half))
    }
}
