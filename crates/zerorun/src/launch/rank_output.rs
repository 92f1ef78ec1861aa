//! The output of several ranks on one screen: complete lines, each with the prefix `[rank N] ` or, if there are several
//! hosts, `[HOST rank N] `.
//!
//! A progress line that is redrawn with carriage returns is shown live on a terminal. A file gets only its last state,
//! which is what a terminal would show in the end.

use super::console::{self, ConsoleStream, eprint};
use super::job_record::JobRecordWriter;
use super::signals::LauncherEvent;
use super::stderr_tail::StderrTail;
use crate::error::{LaunchError, Result};
use candle_zero::util::lock;
use rustix::process::Signal;
use std::io::{self, IsTerminal, Read};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The maximum length of a line. A longer one is split. A program that never ends its lines therefore cannot exhaust
/// memory.
const MAX_LINE_BYTES: usize = 1 << 20;
const READ_CHUNK: usize = 64 << 10;
/// How long to wait for the last output after the last rank has ended. Only a process that left its rank's process
/// group can keep a pipe open longer.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// The interval at which signals are checked during that time.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A piece of a rank's output.
#[derive(Debug, PartialEq, Eq)]
enum OutputPiece<'a> {
    Line(&'a [u8]),
    /// The current state of a line that is being redrawn.
    Progress(&'a [u8]),
}

/// A splitter of bytes into lines.
#[derive(Debug, Default)]
struct LineSplitter {
    /// The bytes after the last line end or carriage return.
    pending: Vec<u8>,
    /// The text before the last carriage return of this line.
    redrawn: Vec<u8>,
    has_carriage_return: bool,
}

impl LineSplitter {
    fn feed(&mut self, bytes: &[u8], mut sink: impl FnMut(OutputPiece<'_>) -> io::Result<()>) -> io::Result<()> {
        let mut rest = bytes;
        while let Some(at) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            self.pending.extend_from_slice(&rest[..at]);
            if rest[at] == b'\n' {
                self.end_line(&mut sink)?;
            } else {
                self.has_carriage_return = true;
                if !self.pending.is_empty() {
                    std::mem::swap(&mut self.redrawn, &mut self.pending);
                    self.pending.clear();
                    sink(OutputPiece::Progress(&self.redrawn))?;
                }
            }
            rest = &rest[at + 1..];
        }
        self.pending.extend_from_slice(rest);
        if self.pending.len() > MAX_LINE_BYTES {
            return self.end_line(&mut sink);
        }
        if self.has_carriage_return && !rest.is_empty() {
            sink(OutputPiece::Progress(&self.pending))?;
        }
        Ok(())
    }

    fn end_line(&mut self, mut sink: impl FnMut(OutputPiece<'_>) -> io::Result<()>) -> io::Result<()> {
        // `text\r\n` has a line end of two bytes.
        let line = if self.pending.is_empty() { &self.redrawn } else { &self.pending };
        let outcome = sink(OutputPiece::Line(line));
        *self = Self::default();
        outcome
    }

    /// Outputs a last line without a line end.
    fn finish(&mut self, sink: impl FnMut(OutputPiece<'_>) -> io::Result<()>) -> io::Result<()> {
        if self.pending.is_empty() && self.redrawn.is_empty() { Ok(()) } else { self.end_line(sink) }
    }
}

/// The launcher's own stdout and stderr, written by one rank at a time.
#[derive(Debug)]
struct ConsoleScreen {
    out_is_terminal: bool,
    err_is_terminal: bool,
    /// Whether the terminal shows a progress line without a line end.
    progress_shown: Mutex<bool>,
}

const ERASE_LINE: &[u8] = b"\r\x1b[K";

impl ConsoleScreen {
    fn show(&self, stream: ConsoleStream, prefix: &[u8], piece: &OutputPiece<'_>) -> io::Result<()> {
        let on_terminal = match stream {
            ConsoleStream::Out => self.out_is_terminal,
            ConsoleStream::Err => self.err_is_terminal,
        };
        let (text, end): (&[u8], &[u8]) = match piece {
            OutputPiece::Line(text) => (text, b"\n"),
            OutputPiece::Progress(_) if !on_terminal => return Ok(()),
            OutputPiece::Progress(text) => (text, b""),
        };
        let mut progress_shown = lock(&self.progress_shown);
        let erase = if on_terminal && *progress_shown { ERASE_LINE } else { b"" };
        console::write(stream, &[erase, prefix, text, end].concat())?;
        if on_terminal {
            *progress_shown = end.is_empty();
        }
        Ok(())
    }

    fn end_progress_line(&self) {
        let mut progress_shown = lock(&self.progress_shown);
        if std::mem::take(&mut *progress_shown) {
            // The terminal may be gone.
            let _ = console::write(if self.err_is_terminal { ConsoleStream::Err } else { ConsoleStream::Out }, b"\n");
        }
    }
}

/// The threads that forward the ranks' output.
#[derive(Debug)]
pub(super) struct RankOutputForwarder {
    screen: Arc<ConsoleScreen>,
    /// The number of readers with bytes that are not written yet.
    busy: Arc<AtomicUsize>,
    ended_sender: Sender<()>,
    ended: Receiver<()>,
    running: usize,
    tails: Arc<Mutex<Vec<StderrTail>>>,
    /// Whether some output could not be written for a reason other than a closed pipe.
    output_lost: Arc<AtomicBool>,
    /// The name of this host, if there are several hosts, and the number of its first rank.
    host_and_first_rank: (Option<String>, usize),
    record: Arc<JobRecordWriter>,
}

/// The results of draining the output.
#[derive(Debug)]
pub(super) struct DrainedOutput {
    /// The last part of each rank's stderr output, by rank. Ranks without output may be missing.
    pub(super) tails: Vec<StderrTail>,
    /// Whether some output could not be written for a reason other than a closed pipe. This has been reported.
    pub(super) output_lost: bool,
    /// The last signal that asked the launcher to end while the output was drained.
    pub(super) end_signal: Option<Signal>,
}

impl RankOutputForwarder {
    /// Creates a forwarder for the output of one host's ranks. `host_and_first_rank` is the host's name, if there
    /// are other hosts, and the number of its first rank. Complete lines also go into `record`.
    pub(super) fn new(host_and_first_rank: (Option<String>, usize), record: Arc<JobRecordWriter>) -> Self {
        let (ended_sender, ended) = channel();
        let screen = ConsoleScreen {
            out_is_terminal: io::stdout().is_terminal(),
            err_is_terminal: io::stderr().is_terminal(),
            progress_shown: Mutex::new(false),
        };
        Self {
            screen: Arc::new(screen),
            busy: Arc::default(),
            ended_sender,
            ended,
            running: 0,
            tails: Arc::default(),
            output_lost: Arc::default(),
            host_and_first_rank,
            record,
        }
    }

    /// Forwards `from` to `stream` line by line until it ends, on a separate thread.
    pub(super) fn forward_lines(
        &mut self,
        rank: usize,
        mut from: impl Read + Send + 'static,
        stream: ConsoleStream,
    ) -> Result<()> {
        let screen = Arc::clone(&self.screen);
        let busy = Arc::clone(&self.busy);
        let ended = self.ended_sender.clone();
        let (host, first) = &self.host_and_first_rank;
        let host = host.as_ref().map(|host| format!("{host} ")).unwrap_or_default();
        let prefix = format!("[{host}rank {}] ", first + rank);
        let record = Arc::clone(&self.record);
        let tails = Arc::clone(&self.tails);
        let output_lost = Arc::clone(&self.output_lost);
        let work = move || {
            let show = |piece: OutputPiece<'_>| {
                if let OutputPiece::Line(line) = &piece {
                    if stream == ConsoleStream::Err {
                        remember(&tails, rank, line);
                    }
                    record.line(&prefix, line);
                }
                screen.show(stream, prefix.as_bytes(), &piece)
            };
            let mut splitter = LineSplitter::default();
            let mut buffer = vec![0; READ_CHUNK];
            loop {
                let read = match from.read(&mut buffer) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Ok(0) | Err(_) => break,
                    Ok(read) => read,
                };
                busy.fetch_add(1, Ordering::SeqCst);
                let written = splitter.feed(&buffer[..read], show);
                busy.fetch_sub(1, Ordering::SeqCst);
                if let Err(error) = written {
                    // Closing the pipe makes the rank's next write fail, as it would without a launcher.
                    if error.kind() != io::ErrorKind::BrokenPipe && !output_lost.swap(true, Ordering::SeqCst) {
                        eprint(&console::cannot_write(stream, &error));
                    }
                    break;
                }
            }
            // The final output of a rank cannot be shown if the output stream is closed.
            let _ = splitter.finish(show);
            let _ = ended.send(());
        };
        std::thread::Builder::new()
            .name(format!("output of rank {rank}"))
            .spawn(work)
            .map_err(|source| LaunchError::Setup { what: "starting a thread for a rank's output", source })?;
        self.running += 1;
        Ok(())
    }

    /// Waits until all output of the ranks is shown, or until the pipes that are still open have had no output for
    /// [`DRAIN_TIMEOUT`]. After a signal that asks the launcher to end, output that is not read is discarded (see
    /// [`console::write`]).
    pub(super) fn drain(mut self, events: &Receiver<LauncherEvent>) -> DrainedOutput {
        let mut end_signal = None;
        let mut last_activity = Instant::now();
        while self.running > 0 {
            match self.ended.recv_timeout(DRAIN_POLL_INTERVAL) {
                Ok(()) => {
                    self.running -= 1;
                    last_activity = Instant::now();
                }
                // A reader with pending text waits for a slow terminal or pipe, so keep waiting.
                Err(RecvTimeoutError::Timeout) if self.busy.load(Ordering::SeqCst) > 0 => {
                    last_activity = Instant::now();
                }
                Err(RecvTimeoutError::Timeout) if last_activity.elapsed() < DRAIN_TIMEOUT => {}
                Err(_) => break,
            }
            for event in events.try_iter() {
                if let LauncherEvent::End(signal) = event {
                    end_signal = Some(signal);
                }
            }
        }
        self.screen.end_progress_line();
        let tails = std::mem::take(&mut *lock(&self.tails));
        DrainedOutput { tails, output_lost: self.output_lost.load(Ordering::SeqCst), end_signal }
    }
}

fn remember(tails: &Mutex<Vec<StderrTail>>, rank: usize, line: &[u8]) {
    let mut tails = lock(tails);
    if tails.len() <= rank {
        tails.resize_with(rank + 1, StderrTail::default);
    }
    tails[rank].push(line);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the pieces of some reads, as `L:text` and `P:text`.
    fn pieces(reads: &[&str]) -> Vec<String> {
        let mut seen = Vec::new();
        let mut sink = |piece: OutputPiece<'_>| {
            seen.push(match piece {
                OutputPiece::Line(text) => format!("L:{}", String::from_utf8_lossy(text)),
                OutputPiece::Progress(text) => format!("P:{}", String::from_utf8_lossy(text)),
            });
            Ok(())
        };
        let mut splitter = LineSplitter::default();
        for read in reads {
            splitter.feed(read.as_bytes(), &mut sink).unwrap();
        }
        splitter.finish(&mut sink).unwrap();
        seen
    }

    #[test]
    fn lines_come_whole_whatever_the_reads() {
        assert_eq!(pieces(&["ab", "c\nd", "\n\n", "e"]), ["L:abc", "L:d", "L:", "L:e"]);
        assert_eq!(pieces(&["a\r\nb\r", "\nc"]), ["P:a", "L:a", "P:b", "L:b", "L:c"]);
        assert_eq!(pieces(&[]), Vec::<String>::new());
    }

    #[test]
    fn a_redrawn_line_is_progress_and_then_its_last_state() {
        assert_eq!(pieces(&["1%\r2%\r", "3%\n"]), ["P:1%", "P:2%", "L:3%"]);
        assert_eq!(pieces(&["\r1%", "\r2%", "\nend\n"]), ["P:1%", "P:1%", "P:2%", "L:2%", "L:end"]);
        assert_eq!(pieces(&["1%\r"]), ["P:1%", "L:1%"]);
    }

    #[test]
    fn an_endless_line_is_broken() {
        let long = "x".repeat(MAX_LINE_BYTES);
        let seen = pieces(&[&long, "yz", "end\n"]);
        assert_eq!(seen.iter().map(|piece| piece.len() - 2).collect::<Vec<_>>(), [MAX_LINE_BYTES + 2, 3]);
    }

    proptest! {
        #[test]
        fn no_text_without_carriage_returns_is_lost(text in "[a\\n\u{e9}]{0,40}", cut in 0usize..40) {
            let bytes = text.as_bytes();
            let (head, tail) = bytes.split_at(cut.min(bytes.len()));
            let mut lines = Vec::new();
            let mut splitter = LineSplitter::default();
            let mut sink = |piece: OutputPiece<'_>| {
                if let OutputPiece::Line(line) = piece {
                    lines.extend_from_slice(line);
                    lines.push(b'\n');
                }
                Ok(())
            };
            splitter.feed(head, &mut sink).unwrap();
            splitter.feed(tail, &mut sink).unwrap();
            splitter.finish(&mut sink).unwrap();
            let whole = if text.is_empty() || text.ends_with('\n') { text.clone() } else { format!("{text}\n") };
            prop_assert_eq!(lines, whole.into_bytes());
        }
    }
}
