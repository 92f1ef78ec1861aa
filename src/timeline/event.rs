//! A timeline event, and its line in a part file.
//!
//! ```text
//!   1837465012 1837465512 0 2 "name":"all_gather h.3","cat":"collective","args":{"bytes":4096,"queued_us":12}
//!   start      end     rank lane rest of the event
//! ```

use serde_json::Value;
use std::fmt::Write;
use std::sync::Arc;

/// The kind of work that an event records: its category in the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventCategory {
    /// An engine call.
    Engine,
    /// The forward or backward pass of a unit.
    Unit,
    /// A gather of parameters.
    Gather,
    /// A reduction of gradients into this rank's share.
    Reduce,
    /// A wait for a collective or a file.
    Wait,
    /// A phase of the optimizer step.
    Optimizer,
    /// A collective, while it runs.
    Collective,
    /// A read or write of a block of a file.
    File,
    /// A copy of elements between a GPU and the host.
    #[cfg(feature = "cuda")]
    Copy,
    /// The saving or loading of a checkpoint.
    Checkpoint,
}

impl EventCategory {
    fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Unit => "unit",
            Self::Gather => "gather",
            Self::Reduce => "reduce",
            Self::Wait => "wait",
            Self::Optimizer => "optimizer",
            Self::Collective => "collective",
            Self::File => "file",
            #[cfg(feature = "cuda")]
            Self::Copy => "copy",
            Self::Checkpoint => "checkpoint",
        }
    }
}

/// The row, within its rank, in which an event is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimelineLane {
    /// The thread that calls the engine.
    Training,
    /// Collectives, whichever thread runs them: one at a time.
    Collectives,
    /// The thread of a background save.
    Checkpoint,
    /// Copies of gradients from a GPU to the host.
    #[cfg(feature = "cuda")]
    Gradients,
    /// Copies of updated weights from the host to a GPU.
    #[cfg(feature = "cuda")]
    Updates,
    /// Copies of parameter shards from the host to a GPU.
    #[cfg(feature = "cuda")]
    Shards,
    /// The thread of a delayed update.
    #[cfg(feature = "cuda")]
    DelayedUpdate,
    /// Collectives between GPUs, while the GPUs run them.
    #[cfg(feature = "cuda")]
    BetweenGpus,
    /// The model's work on a GPU.
    #[cfg(feature = "cuda")]
    Gpu,
    /// An offload thread.
    File(usize),
}

/// The number of lanes of one engine. If a rank has several engines at a time, each has its own lanes.
const LANES_PER_ENGINE: usize = 100;
const FIRST_FILE_LANE: usize = 10;

impl TimelineLane {
    /// Returns the lane's number within its rank, counted from 1 (viewers use 0 for the idle thread).
    pub(super) fn number(self, engine: usize) -> usize {
        engine * LANES_PER_ENGINE
            + match self {
                Self::Training => 1,
                Self::Collectives => 2,
                Self::Checkpoint => 3,
                #[cfg(feature = "cuda")]
                Self::Gradients => 4,
                #[cfg(feature = "cuda")]
                Self::Updates => 5,
                #[cfg(feature = "cuda")]
                Self::Shards => 6,
                #[cfg(feature = "cuda")]
                Self::DelayedUpdate => 7,
                #[cfg(feature = "cuda")]
                Self::BetweenGpus => 8,
                #[cfg(feature = "cuda")]
                Self::Gpu => 9,
                Self::File(thread) => FIRST_FILE_LANE + thread,
            }
    }

    /// Returns the name of the lane with this number.
    pub(super) fn name_of(number: usize) -> String {
        let (engine, lane) = (number / LANES_PER_ENGINE, number % LANES_PER_ENGINE);
        let name = match lane {
            1 => "training".to_string(),
            2 => "collectives".to_string(),
            3 => "checkpoint".to_string(),
            4 => "gradients to the host".to_string(),
            5 => "updates to the GPU".to_string(),
            6 => "shards to the GPU".to_string(),
            7 => "delayed update".to_string(),
            8 => "collectives between GPUs".to_string(),
            9 => "GPU".to_string(),
            file => format!("files {}", file.saturating_sub(FIRST_FILE_LANE)),
        };
        if engine == 0 { name } else { format!("{name} (engine {})", engine + 1) }
    }
}

/// A piece of work from `start` to `end`.
#[derive(Debug, Clone)]
pub(super) struct TimelineEvent {
    pub start: u64,
    pub end: u64,
    pub rank: usize,
    /// The lane's number.
    pub lane: usize,
    pub kind: EventCategory,
    pub name: &'static str,
    /// The subject of the work, such as a unit or parameters.
    pub subject: Option<Arc<str>>,
    /// Named numbers; entries with an empty name are ignored.
    pub numbers: [(&'static str, u64); 2],
}

impl TimelineEvent {
    /// Appends the event's line to `text`.
    pub fn write(&self, text: &mut String) {
        let Self { start, end, rank, lane, kind, name, subject, numbers } = self;
        let title = match subject {
            // Parameter names may contain any character.
            Some(subject) => Value::from(format!("{name} {subject}")).to_string(),
            None => format!("\"{name}\""),
        };
        // Writing to a String cannot fail.
        let _ = write!(text, "{start} {end} {rank} {lane} \"name\":{title},\"cat\":\"{}\",\"args\":{{", kind.name());
        let mut comma = "";
        for (name, number) in numbers.iter().filter(|(name, _)| !name.is_empty()) {
            let _ = write!(text, "{comma}\"{name}\":{number}");
            comma = ",";
        }
        text.push_str("}\n");
    }
}

/// A parsed line of a part file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventLine<'a> {
    Event {
        start: u64,
        end: u64,
        rank: usize,
        lane: usize,
        rest: &'a str,
    },
    /// The number of further events, which were dropped.
    Dropped(u64),
}

impl<'a> EventLine<'a> {
    /// Parses a line. Returns `None` if the line is incomplete, such as one left by a process that was killed while it
    /// was writing.
    pub fn read(line: &'a str) -> Option<Self> {
        let line = line.strip_suffix('\n')?;
        if let Some(count) = line.strip_prefix("dropped ") {
            return Some(Self::Dropped(count.parse().ok()?));
        }
        let mut words = line.splitn(5, ' ');
        let mut word = || words.next();
        let (start, end) = (word()?.parse().ok()?, word()?.parse().ok()?);
        let (rank, lane) = (word()?.parse().ok()?, word()?.parse().ok()?);
        let rest = word()?;
        (start <= end).then_some(Self::Event { start, end, rank, lane, rest })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn event(subject: Option<&str>, numbers: [(&'static str, u64); 2]) -> TimelineEvent {
        let (kind, name, subject) = (EventCategory::Collective, "all_gather", subject.map(Arc::from));
        let lane = TimelineLane::Collectives.number(0);
        TimelineEvent { start: 5, end: 9, rank: 3, lane, kind, name, subject, numbers }
    }

    #[test]
    fn a_line_is_read_as_it_was_written() {
        for (subject, numbers) in [
            (None, [("", 0), ("", 0)]),
            (Some("h.3 \"\n x"), [("bytes", 7), ("queued_us", u64::MAX)]),
            (Some(""), [("", 0), ("bytes", 1)]),
        ] {
            let mut text = String::new();
            event(subject, numbers).write(&mut text);
            assert_eq!(text.lines().count(), 1, "{text}");
            let Some(EventLine::Event { start: 5, end: 9, rank: 3, lane: 2, rest }) = EventLine::read(&text) else {
                panic!("{text}")
            };
            let rest: Value = serde_json::from_str(&format!("{{{rest}}}")).unwrap();
            let title = subject.map_or("all_gather".to_string(), |subject| format!("all_gather {subject}"));
            assert_eq!(rest["name"], title);
            assert_eq!(rest["cat"], "collective");
            let named = numbers.iter().filter(|(name, _)| !name.is_empty());
            assert_eq!(rest["args"].as_object().unwrap().len(), named.clone().count());
            named.for_each(|(name, number)| assert_eq!(rest["args"][name], *number));
        }
        assert_eq!(EventLine::read("dropped 12\n"), Some(EventLine::Dropped(12)));
    }

    #[test]
    fn what_is_not_a_whole_line_is_none() {
        let mut text = String::new();
        event(Some("h.3"), [("bytes", 7), ("", 0)]).write(&mut text);
        (0..text.len()).for_each(|end| assert_eq!(EventLine::read(&text[..end]), None, "{}", &text[..end]));
        assert_eq!(EventLine::read("9 5 0 1 {}\n"), None, "ends before it begins");
        assert_eq!(EventLine::read("dropped many\n"), None);
    }

    #[test]
    fn lanes_have_names_and_numbers_of_their_own() {
        let lanes = [
            TimelineLane::Training,
            TimelineLane::Collectives,
            TimelineLane::Checkpoint,
            TimelineLane::File(0),
            TimelineLane::File(63),
        ];
        let numbers: Vec<usize> = (0..2).flat_map(|engine| lanes.map(|lane| lane.number(engine))).collect();
        assert_eq!(numbers, [1, 2, 3, 10, 73, 101, 102, 103, 110, 173]);
        let names: Vec<String> = numbers.into_iter().map(TimelineLane::name_of).collect();
        assert_eq!(names[..5], ["training", "collectives", "checkpoint", "files 0", "files 63"]);
        assert_eq!(names[8], "files 0 (engine 2)");
    }
}
