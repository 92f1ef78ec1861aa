//! The trace of a step, recorded by a rehearsal: what is computed, and which collectives are launched and waited for.
//!
//! [`StepTrace::simulate`] simulates the step: the training thread computes, launches and waits; the communication
//! thread carries out collectives one after the other, in the order of their launch. As in [`crate::comm`], a short
//! collective begins when a thread waits for it, when a long collective is launched after it, or after a grace period.

use super::network::TransferTime;
use crate::comm::{CollectiveKind, MAX_QUEUE_DELAY, SHORT_BYTES, WireFormat};
use candle_core::DType;
use std::collections::VecDeque;

/// A measured phase of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepPhase {
    Forward,
    /// The backward pass, including recomputation.
    Backward,
    /// The optimizer's update.
    Update,
}

/// The amount of work in each phase.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct PhaseWork {
    pub forward: f64,
    pub backward: f64,
    pub update: f64,
}

impl PhaseWork {
    pub fn of(&self, phase: StepPhase) -> f64 {
        match phase {
            StepPhase::Forward => self.forward,
            StepPhase::Backward => self.backward,
            StepPhase::Update => self.update,
        }
    }

    fn add(&mut self, phase: StepPhase, work: f64) {
        *match phase {
            StepPhase::Forward => &mut self.forward,
            StepPhase::Backward => &mut self.backward,
            StepPhase::Update => &mut self.update,
        } += work;
    }
}

/// A collective, with the arguments of [`UniformHosts::transfers`](crate::comm::UniformHosts::transfers).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct CollectiveCall {
    pub kind: CollectiveKind,
    pub wire: WireFormat,
    pub dtype: DType,
    /// The number of elements of the argument.
    pub elements: usize,
}

impl CollectiveCall {
    fn is_short(&self) -> bool {
        self.elements.saturating_mul(self.dtype.size_in_bytes()) <= SHORT_BYTES
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum TraceEvent {
    Compute(StepPhase, f64),
    Launch(CollectiveCall),
    /// A wait for the n-th collective launched in this segment.
    Wait(usize),
}

/// Events after which no collective is in flight, and the number of times they happen.
#[derive(Debug, Clone, Default, PartialEq)]
struct TraceSegment {
    events: Vec<TraceEvent>,
    launched: usize,
    times: u64,
}

/// The events of one rank in a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct StepTrace {
    segments: Vec<TraceSegment>,
}

/// The index of a launched collective.
#[derive(Debug, Clone, Copy)]
pub(super) struct LaunchedCollectiveId(usize);

/// The times of a simulated step in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct SimulatedStep {
    /// The time until both threads have finished.
    pub step: f64,
    /// The time during which the communication thread is busy.
    pub wire: f64,
}

impl StepTrace {
    /// Begins the next segment. No collective may be in flight at the end of the previous segment.
    pub fn begin_segment(&mut self) {
        self.segments.push(TraceSegment { times: 1, ..TraceSegment::default() });
    }

    /// Repeats the current segment `count` more times.
    pub fn repeat(&mut self, count: usize) {
        let times = &mut self.segment().times;
        *times = times.saturating_add(count as u64);
    }

    fn segment(&mut self) -> &mut TraceSegment {
        if self.segments.is_empty() {
            self.begin_segment();
        }
        self.segments.last_mut().expect("a segment has begun")
    }

    pub fn compute(&mut self, phase: StepPhase, work: f64) {
        let events = &mut self.segment().events;
        match events.last_mut() {
            Some(TraceEvent::Compute(last, sum)) if *last == phase => *sum += work,
            _ => events.push(TraceEvent::Compute(phase, work)),
        }
    }

    pub fn launch(&mut self, collective: CollectiveCall) -> LaunchedCollectiveId {
        let segment = self.segment();
        segment.events.push(TraceEvent::Launch(collective));
        segment.launched += 1;
        LaunchedCollectiveId(segment.launched - 1)
    }

    pub fn wait(&mut self, LaunchedCollectiveId(number): LaunchedCollectiveId) {
        self.segment().events.push(TraceEvent::Wait(number));
    }

    /// Returns all work that is computed in a step.
    pub fn work(&self) -> PhaseWork {
        let mut total = PhaseWork::default();
        for TraceSegment { events, times, .. } in &self.segments {
            for event in events {
                if let TraceEvent::Compute(phase, work) = event {
                    total.add(*phase, work * *times as f64);
                }
            }
        }
        total
    }

    /// Returns the collectives of a step, each with the number of times it takes place.
    pub fn collectives(&self) -> impl Iterator<Item = (CollectiveCall, u64)> {
        self.segments.iter().flat_map(|segment| {
            segment.events.iter().filter_map(|event| match event {
                TraceEvent::Launch(collective) => Some((*collective, segment.times)),
                _ => None,
            })
        })
    }

    /// Simulates the step. `compute_seconds` returns the seconds of an amount of work, and `transfer_time` the time of
    /// a collective.
    pub fn simulate(
        &self,
        compute_seconds: impl Fn(StepPhase, f64) -> f64,
        transfer_time: impl Fn(&CollectiveCall) -> TransferTime,
    ) -> SimulatedStep {
        let mut total = SimulatedStep::default();
        for segment in &self.segments {
            let simulated = segment.simulate(&compute_seconds, &transfer_time);
            total.step += simulated.step * segment.times as f64;
            total.wire += simulated.wire * segment.times as f64;
        }
        total
    }
}

/// The communication thread.
#[derive(Default)]
struct SimulatedCommThread {
    /// The time in seconds at which all collectives taken from the queue have finished.
    free_at: f64,
    /// The seconds of work so far.
    busy_seconds: f64,
    /// The launch time and transfer time of each collective that has not begun.
    queue: VecDeque<(f64, TransferTime)>,
    /// The end of each collective that has begun, in the order of launch.
    ends: Vec<f64>,
    /// The start and end of each period in which a transfer occupies processors while something may still be computed,
    /// and the share that it occupies.
    processor_use: VecDeque<(f64, f64, f64)>,
}

impl SimulatedCommThread {
    /// Begins the first collective in the queue, if there is one: at `now` seconds, or after its grace period if that
    /// ends earlier, but not before the thread is free.
    fn begin(&mut self, now: f64) {
        if let Some((launched, TransferTime { seconds, processors })) = self.queue.pop_front() {
            let start = self.free_at.max(now.min(launched + MAX_QUEUE_DELAY.as_secs_f64()));
            self.free_at = start + seconds;
            self.busy_seconds += seconds;
            self.ends.push(self.free_at);
            if processors > 0.0 {
                self.processor_use.push_back((start, self.free_at, (processors / seconds).min(1.0)));
            }
        }
    }

    /// Returns the end of a computation that begins at `now` seconds and takes `seconds` if it has the processors to
    /// itself.
    fn computation_end(&mut self, mut now: f64, mut seconds: f64) -> f64 {
        while let Some((start, end, share)) = self.processor_use.front().copied() {
            let before_transfer = (start - now).max(0.0);
            let during_transfer = (end - now.max(start)).max(0.0) * (1.0 - share);
            if seconds <= before_transfer {
                return now + seconds;
            }
            if seconds < before_transfer + during_transfer {
                return now.max(start) + (seconds - before_transfer) / (1.0 - share);
            }
            seconds -= before_transfer + during_transfer;
            now = now.max(end);
            self.processor_use.pop_front();
        }
        now + seconds
    }
}

impl TraceSegment {
    fn simulate(
        &self,
        compute_seconds: &impl Fn(StepPhase, f64) -> f64,
        transfer_time: &impl Fn(&CollectiveCall) -> TransferTime,
    ) -> SimulatedStep {
        let (mut now, mut wire) = (0f64, SimulatedCommThread::default());
        for event in &self.events {
            match event {
                TraceEvent::Compute(phase, work) => now = wire.computation_end(now, compute_seconds(*phase, *work)),
                TraceEvent::Launch(collective) => {
                    wire.queue.push_back((now, transfer_time(collective)));
                    if !collective.is_short() {
                        while !wire.queue.is_empty() {
                            wire.begin(now);
                        }
                    }
                }
                TraceEvent::Wait(number) => {
                    while wire.ends.len() <= *number && !wire.queue.is_empty() {
                        wire.begin(now);
                    }
                    now = now.max(wire.ends.get(*number).copied().unwrap_or(0.0));
                }
            }
        }
        while !wire.queue.is_empty() {
            wire.begin(now);
        }
        SimulatedStep { step: now.max(wire.free_at), wire: wire.busy_seconds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum_of(elements: usize) -> CollectiveCall {
        CollectiveCall { kind: CollectiveKind::ReduceScatter, wire: WireFormat::Exact, dtype: DType::F32, elements }
    }

    /// Simulates a trace in which each unit of work takes a second, a long collective `long` seconds and a short one
    /// `short` seconds.
    fn seconds(step_trace: &StepTrace, long: f64, short: f64) -> (f64, f64) {
        let transfer_time =
            |c: &CollectiveCall| TransferTime { seconds: if c.is_short() { short } else { long }, processors: 0.0 };
        let SimulatedStep { step, wire } = step_trace.simulate(|_, work| work, transfer_time);
        (step, wire)
    }

    /// Returns the trace of a backward pass of four seconds with two buckets, one launched every two seconds. If it
    /// `overlaps`, a bucket is waited for when the next one is launched, or at the end; otherwise, immediately.
    fn backward(overlaps: bool) -> StepTrace {
        let mut step_trace = StepTrace::default();
        step_trace.compute(StepPhase::Backward, 1.0);
        step_trace.compute(StepPhase::Backward, 1.0);
        let first = step_trace.launch(sum_of(1 << 20));
        if !overlaps {
            step_trace.wait(first);
        }
        step_trace.compute(StepPhase::Backward, 2.0);
        let second = step_trace.launch(sum_of(1 << 20));
        if overlaps {
            step_trace.wait(first);
        }
        step_trace.wait(second);
        step_trace
    }

    #[test]
    fn collectives_pass_while_the_other_thread_computes() {
        assert_eq!(seconds(&backward(true), 0.0, 0.0), (4.0, 0.0));
        assert_eq!(seconds(&backward(true), 1.0, 0.0), (5.0, 2.0), "nothing overlaps the last one");
        assert_eq!(seconds(&backward(true), 3.0, 0.0), (8.0, 6.0), "one after the other");
        assert_eq!(seconds(&backward(false), 1.0, 0.0), (6.0, 2.0), "the sum");
        assert_eq!(seconds(&backward(false), 3.0, 0.0), (10.0, 6.0));
        assert_eq!(backward(true).work(), PhaseWork { backward: 4.0, ..PhaseWork::default() });
    }

    #[test]
    fn computing_beside_a_collective_waits_for_processors() {
        let step = |overlaps: bool, seconds: f64, processors: f64| {
            backward(overlaps).simulate(|_, work| work, |_| TransferTime { seconds, processors }).step
        };
        // The first collective overlaps with two seconds of computation, the second with nothing.
        assert_eq!(step(true, 1.0, 0.25), 5.25);
        assert_eq!(step(true, 2.0, 1.0), 2.0 + 3.0 + 2.0);
        assert_eq!(step(true, 3.0, 3.0), 2.0 + 3.0 + 2.0 + 3.0, "no processor until the collective ends");
        assert_eq!(step(true, 8.0, 4.0), 2.0 + 8.0 + 8.0, "the computation ends first");
        assert_eq!(step(false, 3.0, 3.0), 10.0);
    }

    #[test]
    fn short_collectives_begin_when_they_are_waited_for_or_after_a_grace() {
        let step_trace = |work: f64, then_long: bool| {
            let mut step_trace = StepTrace::default();
            let short = step_trace.launch(sum_of(8));
            step_trace.compute(StepPhase::Forward, work);
            let long = then_long.then(|| step_trace.launch(sum_of(1 << 20)));
            step_trace.wait(short);
            long.into_iter().for_each(|long| step_trace.wait(long));
            step_trace
        };
        let grace = MAX_QUEUE_DELAY.as_secs_f64();
        assert_eq!(seconds(&step_trace(grace / 2.0, false), 0.0, 1.0).0, 1.0 + grace / 2.0);
        assert_eq!(seconds(&step_trace(3.0, false), 0.0, 1.0).0, 3.0);
        assert_eq!(seconds(&step_trace(0.5, false), 0.0, 1.0).0, 1.0 + grace);
        assert_eq!(seconds(&step_trace(0.001, true), 2.0, 1.0).0, 3.001);
    }

    #[test]
    fn parts_happen_as_often_as_they_are_repeated() {
        let mut step_trace = backward(true);
        step_trace.repeat(9);
        step_trace.begin_segment();
        let vote = step_trace.launch(sum_of(3));
        step_trace.wait(vote);
        assert_eq!(seconds(&step_trace, 1.0, 0.5), (50.5, 20.5));
        assert_eq!(step_trace.work().backward, 40.0);
        let all: Vec<_> = step_trace.collectives().map(|(collective, times)| (collective.elements, times)).collect();
        assert_eq!(all, [(1 << 20, 10), (1 << 20, 10), (3, 1)]);
    }
}
