//! What a run tells while it goes: metrics for programs, progress for people.

mod memory;
mod metrics;
mod progress;

pub use memory::rss_peak_bytes;
pub use metrics::MetricsWriter;
pub use progress::Progress;

/// Says something to the user, once and aloud: through `tracing` where a subscriber listens, else on stderr.
pub fn say(message: &str) {
    if tracing::dispatcher::has_been_set() {
        tracing::info!(target: "candle_zero", "{message}");
    } else {
        eprintln!("[candle-zero] {message}");
    }
}
