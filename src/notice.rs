//! Messages to the user that do not end a run: warnings and noteworthy facts.

use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// The minimum level of the messages that are reported (`log_level`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
#[non_exhaustive]
pub enum LogLevel {
    /// Everything.
    Debug,
    /// The default. Everything, because no message has a lower level. Progress messages and notes about a
    /// configuration have this level.
    Info,
    /// Only problems that do not end the training.
    Warning,
    /// No messages. A run that fails still reports its error.
    Error,
    /// The same as `Error`.
    Critical,
}

/// The minimum level that is reported in this process.
static MIN_LEVEL: AtomicU8 = AtomicU8::new(LogLevel::Info as u8);

/// Suppresses messages below `level` in this process from now on.
pub(crate) fn suppress_below(level: LogLevel) {
    MIN_LEVEL.store(level as u8, Ordering::Relaxed);
}

fn is_reported(level: LogLevel) -> bool {
    level as u8 >= MIN_LEVEL.load(Ordering::Relaxed)
}

/// Reports a fact: through `tracing` if a subscriber is set, otherwise on stderr.
pub fn emit(message: &str) {
    if !is_reported(LogLevel::Info) {
        return;
    }
    if tracing::dispatcher::has_been_set() {
        tracing::info!(target: "candle_zero", "{message}");
    } else {
        print(message);
    }
}

/// Reports a problem that does not end the run, in the same way as [`emit`].
pub(crate) fn warn(message: &str) {
    if !is_reported(LogLevel::Warning) {
        return;
    }
    if tracing::dispatcher::has_been_set() {
        tracing::warn!(target: "candle_zero", "{message}");
    } else {
        print(message);
    }
}

fn print(message: &str) {
    if is_test_program() {
        // The test harness captures only output that is printed in this way.
        eprintln!("[candle-zero] {message}");
        return;
    }
    // A closed or full stream must not stop the training.
    _ = writeln!(std::io::stderr(), "[candle-zero] {message}");
}

/// Returns whether this program is one of cargo's test programs, which are in the folder `deps`.
fn is_test_program() -> bool {
    static IS_TEST: OnceLock<bool> = OnceLock::new();
    *IS_TEST.get_or_init(|| {
        let program = std::env::current_exe().unwrap_or_default();
        program.parent().is_some_and(|folder| folder.ends_with("deps"))
    })
}
