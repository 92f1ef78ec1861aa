//! Counts the outcomes of a file's records, and names their lines.

use super::record_parser::RecordFormat;
use crate::error::unit;
use candle_zero::util::counted;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// The maximum number of lines that are listed for each kind of remark.
const MAX_LISTED_LINES: usize = 5;

/// The outcome of reading the records of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct DataReport {
    /// The number of records, or of pieces of plain text, that were read.
    pub records: u64,
    /// The number of records of each format.
    pub forms: BTreeMap<RecordFormat, u64>,
    /// The number of samples built from the records.
    pub samples: u64,
    /// The number of tokens in the samples.
    pub tokens: u64,
    /// The number of tokens that are predicted.
    pub targets: u64,
    /// The records that could not be used.
    pub broken: RecordLineNumbers,
    /// The records with an empty answer or text. The model is trained only on the end of such an answer.
    pub empty_answers: RecordLineNumbers,
    /// The samples that were cut at the context length after their last target.
    pub truncated: RecordLineNumbers,
    /// The samples that lost targets when they were cut at the context length.
    pub truncated_targets: RecordLineNumbers,
    /// The samples that were left out because their first target is beyond the context.
    pub targets_beyond: RecordLineNumbers,
    /// The samples that were left out because they contain nothing to predict.
    pub without_target: RecordLineNumbers,
    /// The samples that were left out because they are longer than the context.
    pub dropped: RecordLineNumbers,
    /// The texts that were cut into pieces of the context length. Only a last piece of a single token is left out.
    pub cut: RecordLineNumbers,
    /// The samples with an answer whose end is not trained on.
    #[serde(default)]
    pub endless: RecordLineNumbers,
    /// Other remarks, each the predicate of a sentence about records, beginning with a verb in the plural.
    #[serde(default)]
    pub remarks: BTreeMap<String, RecordLineNumbers>,
    /// The keys that were not read, with the number of records that contain a value for them. Only the first 64 keys
    /// are kept.
    #[serde(default)]
    pub ignored: BTreeMap<String, u64>,
    /// Whether samples come in pairs.
    #[serde(default)]
    pub pairs: bool,
    /// Whether records are identified by their rows, as in Parquet, rather than by the lines in which they begin.
    #[serde(default)]
    pub by_row: bool,
    /// Whether the samples come from the cache.
    #[serde(skip)]
    pub from_cache: bool,
}

/// A number of records, and the lines of the first ones.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct RecordLineNumbers {
    /// The number of records.
    pub count: u64,
    /// The lines (or rows) of the first five records, counted from 1.
    pub first: Vec<u64>,
    /// The problem with the first record, for kinds in which each record has a different problem.
    pub reason: Option<String>,
    /// The line of the last record.
    #[serde(skip)]
    last: Option<u64>,
}

/// A remark on a record.
pub(super) enum RecordNote {
    Broken(String),
    EmptyAnswer,
    Truncated,
    TruncatedTarget,
    TargetBeyond,
    WithoutTarget,
    Dropped,
    Cut,
    Endless,
    /// The predicate of a sentence about records, beginning with a verb in the plural.
    Remark(String),
    /// A key that was not read.
    Ignored(String),
}

/// The maximum number of different keys, and of different remarks, that are counted.
const MAX_KINDS: usize = 64;

impl DataReport {
    /// Returns an empty report for the file at `path`.
    pub(crate) fn of(path: &Path) -> Self {
        Self { by_row: unit(path) == "row", ..Self::default() }
    }

    pub(super) fn note(&mut self, line: u64, note: RecordNote) {
        let (lines, reason) = match note {
            RecordNote::Ignored(key) => {
                if self.ignored.len() < MAX_KINDS || self.ignored.contains_key(&key) {
                    *self.ignored.entry(key).or_default() += 1;
                }
                return;
            }
            RecordNote::Remark(remark) => {
                if self.remarks.len() >= MAX_KINDS && !self.remarks.contains_key(&remark) {
                    return;
                }
                (self.remarks.entry(remark).or_default(), None)
            }
            RecordNote::Endless => (&mut self.endless, None),
            RecordNote::Broken(reason) => (&mut self.broken, Some(reason)),
            RecordNote::EmptyAnswer => (&mut self.empty_answers, None),
            RecordNote::Truncated => (&mut self.truncated, None),
            RecordNote::TruncatedTarget => (&mut self.truncated_targets, None),
            RecordNote::TargetBeyond => (&mut self.targets_beyond, None),
            RecordNote::WithoutTarget => (&mut self.without_target, None),
            RecordNote::Dropped => (&mut self.dropped, None),
            RecordNote::Cut => (&mut self.cut, None),
        };
        // The two answers of a preference come from one line, and count once.
        if lines.last.replace(line) == Some(line) {
            return;
        }
        lines.count += 1;
        if lines.first.len() < MAX_LISTED_LINES {
            lines.first.push(line);
        }
        lines.reason = lines.reason.take().or(reason);
    }

    /// Returns the noteworthy facts about the records, one sentence each.
    pub fn notes(&self) -> Vec<String> {
        let kinds = [
            (&self.broken, "could not be used"),
            (&self.empty_answers, "have an empty answer, of which only the end is trained on"),
            (&self.truncated, "are longer than the context and lost text, but no targets"),
            (&self.truncated_targets, "are longer than the context and lost targets"),
            (&self.targets_beyond, "were omitted because all targets are beyond the context"),
            (&self.without_target, "were omitted because there is nothing to predict"),
            (&self.dropped, "were omitted for being longer than the context"),
            (&self.cut, "were split into pieces for being longer than the context"),
            (
                &self.endless,
                "have an answer whose end is not trained on, because neither the template nor the tokenizer has a text \
                 or token for it",
            ),
        ];
        let remarks = self.remarks.iter().map(|(predicate, lines)| (lines, predicate.as_str()));
        let noteworthy = kinds.into_iter().chain(remarks).filter(|(lines, _)| lines.count > 0);
        let unit = if self.by_row { "row" } else { "line" };
        let mut notes: Vec<String> = noteworthy.map(|(lines, predicate)| lines.sentence(unit, predicate)).collect();
        if !self.ignored.is_empty() {
            let named = |(key, count): (&String, &u64)| {
                let key = if key.is_empty() { "(unnamed)" } else { key };
                format!("{key} ({})", counted(*count, "record"))
            };
            let keys: Vec<String> = self.ignored.iter().map(named).collect();
            notes.push(format!("not read: {}", keys.join(", ")));
        }
        notes
    }

    /// Returns the number of records that could not be used or contain nothing to train on.
    pub fn skipped(&self) -> u64 {
        self.broken.count + self.without_target.count
    }

    /// Returns whether more than a tenth of all records were skipped.
    pub fn skips_many(&self) -> bool {
        self.skipped().saturating_mul(10) > self.records
    }

    /// Returns the reasons why records were skipped.
    pub(super) fn skip_reasons(&self) -> String {
        let Self { broken, without_target, by_row, .. } = self.clone();
        Self { broken, without_target, by_row, ..Self::default() }.notes().join("; ")
    }

    /// Returns the reasons why a file yielded no samples.
    pub(super) fn no_samples_reason(&self) -> String {
        match self.notes() {
            notes if notes.is_empty() => "it is empty".into(),
            notes => notes.join("; "),
        }
    }
}

impl RecordLineNumbers {
    /// Returns whether there are no records.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns a sentence about the records. `predicate` is the rest of the sentence, beginning with the verb in
    /// the plural.
    fn sentence(&self, unit: &str, predicate: &str) -> String {
        let (verb, rest) = predicate.split_once(' ').unwrap_or((predicate, ""));
        let verb = match verb {
            "have" if self.count == 1 => "has",
            "are" if self.count == 1 => "is",
            "were" if self.count == 1 => "was",
            "call" if self.count == 1 => "calls",
            verb => verb,
        };
        format!("{} {verb} {rest}{}", self.count_and_lines(unit), self.reason_text(unit))
    }

    fn reason_text(&self, unit: &str) -> String {
        let line = self.first.first().copied().unwrap_or(0);
        self.reason.as_ref().map(|reason| format!(" ({unit} {line}: {reason})")).unwrap_or_default()
    }

    fn count_and_lines(&self, unit: &str) -> String {
        let lines = self.first.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let more = if self.count > self.first.len() as u64 { ", ..." } else { "" };
        let plural = if self.count == 1 { "" } else { "s" };
        format!("{} ({unit}{plural} {lines}{more})", counted(self.count, "record"))
    }
}

/// Writes the formats, and the numbers of records, samples, tokens and targets, on one line.
impl fmt::Display for DataReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let forms: Vec<String> = self.forms.keys().map(ToString::to_string).collect();
        let cached = if self.from_cache { ", from the cache" } else { "" };
        let (samples, noun) = if self.pairs { (self.samples / 2, "pair") } else { (self.samples, "sample") };
        write!(
            f,
            "{}: {}, {}, {}, {}{cached}",
            forms.join(", "),
            counted(self.records, "record"),
            counted(samples, noun),
            counted(self.tokens, "token"),
            match self.targets {
                1 => "1 of them a target".to_string(),
                targets => format!("{targets} of them targets"),
            }
        )
    }
}
