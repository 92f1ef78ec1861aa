//! Rows of Parquet files, converted to the values that JSON lines yield.
//!
//! ```text
//!   PAR1 | row group: a chunk of pages for each column | row group ... | footer: schema, positions of chunks | PAR1
//! ```
//!
//! Row groups are read one after another, and only the columns that define a record are read. Memory holds the footer
//! and, for each of these columns, a dictionary page, a page of values, and the values of [`DECODED_ROWS`] rows
//! with the pages that contain them. Memory is therefore bounded by what a writer puts into a page (usually a megabyte)
//! and into a row, not by the file or a row group.

use super::column_mapping::ColumnMapping;
use super::raw_record::{MAX_RECORD_BYTES, RawRecord, RecordContent};
use super::record_parser::RECORD_FORMATS;
use crate::error::FinetuneError;
use crate::error::{Error, Result};
use candle_zero::files;
use candle_zero::untrusted_work::{SandboxSubject, run_sandboxed};
use candle_zero::util::{counted, list};
use minijinja::value::Value;
use parquet::basic::{Compression, ConvertedType, LogicalType, Repetition, Type as Physical};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, ParquetStatisticsPolicy, RowGroupMetaData};
use parquet::file::reader::FileReader;
use parquet::file::serialized_reader::{ReadOptionsBuilder, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::{ReaderIter, TreeBuilder};
use parquet::schema::types::{SchemaDescPtr, SchemaDescriptor, Type, TypePtr};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The number of rows for which the values of a column are decoded at a time.
const DECODED_ROWS: usize = 64;

/// The first and the last bytes of a file, and those of a file with an encrypted footer.
const MAGIC: &[u8; 4] = b"PAR1";
const ENCRYPTED_MAGIC: &[u8; 4] = b"PARE";

/// The rows of a file.
pub(super) struct ParquetRows {
    path: PathBuf,
    /// The file, as the sandbox names it in errors.
    subject: SandboxSubject,
    reader: SerializedFileReader<File>,
    /// The names of all columns.
    names: Vec<String>,
    /// The columns that are not read.
    unread: Arc<[String]>,
    /// The columns that are read.
    columns: SchemaDescPtr,
    /// The number of row groups that have been started.
    groups: usize,
    /// The remaining rows of the last group that has been started.
    group: Option<ReaderIter>,
    /// The number of rows read, and the number of rows in the file.
    row: u64,
    total_rows: u64,
    /// The size of the file in bytes.
    bytes: u64,
}

impl ParquetRows {
    /// Opens a file.
    ///
    /// # Errors
    /// [`FinetuneError::Parquet`] for a file that is not a Parquet file, or is cut off, damaged, encrypted or in an
    /// unsupported form; [`Error::Io`].
    pub(super) fn open(path: &Path, known: &ColumnMapping) -> Result<Self> {
        let io = |source| Error::Io { action: "read", path: path.into(), source };
        let wrong = |problem| Error::from(FinetuneError::Parquet { path: path.into(), problem });
        let mut file = files::open(path).map_err(io)?;
        let bytes = file.metadata().map_err(io)?.len();
        check_ends(&mut file, bytes).map_err(io)?.map_err(wrong)?;
        let options = ReadOptionsBuilder::new()
            .with_column_stats_policy(ParquetStatisticsPolicy::SkipAll)
            .with_size_stats_policy(ParquetStatisticsPolicy::SkipAll)
            .with_encoding_stats_policy(ParquetStatisticsPolicy::SkipAll)
            .build();
        let damaged = |reason| wrong(format!("its footer is damaged ({reason}); fetch or write it again"));
        let subject = SandboxSubject::new(path.display().to_string());
        let reader =
            run_guarded(&subject, || SerializedFileReader::new_with_options(file, options)).map_err(damaged)?;
        let metadata = reader.metadata();
        let root = metadata.file_metadata().schema_descr().root_schema();
        let names: Vec<String> = root.get_fields().iter().map(|field| field.name().to_owned()).collect();
        // A column that cannot be read is an error only if it defines a format.
        let is_read = |field: &&TypePtr| {
            let name = field.name();
            known.is_key(name) || known.is_known(name) && check_type(field, name).is_ok()
        };
        let read: Vec<_> = root.get_fields().iter().filter(is_read).cloned().collect();
        if !read.iter().any(|field| known.is_key(field.name())) {
            let hint = ColumnMapping::hint(&names);
            return Err(wrong(format!(
                "its columns ({}) match no known format: {RECORD_FORMATS}; {hint}",
                list(&names)
            )));
        }
        let unread = names.iter().filter(|name| !read.iter().any(|field| field.name() == *name)).cloned().collect();
        read.iter().try_for_each(|field| check_type(field, field.name())).map_err(wrong)?;
        let root = Type::group_type_builder(root.name()).with_fields(read).build();
        let columns = Arc::new(SchemaDescriptor::new(Arc::new(root.map_err(|e| damaged(e.to_string()))?)));
        let total_rows = check_groups(metadata, &columns).map_err(wrong)?;
        Ok(Self {
            path: path.into(),
            subject,
            reader,
            names,
            unread,
            columns,
            groups: 0,
            group: None,
            row: 0,
            total_rows,
            bytes,
        })
    }

    /// Returns the next row, or `None` at the end. The row's number takes the place of a line number.
    ///
    /// # Errors
    /// [`FinetuneError::Parquet`] for data that cannot be read, after which there are no further rows, or for a row
    /// that is too large.
    pub(super) fn next(&mut self) -> Result<Option<RawRecord>> {
        loop {
            match run_guarded(&self.subject, || self.group.as_mut().and_then(Iterator::next).transpose()) {
                Ok(None) if self.groups == self.reader.num_row_groups() => return Ok(None),
                Ok(None) => {
                    let open = || {
                        let group = self.reader.get_row_group(self.groups)?;
                        TreeBuilder::new().with_batch_size(DECODED_ROWS).as_iter(self.columns.clone(), &*group)
                    };
                    self.group = Some(run_guarded(&self.subject, open).map_err(|reason| self.damaged(&reason))?);
                    self.groups += 1;
                }
                Ok(Some(row)) => {
                    self.row += 1;
                    if row.get_column_iter().map(|(_, field)| text_bytes(field)).sum::<usize>() > MAX_RECORD_BYTES {
                        let problem =
                            format!("row {} is larger than {} MiB; shorten it", self.row, MAX_RECORD_BYTES >> 20);
                        return Err(FinetuneError::Parquet { path: self.path.clone(), problem }.into());
                    }
                    let mut bytes = 0;
                    let mut fields = row.get_column_iter().peekable();
                    // Unread columns are null.
                    let value = Value::from_pairs(self.names.iter().map(|name| {
                        let field = fields.next_if(|(column, _)| *column == name);
                        (name.as_str(), field.map_or(().into(), |(_, field)| value(field, &mut bytes)))
                    }));
                    return Ok(Some(RawRecord {
                        line: self.row,
                        raw: RecordContent::Columns { value, bytes, unread: self.unread.clone() },
                    }));
                }
                Err(reason) => return Err(self.damaged(&reason)),
            }
        }
    }

    /// Returns the approximate position in the file in bytes, as if all rows had the same size.
    pub(super) fn position(&self) -> u64 {
        (u128::from(self.bytes) * u128::from(self.row) / u128::from(self.total_rows.max(1))) as u64
    }

    fn damaged(&mut self, reason: &str) -> Error {
        (self.group, self.groups) = (None, self.reader.num_row_groups());
        let problem =
            format!("row {} cannot be read ({reason}): the file is damaged; fetch or write it again", self.row + 1);
        FinetuneError::Parquet { path: self.path.clone(), problem }.into()
    }
}

/// Returns the result of `read`, or why it failed. For damaged bytes, the `parquet` crate mostly returns errors, but
/// slicing and assertions in its decoders can also panic. A reader that panicked is not used again.
fn run_guarded<T>(subject: &SandboxSubject, read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    const MAX_SHOWN_CHARS: usize = 200;
    // The usual size of a page in bytes.
    let result = run_sandboxed(subject, 1 << 20, read);
    let reason = match result {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(ParquetError::General(reason) | ParquetError::EOF(reason) | ParquetError::NYI(reason))) => reason,
        Ok(Err(error)) => error.to_string(),
        Err(panic) => panic,
    };
    // The error contains all bytes of a text that is not UTF-8.
    Err(reason.chars().take(MAX_SHOWN_CHARS).collect())
}

/// Checks, by its first and last bytes, that a file of this size is a complete file of this format.
fn check_ends(file: &mut File, bytes: u64) -> std::io::Result<Result<(), String>> {
    let mut ends = [[0; 4]; 2];
    if bytes >= 12 {
        file.read_exact(&mut ends[0])?;
        file.seek(SeekFrom::End(-4))?;
        file.read_exact(&mut ends[1])?;
    }
    Ok(match ends.each_ref() {
        [MAGIC, MAGIC] => Ok(()),
        [ENCRYPTED_MAGIC, _] | [_, ENCRYPTED_MAGIC] => Err("it is encrypted; write it without encryption".into()),
        [MAGIC, _] => Err("its end is missing; fetch or write it again".into()),
        _ if bytes == 0 => Err("it is empty; fetch or write it again".into()),
        _ => {
            Err("it does not begin with PAR1; fetch it again, with `git lfs pull` if it is from a Git repository, or \
                  correct its extension"
                .into())
        }
    })
}

/// Checks that a column can be read completely.
fn check_type(field: &Type, path: &str) -> Result<(), String> {
    let info = field.get_basic_info();
    let refused = |description: &str| {
        Err(format!(
            "column {path} is {description}, but only strings, numbers, Booleans, and lists, structs and maps of these \
             are supported; write it as one of them, or omit it"
        ))
    };
    if let Type::PrimitiveType { physical_type, .. } = field {
        use ConvertedType as C;
        return match (physical_type, info.converted_type()) {
            (Physical::BOOLEAN | Physical::FLOAT | Physical::DOUBLE, C::NONE)
            | (Physical::INT32 | Physical::INT64, C::NONE)
            | (Physical::INT32, C::INT_8 | C::INT_16 | C::INT_32 | C::UINT_8 | C::UINT_16 | C::UINT_32)
            | (Physical::INT64, C::INT_64 | C::UINT_64)
            | (Physical::INT32, C::DATE | C::TIME_MILLIS)
            | (Physical::INT64, C::TIME_MICROS | C::TIMESTAMP_MILLIS | C::TIMESTAMP_MICROS)
            | (Physical::BYTE_ARRAY, C::UTF8 | C::ENUM | C::JSON) => Ok(()),
            (Physical::FIXED_LEN_BYTE_ARRAY, C::NONE) if info.logical_type_ref() == Some(&LogicalType::Float16) => {
                Ok(())
            }
            (Physical::BYTE_ARRAY | Physical::FIXED_LEN_BYTE_ARRAY, C::NONE | C::BSON) => refused("binary"),
            (physical, C::NONE) => refused(&format!("of type {physical}")),
            (_, converted) => refused(&format!("of type {converted}")),
        };
    }
    let fields = field.get_fields();
    // The crate's reader assumes that lists, maps and structs have the form that the format prescribes.
    let is_well_formed = match (info.converted_type(), fields) {
        (ConvertedType::LIST, [items]) => is_repeated(items),
        (ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE, [pairs]) => {
            is_repeated(pairs) && pairs.is_group() && pairs.get_fields().len() <= 2
        }
        (ConvertedType::LIST | ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE, _) => false,
        (_, fields) => !fields.is_empty(),
    };
    if !is_well_formed {
        return refused("a list, map or struct without items");
    }
    fields.iter().try_for_each(|field| check_type(field, &format!("{path}.{}", field.name())))
}

fn is_repeated(field: &Type) -> bool {
    field.get_basic_info().repetition() == Repetition::REPEATED
}

/// Checks that the columns of all row groups can be read. Returns the number of rows.
fn check_groups(metadata: &ParquetMetaData, columns: &SchemaDescriptor) -> Result<u64, String> {
    let read = |group: &RowGroupMetaData| -> Result<u64, String> {
        let rows = group.num_rows();
        for column in group.columns() {
            let path = column.column_path();
            if !columns.columns().iter().any(|read| read.path() == path) {
                continue;
            }
            if let Some(other) = column.file_path() {
                return Err(format!("its rows are in other files, such as {other}; pass those files instead"));
            }
            if matches!(column.compression(), Compression::BROTLI(_) | Compression::LZO) {
                let codec = column.compression().to_string();
                let codec = codec.split('(').next().unwrap_or_default();
                return Err(format!(
                    "column {path} is compressed with {codec}, which is not supported; write it with SNAPPY, GZIP, ZSTD, \
                     LZ4 or no compression"
                ));
            }
            // A row has a value in each column, which may be null.
            if rows < 0 || column.num_values() < rows {
                return Err(format!(
                    "its footer is damaged ({} with {} of {path}); fetch or write it again",
                    counted(rows, "row"),
                    counted(column.num_values(), "value")
                ));
            }
        }
        Ok(rows as u64)
    };
    metadata.row_groups().iter().map(read).sum()
}

/// Returns the number of bytes of the texts in a field.
fn text_bytes(field: &Field) -> usize {
    match field {
        Field::Str(text) => text.len(),
        Field::Group(row) => row.get_column_iter().map(|(_, field)| text_bytes(field)).sum(),
        Field::ListInternal(items) => items.elements().iter().map(text_bytes).sum(),
        Field::MapInternal(map) => map.entries().iter().map(|(key, item)| text_bytes(key) + text_bytes(item)).sum(),
        _ => 0,
    }
}

/// Returns the value that a field has in JSON lines, and adds its approximate size in memory to `bytes`. Dates and
/// times are returned as the integers in the file.
///
/// Null fields of a struct are omitted. A Parquet struct has all fields that any struct of its column has, so a message
/// without a tool call would otherwise have a null call.
fn value(field: &Field, bytes: &mut usize) -> Value {
    *bytes += size_of::<Value>();
    match field {
        Field::Bool(truth) => (*truth).into(),
        Field::Byte(number) => (*number).into(),
        Field::Short(number) => (*number).into(),
        Field::Int(number) | Field::Date(number) | Field::TimeMillis(number) => (*number).into(),
        Field::Long(number)
        | Field::TimeMicros(number)
        | Field::TimestampMillis(number)
        | Field::TimestampMicros(number) => (*number).into(),
        Field::UByte(number) => (*number).into(),
        Field::UShort(number) => (*number).into(),
        Field::UInt(number) => (*number).into(),
        Field::ULong(number) => (*number).into(),
        Field::Float16(number) => finite(number.to_f64()),
        Field::Float(number) => finite((*number).into()),
        Field::Double(number) => finite(*number),
        Field::Str(text) => {
            *bytes += text.len();
            text.as_str().into()
        }
        Field::Group(row) => {
            let fields = row.get_column_iter().filter(|(_, field)| **field != Field::Null);
            Value::from_pairs(fields.map(|(name, field)| {
                *bytes += size_of::<Value>() + name.len();
                (name.as_str(), value(field, bytes))
            }))
        }
        Field::ListInternal(items) => items.elements().iter().map(|item| value(item, bytes)).collect(),
        Field::MapInternal(map) => {
            let pairs = map.entries().iter();
            Value::from_pairs(pairs.map(|(key, item)| (value(key, bytes).to_string(), value(item, bytes))))
        }
        // `check_type` refuses the types of `Decimal` and `Bytes`.
        Field::Null | Field::Decimal(_) | Field::Bytes(_) => ().into(),
    }
}

/// Returns a number, or null for NaN and infinity, which JSON cannot represent.
fn finite(number: f64) -> Value {
    if number.is_finite() { number.into() } else { ().into() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::chat::conversation::field;
    use crate::data::column_mapping::FORMAT_KEYS;
    use proptest::prelude::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/finetune/parquet").join(name)
    }

    /// Returns all rows of a file, or why it cannot be read.
    fn rows(path: &Path) -> Result<Vec<(Value, usize)>> {
        let mut rows = ParquetRows::open(path, &ColumnMapping::default())?;
        let mut found = vec![];
        while let Some(record) = rows.next()? {
            let RecordContent::Columns { value, bytes, .. } = record.raw else { panic!("{record:?}") };
            found.push((value, bytes));
            assert_eq!(record.line, found.len() as u64);
        }
        assert_eq!(rows.position(), if rows.total_rows == 0 { 0 } else { rows.bytes });
        assert!(rows.next()?.is_none());
        Ok(found)
    }

    #[test]
    fn each_row_is_what_its_json_line_is() {
        let mut files = 0;
        for entry in std::fs::read_dir(fixture("")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if !name.ends_with(".parquet") || name == "chats.text.parquet" {
                continue;
            }
            let lines =
                std::fs::read_to_string(fixture(name.split('.').next().unwrap()).with_extension("jsonl")).unwrap();
            let found = rows(&path).unwrap();
            assert_eq!(found.len(), lines.lines().count(), "{name}");
            for ((found, bytes), line) in found.into_iter().zip(lines.lines()) {
                let expected: Value = serde_json::from_str(line).unwrap();
                for key in FORMAT_KEYS {
                    // A null in a column means that there is no value.
                    let expected = Some(field(&expected, key)).filter(|value| !value.is_undefined());
                    let found = Some(field(&found, key)).filter(|value| !value.is_undefined());
                    assert_eq!(found.unwrap_or(().into()), expected.unwrap_or(().into()), "{name}: {key} of {line}");
                }
                assert!((line.len() / 4..16 * line.len()).contains(&bytes), "{name}: {bytes} bytes of {line}");
            }
            files += 1;
        }
        assert_eq!(files, 17);
    }

    proptest! {
        #[test]
        fn a_damaged_file_is_an_error_or_has_other_values(
            name in prop::sample::select(vec!["snappy", "zstd", "gzip", "lz4", "plain"]),
            position: prop::sample::Index,
            count in 1_usize..5,
            xor in 1_u8..,
        ) {
            let mut bytes = std::fs::read(fixture(&format!("chats.{name}.parquet"))).unwrap();
            let position = position.index(bytes.len());
            bytes.iter_mut().skip(position).take(count).for_each(|byte| *byte ^= xor);
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), bytes).unwrap();
            match rows(file.path()) {
                Ok(rows) => prop_assert!(rows.len() <= 40),
                Err(error) => match error.downcast_ref() {
                    Some(FinetuneError::Parquet { path, problem }) => {
                        prop_assert_eq!(path, file.path());
                        prop_assert!(!problem.is_empty() && problem.len() < 1000);
                    }
                    _ => prop_assert!(false, "{}", error),
                },
            }
        }
    }
}
