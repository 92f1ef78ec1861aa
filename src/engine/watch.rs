//! One guard over a call of a micro step: its time, its events in timeline and profile, its memory lines.

use super::Engine;
use super::clock::{Call, Watch};
use crate::comm::calls::during;
use crate::profiler::spans::{self, Half};
use crate::timeline::{self, Recorder, Span};
use std::time::Instant;

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
            self.reporter.micro_step = Some(start);
        }
        let during = during(name);
        let span = self.span(name);
        let profile = half.and_then(|half| self.record(half));
        Watch { call, start, waited: self.core.comm().report().waited_s, profile, span, during }
    }

    /// The call has succeeded.
    pub(super) fn end_watch(&mut self, Watch { call, start, waited, profile, span: _span, during: _during }: Watch) {
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
        let first = self.accumulation.micro_steps == 0;
        if self.rank() != 0 || profiler.profile_step != self.global_steps {
            return None;
        }
        if first && half == Half::Forward {
            spans::clear();
        }
        Some(spans::record(half))
    }
}
