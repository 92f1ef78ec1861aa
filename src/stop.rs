//! Signals that ask this process to end, noted for a training loop that looks.

use crate::util::lock;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// A variable that `zerorun` gives to its ranks.
pub(crate) const RESTART: &str = "ZERORUN_RESTART";

/// Whether SIGTERM or SIGINT has come. From the first call on they do nothing else.
pub(crate) fn asked_to_stop() -> io::Result<bool> {
    static ASKED: Mutex<Option<Arc<AtomicBool>>> = Mutex::new(None);
    let mut asked = lock(&ASKED);
    let flag = match &*asked {
        Some(flag) => flag,
        None => asked.insert(listen()?),
    };
    Ok(flag.load(Ordering::SeqCst))
}

fn listen() -> io::Result<Arc<AtomicBool>> {
    let asked = Arc::new(AtomicBool::new(false));
    // A scheduler sends a signal to launcher and ranks, and the launcher passes it on: there it is the launcher that
    // counts signals.
    let is_alone = std::env::var_os(RESTART).is_none();
    for signal in [SIGTERM, SIGINT] {
        if is_alone {
            // Before the next line: the first signal finds the flag unset.
            flag::register_conditional_default(signal, Arc::clone(&asked))?;
        }
        flag::register(signal, Arc::clone(&asked))?;
    }
    Ok(asked)
}
