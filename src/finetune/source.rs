//! Data files, record by record, in memory that the largest record bounds.

use super::error::FinetuneError;
use super::parquet::Rows;
use super::raw::{MOST_BYTES, Raw, Record};
use crate::error::{Error, Result};
use crate::files;
use minijinja::value::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read as _};
use std::path::{Path, PathBuf};

/// Bytes that are read at once.
const BUFFER: usize = 1 << 20;

/// Bytes of plain text that make a record, up to the end of their line.
const PIECE: usize = 64 << 10;

/// A data file, and how often each of its samples counts.
#[derive(Debug, Clone, PartialEq)]
pub struct Source {
    /// The file.
    pub path: PathBuf,
    /// How often each of its samples comes in an epoch, 1 by default; 0.5 is half of the samples once.
    pub weight: f64,
}

impl Source {
    /// A path, or a path and a weight (`chats.jsonl:2.5`).
    ///
    /// # Errors
    /// [`FinetuneError::Weight`] for a weight that is not above 0 and at most 1000.
    pub fn parse(text: &str) -> Result<Self> {
        let whole = Self { path: text.into(), weight: 1.0 };
        let Some((path, weight)) = text.rsplit_once(':').filter(|_| !whole.path.exists()) else { return Ok(whole) };
        match weight.parse::<f64>() {
            Ok(weight) if weight > 0.0 && weight <= 1000.0 => Ok(Self { path: path.into(), weight }),
            Ok(_) => Err(FinetuneError::Weight { text: text.into() }.into()),
            Err(_) => Ok(whole),
        }
    }
}

/// The records of a file.
pub(super) struct Records {
    path: PathBuf,
    format: Format,
}

enum Format {
    Lines(Lines),
    List(List),
    Text(Lines),
    Table(Table),
    Rows(Box<Rows>),
}

impl Records {
    /// Opens a file by its extension.
    ///
    /// # Errors
    /// [`FinetuneError::UnknownFormat`]; [`FinetuneError::Parquet`]; [`Error::Io`].
    pub(super) fn open(path: &Path) -> Result<Self> {
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_lowercase();
        let format = match extension.as_str() {
            "jsonl" | "ndjson" => Format::Lines(Lines::open(path)?),
            "json" => {
                let mut lines = Lines::open(path)?;
                match lines.first_byte().map_err(|source| io(path, source))? {
                    Some(b'[') => Format::List(List { lines, state: State::Before }),
                    _ => Format::Lines(lines),
                }
            }
            "csv" => Format::Table(Table::open(path, b',')?),
            "tsv" => Format::Table(Table::open(path, b'\t')?),
            "txt" | "md" | "text" => Format::Text(Lines::open(path)?),
            "parquet" => Format::Rows(Box::new(Rows::open(path)?)),
            _ => return Err(FinetuneError::UnknownFormat { path: path.into() }.into()),
        };
        Ok(Self { path: path.into(), format })
    }

    /// The next record; none at the end. What is no record is one that is [`Raw::Broken`].
    pub(super) fn next(&mut self) -> Result<Option<Record>> {
        let wrong = |source| io(&self.path, source);
        match &mut self.format {
            Format::Lines(lines) => loop {
                let line = lines.line + 1;
                let Some(bytes) = lines.next().map_err(wrong)? else { return Ok(None) };
                if !bytes.trim_ascii().is_empty() {
                    return Ok(Some(Record { line, raw: Raw::Json(bytes) }));
                }
            },
            Format::Text(lines) => {
                let line = lines.line + 1;
                let mut piece = vec![];
                while piece.len() < PIECE {
                    let Some(next) = lines.next().map_err(wrong)? else { break };
                    piece.extend(next);
                }
                let raw = |piece| match String::from_utf8(piece) {
                    Ok(text) => Raw::Text(text),
                    Err(_) => Raw::Broken("it is not UTF-8 text".into()),
                };
                Ok((!piece.is_empty()).then(|| Record { line, raw: raw(piece) }))
            }
            Format::List(list) => list.next().map_err(wrong),
            Format::Table(table) => table.next().map_err(wrong),
            Format::Rows(rows) => rows.next(),
        }
    }

    /// Bytes of the file up to here, where those of the records so far do not tell.
    pub(super) fn position(&self) -> Option<u64> {
        match &self.format {
            Format::Rows(rows) => Some(rows.position()),
            _ => None,
        }
    }
}

fn io(path: &Path, source: std::io::Error) -> Error {
    Error::Io { action: "read", path: path.into(), source }
}

/// An error for a record that is too large to be one.
fn check_size(bytes: usize, line: u64) -> std::io::Result<()> {
    match bytes > MOST_BYTES {
        true => {
            let reason = format!("the record of line {line} has more than {} MiB; cut it", MOST_BYTES >> 20);
            Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, reason))
        }
        false => Ok(()),
    }
}

/// Lines of a file.
struct Lines {
    reader: BufReader<File>,
    /// Lines read.
    line: u64,
}

impl Lines {
    fn open(path: &Path) -> Result<Self> {
        let file = files::open(path).map_err(|source| io(path, source))?;
        Ok(Self { reader: BufReader::with_capacity(BUFFER, file), line: 0 })
    }

    /// The first byte that is no white space, without a byte order mark.
    fn first_byte(&mut self) -> std::io::Result<Option<u8>> {
        if self.reader.fill_buf()?.starts_with(b"\xEF\xBB\xBF") {
            self.reader.consume(3);
        }
        let ahead = self.reader.fill_buf()?;
        Ok(ahead.iter().copied().find(|byte| !byte.is_ascii_whitespace()))
    }

    /// The next line with its end.
    fn next(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        let mut bytes = vec![];
        if self.line == 0 {
            self.first_byte()?;
        }
        (&mut self.reader).take(MOST_BYTES as u64 + 1).read_until(b'\n', &mut bytes)?;
        self.line += 1;
        check_size(bytes.len(), self.line)?;
        Ok((!bytes.is_empty()).then_some(bytes))
    }
}

/// The rows of a table whose first one has the names of its columns.
struct Table {
    lines: Lines,
    reader: Box<csv_core::Reader>,
    names: Vec<String>,
}

impl Table {
    fn open(path: &Path, delimiter: u8) -> Result<Self> {
        let reader = Box::new(csv_core::ReaderBuilder::new().delimiter(delimiter).build());
        let mut table = Self { lines: Lines::open(path)?, reader, names: vec![] };
        let names = table.row().map_err(|source| io(path, source))?.unwrap_or_default();
        table.names = names.into_iter().map(|name| String::from_utf8_lossy(&name).into_owned()).collect();
        Ok(table)
    }

    fn next(&mut self) -> std::io::Result<Option<Record>> {
        let line = self.reader.line();
        let Some(row) = self.row()? else { return Ok(None) };
        let (found, names) = (row.len(), self.names.len());
        let fields: Result<Vec<String>, _> = row.into_iter().map(String::from_utf8).collect();
        let raw = match fields {
            Ok(fields) if found == names => {
                let bytes = fields.iter().map(|field| field.len() + size_of::<Value>()).sum();
                Raw::Columns { value: Value::from_pairs(self.names.iter().cloned().zip(fields)), bytes }
            }
            Ok(_) => Raw::Broken(format!("it has {found} columns, and the first line has {names}")),
            Err(_) => Raw::Broken("it is not UTF-8 text".into()),
        };
        Ok(Some(Record { line, raw }))
    }

    /// The fields of the next row.
    fn row(&mut self) -> std::io::Result<Option<Vec<Vec<u8>>>> {
        let (mut bytes, mut ends) = (vec![0; 1 << 10], vec![0; 16]);
        let (mut written, mut ended) = (0, 0);
        let line = self.reader.line();
        loop {
            let input = self.lines.reader.fill_buf()?;
            let (result, read, wrote, fields) =
                self.reader.read_record(input, &mut bytes[written..], &mut ends[ended..]);
            self.lines.reader.consume(read);
            (written, ended) = (written + wrote, ended + fields);
            check_size(written.saturating_add(ended * size_of::<usize>()), line)?;
            match result {
                csv_core::ReadRecordResult::InputEmpty => {}
                csv_core::ReadRecordResult::OutputFull => bytes.resize(2 * bytes.len(), 0),
                csv_core::ReadRecordResult::OutputEndsFull => ends.resize(2 * ends.len(), 0),
                csv_core::ReadRecordResult::Record => break,
                csv_core::ReadRecordResult::End => return Ok(None),
            }
        }
        let starts = [0].into_iter().chain(ends.iter().copied());
        Ok(Some(starts.zip(&ends[..ended]).map(|(start, end)| bytes[start..*end].to_vec()).collect()))
    }
}

/// The items of a JSON list, found by counting brackets.
struct List {
    lines: Lines,
    state: State,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Before,
    Inside,
    After,
}

impl List {
    fn next(&mut self) -> std::io::Result<Option<Record>> {
        let (mut bytes, mut depth, mut in_string, mut escaped) = (vec![], 0_usize, false, false);
        // Where the item begins.
        let mut line = self.lines.line + 1;
        while self.state != State::After {
            let buffer = self.lines.reader.fill_buf()?;
            if buffer.is_empty() {
                self.state = State::After;
                return Ok(Some(Record { line, raw: Raw::Broken("the file ends within the list".into()) }));
            }
            let (mut used, mut complete) = (0, false);
            for byte in buffer {
                used += 1;
                self.lines.line += u64::from(*byte == b'\n');
                match byte {
                    _ if in_string => {
                        in_string = *byte != b'"' || escaped;
                        escaped = *byte == b'\\' && !escaped;
                    }
                    b'[' if self.state == State::Before => {
                        self.state = State::Inside;
                        continue;
                    }
                    b',' | b']' if depth == 0 => {
                        self.state = if *byte == b']' { State::After } else { State::Inside };
                        complete = true;
                        break;
                    }
                    byte if bytes.is_empty() && byte.is_ascii_whitespace() => {
                        line = self.lines.line + 1;
                        continue;
                    }
                    b'[' | b'{' => depth += 1,
                    b']' | b'}' => depth = depth.saturating_sub(1),
                    b'"' => in_string = true,
                    _ => {}
                }
                bytes.push(*byte);
            }
            self.lines.reader.consume(used);
            check_size(bytes.len(), line)?;
            match (complete, bytes.is_empty()) {
                (true, false) => return Ok(Some(Record { line, raw: Raw::Json(bytes) })),
                (true, true) if self.state == State::Inside => {
                    return Ok(Some(Record { line, raw: Raw::Broken("an item of the list is missing".into()) }));
                }
                _ => {}
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The records of a file of this name and text: their lines and JSON, or what is wrong.
    fn records(name: &str, text: &str) -> Vec<(u64, String)> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let mut records = Records::open(&path).unwrap();
        let shown = |raw| match raw {
            Raw::Json(bytes) => String::from_utf8(bytes).unwrap().trim().to_string(),
            Raw::Columns { value, .. } => value.to_string(),
            Raw::Text(text) => text,
            Raw::Broken(reason) => format!("broken: {reason}"),
        };
        std::iter::from_fn(|| records.next().unwrap()).map(|record| (record.line, shown(record.raw))).collect()
    }

    fn at(line: u64, text: &str) -> (u64, String) {
        (line, text.into())
    }

    #[test]
    fn lines_are_counted_with_blank_ones_and_without_a_byte_order_mark() {
        let text = "\u{FEFF}{\"a\": 1}\r\n\n  \n{\"b\": 2}";
        assert_eq!(records("x.jsonl", text), [at(1, "{\"a\": 1}"), at(4, "{\"b\": 2}")]);
        assert_eq!(records("x.json", text), records("x.jsonl", text));
        assert_eq!(records("x.jsonl", ""), []);
    }

    #[test]
    fn items_of_a_list_are_found_whatever_stands_in_their_strings() {
        let text = "\n[ {\"a\": \"],{\\\"[\\\\\"},\n\n{\"b\": [1, {\"c\": []}]} , 7\n]\n";
        let expected = [at(2, "{\"a\": \"],{\\\"[\\\\\"}"), at(4, "{\"b\": [1, {\"c\": []}]}"), at(4, "7")];
        assert_eq!(records("x.json", text), expected);
        assert_eq!(records("x.json", "[]"), []);
        assert_eq!(records("x.json", " [ ]"), []);
        let cut = [at(1, "1"), at(2, "broken: the file ends within the list")];
        assert_eq!(records("x.json", "[1,\n{\"a\""), cut);
        assert_eq!(records("x.json", "[1,,2]")[1], at(1, "broken: an item of the list is missing"));
        assert_eq!(records("x.json", "[1}}]"), [at(1, "1}}")]);
    }

    #[test]
    fn rows_of_a_table_are_named_by_their_first_line() {
        let rows = records("x.csv", "prompt,completion\n\"a\nb\",c\nonly one\nd,e\n");
        assert_eq!(rows[0], at(2, "{'prompt': 'a\\nb', 'completion': 'c'}"));
        assert_eq!(rows[1].0, 4);
        assert!(rows[1].1.starts_with("broken: "), "{rows:?}");
        assert_eq!(rows[2], at(5, "{'prompt': 'd', 'completion': 'e'}"));
        assert_eq!(records("x.tsv", "a\tb\n1\t2\n"), [at(2, "{'a': '1', 'b': '2'}")]);
    }

    #[test]
    fn plain_text_comes_in_pieces_that_end_with_a_line() {
        let text = "a line of text\n".repeat(10_000);
        let pieces = records("x.txt", &text);
        assert!(pieces.len() > 1 && pieces.iter().all(|(_, piece)| piece.ends_with('\n')));
        assert_eq!(pieces[1].0, pieces[0].1.lines().count() as u64 + 1);
        assert_eq!(pieces.into_iter().map(|(_, piece)| piece).collect::<String>(), text);
    }

    #[test]
    fn a_weight_stands_after_the_last_colon() {
        let parse = |text: &str| Source::parse(text).map_err(|e| e.to_string());
        let source = |path: &str, weight| Ok(Source { path: path.into(), weight });
        assert_eq!(parse("a.jsonl"), source("a.jsonl", 1.0));
        assert_eq!(parse("a.jsonl:2.5"), source("a.jsonl", 2.5));
        assert_eq!(parse("c:/a.jsonl"), source("c:/a.jsonl", 1.0));
        assert!(parse("a.jsonl:0").unwrap_err().contains("weight"));
        assert!(parse("a.jsonl:-1").is_err());
    }
}
