//! Collects a process's events in memory, and periodically writes them to a file as lines.

use super::event::TimelineEvent;
use super::job_timeline::PART_PREFIX;
use super::now;
use super::trace::{cannot_write, check_earlier, write_trace};
use crate::error::Result;
use crate::files::{folder_of, new_temp_file};
use crate::notice::{emit, warn};
use crate::util::lock;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The interval between writes: a killed process loses at most the events of one interval.
const WRITE_INTERVAL: Duration = Duration::from_millis(250);
/// The maximum number of events in memory; the thread that reaches this number writes the events to the file.
const MAX_BUFFERED_EVENTS: usize = 1 << 14;
/// The maximum number of events that a process writes to a file: no viewer opens a trace of more than a few hundred MB.
const MAX_EVENTS: usize = 1 << 20;

/// All sinks of this process. They are kept so that consecutive engines fill the same file.
static SINKS: Mutex<Vec<Arc<EventSink>>> = Mutex::new(Vec::new());

/// The destination of the lines.
#[derive(Debug, PartialEq, Eq)]
enum SinkDestination {
    /// A file in this folder, read by the launcher.
    Part { folder: PathBuf },
    /// A trace file that this process creates.
    Trace { file: PathBuf },
}

/// Events that are collected for one file.
pub(super) struct EventSink {
    destination: SinkDestination,
    /// The time at which the sink was created.
    start: u64,
    memory: Mutex<UnwrittenEvents>,
    lines: Mutex<EventLinesFile>,
}

/// The events that are not written yet.
struct UnwrittenEvents {
    events: Vec<TimelineEvent>,
    /// The number of events that can still be recorded.
    room: usize,
    dropped: u64,
    /// The rank and number of each engine that records.
    engines: Vec<(usize, usize)>,
    /// Whether a thread writes periodically.
    has_writer: bool,
}

struct EventLinesFile {
    file: File,
    /// Whether writing has failed. Nothing more is then written.
    has_failed: bool,
}

impl EventSink {
    /// Returns a sink for the launcher that created `folder`.
    pub fn part(folder: &Path) -> Result<Arc<Self>> {
        Self::for_destination(SinkDestination::Part { folder: folder.into() })
    }

    /// Returns a sink for the trace `file`.
    pub fn for_trace(file: &Path) -> Result<Arc<Self>> {
        let file = std::path::absolute(file).map_err(|e| cannot_write(file, &e))?;
        Self::for_destination(SinkDestination::Trace { file })
    }

    fn for_destination(destination: SinkDestination) -> Result<Arc<Self>> {
        let mut sinks = lock(&SINKS);
        if let Some(sink) = sinks.iter().find(|sink| sink.destination == destination) {
            return Ok(sink.clone());
        }
        let file = match &destination {
            SinkDestination::Part { folder } => {
                let file = new_temp_file(folder, PART_PREFIX).and_then(|part| Ok(part.keep()?.0));
                file.map_err(|e| cannot_write(folder, &e))?
            }
            SinkDestination::Trace { file } if file.is_dir() => {
                return Err(cannot_write(file, &std::io::ErrorKind::IsADirectory.into()));
            }
            // The file has no name, and disappears with the process.
            SinkDestination::Trace { file } => {
                check_earlier(file).map_err(|e| cannot_write(file, &e))?;
                tempfile::tempfile_in(folder_of(file)).map_err(|e| cannot_write(file, &e))?
            }
        };
        let sink = Arc::new(Self::into_file(destination, file, MAX_EVENTS));
        sinks.push(sink.clone());
        Ok(sink)
    }

    fn into_file(destination: SinkDestination, file: File, max_events: usize) -> Self {
        let memory = UnwrittenEvents {
            events: Vec::new(),
            room: max_events,
            dropped: 0,
            engines: Vec::new(),
            has_writer: false,
        };
        let lines = EventLinesFile { file, has_failed: false };
        Self { destination, start: now(), memory: Mutex::new(memory), lines: Mutex::new(lines) }
    }

    /// Registers an engine of `rank` that records from now on; returns the smallest number not used by an engine of the
    /// rank.
    pub fn join(self: &Arc<Self>, rank: usize) -> usize {
        let mut memory = lock(&self.memory);
        let engine = (0..).find(|engine| !memory.engines.contains(&(rank, *engine))).unwrap_or_default();
        memory.engines.push((rank, engine));
        if !memory.has_writer {
            let sink = self.clone();
            let writer = std::thread::Builder::new().name("timeline".into()).spawn(move || sink.write_periodically());
            // Without a writer thread, events are written by the thread that fills the memory.
            memory.has_writer = writer.is_ok();
        }
        engine
    }

    /// Unregisters an engine, which no longer records.
    pub fn leave(&self, rank: usize, engine: usize) {
        let mut memory = lock(&self.memory);
        memory.engines.retain(|registered| *registered != (rank, engine));
        let is_last = memory.engines.is_empty();
        drop(memory);
        self.flush();
        if let (true, SinkDestination::Trace { file }) = (is_last, &self.destination) {
            match write_trace(&[&lock(&self.lines).file], self.start, file) {
                Ok(summary) if summary.dropped > 0 => emit(&format!("timeline: {summary}")),
                Ok(_) => {}
                Err(error) => warn(&error.to_string()),
            }
        }
    }

    fn write_periodically(&self) {
        loop {
            std::thread::park_timeout(WRITE_INTERVAL);
            self.flush();
            let mut memory = lock(&self.memory);
            if memory.engines.is_empty() {
                memory.has_writer = false;
                return;
            }
        }
    }

    /// Records an event.
    pub fn record(&self, event: TimelineEvent) {
        let mut memory = lock(&self.memory);
        if memory.room == 0 {
            memory.dropped += 1;
            return;
        }
        memory.room -= 1;
        memory.events.push(event);
        if memory.events.len() >= MAX_BUFFERED_EVENTS {
            drop(memory);
            self.flush();
        }
    }

    /// Writes the events in memory to the file. If that fails, recording ends, but training continues.
    pub fn flush(&self) {
        let mut lines = lock(&self.lines);
        let mut memory = lock(&self.memory);
        let (events, dropped) = (std::mem::take(&mut memory.events), std::mem::take(&mut memory.dropped));
        drop(memory);
        if lines.has_failed || (events.is_empty() && dropped == 0) {
            return;
        }
        let mut text = String::with_capacity(128 * events.len());
        events.iter().for_each(|event| event.write(&mut text));
        if dropped > 0 {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "dropped {dropped}");
        }
        if let Err(error) = lines.file.write_all(text.as_bytes()) {
            lines.has_failed = true;
            lock(&self.memory).room = 0;
            let (SinkDestination::Part { folder: path } | SinkDestination::Trace { file: path }) = &self.destination;
            warn(&format!("{}; the timeline ends here", cannot_write(path, &error)));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::event::{EventCategory, TimelineLane};
    use super::*;
    use std::io::{Read, Seek, SeekFrom};

    fn event(start: u64) -> TimelineEvent {
        let (kind, lane, numbers) = (EventCategory::Unit, TimelineLane::Training.number(0), [("", 0); 2]);
        TimelineEvent { start, end: start + 1, rank: 0, lane, kind, name: "forward", subject: None, numbers }
    }

    fn sink(file: File, max_events: usize) -> EventSink {
        EventSink::into_file(SinkDestination::Part { folder: "nowhere".into() }, file, max_events)
    }

    fn text(sink: &EventSink) -> String {
        let mut file = &lock(&sink.lines).file;
        let mut text = String::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn memory_that_is_full_is_written_down() {
        let sink = sink(tempfile::tempfile().unwrap(), MAX_EVENTS);
        (0..MAX_BUFFERED_EVENTS as u64 - 1).for_each(|i| sink.record(event(i)));
        assert_eq!(text(&sink), "");
        sink.record(event(0));
        assert_eq!(text(&sink).lines().count(), MAX_BUFFERED_EVENTS);
        assert!(lock(&sink.memory).events.is_empty());
    }

    #[test]
    fn what_is_beyond_the_limit_is_counted() {
        let sink = sink(tempfile::tempfile().unwrap(), 3);
        (0..5).for_each(|i| sink.record(event(i)));
        sink.flush();
        sink.record(event(5));
        sink.flush();
        sink.flush();
        let text = text(&sink);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{text}");
        assert_eq!(lines[3..], ["dropped 2", "dropped 1"]);
    }

    #[test]
    fn a_full_disk_ends_the_recording() {
        let sink = sink(File::options().write(true).open("/dev/full").unwrap(), MAX_EVENTS);
        sink.record(event(1));
        sink.flush();
        sink.record(event(2));
        assert!(lock(&sink.lines).has_failed);
        assert!(lock(&sink.memory).events.is_empty());
        sink.flush();
    }

    #[test]
    fn engines_of_a_rank_have_numbers_of_their_own() {
        let sink = Arc::new(sink(tempfile::tempfile().unwrap(), MAX_EVENTS));
        assert_eq!([0, 1, 0, 0].map(|rank| sink.join(rank)), [0, 0, 1, 2]);
        sink.leave(0, 1);
        assert_eq!(sink.join(0), 1);
    }
}
