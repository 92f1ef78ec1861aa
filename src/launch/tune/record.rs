//! What is finished: one JSON line for each experiment, in a file that is always whole.

use super::experiment::Outcome;
use super::space::Candidate;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A candidate and what became of it.
pub(super) struct Row {
    pub(super) candidate: Candidate,
    pub(super) outcome: Outcome,
}

/// One line of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Line {
    id: String,
    changes: Map<String, Value>,
    #[serde(flatten)]
    outcome: Outcome,
}

/// The file.
pub(super) struct Record {
    path: PathBuf,
    lines: Vec<Line>,
}

impl Record {
    /// Reads `results.jsonl` in `folder`, which is created where it is not there.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(|source| Error::Io {
            action: "create",
            path: folder.to_owned(),
            source,
        })?;
        let path = folder.join("results.jsonl");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(source) => return Err(Error::Io { action: "read", path, source }),
        };
        // A line that is no experiment of ours is one that has to be made again.
        let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        Ok(Self { path, lines })
    }

    /// What became of an experiment that is finished.
    pub(super) fn find(&self, id: &str) -> Option<Outcome> {
        self.lines.iter().find(|line| line.id == id).map(|line| line.outcome.clone())
    }

    /// An experiment is finished.
    pub(super) fn add(&mut self, id: &str, candidate: &Candidate, outcome: &Outcome) -> Result<()> {
        self.lines.push(Line { id: id.into(), changes: candidate.0.clone(), outcome: outcome.clone() });
        let mut text = String::new();
        for line in &self.lines {
            let json = serde_json::to_string(line).unwrap_or_else(|e| unreachable!("strings and numbers: {e}"));
            _ = writeln!(text, "{json}");
        }
        super::write_whole(&self.path, &text)
    }
}

/// The rows, in the order in which they come.
pub(super) fn table(rows: &[Row]) -> String {
    let names: Vec<String> = rows.iter().map(|row| row.candidate.to_string()).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0);
    let lines = rows.iter().zip(&names).map(|(row, name)| format!("{name:width$}  {}", row.outcome));
    lines.collect::<Vec<_>>().join("\n")
}
