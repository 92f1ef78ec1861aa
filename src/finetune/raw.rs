//! A record of a data file, before it is known what it is.

use minijinja::value::Value;

/// The most bytes of a record.
pub(super) const MOST_BYTES: usize = 64 << 20;

/// A record, not yet read as what it is.
#[derive(Debug)]
pub(super) enum Raw {
    /// A JSON value.
    Json(Vec<u8>),
    /// Columns by name, and the bytes that they take in memory.
    Columns { value: Value, bytes: usize },
    /// A stretch of plain text.
    Text(String),
    /// What cannot be a record.
    Broken(String),
}

/// A record and the line that it begins in, from 1; of Parquet, its row.
#[derive(Debug)]
pub(super) struct Record {
    pub line: u64,
    pub raw: Raw,
}

impl Record {
    /// Bytes that it takes in memory, more or less.
    pub(super) fn bytes(&self) -> usize {
        match &self.raw {
            Raw::Json(bytes) => bytes.len(),
            Raw::Text(text) => text.len(),
            Raw::Columns { bytes, .. } => *bytes,
            Raw::Broken(reason) => reason.len(),
        }
    }
}
