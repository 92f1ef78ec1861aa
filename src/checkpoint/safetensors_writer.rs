//! Writes safetensors files in the layout that transformers reads: one file, or several with an index.

use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::Path;

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[doc(hidden)]
pub struct TensorEntry {
    pub name: String,
    /// The dtype's name in safetensors.
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: u64,
}

/// The receiver of the bytes of a tensor, piece by piece.
pub(crate) type TensorSink<'a> = &'a mut dyn FnMut(&[u8]) -> Result<()>;

/// Writes the tensors into `folder` and returns the names of their files. A file has at most `max_bytes` bytes of
/// tensor data unless it contains a single larger tensor. `write_tensor` writes the bytes of the tensor with a given
/// index into a sink.
///
/// # Errors
/// Returns the errors of `write_tensor`, and [`Error::Io`] if a file cannot be written.
#[doc(hidden)]
pub fn write_model_files(
    folder: &Path,
    entries: &[TensorEntry],
    max_bytes: u64,
    mut write_tensor: impl FnMut(usize, TensorSink<'_>) -> Result<()>,
) -> Result<Vec<String>> {
    let bytes: Vec<u64> = entries.iter().map(|entry| entry.bytes).collect();
    let parts = split(&bytes, max_bytes);
    let name = |i: usize| match parts.len() {
        1 => "model.safetensors".to_string(),
        n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
    };
    let files: Vec<String> = (0..parts.len()).map(name).collect();
    for (file, part) in files.iter().zip(&parts) {
        create(folder, file, |out| {
            let write_error = |source| write_error(folder, file, source);
            let header = header(&entries[part.clone()]);
            out.write_all(&(header.len() as u64).to_le_bytes()).map_err(write_error)?;
            out.write_all(&header).map_err(write_error)?;
            part.clone().try_for_each(|i| write_tensor(i, &mut |bytes| out.write_all(bytes).map_err(write_error)))
        })?;
    }
    if files.len() > 1 {
        let in_file = |(file, part): (&String, &Range<usize>)| {
            let entries = entries[part.clone()].iter();
            entries.map(|entry| (entry.name.clone(), Value::from(file.as_str()))).collect::<Vec<_>>()
        };
        let map: Map<String, Value> = files.iter().zip(&parts).flat_map(in_file).collect();
        let index = json!({"metadata": {"total_size": bytes.iter().sum::<u64>()}, "weight_map": map});
        write_json(folder, "model.safetensors.index.json", &index)?;
    }
    Ok(files)
}

/// Writes a JSON file and syncs it to disk.
#[doc(hidden)]
pub fn write_json(folder: &Path, name: &str, value: &Value) -> Result<()> {
    create(folder, name, |file| writeln!(file, "{value:#}").map_err(|source| write_error(folder, name, source)))
}

/// Writes a new file and syncs it to disk.
#[doc(hidden)]
pub fn create(folder: &Path, name: &str, fill: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let write_error = |source| write_error(folder, name, source);
    let mut file = BufWriter::new(File::create_new(folder.join(name)).map_err(write_error)?);
    fill(&mut file)?;
    file.into_inner().map_err(|e| write_error(e.into_error()))?.sync_all().map_err(write_error)
}

fn write_error(folder: &Path, name: &str, source: std::io::Error) -> Error {
    Error::Io { action: "write", path: folder.join(name), source }
}

fn header(entries: &[TensorEntry]) -> Vec<u8> {
    let mut header = Map::new();
    // transformers rejects files without this entry.
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut end = 0;
    for TensorEntry { name, dtype, shape, bytes } in entries {
        let start = end;
        end += bytes;
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}));
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // The format requires data aligned to 8 bytes and allows spaces after the JSON.
    header.resize(header.len().next_multiple_of(8), b' ');
    header
}

/// Returns the tensors of each file: as many as the limit allows, at least one.
fn split(bytes: &[u64], limit: u64) -> Vec<Range<usize>> {
    let mut files: Vec<Range<usize>> = Vec::new();
    let mut filled = 0u64;
    for (index, bytes) in bytes.iter().enumerate() {
        match files.last_mut().filter(|_| filled.saturating_add(*bytes) <= limit) {
            Some(file) => (file.end, filled) = (index + 1, filled + bytes),
            None => {
                files.push(index..index + 1);
                filled = *bytes;
            }
        }
    }
    // A model without parameters also gets a file.
    if files.is_empty() {
        files.push(0..0);
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_take_what_fits_and_at_least_one_tensor() {
        assert_eq!(split(&[], 10).len(), 1);
        assert_eq!(split(&[4, 6, 1], 10), [0..2, 2..3]);
        assert_eq!(split(&[40, 40, 1, 1], 10), [0..1, 1..2, 2..4]);
        assert_eq!(split(&[1, 1, 1], 1), [0..1, 1..2, 2..3]);
        assert_eq!(split(&[3, 3, 3], u64::MAX).len(), 1);
    }
}
