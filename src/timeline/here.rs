//! The records of the present thread: spans, sections that follow one another, and what other threads do for it.

use super::event::{Event, Kind, Lane};
use super::now;
use super::recorder::{Recorder, Track, any_records};
use std::cell::RefCell;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::time::Instant;

/// The work of a thread.
#[derive(Default)]
struct Context {
    /// The engine that it works for, and its lane there.
    track: Option<(Arc<Track>, Lane)>,
    /// The subject of that.
    of: Option<Arc<str>>,
    /// Sections that have not ended, from the outside in.
    sections: Vec<Span>,
}

thread_local! {
    static HERE: RefCell<Context> = RefCell::default();
}

/// Whether the present thread works for an engine that records.
pub(crate) fn is_recording() -> bool {
    any_records() && HERE.with_borrow(|here| here.track.is_some())
}

/// An event from now to the span's end; nothing where nothing is recorded.
#[must_use = "an event ends when its span is dropped"]
#[derive(Default)]
pub(crate) struct Span(Option<(Arc<Track>, Event)>);

impl Span {
    pub(super) fn begin((track, lane): (Arc<Track>, Lane), kind: Kind, name: &'static str) -> Self {
        let (rank, lane, start) = (track.rank, lane.number(track.engine), now());
        Self(Some((track, Event { start, end: start, rank, lane, kind, name, of: None, numbers: [("", 0); 2] })))
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

impl Drop for Span {
    fn drop(&mut self) {
        if let Some((track, mut event)) = self.0.take() {
            event.end = now();
            track.sink.record(event);
        }
    }
}

impl Recorder {
    /// Begins an event of the thread that calls the engine; nothing without a recorder.
    pub fn span(recorder: Option<&Self>, kind: Kind, name: &'static str) -> Span {
        recorder
            .map_or_else(Span::default, |recorder| Span::begin((recorder.track().clone(), Lane::Training), kind, name))
    }
}

/// Begins an event of the present thread.
pub(crate) fn span(kind: Kind, name: &'static str) -> Span {
    if !any_records() {
        return Span::default();
    }
    HERE.with_borrow(|here| here.track.clone().map_or_else(Span::default, |track| Span::begin(track, kind, name)))
}

/// Work that the present thread hands over from now on is about `of`.
pub(crate) fn about(of: impl FnOnce() -> String) -> About {
    if !is_recording() {
        return About(None);
    }
    let of = Some(of().into());
    About(Some(HERE.with_borrow_mut(|here| std::mem::replace(&mut here.of, of))))
}

/// Ends what work is about.
#[must_use = "ends when it is dropped"]
pub(crate) struct About(Option<Option<Arc<str>>>);

impl Drop for About {
    fn drop(&mut self) {
        if let Some(before) = self.0.take() {
            HERE.with_borrow_mut(|here| here.of = before);
        }
    }
}

/// The present thread works for the engine of `recorder` from now on.
pub(crate) fn enter(recorder: Option<&Recorder>) -> EntryGuard {
    EntryGuard::new(recorder.map(|recorder| (recorder.track().clone(), Lane::Training)))
}

/// Gives the thread back what it worked on before.
#[must_use = "ends when it is dropped"]
pub(crate) struct EntryGuard(Option<Context>);

impl EntryGuard {
    fn new(track: Option<(Arc<Track>, Lane)>) -> Self {
        let here = |track| Context { track: Some(track), ..Context::default() };
        // What is entered again stays as it is: calls of an engine lie within one another.
        let same = |(track, _): &(Arc<Track>, Lane)| {
            HERE.with_borrow(|here| here.track.as_ref().is_some_and(|(known, _)| Arc::ptr_eq(known, track)))
        };
        Self(track.filter(|track| !same(track)).map(|track| HERE.replace(here(track))))
    }
}

impl Drop for EntryGuard {
    fn drop(&mut self) {
        if let Some(before) = self.0.take() {
            // Its sections end outside of the borrow.
            let ended = HERE.replace(before);
            drop(ended);
        }
    }
}

/// Sections of this level may begin from now on; the last one ends with it.
pub(crate) fn sections() -> Sections {
    let is_on = is_recording();
    if is_on {
        HERE.with_borrow_mut(|here| here.sections.push(Span::default()));
    }
    Sections(is_on)
}

/// Ends a level of sections.
#[must_use = "ends when it is dropped"]
pub(crate) struct Sections(bool);

impl Drop for Sections {
    fn drop(&mut self) {
        // The last one ends outside of the borrow.
        let ended = if self.0 { HERE.with_borrow_mut(|here| here.sections.pop()) } else { None };
        drop(ended);
    }
}

/// Ends the section of this level, if there is one.
pub(crate) fn end_section() {
    replace_section(Span::default);
}

/// Begins the next section of this level: an event that lasts until the next one.
pub(crate) fn section(kind: Kind, name: &'static str, of: impl FnOnce() -> String) {
    replace_section(|| span(kind, name).of(of));
}

fn replace_section(next: impl FnOnce() -> Span) {
    if is_recording() {
        let take = |here: &mut Context| here.sections.last_mut().map(std::mem::take);
        if HERE.with_borrow_mut(take).is_some() {
            let next = next();
            HERE.with_borrow_mut(|here| here.sections.last_mut().map(|section| *section = next));
        }
    }
}

/// The context that work takes along to another thread.
#[derive(Clone, Default)]
pub(crate) struct CarriedContext(Option<Arc<Load>>);

struct Load {
    track: Arc<Track>,
    of: Option<Arc<str>>,
    /// When it was handed over.
    at: u64,
}

/// The context for work that the present thread hands over.
pub(crate) fn carry() -> CarriedContext {
    if !any_records() {
        return CarriedContext::default();
    }
    HERE.with_borrow(|here| {
        let load = |(track, _): &(Arc<Track>, Lane)| Load { track: track.clone(), of: here.of.clone(), at: now() };
        CarriedContext(here.track.as_ref().map(load).map(Arc::new))
    })
}

impl CarriedContext {
    /// Begins an event of that work, with the microseconds that it has waited.
    pub fn span(&self, lane: Lane, kind: Kind, name: &'static str) -> Span {
        let Some(load) = &self.0 else { return Span::default() };
        let mut span = Span::begin((load.track.clone(), lane), kind, name).of_carried(self);
        if let Some((_, event)) = &mut span.0 {
            event.numbers[0] = ("queued_us", (event.start - load.at) / 1000);
        }
        span
    }

    /// Records that work where it is over: when it began and ended, and a number that is shown with it.
    #[cfg(feature = "cuda")]
    pub fn past(&self, lane: Lane, kind: Kind, name: &'static str, times: [Instant; 2], number: (&'static str, u64)) {
        let Some(load) = &self.0 else { return };
        let (now, here) = (now(), Instant::now());
        let [start, end] = times.map(|time| now.saturating_sub(here.duration_since(time).as_nanos() as u64));
        let Load { track, of, .. } = &**load;
        let (rank, lane, of, numbers) = (track.rank, lane.number(track.engine), of.clone(), [number, ("", 0)]);
        track.sink.record(Event { start, end, rank, lane, kind, name, of, numbers });
    }

    /// The present thread does nothing else than that work from now on.
    pub fn enter(&self, lane: Lane) -> EntryGuard {
        EntryGuard::new(self.0.as_ref().map(|load| (load.track.clone(), lane)))
    }
}
