//! The signals that reach the launcher, those that it passes on to the ranks, and the one that the kernel sends to the
//! ranks when the launcher dies.

use super::console;
use crate::error::{Error, LaunchError, Result};
use candle_zero::stop_signal::ignored_signals;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};

/// An event that the launcher waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LauncherEvent {
    /// A child may have ended.
    Child,
    /// The launcher and the ranks are asked to end.
    End(Signal),
    /// The terminal asks everything to stop temporarily.
    Suspend,
    /// A signal whose meaning the program defines.
    Pass(Signal),
    /// A message from another host has arrived.
    PeerMessage,
}

/// Starts to handle signals. Must be called before the first rank is started.
///
/// Other kinds of events may be sent to the same receiver.
pub(crate) fn listen() -> Result<(Sender<LauncherEvent>, Receiver<LauncherEvent>)> {
    let setup = |source| Error::from(LaunchError::Setup { what: "listening for signals", source });
    // nohup, and shells without job control, start programs with some of these signals ignored. They must stay ignored.
    let ignored = ignored_signals();
    let handled = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGTSTP].into_iter().filter(|n| !ignored(*n));
    let mut signals = Signals::new(handled.chain([SIGCHLD])).map_err(setup)?;
    let (sender, receiver) = channel();
    let event_sender = sender.clone();
    std::thread::Builder::new()
        .name("signals".to_string())
        .spawn(move || {
            for number in signals.forever() {
                let event = match number {
                    SIGCHLD => LauncherEvent::Child,
                    SIGINT => LauncherEvent::End(Signal::INT),
                    SIGHUP => LauncherEvent::End(Signal::HUP),
                    SIGTERM => LauncherEvent::End(Signal::TERM),
                    SIGTSTP => LauncherEvent::Suspend,
                    SIGUSR1 => LauncherEvent::Pass(Signal::USR1),
                    _ => LauncherEvent::Pass(Signal::USR2),
                };
                if matches!(event, LauncherEvent::End(_)) {
                    console::request_end();
                }
                if sender.send(event).is_err() {
                    return;
                }
            }
        })
        .map_err(setup)?;
    console::set_signals_handled();
    Ok((event_sender, receiver))
}

/// Stops this process as Ctrl-Z does. Returns when it is continued.
pub(crate) fn suspend_self() {
    // This cannot fail for a stop signal; if it did, continuing would be right.
    let _ = signal_hook::low_level::emulate_default_handler(SIGTSTP);
}

/// Returns the name and the number of a signal, such as `SIGKILL (9)`, or `signal 60` if it has no name.
pub(crate) fn name(number: i32) -> String {
    match signal_hook::low_level::signal_name(number) {
        Some(name) => format!("{name} ({number})"),
        None => format!("signal {number}"),
    }
}

/// Makes the kernel send `signal` to the child when the launcher dies, however it dies.
///
/// The kernel watches the *thread* that starts the child, so that thread must be the main thread.
pub(crate) fn die_with_parent(command: &mut Command, signal: Signal) {
    let parent = getpid();
    let in_child = move || {
        set_parent_process_death_signal(Some(signal))?;
        // The launcher may have died between fork and the call above. In this case, no signal will ever arrive.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::from(rustix::io::Errno::SRCH)) }
    };
    // SAFETY: between fork and exec, only async-signal-safe calls are allowed. The closure makes two system calls
    // (prctl, getppid); it does not allocate, lock or panic.
    unsafe {
        command.pre_exec(in_child);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_named() {
        assert_eq!(name(9), "SIGKILL (9)");
        assert_eq!(name(60), "signal 60");
    }
}
