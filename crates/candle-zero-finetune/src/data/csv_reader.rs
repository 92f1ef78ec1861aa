//! The rows of a text table (CSV, TSV) whose first line names its columns.

use super::column_mapping::ColumnMapping;
use super::raw_record::{RawRecord, RecordContent, check_size, utf8};
use candle_zero::util::list;
use minijinja::value::Value;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::sync::Arc;

/// The column separators that are considered if the file does not declare one.
const SEPARATORS: [u8; 4] = [b',', b';', b'\t', b'|'];

/// A reader of the rows of a table.
pub(super) struct CsvRowReader {
    input: BufReader<File>,
    parser: Box<csv_core::Reader>,
    quotes: QuoteTracker,
    names: Vec<String>,
}

/// A row's fields, or the problem with the rest of the file.
type CsvRow = Result<Option<Vec<Vec<u8>>>, String>;

impl CsvRowReader {
    /// Reads the line with the names of the columns. The inner error explains why there is no table.
    ///
    /// Columns are separated by the character that a line such as `sep=;` declares. Without such a line, the separator
    /// is the character that yields the most known names or, if there is a tie, the most columns. If there is still a
    /// tie, `default_separator` is preferred.
    pub(super) fn open(
        mut input: BufReader<File>,
        default_separator: u8,
        columns: &ColumnMapping,
    ) -> std::io::Result<Result<Self, String>> {
        let head = input.fill_buf()?;
        let first_line = head.split(|byte| matches!(byte, b'\n' | b'\r')).next().unwrap_or_default();
        // Excel may write a first line such as `sep=;`.
        let declared = match first_line.to_ascii_lowercase()[..] {
            [b's', b'e', b'p', b'=', separator] => Some(separator),
            _ => None,
        };
        let separator = declared.unwrap_or_else(|| separator(first_line, default_separator, columns));
        let parser = Box::new(csv_core::ReaderBuilder::new().delimiter(separator).build());
        let mut table = Self { input, parser, quotes: QuoteTracker::of(separator), names: vec![] };
        if declared.is_some()
            && let Err(problem) = table.row()?
        {
            return Ok(Err(problem));
        }
        let row = match table.row()? {
            Ok(row) => row.unwrap_or_default(),
            Err(problem) => return Ok(Err(problem)),
        };
        for name in row {
            match utf8(&name) {
                Ok(name) => table.names.push(name.trim().to_string()),
                Err(reason) => return Ok(Err(format!("its first line: {reason}"))),
            }
        }
        let mut seen = BTreeSet::new();
        match table.names.iter().find(|name| !name.is_empty() && !seen.insert(name.as_str())) {
            Some(duplicate) => Ok(Err(format!("two columns are named {duplicate:?}; rename one in the first line"))),
            None => Ok(Ok(table)),
        }
    }

    /// Returns the next row, or `None` at the end. The inner error explains why the rest of the file cannot be split
    /// into rows.
    pub(super) fn next(&mut self) -> std::io::Result<Result<Option<RawRecord>, String>> {
        let row = match self.row()? {
            Ok(Some(row)) => row,
            Ok(None) => return Ok(Ok(None)),
            Err(problem) => return Ok(Err(problem)),
        };
        let (found, names) = (row.len(), self.names.len());
        let columns = |n: usize| if n == 1 { "1 column".to_string() } else { format!("{n} columns") };
        let fields: Result<Vec<&str>, String> = row.iter().map(|field| utf8(field)).collect();
        let raw = match fields {
            _ if self.quotes.malformed.is_some() => RecordContent::Broken(
                "text follows the closing quote of a field; double each quote within a quoted field".into(),
            ),
            _ if found != names => RecordContent::Broken(format!(
                "it has {}, but the first line names {names} ({}); quote fields that contain the separator, a quote or \
                 a line break",
                columns(found),
                list(&self.names)
            )),
            Ok(fields) => {
                let bytes = fields.iter().map(|field| field.len() + size_of::<Value>()).sum();
                let value = Value::from_pairs(self.names.iter().cloned().zip(fields.into_iter().map(Value::from)));
                RecordContent::Columns { value, bytes, unread: Arc::default() }
            }
            Err(reason) => RecordContent::Broken(reason),
        };
        Ok(Ok(Some(RawRecord { line: self.quotes.row, raw })))
    }

    /// Returns the fields of the next row.
    fn row(&mut self) -> std::io::Result<CsvRow> {
        let (mut bytes, mut ends) = (vec![0; 1 << 10], vec![0; 16]);
        let (mut written, mut num_fields) = (0, 0);
        self.quotes.begin_row();
        loop {
            let input = self.input.fill_buf()?;
            let (result, read, wrote, fields) =
                self.parser.read_record(input, &mut bytes[written..], &mut ends[num_fields..]);
            input[..read].iter().for_each(|byte| self.quotes.take(*byte));
            self.input.consume(read);
            (written, num_fields) = (written + wrote, num_fields + fields);
            check_size(written.saturating_add(num_fields * size_of::<usize>()), self.quotes.row)?;
            let at_end = match result {
                csv_core::ReadRecordResult::InputEmpty => continue,
                csv_core::ReadRecordResult::OutputFull => {
                    bytes.resize(2 * bytes.len(), 0);
                    continue;
                }
                csv_core::ReadRecordResult::OutputEndsFull => {
                    ends.resize(2 * ends.len(), 0);
                    continue;
                }
                csv_core::ReadRecordResult::Record => false,
                csv_core::ReadRecordResult::End => true,
            };
            if let Some(problem) = self.quotes.problem() {
                return Ok(Err(problem));
            }
            if at_end {
                return Ok(Ok(None));
            }
            let starts = [0].into_iter().chain(ends.iter().copied());
            return Ok(Ok(Some(
                starts.zip(&ends[..num_fields]).map(|(start, end)| bytes[start..*end].to_vec()).collect(),
            )));
        }
    }
}

/// Returns the separator of the columns of a table with this first line.
fn separator(first_line: &[u8], default_separator: u8, columns: &ColumnMapping) -> u8 {
    let score = |separator: u8| {
        let mut quotes = QuoteTracker::of(separator);
        let mut names = vec![vec![]];
        for byte in first_line {
            quotes.take(*byte);
            match (byte, &quotes.state) {
                (_, QuoteState::FieldStart) => names.push(vec![]),
                (b'"', _) => {}
                _ => names.last_mut().into_iter().for_each(|name: &mut Vec<u8>| name.push(*byte)),
            }
        }
        let is_known = |name: &&Vec<u8>| columns.is_known(String::from_utf8_lossy(name).trim());
        (names.iter().filter(is_known).count(), names.len(), separator == default_separator)
    };
    SEPARATORS.into_iter().max_by_key(|separator| score(*separator)).unwrap_or(default_separator)
}

/// The positions at which quotes open and close, which the parser does not report.
struct QuoteTracker {
    separator: u8,
    state: QuoteState,
    /// The current line, counted from 1, and the line on which its row begins.
    line: u64,
    row: u64,
    has_begun: bool,
    /// The line of the last opening quote.
    opened: u64,
    /// The lines of the opening and the closing quote of the row's first quoted field that is followed by other text.
    malformed: Option<(u64, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum QuoteState {
    FieldStart,
    Plain,
    Quoted,
    /// After a quote within a quoted field: the end of the field, or the first of two quotes.
    Closing,
}

impl QuoteTracker {
    fn of(separator: u8) -> Self {
        let state = QuoteState::FieldStart;
        Self { separator, state, line: 1, row: 1, has_begun: false, opened: 0, malformed: None }
    }

    fn begin_row(&mut self) {
        (self.has_begun, self.malformed) = (false, None);
    }

    fn take(&mut self, byte: u8) {
        let ends_line = matches!(byte, b'\n' | b'\r');
        if !self.has_begun && !ends_line {
            (self.has_begun, self.row) = (true, self.line);
        }
        self.state = match (self.state, byte) {
            (QuoteState::Quoted, b'"') => QuoteState::Closing,
            (QuoteState::Quoted, _) => QuoteState::Quoted,
            (QuoteState::Closing, b'"') => QuoteState::Quoted,
            (QuoteState::FieldStart, b'"') => {
                self.opened = self.line;
                QuoteState::Quoted
            }
            (_, byte) if byte == self.separator || ends_line => QuoteState::FieldStart,
            (QuoteState::Closing, _) => {
                self.malformed.get_or_insert((self.opened, self.line));
                QuoteState::Plain
            }
            _ => QuoteState::Plain,
        };
        self.line += u64::from(byte == b'\n');
    }

    /// Returns the reason why the end of the row is unknown.
    fn problem(&self) -> Option<String> {
        let (opened, closed) = match (self.state, self.malformed) {
            (QuoteState::Quoted, _) => (self.opened, None),
            (_, Some((opened, closed))) if opened != closed => (opened, Some(closed)),
            _ => return None,
        };
        let end = match closed {
            None => "is not closed before the end of the file".to_string(),
            Some(line) => format!("is closed on line {line}, where other text follows the closing quote"),
        };
        Some(format!(
            "a quote that opens on line {opened} {end}, so the lines in between are one field; remove the quote, \
             or double each quote within a quoted field"
        ))
    }
}
