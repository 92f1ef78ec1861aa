//! Messages to the user of a run that continues: warnings, and facts that are worth a line.

use std::io::Write as _;
use std::sync::OnceLock;

/// Reports a message: through `tracing` where a subscriber listens, else on stderr.
pub(crate) fn say(message: &str) {
    if tracing::dispatcher::has_been_set() {
        tracing::info!(target: "candle_zero", "{message}");
    } else if is_test_program() {
        // Only what is printed so can be kept from the screen by a test that passes.
        eprintln!("[candle-zero] {message}");
    } else {
        // A stream that is closed or full is no reason to stop training.
        _ = writeln!(std::io::stderr(), "[candle-zero] {message}");
    }
}

/// Whether this program is one of cargo's tests, which lie in a folder of their own.
fn is_test_program() -> bool {
    static IS_TEST: OnceLock<bool> = OnceLock::new();
    *IS_TEST.get_or_init(|| {
        let program = std::env::current_exe().unwrap_or_default();
        program.parent().is_some_and(|folder| folder.ends_with("deps"))
    })
}
