//! The signals that reach the launcher, those that it passes on to the ranks or to other hosts' launchers, and the one
//! that the kernel sends to the ranks when the launcher dies.

use super::console;
use crate::error::{Error, LaunchError, Result};
use candle_zero::stop_signal::ignored_signals;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::io::{self, BufRead, Write};
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
                    SIGTSTP => LauncherEvent::Suspend,
                    number => match Signal::from_named_raw(number) {
                        Some(signal) => request_of(signal),
                        None => continue,
                    },
                };
                if sender.send(event).is_err() {
                    return;
                }
            }
        })
        .map_err(setup)?;
    console::set_signals_handled();
    Ok((event_sender, receiver))
}

/// Returns the signal with this number if it asks a launcher to end.
pub(super) fn ending_signal(number: i32) -> Option<Signal> {
    [Signal::INT, Signal::TERM, Signal::HUP].into_iter().find(|signal| signal.as_raw() == number)
}

/// Returns the event of a signal that asks the launcher to end, or that is passed on. Output is no longer waited for if
/// the launcher is asked to end.
pub(super) fn request_of(signal: Signal) -> LauncherEvent {
    match ending_signal(signal.as_raw()) {
        Some(signal) => {
            console::request_end();
            LauncherEvent::End(signal)
        }
        None => LauncherEvent::Pass(signal),
    }
}

/// Writes a signal to the standard input of another host's launcher, as a line that [`read_signals`] reads.
pub(crate) fn write_signal(to: &mut impl Write, signal: Signal) -> io::Result<()> {
    to.write_all(format!("{}\n", signal.as_raw()).as_bytes())
}

/// Reads signals, each from a line with its number, until the input ends. Other lines are ignored.
pub(crate) fn read_signals(from: impl BufRead, mut on_signal: impl FnMut(Signal)) {
    use Signal as S;
    let known = [S::INT, S::TERM, S::HUP, S::KILL, S::TSTP, S::CONT, S::USR1, S::USR2];
    for line in from.lines() {
        let Ok(line) = line else { break };
        known.into_iter().find(|signal| signal.as_raw().to_string() == line.trim()).map(&mut on_signal);
    }
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_named() {
        assert_eq!(name(9), "SIGKILL (9)");
        assert_eq!(name(60), "signal 60");
    }

    #[test]
    fn signals_arrive_in_their_order_and_other_lines_are_ignored() {
        let mut lines = Vec::new();
        for signal in [Signal::USR2, Signal::INT, Signal::KILL] {
            write_signal(&mut lines, signal).unwrap();
        }
        lines.extend(b"\n64\n-2\nTERM\n 1 \n15");
        let mut signals = Vec::new();
        read_signals(&lines[..], |signal| signals.push(signal));
        assert_eq!(signals, [Signal::USR2, Signal::INT, Signal::KILL, Signal::HUP, Signal::TERM]);
    }
}
