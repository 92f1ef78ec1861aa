//! The messages of `zerorun` itself, and the exit codes that go with them.

use candle_zero::Error;
use candle_zero::util::lock;
use clap::error::ErrorKind;
use std::fmt::Display;
use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Exit code for a wrong command line and for a build or start that could not be set up.
pub(crate) const EXIT_SETUP: u8 = 2;

/// Where a line goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConsoleStream {
    Out,
    Err,
}

/// Bytes that are written at once.
const AT_ONCE: usize = 4096;
/// How often a writer that waits looks whether the launcher is asked to end.
const TICK: Duration = Duration::from_millis(100);
/// How long a stream may take nothing, once the launcher is asked to end, before all that follows is thrown away.
const PATIENCE: Duration = Duration::from_secs(1);

/// Signals that ask the launcher to end are listened to.
static LISTENING: AtomicBool = AtomicBool::new(false);
/// One has come.
static ASKED_TO_END: AtomicBool = AtomicBool::new(false);

/// From now on, signals do not end the process by themselves.
pub(super) fn signals_are_heard() {
    LISTENING.store(true, Ordering::SeqCst);
}

/// From now on, output that nobody takes is thrown away.
pub(super) fn asked_to_end() {
    ASKED_TO_END.store(true, Ordering::SeqCst);
}

/// Writes all of `bytes`, however long the terminal or pipe takes; after [`asked_to_end`] no longer than about a second
/// without any progress. One writer at a time, as with the standard library's streams.
pub(super) fn write(stream: ConsoleStream, bytes: &[u8]) -> io::Result<()> {
    static WRITERS: [Mutex<ConsoleWriter>; 2] = [Mutex::new(ConsoleWriter::Direct), Mutex::new(ConsoleWriter::Direct)];
    let mut writer = lock(&WRITERS[stream as usize]);
    if matches!(*writer, ConsoleWriter::Direct) && LISTENING.load(Ordering::SeqCst) {
        *writer = ConsoleWriter::start(stream);
    }
    writer.write(stream, bytes)
}

/// The way to one of the launcher's own streams.
enum ConsoleWriter {
    /// By the thread that has something to say.
    Direct,
    /// By a thread of its own: one that writes into a full pipe cannot be called back, one that waits for it can give up.
    Thread { chunks: Sender<Vec<u8>>, written: Receiver<io::Result<()>> },
    /// Nobody takes anything.
    GivenUp,
}

impl ConsoleWriter {
    fn start(stream: ConsoleStream) -> Self {
        let (chunks, to_write) = channel::<Vec<u8>>();
        let (done, written) = channel();
        let work = move || {
            for chunk in to_write {
                if done.send(write_now(stream, &chunk)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name(format!("writes {}", stream.name())).spawn(work);
        thread.map_or(Self::Direct, |_| Self::Thread { chunks, written })
    }

    fn write(&mut self, stream: ConsoleStream, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Direct => write_now(stream, bytes),
            Self::GivenUp => Ok(()),
            Self::Thread { chunks, written } => {
                for chunk in bytes.chunks(AT_ONCE) {
                    // The thread ends with the sender.
                    let _ = chunks.send(chunk.to_vec());
                    let mut waited = Duration::ZERO;
                    loop {
                        match written.recv_timeout(TICK) {
                            Ok(result) => break result?,
                            Err(RecvTimeoutError::Timeout) if !ASKED_TO_END.load(Ordering::SeqCst) => {}
                            Err(RecvTimeoutError::Timeout) if waited < PATIENCE => waited += TICK,
                            // It cannot have ended before us.
                            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                                *self = Self::GivenUp;
                                return Ok(());
                            }
                        }
                    }
                }
                Ok(())
            }
        }
    }
}

fn write_now(stream: ConsoleStream, bytes: &[u8]) -> io::Result<()> {
    match stream {
        ConsoleStream::Out => {
            let mut out = io::stdout().lock();
            out.write_all(bytes).and_then(|()| out.flush())
        }
        ConsoleStream::Err => io::stderr().lock().write_all(bytes),
    }
}

impl ConsoleStream {
    fn name(self) -> &'static str {
        match self {
            Self::Out => "standard output",
            Self::Err => "standard error",
        }
    }
}

/// A line on stderr. A closed stderr must not change the exit code, as `eprintln!` would.
pub(crate) fn eprint(line: &str) {
    let _ = write(ConsoleStream::Err, format!("{line}\n").as_bytes());
}

/// Something that [`print()`] had to say went nowhere.
static LOST: AtomicBool = AtomicBool::new(false);

/// Whether standard output has taken all that this process printed, as far as anybody reads it: else it ends with an error.
pub(crate) fn all_is_written() -> bool {
    !LOST.load(Ordering::SeqCst)
}

/// Whether standard output took the text, as a line. If not, and there is a reader, that is said.
pub(crate) fn print(text: impl Display) -> bool {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => true,
        // Who reads the beginning, as `head` does, wants no more.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => false,
        Err(error) => {
            // Once: what follows goes the same way.
            if !LOST.swap(true, Ordering::SeqCst) {
                eprint(&cannot_write(ConsoleStream::Out, &error));
            }
            false
        }
    }
}

/// Whether what is printed may be coloured: standard output is a terminal, and `NO_COLOR` is not set.
pub(crate) fn colours() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// The message about a stream that cannot be written.
pub(super) fn cannot_write(stream: ConsoleStream, error: &io::Error) -> String {
    format!("zerorun: cannot write to {}: {error}", stream.name())
}

/// Says why nothing was done, or not all, and gives the exit code `code`.
pub(crate) fn refused(error: &Error, code: u8) -> ExitCode {
    eprint(&format!("zerorun: {error}"));
    ExitCode::from(code)
}

/// Why there is nothing to carry out: help or version was asked for, or the command line is wrong.
#[derive(Debug)]
pub(crate) struct CommandLineError(pub(crate) clap::Error);

impl CommandLineError {
    /// Prints the text where it belongs and gives the exit code.
    pub(crate) fn print(&self) -> ExitCode {
        if self.0.use_stderr() {
            eprint(self.message().trim_end());
            ExitCode::from(EXIT_SETUP)
        } else {
            // Help on a closed pipe is nobody's loss.
            let _ = self.0.print();
            ExitCode::SUCCESS
        }
    }

    pub(crate) fn message(&self) -> String {
        let wrong = std::env::args_os().find(|word| word.to_str().is_none());
        if let (ErrorKind::InvalidUtf8, Some(word)) = (self.0.kind(), wrong) {
            let word = word.to_string_lossy();
            return format!("zerorun: `{word}` is no UTF-8 text; rename the file or folder, or name a link to it");
        }
        let text = self.0.render().to_string();
        format!("zerorun: {}", text.strip_prefix("error: ").unwrap_or(&text))
    }
}
