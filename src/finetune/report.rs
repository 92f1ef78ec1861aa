//! What became of the records of a file, counted and named by line.

use super::error::unit;
use super::record::Form;
use crate::util::counted;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// Lines that are named of each kind.
const NAMED: usize = 5;

/// What became of the records of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Report {
    /// Records read; of plain text, pieces of it.
    pub records: u64,
    /// Records of each form.
    pub forms: BTreeMap<Form, u64>,
    /// Samples made of them.
    pub samples: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Tokens that are predicted.
    pub targets: u64,
    /// Records that could not be used.
    pub broken: Lines,
    /// Conversations with an answer that says nothing: its end is learned.
    pub empty_answers: Lines,
    /// Samples that were cut at the context behind their last target.
    pub truncated: Lines,
    /// Samples that lost targets as they were cut at the context.
    pub truncated_targets: Lines,
    /// Samples that were left out, for their first target is beyond the context.
    pub targets_beyond: Lines,
    /// Samples that were left out, for nothing in them is to be predicted.
    pub without_target: Lines,
    /// Samples that were left out as they are longer than the context.
    pub dropped: Lines,
    /// Texts that were cut into pieces of the context's length, of which none is lost.
    pub cut: Lines,
    /// Whether records are known by their rows, as in Parquet, rather than by the lines that they begin in.
    #[serde(default)]
    pub by_row: bool,
    /// Whether the samples were made before.
    #[serde(skip)]
    pub from_cache: bool,
}

/// How many records, and the lines of the first ones.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Lines {
    /// How many.
    pub count: u64,
    /// Lines (or rows) of the first five, from 1.
    pub first: Vec<u64>,
    /// Why the first one is among them, where that differs.
    pub reason: Option<String>,
}

/// What is said of a record.
pub(super) enum Note {
    Broken(String),
    EmptyAnswer,
    Truncated,
    TruncatedTarget,
    TargetBeyond,
    WithoutTarget,
    Dropped,
    Cut,
}

impl Report {
    /// Of the file at `path`, before it is read.
    pub(super) fn of(path: &Path) -> Self {
        Self { by_row: unit(path) == "row", ..Self::default() }
    }

    pub(super) fn note(&mut self, line: u64, note: Note) {
        let (lines, reason) = match note {
            Note::Broken(reason) => (&mut self.broken, Some(reason)),
            Note::EmptyAnswer => (&mut self.empty_answers, None),
            Note::Truncated => (&mut self.truncated, None),
            Note::TruncatedTarget => (&mut self.truncated_targets, None),
            Note::TargetBeyond => (&mut self.targets_beyond, None),
            Note::WithoutTarget => (&mut self.without_target, None),
            Note::Dropped => (&mut self.dropped, None),
            Note::Cut => (&mut self.cut, None),
        };
        lines.count += 1;
        // The two answers of a preference are of one line.
        if lines.first.len() < NAMED && lines.first.last() != Some(&line) {
            lines.first.push(line);
        }
        lines.reason = lines.reason.take().or(reason);
    }

    /// What is not as it should be, a sentence each.
    pub fn notes(&self) -> Vec<String> {
        let kinds = [
            (&self.broken, "could not be used"),
            (&self.empty_answers, "have an answer that says nothing, of which the end is learned"),
            (&self.truncated, "are longer than the context and were cut behind their targets"),
            (&self.truncated_targets, "are longer than the context and lost targets"),
            (&self.targets_beyond, "were left out: their targets are beyond the context"),
            (&self.without_target, "were left out: nothing in them is to be predicted"),
            (&self.dropped, "were left out: they are longer than the context"),
            (&self.cut, "are longer than the context and were cut into pieces"),
        ];
        let seen = kinds.into_iter().filter(|(lines, _)| lines.count > 0);
        let unit = if self.by_row { "row" } else { "line" };
        seen.map(|(lines, what)| format!("{} {what}{}", lines.named(unit), lines.because(unit))).collect()
    }

    /// Why a file gave no sample.
    pub(super) fn why_nothing(&self) -> String {
        match self.notes() {
            notes if notes.is_empty() => "it is empty".into(),
            notes => notes.join("; "),
        }
    }
}

impl Lines {
    fn because(&self, unit: &str) -> String {
        let line = self.first.first().copied().unwrap_or(0);
        self.reason.as_ref().map(|reason| format!(" ({unit} {line}: {reason})")).unwrap_or_default()
    }

    fn named(&self, unit: &str) -> String {
        let lines = self.first.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let more = if self.count > self.first.len() as u64 { ", ..." } else { "" };
        format!("{} ({unit} {lines}{more})", self.count)
    }
}

/// Forms, samples and tokens in a line.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let forms: Vec<String> = self.forms.keys().map(ToString::to_string).collect();
        let cached = if self.from_cache { ", from the cache" } else { "" };
        write!(
            f,
            "{}: {}, {}, {}, {} of them targets{cached}",
            forms.join(", "),
            counted(self.records, "record"),
            counted(self.samples, "sample"),
            counted(self.tokens, "token"),
            self.targets
        )
    }
}
