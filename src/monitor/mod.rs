//! What a run tells while it goes: metrics for programs, progress for people.

mod memory;
mod metrics;
mod progress;

pub use memory::rss_peak_bytes;
pub use metrics::MetricsWriter;
pub use progress::Progress;
