//! The spans and consecutive sections of the current thread, and their context for other threads.

use super::event::{EventCategory, TimelineEvent, TimelineLane};
use super::now;
use super::recorder::{EngineTrack, TimelineRecorder, is_any_recording};
use std::cell::RefCell;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::time::Instant;

/// The recording context of a thread.
#[derive(Default)]
struct ThreadContext {
    /// The engine that the thread works for, and the thread's lane in it.
    track: Option<(Arc<EngineTrack>, TimelineLane)>,
    /// The subject of the work.
    subject: Option<Arc<str>>,
    /// The sections that have not ended, the outermost first.
    sections: Vec<TimelineSpan>,
}

thread_local! {
    static CURRENT: RefCell<ThreadContext> = RefCell::default();
}

/// Returns whether the current thread works for an engine that records.
pub(crate) fn is_recording() -> bool {
    is_any_recording() && CURRENT.with_borrow(|context| context.track.is_some())
}

/// An event that lasts from the span's creation to its end; empty if nothing is recorded.
#[must_use = "an event ends when its span is dropped"]
#[derive(Default)]
pub(crate) struct TimelineSpan(Option<(Arc<EngineTrack>, TimelineEvent)>);

impl TimelineSpan {
    pub(super) fn begin(
        (track, lane): (Arc<EngineTrack>, TimelineLane),
        kind: EventCategory,
        name: &'static str,
    ) -> Self {
        let (rank, lane, start) = (track.rank, lane.number(track.engine), now());
        Self(Some((
            track,
            TimelineEvent { start, end: start, rank, lane, kind, name, subject: None, numbers: [("", 0); 2] },
        )))
    }

    /// Sets the subject of the work.
    pub fn with_subject(mut self, subject: impl FnOnce() -> String) -> Self {
        if let Some((_, event)) = &mut self.0 {
            event.subject = Some(subject().into());
        }
        self
    }

    /// Sets the subject of the work to that of the context in which the work was handed over.
    pub fn with_subject_of(mut self, carried: &CarriedContext) -> Self {
        if let (Some((_, event)), Some(carried)) = (&mut self.0, &carried.0) {
            event.subject = carried.subject.clone();
        }
        self
    }

    /// Adds a number that is shown with the event. An event has room for two numbers; any others are ignored.
    pub fn with(mut self, name: &'static str, number: u64) -> Self {
        if let Some((_, event)) = &mut self.0
            && let Some(free) = event.numbers.iter_mut().find(|(name, _)| name.is_empty())
        {
            *free = (name, number);
        }
        self
    }
}

impl Drop for TimelineSpan {
    fn drop(&mut self) {
        if let Some((track, mut event)) = self.0.take() {
            event.end = now();
            track.sink.record(event);
        }
    }
}

impl TimelineRecorder {
    /// Begins an event of the thread that calls the engine. If there is no recorder, returns an empty span.
    pub fn span(recorder: Option<&Self>, kind: EventCategory, name: &'static str) -> TimelineSpan {
        recorder.map_or_else(TimelineSpan::default, |recorder| {
            TimelineSpan::begin((recorder.track().clone(), TimelineLane::Training), kind, name)
        })
    }
}

/// Begins an event of the current thread.
pub(crate) fn span(kind: EventCategory, name: &'static str) -> TimelineSpan {
    if !is_any_recording() {
        return TimelineSpan::default();
    }
    CURRENT.with_borrow(|context| {
        context.track.clone().map_or_else(TimelineSpan::default, |track| TimelineSpan::begin(track, kind, name))
    })
}

/// Sets `subject` as the subject of work that the current thread hands over until the guard is dropped.
pub(crate) fn set_subject(subject: impl FnOnce() -> String) -> SubjectGuard {
    if !is_recording() {
        return SubjectGuard(None);
    }
    let subject = Some(subject().into());
    SubjectGuard(Some(CURRENT.with_borrow_mut(|context| std::mem::replace(&mut context.subject, subject))))
}

/// A guard that restores the previous subject when dropped.
#[must_use = "the previous subject returns when the guard is dropped"]
pub(crate) struct SubjectGuard(Option<Option<Arc<str>>>);

impl Drop for SubjectGuard {
    fn drop(&mut self) {
        if let Some(previous) = self.0.take() {
            CURRENT.with_borrow_mut(|context| context.subject = previous);
        }
    }
}

/// Makes the current thread work for the engine of `recorder` until the guard is dropped.
pub(crate) fn enter(recorder: Option<&TimelineRecorder>) -> EngineThreadGuard {
    EngineThreadGuard::new(recorder.map(|recorder| (recorder.track().clone(), TimelineLane::Training)))
}

/// A guard that restores the thread's previous context when dropped.
#[must_use = "the previous context returns when the guard is dropped"]
pub(crate) struct EngineThreadGuard(Option<ThreadContext>);

impl EngineThreadGuard {
    fn new(track: Option<(Arc<EngineTrack>, TimelineLane)>) -> Self {
        let context = |track| ThreadContext { track: Some(track), ..ThreadContext::default() };
        // Entering the same engine again changes nothing: engine calls may be nested.
        let is_current = |(track, _): &(Arc<EngineTrack>, TimelineLane)| {
            CURRENT.with_borrow(|context| context.track.as_ref().is_some_and(|(active, _)| Arc::ptr_eq(active, track)))
        };
        Self(track.filter(|track| !is_current(track)).map(|track| CURRENT.replace(context(track))))
    }
}

impl Drop for EngineThreadGuard {
    fn drop(&mut self) {
        if let Some(previous) = self.0.take() {
            // The thread's sections end outside the borrow.
            let ended = CURRENT.replace(previous);
            drop(ended);
        }
    }
}

/// Opens a level of sections. When the level ends, its last section ends too.
pub(crate) fn sections() -> SectionsGuard {
    let is_on = is_recording();
    if is_on {
        CURRENT.with_borrow_mut(|context| context.sections.push(TimelineSpan::default()));
    }
    SectionsGuard(is_on)
}

/// A guard that ends a level of sections.
#[must_use = "the level of sections ends when its guard is dropped"]
pub(crate) struct SectionsGuard(bool);

impl Drop for SectionsGuard {
    fn drop(&mut self) {
        // The last section ends outside the borrow.
        let ended = if self.0 { CURRENT.with_borrow_mut(|context| context.sections.pop()) } else { None };
        drop(ended);
    }
}

/// Ends the section of this level, if there is one.
pub(crate) fn end_section() {
    replace_section(TimelineSpan::default);
}

/// Begins the next section of this level: an event that lasts until the next section.
pub(crate) fn section(kind: EventCategory, name: &'static str, subject: impl FnOnce() -> String) {
    replace_section(|| span(kind, name).with_subject(subject));
}

fn replace_section(next: impl FnOnce() -> TimelineSpan) {
    if is_recording() {
        let take = |context: &mut ThreadContext| context.sections.last_mut().map(std::mem::take);
        if CURRENT.with_borrow_mut(take).is_some() {
            let next = next();
            CURRENT.with_borrow_mut(|context| context.sections.last_mut().map(|section| *section = next));
        }
    }
}

/// The context that work carries along to another thread.
#[derive(Clone, Default)]
pub(crate) struct CarriedContext(Option<Arc<CarriedFields>>);

struct CarriedFields {
    track: Arc<EngineTrack>,
    subject: Option<Arc<str>>,
    /// The time at which the work was handed over.
    queued_at: u64,
}

/// Returns the context for work that the current thread hands over.
pub(crate) fn carry() -> CarriedContext {
    if !is_any_recording() {
        return CarriedContext::default();
    }
    CURRENT.with_borrow(|context| {
        let fields = |(track, _): &(Arc<EngineTrack>, TimelineLane)| CarriedFields {
            track: track.clone(),
            subject: context.subject.clone(),
            queued_at: now(),
        };
        CarriedContext(context.track.as_ref().map(fields).map(Arc::new))
    })
}

impl CarriedContext {
    /// Begins an event of the work, with the number of microseconds for which the work has waited.
    pub fn span(&self, lane: TimelineLane, kind: EventCategory, name: &'static str) -> TimelineSpan {
        let Some(fields) = &self.0 else { return TimelineSpan::default() };
        let mut span = TimelineSpan::begin((fields.track.clone(), lane), kind, name).with_subject_of(self);
        if let Some((_, event)) = &mut span.0 {
            event.numbers[0] = ("queued_us", (event.start - fields.queued_at) / 1000);
        }
        span
    }

    /// Records finished work, with its start and end times and a number that is shown with it.
    #[cfg(feature = "cuda")]
    pub fn record_finished(
        &self,
        lane: TimelineLane,
        kind: EventCategory,
        name: &'static str,
        times: [Instant; 2],
        number: (&'static str, u64),
    ) {
        let Some(fields) = &self.0 else { return };
        let (now, instant) = (now(), Instant::now());
        let [start, end] = times.map(|time| now.saturating_sub(instant.duration_since(time).as_nanos() as u64));
        let CarriedFields { track, subject, .. } = &**fields;
        let (rank, lane, subject) = (track.rank, lane.number(track.engine), subject.clone());
        let numbers = [number, ("", 0)];
        track.sink.record(TimelineEvent { start, end, rank, lane, kind, name, subject, numbers });
    }

    /// Makes the current thread work for the engine of this context until the guard is dropped.
    pub fn enter(&self, lane: TimelineLane) -> EngineThreadGuard {
        EngineThreadGuard::new(self.0.as_ref().map(|fields| (fields.track.clone(), lane)))
    }
}
