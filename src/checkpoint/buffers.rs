//! The buffers of a checkpoint: one safetensors file, written by rank 0, with a checksum of the complete file in the
//! manifest.
//!
//! Every rank has the same buffers, unless the engine uses `BufferSync::None`; in that case, rank 0's values are saved.
//! In a pipeline, each rank has those of its stages, and rank 0 saves the buffers of all ranks of its pipeline. Buffers
//! change in a forward pass, so a background save writes the values from the time at which it began.

use super::folder::write_error;
use super::manifest::{BufferFile, MANIFEST};
use crate::error::{CheckpointError, Error, Result};
use crate::param::{ModelBuffer, is_dispensable};
use crate::tensor::bytes::{converted, dtype_for_file, dtype_in_file};
use crate::util::list;
use candle_core::DType;
use safetensors::SafeTensors;
use safetensors::tensor::{TensorView, serialize};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use twox_hash::XxHash3_64;

const NAME: &str = "buffers.safetensors";

/// A buffer in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
#[doc(hidden)]
pub struct SavedBuffer {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub bytes: Vec<u8>,
}

/// Returns the file's bytes for the current buffers; `None` if there are no buffers.
pub(super) fn snapshot(buffers: &[ModelBuffer], dir: &Path) -> Result<Option<Vec<u8>>> {
    if buffers.is_empty() {
        return Ok(None);
    }
    let current = |buffer: &ModelBuffer| {
        let (name, shape, dtype) = (buffer.name.clone(), buffer.tensor.dims().to_vec(), buffer.tensor.dtype());
        Ok(SavedBuffer { name, shape, dtype, bytes: buffer.bytes()? })
    };
    to_file_bytes(&buffers.iter().map(current).collect::<Result<Vec<_>>>()?, dir)
}

/// Returns the file's bytes for the buffers in several files, some of which may be empty; `None` if there are no buffers.
pub(super) fn merge_files(files: &[Vec<u8>], dir: &Path) -> Result<Option<Vec<u8>>> {
    let mut all = Vec::new();
    for bytes in files.iter().filter(|bytes| !bytes.is_empty()) {
        all.extend(buffers_in(bytes, |problem| CheckpointError::Unusable { path: dir.join(NAME), problem }.into())?);
    }
    to_file_bytes(&all, dir)
}

/// Returns the file's bytes; `None` if there are no buffers.
pub(super) fn to_file_bytes(buffers: &[SavedBuffer], dir: &Path) -> Result<Option<Vec<u8>>> {
    if buffers.is_empty() {
        return Ok(None);
    }
    let wrong = |problem: String| Error::from(CheckpointError::Unusable { path: dir.join(NAME), problem });
    let views = buffers.iter().map(|SavedBuffer { name, shape, dtype, bytes }| {
        Some((name.clone(), TensorView::new(dtype_for_file(*dtype)?, shape.clone(), bytes).ok()?))
    });
    let views = views.collect::<Option<Vec<_>>>();
    let views = views.ok_or_else(|| wrong("a buffer has a type that files cannot store".into()))?;
    serialize(views, None).map(Some).map_err(|e| wrong(e.to_string()))
}

/// Returns the manifest entry of a file with these bytes.
pub(super) fn entry(bytes: &[u8]) -> BufferFile {
    let checksum = format!("{:016x}", XxHash3_64::oneshot(bytes));
    BufferFile { name: NAME.into(), bytes: bytes.len() as u64, checksum }
}

/// Writes the file and syncs it to disk.
pub(super) fn write(folder: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create_new(folder.join(NAME))?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|source| write_error(folder, &source))
}

/// Reads and checks the buffer file of a checkpoint's folder.
pub(super) fn read(folder: &Path, entry: &BufferFile) -> Result<Vec<SavedBuffer>> {
    let path = folder.join(&entry.name);
    let wrong = |problem: String| Error::from(CheckpointError::Unusable { path: path.clone(), problem });
    let bytes = std::fs::read(&path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => wrong("the file is missing; load another tag".into()),
        _ => wrong(format!("{e}; make it readable, or load another tag")),
    })?;
    if self::entry(&bytes) != *entry {
        return Err(wrong("it is damaged, or a different file; load another tag".into()));
    }
    let mut all = buffers_in(&bytes, |problem| wrong(format!("{problem}; load another tag")))?;
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

/// Returns the buffers in a file with these bytes. `wrong` turns a problem into an error.
fn buffers_in(bytes: &[u8], wrong: impl Fn(String) -> Error) -> Result<Vec<SavedBuffer>> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| wrong(e.to_string()))?;
    let saved = |(name, view): (String, TensorView<'_>)| {
        let dtype = dtype_in_file(view.dtype())?;
        Some(SavedBuffer { name, shape: view.shape().to_vec(), dtype, bytes: view.data().to_vec() })
    };
    let all: Option<Vec<SavedBuffer>> = file.tensors().into_iter().map(saved).collect();
    all.ok_or_else(|| wrong("it has a tensor of a type that buffers cannot have".into()))
}

/// Returns the new values of this rank's `buffers`, with their indices, from the buffers `saved` in a checkpoint.
/// `elsewhere` contains the names of the buffers that other ranks of a pipeline have.
///
/// # Errors
/// Fails with [`CheckpointError::Unusable`] if a buffer has a different shape, or values that its type in the model
/// cannot hold, or, with `strict`, if the model or the checkpoint lacks a buffer that the other has.
pub(super) fn new_values(
    buffers: &[ModelBuffer],
    elsewhere: Option<&BTreeSet<String>>,
    saved: &[SavedBuffer],
    strict: bool,
    folder: &Path,
) -> Result<Vec<(usize, Vec<u8>)>> {
    let wrong = |problem: String| Error::from(CheckpointError::Unusable { path: folder.join(MANIFEST), problem });
    let own_names: BTreeSet<&str> = buffers.iter().map(|b| b.name.as_str()).collect();
    let saved_names: BTreeSet<&str> = saved.iter().map(|b| b.name.as_str()).collect();
    let missing = own_names.difference(&saved_names).copied().collect();
    let is_known = |name: &str| own_names.contains(name) || elsewhere.is_some_and(|names| names.contains(name));
    let unknown = saved.iter().filter(|b| !is_known(&b.name) && !is_dispensable(&b.name, &b.shape));
    let unknown: Vec<&str> = unknown.map(|b| b.name.as_str()).collect();
    for (names, subject) in [(missing, "it lacks"), (unknown, "the model lacks")] {
        if strict && !names.is_empty() {
            let (noun, names) = (if names.len() == 1 { "buffer" } else { "buffers" }, list(&names));
            return Err(wrong(format!(
                "{subject} the {noun} {names}; build the model that was saved, or load with load_module_strict false"
            )));
        }
    }
    let mut new_values = Vec::new();
    for (number, buffer) in buffers.iter().enumerate() {
        let Some(saved_buffer) = saved.iter().find(|saved| saved.name == buffer.name) else { continue };
        let (name, dims, dtype) = (&buffer.name, buffer.tensor.dims(), buffer.tensor.dtype());
        if saved_buffer.shape != dims {
            let found = &saved_buffer.shape;
            return Err(wrong(format!(
                "buffer {name} has shape {found:?} in the file but {dims:?} in the model; build the model that was \
                 saved"
            )));
        }
        let bytes = converted(&saved_buffer.bytes, saved_buffer.dtype, dtype).ok_or_else(|| {
            let found = saved_buffer.dtype;
            wrong(format!(
                "buffer {name} is {found:?} in the file but {dtype:?} in the model, which cannot hold its values; \
                 build the model that was saved"
            ))
        })?;
        new_values.push((number, bytes));
    }
    Ok(new_values)
}
