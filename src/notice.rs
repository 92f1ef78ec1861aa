//! Messages to the user of a run that continues: warnings, and facts that are worth a line.

use std::io::Write as _;
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
pub(crate) fn say(message: &str) {
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
    // A stream that is closed or full is no reason to stop training.
    _ = writeln!(std::io::stderr(), "[candle-zero] {message}");
}
