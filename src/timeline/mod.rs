//! The work of each rank over time: events of all ranks on a common clock, as a trace for Perfetto.
//!
//! ```text
//!   span, section -> events in memory -> [every 250 ms, on a thread] lines of a part -> trace (all parts, sorted)
//!   (thread_spans.rs) (event_sink.rs)                                   (event_sink.rs)   (trace.rs, job_timeline.rs)
//! ```
//!
//! A span is a guard: the time between its creation and its end is an event. Spans cost one relaxed atomic load while
//! no engine of the process records. An engine records if [`EngineBuilder::timeline`](crate::EngineBuilder::timeline),
//! `zerorun --timeline` or the environment requests it. A thread records for the engine whose call it runs, and work
//! that it hands to another thread carries the engine and the subject along (`CarriedContext`).

mod event;
mod event_sink;
mod job_timeline;
mod recorder;
mod thread_spans;
mod trace;

pub(crate) use event::{EventCategory, TimelineLane};
pub use job_timeline::JobTimeline;
pub(crate) use recorder::TimelineRecorder;
pub(crate) use thread_spans::{
    CarriedContext, TimelineSpan, carry, end_section, enter, is_recording, section, sections, set_subject, span,
};

/// The environment variable that names the file to which this process writes its own timeline.
pub const FILE: &str = "CANDLE_ZERO_TIMELINE";
/// The environment variable that names the folder in which `zerorun` expects the part files of its ranks.
pub const PARTS: &str = "CANDLE_ZERO_TIMELINE_PARTS";

/// Returns the time in nanoseconds on the monotonic clock that all processes of this machine share.
fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}
