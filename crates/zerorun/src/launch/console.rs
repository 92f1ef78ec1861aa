//! The messages of `zerorun` itself, and the matching exit codes.

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

/// The exit code for a wrong command line, for a build or start that could not be set up, and for failures of tools.
pub(crate) const EXIT_SETUP: u8 = 2;

/// The stream that a line is written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConsoleStream {
    Out,
    Err,
}

/// The number of bytes written at a time.
const WRITE_CHUNK: usize = 4096;
/// The interval at which a waiting writer checks whether the launcher should end.
const TICK: Duration = Duration::from_millis(100);
/// How long a stream may accept nothing before all further output is discarded, once the launcher should end.
const STALLED_STREAM_TIMEOUT: Duration = Duration::from_secs(1);

/// Whether signals that ask the launcher to end are handled.
static LISTENING: AtomicBool = AtomicBool::new(false);
/// Whether such a signal has arrived.
static END_REQUESTED: AtomicBool = AtomicBool::new(false);

/// Records that signals no longer end the process by default.
pub(super) fn set_signals_handled() {
    LISTENING.store(true, Ordering::SeqCst);
}

/// Records that the launcher should end. From then on, output that is not read is discarded.
pub(super) fn request_end() {
    END_REQUESTED.store(true, Ordering::SeqCst);
}

/// Writes all `bytes`, however long the terminal or pipe takes. After [`request_end`], gives up after about a second
/// without progress. Only one thread writes to a stream at a time, as with the standard library's streams.
pub(super) fn write(stream: ConsoleStream, bytes: &[u8]) -> io::Result<()> {
    static WRITERS: [Mutex<ConsoleWriter>; 2] = [Mutex::new(ConsoleWriter::Direct), Mutex::new(ConsoleWriter::Direct)];
    let mut writer = lock(&WRITERS[stream as usize]);
    if matches!(*writer, ConsoleWriter::Direct) && LISTENING.load(Ordering::SeqCst) {
        *writer = ConsoleWriter::start(stream);
    }
    writer.write(stream, bytes)
}

/// A writer to one of the launcher's own streams.
enum ConsoleWriter {
    /// Written by the calling thread.
    Direct,
    /// Written by a separate thread. A write to a full pipe cannot be cancelled, but waiting for the thread can.
    Thread { chunks: Sender<Vec<u8>>, written: Receiver<io::Result<()>> },
    /// Output is discarded because it is not read.
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
                for chunk in bytes.chunks(WRITE_CHUNK) {
                    // The thread ends when the sender is dropped.
                    let _ = chunks.send(chunk.to_vec());
                    let mut waited = Duration::ZERO;
                    loop {
                        match written.recv_timeout(TICK) {
                            Ok(result) => break result?,
                            Err(RecvTimeoutError::Timeout) if !END_REQUESTED.load(Ordering::SeqCst) => {}
                            Err(RecvTimeoutError::Timeout) if waited < STALLED_STREAM_TIMEOUT => waited += TICK,
                            // `Disconnected` does not occur: the thread runs as long as this writer exists.
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

/// Prints a line on stderr. A closed stderr must not change the exit code, as `eprintln!` would.
pub(crate) fn eprint(line: &str) {
    let _ = write(ConsoleStream::Err, format!("{line}\n").as_bytes());
}

/// Whether some output of [`print()`] was lost for a reason other than a closed pipe.
static OUTPUT_LOST: AtomicBool = AtomicBool::new(false);

/// Returns false if some output was lost for a reason other than a closed pipe. The process must then end with an error.
pub(crate) fn all_output_written() -> bool {
    !OUTPUT_LOST.load(Ordering::SeqCst)
}

/// Prints the text as a line. Returns whether standard output accepted it, and reports a failure unless the reader
/// closed the stream.
pub(crate) fn print(text: impl Display) -> bool {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => true,
        // A reader that wants only the beginning, such as `head`, has closed the stream.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => false,
        Err(error) => {
            // The failure is reported only once, because later output fails in the same way.
            if !OUTPUT_LOST.swap(true, Ordering::SeqCst) {
                eprint(&cannot_write(ConsoleStream::Out, &error));
            }
            false
        }
    }
}

/// Returns whether output may be coloured: standard output is a terminal, and `NO_COLOR` is not set or is empty.
pub(crate) fn colours() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Returns the message about a stream that cannot be written.
pub(super) fn cannot_write(stream: ConsoleStream, error: &io::Error) -> String {
    format!("zerorun: cannot write to {}: {error}", stream.name())
}

/// Prints why nothing, or not everything, was done, and returns the exit code `code`.
pub(crate) fn refused(error: &Error, code: u8) -> ExitCode {
    eprint(&format!("zerorun: {error}"));
    ExitCode::from(code)
}

/// Prints the text as a line. Returns the exit code of a command that does nothing else.
pub(crate) fn print_and_exit(text: impl Display) -> ExitCode {
    if print(text) { ExitCode::SUCCESS } else { ExitCode::from(EXIT_SETUP) }
}

/// The reason why nothing runs: help or version was requested, or the command line is wrong.
#[derive(Debug)]
pub(crate) struct CommandLineError(pub(crate) clap::Error);

impl CommandLineError {
    /// Prints the text to the matching stream and returns the exit code.
    pub(crate) fn print(&self) -> ExitCode {
        if self.0.use_stderr() {
            eprint(self.message().trim_end());
            ExitCode::from(EXIT_SETUP)
        } else {
            // Help on a closed pipe may be lost.
            let _ = self.0.print();
            ExitCode::SUCCESS
        }
    }

    pub(crate) fn message(&self) -> String {
        let wrong = std::env::args_os().find(|word| word.to_str().is_none());
        if let (ErrorKind::InvalidUtf8, Some(word)) = (self.0.kind(), wrong) {
            let word = word.to_string_lossy();
            return format!("zerorun: `{word}` is not UTF-8 text; rename the file or folder, or create a link to it");
        }
        let text = self.0.render().to_string();
        format!("zerorun: {}", text.strip_prefix("error: ").unwrap_or(&text))
    }
}
