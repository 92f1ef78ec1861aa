//! Rows of a Parquet file, one after another, in memory that the pages of its columns bound.

use super::error::FinetuneError;
use crate::error::{Error, Result};
use crate::files;
use minijinja::value::Value;
use parquet::basic::Compression;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// What a value takes beside its text, about.
const VALUE: usize = 32;

/// The rows of a file.
pub(super) struct ParquetRows {
    path: PathBuf,
    rows: RowIter<'static>,
    /// Bytes of the file.
    bytes: u64,
    /// Rows of the file, and those read.
    count: u64,
    read: u64,
}

impl ParquetRows {
    /// Opens a file.
    ///
    /// # Errors
    /// [`Error::Io`]; [`FinetuneError::Parquet`] for one that is damaged, or compressed in a way that is not read.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = files::open(path).map_err(|source| Error::Io { action: "read", path: path.into(), source })?;
        let bytes = file.metadata().map_or(0, |found| found.len());
        guarded(path, || {
            let reader = SerializedFileReader::new(file).map_err(|e| e.to_string())?;
            let groups = reader.metadata().row_groups();
            let mut columns = groups.iter().flat_map(|group| group.columns());
            let is_read = |kind| matches!(kind, Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::ZSTD(_));
            if let Some(other) = columns.find(|column| !is_read(column.compression())) {
                return Err(format!("its compression is {}, and read are snappy, zstd and none", other.compression()));
            }
            let count = groups.iter().map(|group| group.num_rows().unsigned_abs()).fold(0, u64::saturating_add);
            let rows = RowIter::from_file_into(Box::new(reader));
            Ok(Self { path: path.into(), rows, bytes, count, read: 0 })
        })
    }

    /// The next row, its number, from 1, and about the bytes that it takes.
    ///
    /// # Errors
    /// [`FinetuneError::Parquet`].
    pub(super) fn next(&mut self) -> Result<Option<(u64, Value, usize)>> {
        let rows = &mut self.rows;
        let row = guarded(&self.path, || rows.next().transpose().map_err(|e| e.to_string()))?;
        let Some(row) = row else { return Ok(None) };
        self.read += 1;
        let mut bytes = 0;
        let value = columns(row, &mut bytes);
        Ok(Some((self.read, value, bytes)))
    }

    /// The part of the file's bytes whose rows were read.
    pub(super) fn position(&self) -> u64 {
        (self.bytes as f64 * (self.read as f64 / self.count.max(1) as f64)) as u64
    }
}

/// What `read` gives. On files that are damaged, the reader may panic too.
fn guarded<T>(path: &Path, read: impl FnOnce() -> Result<T, String>) -> Result<T> {
    let found = catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| Err("it is damaged".into()));
    Ok(found.map_err(|reason| FinetuneError::Parquet { path: path.into(), reason })?)
}

/// A row, or a struct in it, by name. What is null is left out: in a table it is what other records do not have.
fn columns(row: Row, bytes: &mut usize) -> Value {
    let fields = row.into_columns().into_iter().filter(|(_, field)| !matches!(field, Field::Null));
    Value::from_pairs(fields.map(|(name, field)| {
        let value = value(field, bytes);
        (name, value)
    }))
}

fn value(field: Field, bytes: &mut usize) -> Value {
    *bytes += VALUE;
    match field {
        Field::Null => Value::from(()),
        Field::Bool(value) => Value::from(value),
        Field::Byte(value) => Value::from(value),
        Field::Short(value) => Value::from(value),
        Field::Int(value) => Value::from(value),
        Field::Long(value) => Value::from(value),
        Field::UByte(value) => Value::from(value),
        Field::UShort(value) => Value::from(value),
        Field::UInt(value) => Value::from(value),
        Field::ULong(value) => Value::from(value),
        Field::Float16(value) => Value::from(f64::from(value)),
        Field::Float(value) => Value::from(f64::from(value)),
        Field::Double(value) => Value::from(value),
        Field::Str(text) => {
            *bytes += text.len();
            Value::from(text)
        }
        // Older writers do not say that they mean text.
        Field::Bytes(data) => {
            *bytes += data.len();
            match std::str::from_utf8(data.data()) {
                Ok(text) => Value::from(text),
                Err(_) => Value::from_bytes(data.data().to_vec()),
            }
        }
        Field::Group(row) => columns(row, bytes),
        Field::ListInternal(list) => list.elements().iter().map(|item| value(item.clone(), bytes)).collect(),
        Field::MapInternal(map) => {
            let entries = map.entries().iter().map(|(key, item)| {
                let key = value(key.clone(), bytes);
                (key, value(item.clone(), bytes))
            });
            Value::from_pairs(entries)
        }
        time @ (Field::Decimal(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_)) => Value::from(time.to_string()),
    }
}
