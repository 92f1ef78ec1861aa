//! The records of the present thread: spans, sections that follow one another, and what other threads do for it.

use super::event::{EventCategory, TimelineEvent, TimelineLane};
use super::now;
use super::recorder::{EngineTrack, TimelineRecorder, any_records};
use std::cell::RefCell;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::time::Instant;

/// The work of a thread.
#[derive(Default)]
struct ThreadContext {
    /// The engine that it works for, and its lane there.
    track: Option<(Arc<EngineTrack>, TimelineLane)>,
    /// The subject of that.
    of: Option<Arc<str>>,
    /// Sections that have not ended, from the outside in.
    sections: Vec<TimelineSpan>,
}

thread_local! {
    static CURRENT: RefCell<ThreadContext> = RefCell::default();
}

/// Whether the present thread works for an engine that records.
pub(crate) fn is_recording() -> bool {
    any_records() && CURRENT.with_borrow(|context| context.track.is_some())
}

/// An event from now to the span's end; nothing where nothing is recorded.
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
            TimelineEvent { start, end: start, rank, lane, kind, name, of: None, numbers: [("", 0); 2] },
        )))
    }

    /// The object of the work.
    pub fn of(mut self, of: impl FnOnce() -> String) -> Self {
        if let Some((_, event)) = &mut self.0 {
            event.of = Some(of().into());
        }
        self
    }

    /// The same, as it was where work was handed over.
    pub fn of_carried(mut self, carried: &CarriedContext) -> Self {
        if let (Some((_, event)), Some(carried)) = (&mut self.0, &carried.0) {
            event.of = carried.of.clone();
        }
        self
    }

    /// A number that is shown with it, two at most.
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
    /// Begins an event of the thread that calls the engine; nothing without a recorder.
    pub fn span(recorder: Option<&Self>, kind: EventCategory, name: &'static str) -> TimelineSpan {
        recorder.map_or_else(TimelineSpan::default, |recorder| {
            TimelineSpan::begin((recorder.track().clone(), TimelineLane::Training), kind, name)
        })
    }
}

/// Begins an event of the present thread.
pub(crate) fn span(kind: EventCategory, name: &'static str) -> TimelineSpan {
    if !any_records() {
        return TimelineSpan::default();
    }
    CURRENT.with_borrow(|context| {
        context.track.clone().map_or_else(TimelineSpan::default, |track| TimelineSpan::begin(track, kind, name))
    })
}

/// Work that the present thread hands over from now on is about `of`.
pub(crate) fn about(of: impl FnOnce() -> String) -> SubjectGuard {
    if !is_recording() {
        return SubjectGuard(None);
    }
    let of = Some(of().into());
    SubjectGuard(Some(CURRENT.with_borrow_mut(|context| std::mem::replace(&mut context.of, of))))
}

/// Ends what work is about.
#[must_use = "ends when it is dropped"]
pub(crate) struct SubjectGuard(Option<Option<Arc<str>>>);

impl Drop for SubjectGuard {
    fn drop(&mut self) {
        if let Some(before) = self.0.take() {
            CURRENT.with_borrow_mut(|context| context.of = before);
        }
    }
}

/// The present thread works for the engine of `recorder` from now on.
pub(crate) fn enter(recorder: Option<&TimelineRecorder>) -> EngineThreadGuard {
    EngineThreadGuard::new(recorder.map(|recorder| (recorder.track().clone(), TimelineLane::Training)))
}

/// Gives the thread back what it worked on before.
#[must_use = "ends when it is dropped"]
pub(crate) struct EngineThreadGuard(Option<ThreadContext>);

impl EngineThreadGuard {
    fn new(track: Option<(Arc<EngineTrack>, TimelineLane)>) -> Self {
        let context = |track| ThreadContext { track: Some(track), ..ThreadContext::default() };
        // What is entered again stays as it is: calls of an engine lie within one another.
        let same = |(track, _): &(Arc<EngineTrack>, TimelineLane)| {
            CURRENT.with_borrow(|context| context.track.as_ref().is_some_and(|(known, _)| Arc::ptr_eq(known, track)))
        };
        Self(track.filter(|track| !same(track)).map(|track| CURRENT.replace(context(track))))
    }
}

impl Drop for EngineThreadGuard {
    fn drop(&mut self) {
        if let Some(before) = self.0.take() {
            // Its sections end outside of the borrow.
            let ended = CURRENT.replace(before);
            drop(ended);
        }
    }
}

/// Sections of this level may begin from now on; the last one ends with it.
pub(crate) fn sections() -> SectionsGuard {
    let is_on = is_recording();
    if is_on {
        CURRENT.with_borrow_mut(|context| context.sections.push(TimelineSpan::default()));
    }
    SectionsGuard(is_on)
}

/// Ends a level of sections.
#[must_use = "ends when it is dropped"]
pub(crate) struct SectionsGuard(bool);

impl Drop for SectionsGuard {
    fn drop(&mut self) {
        // The last one ends outside of the borrow.
        let ended = if self.0 { CURRENT.with_borrow_mut(|context| context.sections.pop()) } else { None };
        drop(ended);
    }
}

/// Ends the section of this level, if there is one.
pub(crate) fn end_section() {
    replace_section(TimelineSpan::default);
}

/// Begins the next section of this level: an event that lasts until the next one.
pub(crate) fn section(kind: EventCategory, name: &'static str, of: impl FnOnce() -> String) {
    replace_section(|| span(kind, name).of(of));
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

/// The context that work takes along to another thread.
#[derive(Clone, Default)]
pub(crate) struct CarriedContext(Option<Arc<CarriedFields>>);

struct CarriedFields {
    track: Arc<EngineTrack>,
    of: Option<Arc<str>>,
    /// When it was handed over.
    at: u64,
}

/// The context for work that the present thread hands over.
pub(crate) fn carry() -> CarriedContext {
    if !any_records() {
        return CarriedContext::default();
    }
    CURRENT.with_borrow(|context| {
        let load = |(track, _): &(Arc<EngineTrack>, TimelineLane)| CarriedFields {
            track: track.clone(),
            of: context.of.clone(),
            at: now(),
        };
        CarriedContext(context.track.as_ref().map(load).map(Arc::new))
    })
}

impl CarriedContext {
    /// Begins an event of that work, with the microseconds that it has waited.
    pub fn span(&self, lane: TimelineLane, kind: EventCategory, name: &'static str) -> TimelineSpan {
        let Some(load) = &self.0 else { return TimelineSpan::default() };
        let mut span = TimelineSpan::begin((load.track.clone(), lane), kind, name).of_carried(self);
        if let Some((_, event)) = &mut span.0 {
            event.numbers[0] = ("queued_us", (event.start - load.at) / 1000);
        }
        span
    }

    /// Records that work where it is over: when it began and ended, and a number that is shown with it.
    #[cfg(feature = "cuda")]
    pub fn past(
        &self,
        lane: TimelineLane,
        kind: EventCategory,
        name: &'static str,
        times: [Instant; 2],
        number: (&'static str, u64),
    ) {
        let Some(load) = &self.0 else { return };
        let (now, context) = (now(), Instant::now());
        let [start, end] = times.map(|time| now.saturating_sub(context.duration_since(time).as_nanos() as u64));
        let CarriedFields { track, of, .. } = &**load;
        let (rank, lane, of, numbers) = (track.rank, lane.number(track.engine), of.clone(), [number, ("", 0)]);
        track.sink.record(TimelineEvent { start, end, rank, lane, kind, name, of, numbers });
    }

    /// The present thread does nothing else than that work from now on.
    pub fn enter(&self, lane: TimelineLane) -> EngineThreadGuard {
        EngineThreadGuard::new(self.0.as_ref().map(|load| (load.track.clone(), lane)))
    }
}
