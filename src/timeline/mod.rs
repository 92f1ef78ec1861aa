//! The work of each rank over time: events of all ranks on one clock, as a trace that Perfetto shows.
//!
//! ```text
//!   span, section -> events in memory -> [every 250 ms, on a thread] lines of a part -> trace (all parts, sorted)
//!   (thread_state.rs) (event_sink.rs)                                   (event_sink.rs)   (trace.rs; job_timeline.rs: of zerorun)
//! ```
//!
//! A span is a guard: what lies between its making and its end is an event. Spans cost one relaxed load while no engine
//! of the process records. An engine records where [`EngineBuilder::timeline`](crate::EngineBuilder::timeline),
//! `zerorun --timeline` or the environment say so; a thread records for the engine whose call it carries out, and work
//! that it hands to another thread takes along ([`CarriedContext`]) whose it is and what it is about.

mod event;
mod event_sink;
mod job_timeline;
mod recorder;
mod thread_state;
mod trace;

pub(crate) use event::{EventCategory, TimelineLane};
pub use job_timeline::JobTimeline;
pub(crate) use recorder::TimelineRecorder;
pub(crate) use thread_state::{
    CarriedContext, TimelineSpan, about, carry, end_section, enter, is_recording, section, sections, span,
};

/// Where this process alone writes its timeline.
pub const FILE: &str = "CANDLE_ZERO_TIMELINE";
/// The folder in which `zerorun` expects the parts of its ranks.
pub const PARTS: &str = "CANDLE_ZERO_TIMELINE_PARTS";

/// Nanoseconds of the clock that all processes of this machine share.
fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}
