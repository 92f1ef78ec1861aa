//! A record of a data file, before it is parsed.

use minijinja::value::Value;
use std::sync::Arc;

/// The maximum size of a record in bytes.
pub(crate) const MAX_RECORD_BYTES: usize = 64 << 20;

/// The content of a record that is not yet parsed.
#[derive(Debug)]
pub(super) enum RecordContent {
    /// The text of a JSON value.
    Json(Vec<u8>),
    /// Columns by name, their size in memory in bytes, and the names of columns that were not read.
    Columns { value: Value, bytes: usize, unread: Arc<[String]> },
    /// A piece of plain text.
    Text(String),
    /// Content that cannot be a record, with the reason.
    Broken(String),
}

/// A record and the line on which it begins, counted from 1. For Parquet, the row takes the place of the line.
#[derive(Debug)]
pub(super) struct RawRecord {
    pub line: u64,
    pub raw: RecordContent,
}

impl RawRecord {
    /// Returns the approximate size in memory in bytes.
    pub(super) fn bytes(&self) -> usize {
        match &self.raw {
            RecordContent::Json(bytes) => bytes.len(),
            RecordContent::Text(text) => text.len(),
            RecordContent::Columns { bytes, .. } => *bytes,
            RecordContent::Broken(reason) => reason.len(),
        }
    }
}

impl RecordContent {
    /// Returns the value of the record and the names of its columns that were not read, or why it is not a record.
    pub(super) fn value(self) -> Result<(Value, Arc<[String]>), String> {
        match self {
            Self::Broken(reason) => Err(reason),
            Self::Text(_) => Err("it is plain text".into()),
            Self::Json(bytes) => Ok((json(utf8(&bytes)?.trim())?, Arc::default())),
            Self::Columns { value, unread, .. } => Ok((value, unread)),
        }
    }
}

/// Returns an error if a record is too large.
pub(super) fn check_size(bytes: usize, line: u64) -> std::io::Result<()> {
    match bytes > MAX_RECORD_BYTES {
        true => {
            let reason = format!("the record on line {line} is larger than {} MiB; shorten it", MAX_RECORD_BYTES >> 20);
            Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, reason))
        }
        false => Ok(()),
    }
}

/// Returns bytes as text, or an error that names the first byte that is not UTF-8.
pub(super) fn utf8(bytes: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(bytes).map_err(|e| {
        let byte = bytes.get(e.valid_up_to()).copied().unwrap_or_default();
        // A byte of 0xA0 or above represents the same character in Windows-1252 and in Latin-1.
        let latin = match byte {
            0xA0.. => format!(", which is {:?} in Windows-1252 and Latin-1", char::from(byte)),
            _ => String::new(),
        };
        format!("it is not UTF-8 text (byte 0x{byte:02X}{latin}); save the file as UTF-8")
    })
}

/// Parses a JSON value, or returns why the text is not one.
pub(crate) fn json(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|e| {
        // The report already names the line in the file.
        let message = e.to_string().replace("at line 1 column", "at column");
        match not_json(text) {
            Some(reason) => format!("it is not JSON: {reason} ({message})"),
            None => format!("it is not JSON ({message})"),
        }
    })
}

/// Returns why a text is not JSON, if the reason is one of the usual ones.
fn not_json(text: &str) -> Option<String> {
    let start = text.trim_start_matches(['[', '{', ' ', '\t', '\n', '\r']);
    if start.len() < text.len() && start.starts_with('\'') {
        return Some("its strings are in single quotes, as Python prints them; write it with json.dumps".into());
    }
    // Collects words outside strings.
    let (mut in_text, mut escaped, mut outside) = (false, false, String::with_capacity(text.len().min(1 << 16)));
    for c in text.chars() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = in_text,
            '"' => in_text = !in_text,
            _ if !in_text => outside.push(c),
            _ => {}
        }
    }
    let mut words = outside.split(|c: char| !c.is_alphanumeric());
    let word =
        words.find(|word| ["NaN", "Infinity", "None", "True", "False", "undefined", "nan", "inf"].contains(word))?;
    let replacement = match word {
        "True" => "true",
        "False" => "false",
        _ => "null",
    };
    Some(format!("{word} is not valid; write {replacement}"))
}
