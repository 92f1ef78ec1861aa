//! Reads data files record by record, in memory bounded by the largest record.

use super::column_mapping::ColumnMapping;
use super::csv_reader::CsvRowReader;
use super::parquet::ParquetRows;
use super::raw_record::{MAX_RECORD_BYTES, RawRecord, RecordContent, check_size, utf8};
use crate::error::FinetuneError;
use crate::error::{Error, Result};
use candle_zero::files;
use std::fs::File;
use std::io::{BufRead, BufReader, Read as _};
use std::path::{Path, PathBuf};

/// The number of bytes that are read at a time.
const READ_CHUNK: usize = 1 << 20;

/// The minimum size in bytes of a record of plain text, except for the last one. Records consist of complete lines.
const MIN_TEXT_RECORD_BYTES: usize = 64 << 10;

/// The records of a file.
pub(super) struct RecordReader {
    path: PathBuf,
    format: FormatReader,
}

enum FormatReader {
    Lines(LineReader),
    List(JsonListReader),
    Text(LineReader),
    Table(CsvRowReader),
    Rows(Box<ParquetRows>),
}

impl RecordReader {
    /// Opens a file, whose extension determines its format. `columns` are the roles of the columns of a table or a
    /// Parquet file.
    ///
    /// # Errors
    /// [`FinetuneError::UnknownFormat`]; [`FinetuneError::DataFile`]; [`FinetuneError::Parquet`]; [`Error::Io`].
    pub(super) fn open(path: &Path, columns: &ColumnMapping) -> Result<Self> {
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_lowercase();
        let table = |separator| -> Result<FormatReader> {
            let table = CsvRowReader::open(LineReader::open(path)?.reader, separator, columns)
                .map_err(|source| io(path, source))?;
            Ok(FormatReader::Table(table.map_err(|problem| unreadable(path, problem))?))
        };
        let format = match extension.as_str() {
            "jsonl" | "ndjson" | "json" => {
                let mut lines = LineReader::open(path)?;
                let head = lines.head().map_err(|source| io(path, source))?.trim_ascii_start();
                match head.first() {
                    Some(b'[') if extension == "json" || is_pretty_printed(head) => {
                        FormatReader::List(JsonListReader::of(lines, ListState::Before))
                    }
                    Some(b'{') if is_pretty_printed(head) => {
                        FormatReader::List(JsonListReader::of(lines, ListState::Following))
                    }
                    _ => FormatReader::Lines(lines),
                }
            }
            "csv" => table(b',')?,
            "tsv" => table(b'\t')?,
            "txt" | "md" | "text" => FormatReader::Text(LineReader::open(path)?),
            "parquet" => FormatReader::Rows(Box::new(ParquetRows::open(path, columns)?)),
            _ => return Err(FinetuneError::UnknownFormat { path: path.into() }.into()),
        };
        Ok(Self { path: path.into(), format })
    }

    /// Returns the next record, or `None` at the end. Content that is not a record is returned as
    /// [`RecordContent::Broken`].
    pub(super) fn next(&mut self) -> Result<Option<RawRecord>> {
        let wrong = |source| io(&self.path, source);
        match &mut self.format {
            FormatReader::Lines(lines) => loop {
                let line = lines.line + 1;
                let Some(bytes) = lines.next().map_err(wrong)? else { return Ok(None) };
                if !bytes.trim_ascii().is_empty() {
                    return Ok(Some(RawRecord { line, raw: RecordContent::Json(bytes) }));
                }
            },
            FormatReader::Text(lines) => {
                let line = lines.line + 1;
                let mut piece = vec![];
                while piece.len() < MIN_TEXT_RECORD_BYTES {
                    let Some(next) = lines.next().map_err(wrong)? else { break };
                    piece.extend(next);
                }
                let raw = |piece: &[u8]| match utf8(piece) {
                    Ok(text) => RecordContent::Text(text.into()),
                    Err(reason) => RecordContent::Broken(reason),
                };
                Ok((!piece.is_empty()).then(|| RawRecord { line, raw: raw(&piece) }))
            }
            FormatReader::List(list) => list.next().map_err(wrong),
            FormatReader::Table(table) => {
                table.next().map_err(wrong)?.map_err(|problem| unreadable(&self.path, problem))
            }
            FormatReader::Rows(rows) => rows.next(),
        }
    }

    /// Returns the position in the file in bytes, if it does not follow from the sizes of the records so far.
    pub(super) fn position(&self) -> Option<u64> {
        match &self.format {
            FormatReader::Rows(rows) => Some(rows.position()),
            _ => None,
        }
    }
}

fn io(path: &Path, source: std::io::Error) -> Error {
    Error::Io { action: "read", path: path.into(), source }
}

fn unreadable(path: &Path, problem: impl Into<String>) -> Error {
    FinetuneError::DataFile { path: path.into(), problem: problem.into() }.into()
}

/// Returns the kind of a file with this beginning, and what to do about it, if the file is not UTF-8 text.
fn foreign_format(head: &[u8]) -> Option<&'static str> {
    const UTF_16: &str = "it is text in UTF-16 or UTF-32; save it as UTF-8, for example with iconv -f UTF-16 -t UTF-8";
    match head {
        [0xFF, 0xFE, ..] | [0xFE, 0xFF, ..] => Some(UTF_16),
        [0x1F, 0x8B, ..] => Some("it is compressed with gzip; unpack it with gunzip"),
        [0x28, 0xB5, 0x2F, 0xFD, ..] => Some("it is compressed with Zstandard; unpack it with unzstd"),
        [b'P', b'K', 3, 4, ..] => {
            Some("it is a ZIP archive, such as an Excel file; unpack it, or save the table as CSV in UTF-8")
        }
        [b'P', b'A', b'R', b'1', ..] => Some("it is a Parquet file; give it the extension .parquet"),
        _ if is_wide(head) => Some(UTF_16),
        _ => None,
    }
}

/// Returns whether a beginning without a byte order mark looks like UTF-16 or UTF-32 text: it contains zero bytes early
/// on, as ASCII text does in these encodings, and no NUL character. A beginning that consists only of zero bytes is not
/// text.
fn is_wide(head: &[u8]) -> bool {
    let head = &head[..head.len().min(32)];
    let (pairs, fours) = (|| head.chunks_exact(2), || head.chunks_exact(4));
    let has_character = |lowest_first: bool| {
        fours().len() > 0
            && fours().all(|bytes| {
                let bytes = [bytes[0], bytes[1], bytes[2], bytes[3]];
                let code = if lowest_first { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) };
                code != 0 && char::from_u32(code).is_some()
            })
    };
    let in_pairs = pairs().take(2).any(|pair| pair.contains(&0)) && pairs().all(|pair| pair != [0, 0]);
    in_pairs || has_character(true) || has_character(false)
}

/// Returns whether JSON is spread over several lines: the first line ends within a value, and the second one is not a
/// complete object. Blank lines are ignored.
fn is_pretty_printed(head: &[u8]) -> bool {
    let is_cut = |line: &[u8]| serde_json::from_slice::<serde::de::IgnoredAny>(line).is_err_and(|e| e.is_eof());
    let is_object =
        |line: &[u8]| line.starts_with(b"{") && serde_json::from_slice::<serde::de::IgnoredAny>(line).is_ok();
    let mut lines = head.split_inclusive(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
    match (lines.next(), lines.next()) {
        (Some(first), Some(second)) => first.ends_with(b"\n") && is_cut(first) && !is_object(second.trim_ascii()),
        _ => false,
    }
}

/// The lines of a file.
struct LineReader {
    reader: BufReader<File>,
    /// The number of lines read.
    line: u64,
}

impl LineReader {
    /// Opens a file and skips a byte order mark.
    fn open(path: &Path) -> Result<Self> {
        let file = files::open(path).map_err(|source| io(path, source))?;
        let mut reader = BufReader::with_capacity(READ_CHUNK, file);
        let head = reader.fill_buf().map_err(|source| io(path, source))?;
        if let Some(problem) = foreign_format(head) {
            return Err(unreadable(path, problem));
        }
        if head.starts_with(b"\xEF\xBB\xBF") {
            reader.consume(3);
        }
        Ok(Self { reader, line: 0 })
    }

    /// Returns the part of the file that is in the buffer. Before the first read, this part is the file's beginning.
    fn head(&mut self) -> std::io::Result<&[u8]> {
        self.reader.fill_buf()
    }

    /// Returns the next line, including its end.
    fn next(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        let mut bytes = vec![];
        (&mut self.reader).take(MAX_RECORD_BYTES as u64 + 1).read_until(b'\n', &mut bytes)?;
        self.line += 1;
        check_size(bytes.len(), self.line)?;
        Ok((!bytes.is_empty()).then_some(bytes))
    }
}

/// The items of a JSON list, or consecutive values, found by counting brackets.
struct JsonListReader {
    lines: LineReader,
    state: ListState,
}

#[derive(Clone, Copy, PartialEq)]
enum ListState {
    Before,
    Inside,
    After,
    /// Among values that are not in a list.
    Following,
}

impl JsonListReader {
    fn of(lines: LineReader, state: ListState) -> Self {
        Self { lines, state }
    }

    fn next(&mut self) -> std::io::Result<Option<RawRecord>> {
        let (mut bytes, mut depth, mut in_string, mut escaped) = (vec![], 0_usize, false, false);
        // The line on which the item begins.
        let mut line = self.lines.line + 1;
        while self.state != ListState::After {
            let buffer = self.lines.reader.fill_buf()?;
            if buffer.is_empty() {
                let within = match self.state {
                    ListState::Following if bytes.is_empty() => return Ok(None),
                    ListState::Following => "a record",
                    _ => "the list",
                };
                self.state = ListState::After;
                return Ok(Some(RawRecord {
                    line,
                    raw: RecordContent::Broken(format!("the file ends within {within}")),
                }));
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
                    b'[' if self.state == ListState::Before => {
                        self.state = ListState::Inside;
                        continue;
                    }
                    b',' | b']' if depth == 0 && self.state != ListState::Following => {
                        self.state = if *byte == b']' { ListState::After } else { ListState::Inside };
                        complete = true;
                        break;
                    }
                    byte if bytes.is_empty() && byte.is_ascii_whitespace() => {
                        line = self.lines.line + 1;
                        continue;
                    }
                    b'[' | b'{' => depth += 1,
                    b']' | b'}' => {
                        depth = depth.saturating_sub(1);
                        if depth == 0 && self.state == ListState::Following {
                            bytes.push(*byte);
                            complete = true;
                            break;
                        }
                    }
                    b'"' => in_string = true,
                    _ => {}
                }
                bytes.push(*byte);
            }
            self.lines.reader.consume(used);
            check_size(bytes.len(), line)?;
            match (complete, bytes.is_empty()) {
                (true, false) => return Ok(Some(RawRecord { line, raw: RecordContent::Json(bytes) })),
                (true, true) if self.state == ListState::Inside => {
                    return Ok(Some(RawRecord {
                        line,
                        raw: RecordContent::Broken("an item of the list is missing".into()),
                    }));
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

    /// Returns the records of a file of this name and text: their lines and JSON, or their problems.
    fn records(name: &str, text: &str) -> Vec<(u64, String)> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let mut records = RecordReader::open(&path, &ColumnMapping::default()).unwrap();
        let display = |raw| match raw {
            RecordContent::Json(bytes) => String::from_utf8(bytes).unwrap().trim().to_string(),
            RecordContent::Columns { value, .. } => value.to_string(),
            RecordContent::Text(text) => text,
            RecordContent::Broken(reason) => format!("broken: {reason}"),
        };
        std::iter::from_fn(|| records.next().unwrap()).map(|record| (record.line, display(record.raw))).collect()
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

    fn holds(text: &str, part: &str) {
        assert!(text.contains(part), "{text}");
    }

    /// Returns why a file of this name and these bytes is refused.
    fn refused(name: &str, bytes: impl AsRef<[u8]>) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let read = || -> Result<()> {
            let mut records = RecordReader::open(&path, &ColumnMapping::default())?;
            while records.next()?.is_some() {}
            Ok(())
        };
        read().unwrap_err().to_string().replace(folder.path().to_str().unwrap(), "DIR")
    }

    #[test]
    fn the_separator_of_a_table_is_found() {
        let expected = [at(2, "{'prompt': 'a;b,c', 'completion': 'd\"e'}")];
        for separator in [",", ";", "\t", "|"] {
            let text = format!("prompt{separator} completion\n\"a;b,c\"{separator}\"d\"\"e\"\n");
            for name in ["x.csv", "x.tsv"] {
                assert_eq!(records(name, &text), expected, "{name} {separator:?}");
            }
        }
        let declared = [at(3, "{'prompt': 'a', 'completion': 'b;c'}")];
        assert_eq!(records("x.csv", "sep=|\r\nprompt|completion\r\na|b;c\r\n"), declared);
        // If the names are unknown, the separator that yields the most columns is used or, if there is a tie, the usual
        // one.
        assert_eq!(records("x.csv", "a;b;c,d\n1;2;3\n"), [at(2, "{'a': '1', 'b': '2', 'c,d': '3'}")]);
        assert_eq!(records("x.csv", "a;b,c\n1,2\n"), [at(2, "{'a;b': '1', 'c': '2'}")]);
        assert_eq!(records("x.csv", "text\na;b\n"), [at(2, "{'text': 'a;b'}")]);
    }

    #[test]
    fn a_stray_quote_is_an_error_with_its_line() {
        let rows = |bad: &str| {
            let good = "a,b\n".repeat(4);
            format!("prompt,completion\n{good}{bad}\n{good}")
        };
        holds(
            &refused("x.csv", rows("a,\"b")),
            "a quote that opens on line 6 is not closed before the end of the file",
        );
        holds(
            &refused("x.csv", rows("a,\"b\nc,d\ne,\"f\"")),
            "a quote that opens on line 6 is closed on line 8, where other text follows the closing quote",
        );
        holds(&refused("x.csv", "\"prompt,completion\na,b\n"), "a quote that opens on line 1 is not closed");
        holds(&refused("x.csv", "prompt,prompt\na,b\n"), "two columns are named");
        let one = records("x.csv", &rows("a,\"b\" c"));
        assert_eq!(one.len(), 9);
        holds(&one[4].1, "broken: text follows the closing quote of a field");
        // In a field that does not begin with a quote, a quote is an ordinary character.
        assert_eq!(records("x.csv", &rows("5\" long,b"))[4], at(6, "{'prompt': '5\" long', 'completion': 'b'}"));
        assert_eq!(records("x.csv", &rows("\n\na,\"b\r\nc\""))[4], at(8, "{'prompt': 'a', 'completion': 'b\\r\\nc'}"));
    }

    #[test]
    fn rows_with_another_number_of_fields_are_named_by_their_line() {
        let rows = records("x.csv", "prompt,completion\n\n\nadd,1 2,3\nx\n\"a\nb\",c,\n");
        assert_eq!(rows.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [4, 5, 6]);
        holds(&rows[0].1, "broken: it has 3 columns, but the first line names 2 (prompt, completion)");
        holds(&rows[1].1, "broken: it has 1 column, but the first line names 2");
    }

    #[test]
    fn what_is_not_text_in_utf_8_is_named() {
        let utf16: Vec<u8> = "\u{FEFF}{}".encode_utf16().flat_map(u16::to_le_bytes).collect();
        holds(
            &refused("x.jsonl", &utf16),
            "DIR/x.jsonl cannot be read: it is text in UTF-16 or UTF-32; save it as UTF-8",
        );
        for (name, bytes) in
            [("x.csv", &utf16[..]), ("x.txt", &utf16), ("x.jsonl", &utf16[2..]), ("x.json", b"\xFE\xFF\0{")]
        {
            assert!(refused(name, bytes).contains("UTF-16"), "{name}");
        }
        let wide =
            |in_order: fn(u32) -> [u8; 4]| "{\"a\": 1}".chars().flat_map(|c| in_order(c.into())).collect::<Vec<u8>>();
        for bytes in [wide(u32::to_le_bytes), wide(u32::to_be_bytes)] {
            assert!(refused("x.jsonl", &bytes).contains("UTF-16 or UTF-32"), "{bytes:?}");
        }
        // Zeros after a text, or without one, do not indicate another encoding.
        for bytes in ["[\n\"", "a\n", "a", ""] {
            assert_eq!(foreign_format(&[bytes.as_bytes(), &[0; 40]].concat()), None, "{bytes:?}");
        }
        holds(&refused("x.jsonl", b"\x1F\x8B\x08"), "gunzip");
        holds(&refused("x.csv", b"PK\x03\x04"), "ZIP archive");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.csv");
        std::fs::write(&path, b"prompt,completion\ncaf\xE9,b\n").unwrap();
        let record = RecordReader::open(&path, &ColumnMapping::default()).unwrap().next().unwrap().unwrap();
        holds(
            &record.raw.value().unwrap_err(),
            "(byte 0xE9, which is 'é' in Windows-1252 and Latin-1); save the file as UTF-8",
        );
    }

    #[test]
    fn printed_json_is_read_as_what_it_is() {
        let compact = |records: Vec<(u64, String)>| -> Vec<(u64, String)> {
            records.into_iter().map(|(line, text)| (line, text.split_whitespace().collect())).collect()
        };
        let text = "{\n  \"a\": [\n 1 ]\n}\n\n{\n  \"b\": \"}\"\n}";
        for name in ["x.jsonl", "x.json"] {
            assert_eq!(compact(records(name, text)), [at(1, "{\"a\":[1]}"), at(6, "{\"b\":\"}\"}")], "{name}");
            assert_eq!(compact(records(name, "[\n  {\n\"a\": 1},\n{\"b\": 2}\n]")).len(), 2, "{name}");
        }
        let cut = records("x.jsonl", "{\n  \"a\": 1\n}\n{\n");
        assert_eq!(cut[1], at(4, "broken: the file ends within a record"));
        // A first line that is cut off does not affect the others.
        assert_eq!(records("x.jsonl", "{\"a\": \n{\"b\": 1}\n{\"c\": 1}\n").len(), 3);
    }

    #[test]
    fn what_is_not_json_is_told_by_its_kind() {
        let problem = |text: &str| RecordContent::Json(text.into()).value().unwrap_err();
        holds(
            &problem("{\"instruction\":\"a\",\"input\":NaN}"),
            "it is not JSON: NaN is not valid; write null (expected value at column 28)",
        );
        holds(&problem("{\"a\": -Infinity}"), "Infinity is not valid; write null");
        holds(&problem("{'role': 'user'}"), "its strings are in single quotes, as Python prints them");
        holds(&problem("{\"a\": True}"), "True is not valid; write true");
        holds(&problem("{\"a\": \"NaN\", \"b\" 1}"), "it is not JSON (expected `:` at column 18)");
    }

    #[test]
    fn plain_text_comes_in_pieces_that_end_with_a_line() {
        let text = "a line of text\n".repeat(10_000);
        let pieces = records("x.txt", &text);
        assert!(pieces.len() > 1 && pieces.iter().all(|(_, piece)| piece.ends_with('\n')));
        assert_eq!(pieces[1].0, pieces[0].1.lines().count() as u64 + 1);
        assert_eq!(pieces.into_iter().map(|(_, piece)| piece).collect::<String>(), text);
    }
}
