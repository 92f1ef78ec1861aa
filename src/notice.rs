//! Messages to the user of a run that continues: warnings, and facts that are worth a line.

use std::io::Write as _;

/// Reports a message: through `tracing` where a subscriber listens, else on stderr.
pub(crate) fn say(message: &str) {
    if tracing::dispatcher::has_been_set() {
        tracing::info!(target: "candle_zero", "{message}");
    } else {
        // A stream that is closed or full is no reason to stop training.
        _ = writeln!(std::io::stderr(), "[candle-zero] {message}");
    }
}
