//! A step as a rehearsal has gone through it: what is computed, which collectives are launched, and which are waited for.
//!
//! [`Script::run`] plays it: the training thread computes, launches and waits, and the communication thread carries out
//! collectives one after the other, in the order of their launch. As in [`crate::comm`], a short one begins when somebody
//! waits for it, when a long one is launched behind it, or after a grace.

use super::network::Travel;
use crate::comm::{CollectiveKind, GRACE, SHORT_BYTES, WireFormat};
use candle_core::DType;
use std::collections::VecDeque;

/// A part of a step whose time is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Forward,
    /// And what is recomputed in it.
    Backward,
    /// The optimizer's.
    Update,
}

/// Work of each phase.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Work {
    pub forward: f64,
    pub backward: f64,
    pub update: f64,
}

impl Work {
    pub fn of(&self, phase: Phase) -> f64 {
        match phase {
            Phase::Forward => self.forward,
            Phase::Backward => self.backward,
            Phase::Update => self.update,
        }
    }

    fn add(&mut self, phase: Phase, work: f64) {
        *match phase {
            Phase::Forward => &mut self.forward,
            Phase::Backward => &mut self.backward,
            Phase::Update => &mut self.update,
        } += work;
    }
}

/// A collective: what [`UniformHosts::transfers`](crate::comm::UniformHosts::transfers) is asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Collective {
    pub kind: CollectiveKind,
    pub wire: WireFormat,
    pub dtype: DType,
    /// Of the argument.
    pub elements: usize,
}

impl Collective {
    fn is_short(&self) -> bool {
        self.elements.saturating_mul(self.dtype.size_in_bytes()) <= SHORT_BYTES
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Event {
    Compute(Phase, f64),
    Launch(Collective),
    /// For the collective that was launched as the n-th of its part.
    Wait(usize),
}

/// Events at whose end nothing is under way, and how often they happen.
#[derive(Debug, Clone, Default, PartialEq)]
struct Part {
    events: Vec<Event>,
    launched: usize,
    times: u64,
}

/// The events of a step of one rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Script {
    parts: Vec<Part>,
}

/// The number of a collective that was launched.
#[derive(Debug, Clone, Copy)]
pub(super) struct Launched(usize);

/// Seconds of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Played {
    /// Until both threads have ended.
    pub step: f64,
    /// In which the communication thread works.
    pub wire: f64,
}

impl Script {
    /// The last part is over, at whose end nothing is under way; the next one begins.
    pub fn begin_part(&mut self) {
        self.parts.push(Part { times: 1, ..Part::default() });
    }

    /// The present part happens so many times more.
    pub fn repeat(&mut self, more: usize) {
        let times = &mut self.part().times;
        *times = times.saturating_add(more as u64);
    }

    fn part(&mut self) -> &mut Part {
        if self.parts.is_empty() {
            self.begin_part();
        }
        self.parts.last_mut().expect("there is one")
    }

    pub fn compute(&mut self, phase: Phase, work: f64) {
        let events = &mut self.part().events;
        match events.last_mut() {
            Some(Event::Compute(last, sum)) if *last == phase => *sum += work,
            _ => events.push(Event::Compute(phase, work)),
        }
    }

    pub fn launch(&mut self, collective: Collective) -> Launched {
        let part = self.part();
        part.events.push(Event::Launch(collective));
        part.launched += 1;
        Launched(part.launched - 1)
    }

    pub fn wait(&mut self, Launched(number): Launched) {
        self.part().events.push(Event::Wait(number));
    }

    /// All that is computed in a step.
    pub fn work(&self) -> Work {
        let mut all = Work::default();
        for Part { events, times, .. } in &self.parts {
            for event in events {
                if let Event::Compute(phase, work) = event {
                    all.add(*phase, work * *times as f64);
                }
            }
        }
        all
    }

    /// The collectives of a step, each with how often it takes place.
    pub fn collectives(&self) -> impl Iterator<Item = (Collective, u64)> {
        self.parts.iter().flat_map(|part| {
            part.events.iter().filter_map(|event| match event {
                Event::Launch(collective) => Some((*collective, part.times)),
                _ => None,
            })
        })
    }

    /// Plays the step: `computing` gives the seconds of an amount of work, `travelling` the way of a collective.
    pub fn run(&self, computing: impl Fn(Phase, f64) -> f64, travelling: impl Fn(&Collective) -> Travel) -> Played {
        let mut all = Played::default();
        for part in &self.parts {
            let played = part.run(&computing, &travelling);
            all.step += played.step * part.times as f64;
            all.wire += played.wire * part.times as f64;
        }
        all
    }
}

/// The communication thread.
#[derive(Default)]
struct CommThread {
    /// Seconds when it has done what was taken from the queue.
    free: f64,
    /// In which it has worked.
    busy: f64,
    /// When each collective was launched that has not begun, and its way.
    queue: VecDeque<(f64, Travel)>,
    /// The ends of those that have, in the order of launch.
    done: Vec<f64>,
    /// From when to when those take a share of the processors beside which something may still be computed, and the share.
    beside: VecDeque<(f64, f64, f64)>,
}

impl CommThread {
    /// At second `now`, the first in the queue is to begin if it has not.
    fn begin(&mut self, now: f64) {
        if let Some((launched, Travel { seconds, processors })) = self.queue.pop_front() {
            let start = self.free.max(now.min(launched + GRACE.as_secs_f64()));
            self.free = start + seconds;
            self.busy += seconds;
            self.done.push(self.free);
            if processors > 0.0 {
                self.beside.push_back((start, self.free, (processors / seconds).min(1.0)));
            }
        }
    }

    /// When computing ends that begins at second `now` and takes `seconds` where it has the processors for itself.
    fn compute_beside(&mut self, mut now: f64, mut seconds: f64) -> f64 {
        while let Some((start, end, share)) = self.beside.front().copied() {
            let alone = (start - now).max(0.0);
            let beside = (end - now.max(start)).max(0.0) * (1.0 - share);
            if seconds <= alone {
                return now + seconds;
            }
            if seconds < alone + beside {
                return now.max(start) + (seconds - alone) / (1.0 - share);
            }
            seconds -= alone + beside;
            now = now.max(end);
            self.beside.pop_front();
        }
        now + seconds
    }
}

impl Part {
    fn run(&self, computing: &impl Fn(Phase, f64) -> f64, travelling: &impl Fn(&Collective) -> Travel) -> Played {
        let (mut now, mut wire) = (0f64, CommThread::default());
        for event in &self.events {
            match event {
                Event::Compute(phase, work) => now = wire.compute_beside(now, computing(*phase, *work)),
                Event::Launch(collective) => {
                    wire.queue.push_back((now, travelling(collective)));
                    if !collective.is_short() {
                        while !wire.queue.is_empty() {
                            wire.begin(now);
                        }
                    }
                }
                Event::Wait(number) => {
                    while wire.done.len() <= *number && !wire.queue.is_empty() {
                        wire.begin(now);
                    }
                    now = now.max(wire.done.get(*number).copied().unwrap_or(0.0));
                }
            }
        }
        while !wire.queue.is_empty() {
            wire.begin(now);
        }
        Played { step: now.max(wire.free), wire: wire.busy }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum_of(elements: usize) -> Collective {
        Collective { kind: CollectiveKind::ReduceScatter, wire: WireFormat::Exact, dtype: DType::F32, elements }
    }

    /// Each unit of work takes a second; a long collective takes `long` seconds, a short one `short`.
    fn seconds(script: &Script, long: f64, short: f64) -> (f64, f64) {
        let travelling = |c: &Collective| Travel { seconds: if c.is_short() { short } else { long }, processors: 0.0 };
        let Played { step, wire } = script.run(|_, work| work, travelling);
        (step, wire)
    }

    /// Two buckets in a backward of four seconds, each launched after two; waited for when the next is, or at the end.
    fn backward(overlaps: bool) -> Script {
        let mut script = Script::default();
        script.compute(Phase::Backward, 1.0);
        script.compute(Phase::Backward, 1.0);
        let first = script.launch(sum_of(1 << 20));
        if !overlaps {
            script.wait(first);
        }
        script.compute(Phase::Backward, 2.0);
        let second = script.launch(sum_of(1 << 20));
        if overlaps {
            script.wait(first);
        }
        script.wait(second);
        script
    }

    #[test]
    fn collectives_pass_while_the_other_thread_computes() {
        assert_eq!(seconds(&backward(true), 0.0, 0.0), (4.0, 0.0));
        assert_eq!(seconds(&backward(true), 1.0, 0.0), (5.0, 2.0), "the last one has nothing beside it");
        assert_eq!(seconds(&backward(true), 3.0, 0.0), (8.0, 6.0), "one after the other");
        assert_eq!(seconds(&backward(false), 1.0, 0.0), (6.0, 2.0), "the sum");
        assert_eq!(seconds(&backward(false), 3.0, 0.0), (10.0, 6.0));
        assert_eq!(backward(true).work(), Work { backward: 4.0, ..Work::default() });
    }

    #[test]
    fn computing_beside_a_collective_waits_for_processors() {
        let step = |overlaps: bool, seconds: f64, processors: f64| {
            backward(overlaps).run(|_, work| work, |_| Travel { seconds, processors }).step
        };
        // The first collective passes beside two seconds of computing, the second one beside nothing.
        assert_eq!(step(true, 1.0, 0.25), 5.25);
        assert_eq!(step(true, 2.0, 1.0), 2.0 + 3.0 + 2.0);
        assert_eq!(step(true, 3.0, 3.0), 2.0 + 3.0 + 2.0 + 3.0, "it gets none until the end");
        assert_eq!(step(true, 8.0, 4.0), 2.0 + 8.0 + 8.0, "it ends first");
        assert_eq!(step(false, 3.0, 3.0), 10.0);
    }

    #[test]
    fn short_collectives_begin_when_they_are_waited_for_or_after_a_grace() {
        let script = |work: f64, then_long: bool| {
            let mut script = Script::default();
            let short = script.launch(sum_of(8));
            script.compute(Phase::Forward, work);
            let long = then_long.then(|| script.launch(sum_of(1 << 20)));
            script.wait(short);
            long.into_iter().for_each(|long| script.wait(long));
            script
        };
        let grace = GRACE.as_secs_f64();
        assert_eq!(seconds(&script(grace / 2.0, false), 0.0, 1.0).0, 1.0 + grace / 2.0);
        assert_eq!(seconds(&script(3.0, false), 0.0, 1.0).0, 3.0);
        assert_eq!(seconds(&script(0.5, false), 0.0, 1.0).0, 1.0 + grace);
        assert_eq!(seconds(&script(0.001, true), 2.0, 1.0).0, 3.001);
    }

    #[test]
    fn parts_happen_as_often_as_they_are_repeated() {
        let mut script = backward(true);
        script.repeat(9);
        script.begin_part();
        let vote = script.launch(sum_of(3));
        script.wait(vote);
        assert_eq!(seconds(&script, 1.0, 0.5), (50.5, 20.5));
        assert_eq!(script.work().backward, 40.0);
        let all: Vec<_> = script.collectives().map(|(collective, times)| (collective.elements, times)).collect();
        assert_eq!(all, [(1 << 20, 10), (1 << 20, 10), (3, 1)]);
    }
}
