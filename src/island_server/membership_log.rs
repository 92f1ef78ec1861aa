//! The record of a run: the membership of every exchange, as JSON lines. A replay repeats the same joins and
//! departures.

use super::messages::RoundKey;
use crate::error::{IslandError, Result};
use crate::notice::emit;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The maximum number of bytes of a record.
const MAX_RECORD_BYTES: u64 = 1 << 30;
/// The version of the format.
const VERSION: u32 = 1;
/// The advice for a file that is not a record.
const GIVE_A_RECORD: &str = "give a file that `zerorun island-server --record` wrote";

/// An event in a run of islands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase", deny_unknown_fields)]
pub(super) enum IslandEvent {
    /// A rank has connected while the run had no islands: at the beginning, or after all islands had left.
    Start { version: u32, islands: usize, ranks: usize },
    /// An island has begun without a donor.
    Begin { slot: usize },
    /// Islands have exchanged a fragment.
    Round {
        exchange: RoundKey,
        members: Vec<RoundMember>,
        /// A hash of the members' common weights before the exchange.
        weights: String,
    },
    /// An island has received the state of `donor` after an exchange.
    Join { slot: usize, donor: usize, exchange: RoundKey },
    /// An island is no longer part of the run.
    Leave { slot: usize, why: String },
}

/// A member of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RoundMember {
    pub slot: usize,
    pub samples: u64,
}

/// A file to which events are appended.
#[derive(Debug)]
pub(super) struct RecordFile {
    path: PathBuf,
    file: Option<File>,
}

impl RecordFile {
    /// Creates the file.
    ///
    /// # Errors
    /// [`IslandError::Record`] if the file exists already or cannot be created.
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create_new(path).map_err(|error| {
            let why = match error.kind() {
                std::io::ErrorKind::AlreadyExists => "it exists; give the name of a new file".into(),
                _ => format!("{error}; give a file in a folder that exists and is writable"),
            };
            IslandError::Record { path: path.to_owned(), why }
        })?;
        Ok(Self { path: path.to_owned(), file: Some(file) })
    }

    /// Appends an event and syncs it to disk. If that fails, the run continues without a record.
    pub fn append(&mut self, event: &IslandEvent) {
        let Some(file) = &mut self.file else { return };
        let mut line = serde_json::to_string(event)
            .unwrap_or_else(|error| unreachable!("strings and numbers are valid JSON: {error}"));
        line.push('\n');
        if let Err(error) = file.write_all(line.as_bytes()).and_then(|()| file.sync_data()) {
            emit(&format!("island server: the record {} ends here: {error}; the run continues", self.path.display()));
            self.file = None;
        }
    }
}

/// An exchange of a recorded run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RecordedRound {
    pub key: RoundKey,
    pub members: Vec<RoundMember>,
    pub weights: String,
    /// The slots of the islands that joined after this exchange, each with its donor.
    pub joins: Vec<(usize, usize)>,
}

/// The exchanges of a recorded run that are still to be replayed.
#[derive(Debug, Clone, Default)]
pub(super) struct Replay {
    pub rounds: VecDeque<RecordedRound>,
    /// The slots of the islands that began without a donor.
    pub begins: Vec<usize>,
}

impl Replay {
    /// Reads a record.
    ///
    /// # Errors
    /// [`IslandError::Record`] for a file that cannot be read or contains no exchange, and for a line that cannot be
    /// read, has a different format version, or does not fit the lines before it.
    pub fn read(path: &Path) -> Result<Self> {
        let invalid = |why: String| IslandError::Record { path: path.to_owned(), why };
        let text = crate::files::read_text(path, MAX_RECORD_BYTES)
            .map_err(|error| invalid(format!("{error}; {GIVE_A_RECORD}")))?;
        // A server that was killed may have left a partial line.
        let complete_lines = text.rfind('\n').map_or("", |end| &text[..end]);
        let mut replay = Self::default();
        for (number, line) in complete_lines.lines().enumerate() {
            let event = serde_json::from_str(line).map_err(|error| format!("{error}; {GIVE_A_RECORD}"));
            event.and_then(|event| replay.add(event)).map_err(|why| invalid(format!("line {}: {why}", number + 1)))?;
        }
        if replay.rounds.is_empty() {
            return Err(
                invalid("it has no exchange; give the record of a run in which islands have exchanged".into()).into()
            );
        }
        Ok(replay)
    }

    /// Adds an event. The error states what is wrong, and what to do.
    fn add(&mut self, event: IslandEvent) -> Result<(), String> {
        match event {
            IslandEvent::Start { version: VERSION, .. } | IslandEvent::Leave { .. } => {}
            IslandEvent::Start { version, .. } => {
                return Err(format!(
                    "it has format version {version}, but this program reads version {VERSION}; {GIVE_A_RECORD}"
                ));
            }
            IslandEvent::Begin { slot } if self.rounds.is_empty() => self.begins.push(slot),
            IslandEvent::Begin { .. } => {
                return Err(
                    "an island begins after the first exchange: all islands had died or left, and a replay ends \
                            there; remove this line and those after it"
                        .into(),
                );
            }
            IslandEvent::Round { exchange: key, members, weights } => {
                if self.rounds.back().is_some_and(|last| last.key >= key) || members.is_empty() {
                    return Err(format!("the exchange is out of order or has no members; {GIVE_A_RECORD}"));
                }
                self.rounds.push_back(RecordedRound { key, members, weights, joins: Vec::new() });
            }
            IslandEvent::Join { slot, donor, exchange } => {
                let round = self.rounds.iter_mut().find(|round| round.key == exchange);
                let round = round.filter(|round| round.members.iter().any(|member| member.slot == donor));
                let round =
                    round.ok_or_else(|| format!("an island joins without an exchange or a donor; {GIVE_A_RECORD}"))?;
                round.joins.push((slot, donor));
            }
        }
        Ok(())
    }
}

/// Returns the event of a rank that connects while the run has no islands. It is also the first event of a record.
pub(super) fn first_event(islands: usize, ranks: usize) -> IslandEvent {
    IslandEvent::Start { version: VERSION, islands, ranks }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn key(step: u64) -> RoundKey {
        RoundKey { step, call: 0, fragment: 0 }
    }

    fn round(step: u64) -> IslandEvent {
        let members = vec![RoundMember { slot: 0, samples: 8 }, RoundMember { slot: 2, samples: 4 }];
        IslandEvent::Round { exchange: key(step), members, weights: "0f".into() }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        let mut record = RecordFile::create(&path).unwrap();
        for event in [
            first_event(3, 2),
            IslandEvent::Begin { slot: 0 },
            IslandEvent::Begin { slot: 2 },
            round(5),
            IslandEvent::Leave { slot: 2, why: "killed".into() },
            round(10),
            IslandEvent::Join { slot: 1, donor: 0, exchange: key(5) },
        ] {
            record.append(&event);
        }
        // The last line is incomplete, as after a power failure.
        record.file.as_mut().unwrap().write_all(b"{\"event\":\"rou").unwrap();
        let replay = Replay::read(&path).unwrap();
        assert_eq!(replay.begins, [0, 2]);
        assert_eq!(replay.rounds.iter().map(|round| round.key).collect::<Vec<_>>(), [key(5), key(10)]);
        assert_eq!(replay.rounds[0].joins, [(1, 0)]);
        insta::assert_snapshot!(std::fs::read_to_string(&path).unwrap().lines().nth(3).unwrap(), @r#"{"event":"round","exchange":{"step":5,"call":0,"fragment":0},"members":[{"slot":0,"samples":8},{"slot":2,"samples":4}],"weights":"0f"}"#);
        let error =
            RecordFile::create(&path).unwrap_err().to_string().replace(&dir.path().display().to_string(), "DIR");
        insta::assert_snapshot!(error, @"the record DIR/record cannot be used: it exists; give the name of a new file");
    }

    #[test]
    fn damaged_records_are_refused_with_the_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        let refused = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Replay::read(&path).unwrap_err().to_string().replace(&dir.path().display().to_string(), "DIR")
        };
        let line = |event: &IslandEvent| format!("{}\n", serde_json::to_string(event).unwrap());
        insta::assert_snapshot!(refused("hello\n"), @"the record DIR/record cannot be used: line 1: expected value at line 1 column 1; give a file that `zerorun island-server --record` wrote");
        insta::assert_snapshot!(refused(&line(&IslandEvent::Start { version: 9, islands: 2, ranks: 1 })), @"the record DIR/record cannot be used: line 1: it has format version 9, but this program reads version 1; give a file that `zerorun island-server --record` wrote");
        insta::assert_snapshot!(refused(&(line(&round(5)) + &line(&round(5)))), @"the record DIR/record cannot be used: line 2: the exchange is out of order or has no members; give a file that `zerorun island-server --record` wrote");
        let join = IslandEvent::Join { slot: 1, donor: 1, exchange: key(5) };
        insta::assert_snapshot!(refused(&(line(&round(5)) + &line(&join))), @"the record DIR/record cannot be used: line 2: an island joins without an exchange or a donor; give a file that `zerorun island-server --record` wrote");
        insta::assert_snapshot!(refused(&line(&first_event(2, 1))), @"the record DIR/record cannot be used: it has no exchange; give the record of a run in which islands have exchanged");
    }
}
