//! The labels of a classification task, collected from the records of data files.

use super::column_mapping::ColumnMapping;
use super::data_report::{DataReport, RecordNote};
use super::record_parser::{RecordFormat, RecordParser, TrainingExample};
use super::record_reader::RecordReader;
use super::source::Source;
use crate::error::FinetuneError;
use crate::error::Result;
use std::path::Path;

/// The maximum number of labels. A column with more values does not contain labels.
const MAX_LABELS: usize = 10_000;

/// The label that means "no label" in many data sets.
pub(super) const NO_LABEL: &str = "-1";

pub(super) fn no_label_reason() -> String {
    "its label is -1, which stands for \"no label\" in many data sets; omit such records, or list all labels, \
     including -1, with --labels"
        .into()
}

/// Returns all labels of the records in `sources`, at least two. Numbers are sorted by value, names alphabetically.
///
/// # Errors
/// [`FinetuneError::NoSamples`] for files without a label; [`FinetuneError::Labels`] for a single label, for more than
/// 10,000, or for two that differ only in white space around them; errors of files and formats.
pub fn labels_of(sources: &[Source], columns: &ColumnMapping) -> Result<Vec<String>> {
    let mut labels = std::collections::BTreeSet::new();
    let mut report = DataReport::default();
    let refused = |path: &Path, problem| Err(FinetuneError::Labels { path: path.into(), problem }.into());
    for source in sources {
        report.by_row = DataReport::of(&source.path).by_row;
        let mut records = RecordReader::open(&source.path, columns)?;
        while let Some(record) = records.next()? {
            let line = record.line;
            let parser = RecordParser { columns, has_template: false, has_labels: true };
            let parsed = record.raw.value().and_then(|(value, unread)| parser.parse(&value, &unread));
            match parsed.map(|parsed| (parsed.format, parsed.example)) {
                Ok((_, TrainingExample::Label { label, .. })) if label == NO_LABEL => {
                    report.note(line, RecordNote::Broken(no_label_reason()))
                }
                Ok((_, TrainingExample::Label { label, .. })) => {
                    // Numbers of up to 18 digits are sorted before names.
                    labels.insert((label.parse::<i64>().unwrap_or(i64::MAX), label));
                }
                Ok((format, _)) => report.note(line, RecordNote::Broken(not_labelled(format))),
                Err(reason) => report.note(line, RecordNote::Broken(reason)),
            }
            if labels.len() > MAX_LABELS {
                return refused(
                    &source.path,
                    format!("there are more than {MAX_LABELS}; a label must be a class that several texts share"),
                );
            }
        }
    }
    let path = sources.last().map(|source| source.path.clone()).unwrap_or_default();
    let labels: Vec<String> = labels.into_iter().map(|(_, label)| label).collect();
    let mut trimmed: Vec<&str> = labels.iter().map(|label| label.trim()).collect();
    trimmed.sort_unstable();
    if let Some(pair) = trimmed.windows(2).find(|pair| pair[0] == pair[1]) {
        let duplicates: Vec<&String> = labels.iter().filter(|label| label.trim() == pair[0]).collect();
        return refused(
            &path,
            format!("{duplicates:?} differ only in surrounding white space; write them identically"),
        );
    }
    match &labels[..] {
        [only] if !report.broken.is_empty() => refused(
            &path,
            format!(
                "all records with a label have the label {only:?}; at least two labels are required ({})",
                report.no_samples_reason()
            ),
        ),
        [] => Err(FinetuneError::NoSamples { path, reason: report.no_samples_reason() }.into()),
        [only] => refused(&path, format!("all records have the label {only:?}; at least two labels are required")),
        _ => Ok(labels),
    }
}

/// Returns the reason why a record has no label.
pub(super) fn not_labelled(format: RecordFormat) -> String {
    format!("it contains {format}, but text and label are required; map them with --columns text=COLUMN,label=COLUMN")
}
