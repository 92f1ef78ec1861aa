//! Messages to the user of a run that continues: warnings, and facts that are worth a line.

use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// How much is said: `log_level`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum LogLevel {
    /// Everything.
    Debug,
    /// Everything: the level of progress and of the notes on a configuration (default).
    Info,
    /// What went wrong while training continues.
    Warning,
    /// Nothing: what ends a run is its error.
    Error,
    /// As `Error`.
    Critical,
}

/// The least level that is said in this process.
static LEAST: AtomicU8 = AtomicU8::new(LogLevel::Info as u8);

/// Leaves out, in this process from now on, what is below `level`.
pub(crate) fn say_from(level: LogLevel) {
    LEAST.store(level as u8, Ordering::Relaxed);
}

fn is_said(level: LogLevel) -> bool {
    level as u8 >= LEAST.load(Ordering::Relaxed)
}

/// Reports a fact: through `tracing` where a subscriber listens, else on stderr.
pub fn say(message: &str) {
    if !is_said(LogLevel::Info) {
        return;
    }
    if tracing::dispatcher::has_been_set() {
        tracing::info!(target: "candle_zero", "{message}");
    } else {
        print(message);
    }
}

/// Reports what went wrong while the run continues, as [`say`] does.
pub(crate) fn warn(message: &str) {
    if !is_said(LogLevel::Warning) {
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
        // Only what is printed so can be kept from the screen by a test that passes.
        eprintln!("[candle-zero] {message}");
        return;
    }
    // A stream that is closed or full is no reason to stop training.
    _ = writeln!(std::io::stderr(), "[candle-zero] {message}");
}

/// Whether this program is one of cargo's tests, which lie in a folder of their own.
fn is_test_program() -> bool {
    static IS_TEST: OnceLock<bool> = OnceLock::new();
    *IS_TEST.get_or_init(|| {
        let program = std::env::current_exe().unwrap_or_default();
        program.parent().is_some_and(|folder| folder.ends_with("deps"))
    })
}
