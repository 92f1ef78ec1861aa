//! Requests to end this process: signals, recorded for a training loop to check, and the step at which a job is meant
//! to pause.

use crate::util::lock;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The environment variable with which `zerorun` gives its ranks the number of restarts.
pub const RESTART: &str = "ZERORUN_RESTART";

/// The variable with the number of optimizer steps after which a job is asked to end, as if by a signal.
/// `zerorun sweep` pauses trials with it.
pub const STOP_AT: &str = "CANDLE_ZERO_STOP_AT";

/// Returns the number of optimizer steps after which the job is asked to end, if [`STOP_AT`] is set.
///
/// # Errors
/// The value, if it is not a number of steps.
pub fn planned_stop() -> Result<Option<u64>, String> {
    match std::env::var_os(STOP_AT).filter(|value| !value.is_empty()) {
        None => Ok(None),
        Some(value) => {
            let value = value.to_string_lossy();
            value.parse().map(Some).map_err(|_| value.into_owned())
        }
    }
}

/// Returns whether a job that has ended after this many optimizer steps was meant to end there.
pub fn is_planned_stop(steps: u64) -> bool {
    planned_stop().is_ok_and(|planned| planned.is_some_and(|planned| steps >= planned))
}

/// Returns whether SIGTERM, SIGINT or SIGHUP (a closed terminal) has arrived since the first call. From then on, the
/// first such signal has no other effect.
pub fn asked_to_stop() -> io::Result<bool> {
    static STOP_FLAG: Mutex<Option<Arc<AtomicBool>>> = Mutex::new(None);
    let mut stop_flag = lock(&STOP_FLAG);
    let flag = match &*stop_flag {
        Some(flag) => flag,
        None => stop_flag.insert(listen()?),
    };
    Ok(flag.load(Ordering::SeqCst))
}

fn listen() -> io::Result<Arc<AtomicBool>> {
    let stop_flag = Arc::new(AtomicBool::new(false));
    // A scheduler sends a signal to the launcher and to the ranks, and the launcher passes it on. Therefore, under a
    // launcher, only the launcher counts signals.
    let is_alone = std::env::var_os(RESTART).is_none();
    // A program started by nohup keeps running when its terminal is closed.
    let handles_sighup = !ignored_signals()(SIGHUP);
    for signal in [SIGTERM, SIGINT].into_iter().chain(handles_sighup.then_some(SIGHUP)) {
        if is_alone {
            // This handler is registered before the next one, so that the first signal finds the flag unset.
            flag::register_conditional_default(signal, Arc::clone(&stop_flag))?;
        }
        flag::register(signal, Arc::clone(&stop_flag))?;
    }
    Ok(stop_flag)
}

/// Returns a predicate for the signals that this process ignores, as listed by the kernel; when the process starts,
/// these are the signals that its parent made it ignore.
pub fn ignored_signals() -> impl Fn(i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = ignored_mask(&status);
    move |number| mask >> (number - 1) & 1 == 1
}

fn ignored_mask(status: &str) -> u64 {
    let hex = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    hex.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_mask_of_ignored_signals_is_read() {
        let mask = ignored_mask("Name:\tx\nSigBlk:\tffffffffffffffff\nSigIgn:\t0000000000001001\nSigCgt:\t00\n");
        assert_eq!(mask, 1 | 1 << 12, "SIGHUP is bit 0, SIGPIPE bit 12");
        assert_eq!(ignored_mask("no such line"), 0);
    }
}
