//! Writes a checkpoint's parameters in Hugging Face's layout, for transformers and other programs that read it.
//!
//! ```text
//!   OUT/model.safetensors                          all parameters, or, if they exceed the size limit:
//!   OUT/model-00001-of-00003.safetensors ...
//!   OUT/model.safetensors.index.json               which file contains which parameter
//!   OUT/config.json                                if the architecture is known
//! ```
//!
//! Everything is written into a temporary folder next to OUT, synced and renamed, so OUT is never incomplete.

use super::buffers::SavedBuffer;
use super::hugging_face_config::{HuggingFaceDescription, describe};
use super::load::Checkpoint;
use super::manifest::Parameter;
use super::safetensors_writer::{TensorEntry, write_json, write_model_files};
use crate::error::{CheckpointError, Error, Result};
use crate::files::{AtomicFolder, check_free_space, free_folder};
use crate::zero::share::state_access::WEIGHTS;
use std::path::{Path, PathBuf};

/// The maximum number of elements that are in memory at a time.
const PIECE: usize = 4 << 20;

/// The precision of consolidated parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ConsolidatedDtype {
    /// f32, the full precision of the checkpoint.
    #[default]
    F32,
    /// bf16, rounded to nearest, ties to even. A value that is too large for bf16 is an error.
    Bf16,
    /// f16, rounded to nearest, ties to even. A value that is too large for f16 is an error.
    F16,
}

/// The settings for consolidating a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsolidateSettings {
    /// The precision of the files. Default f32.
    pub dtype: ConsolidatedDtype,
    /// The maximum number of bytes of parameters in a file; a larger parameter gets its own file. Default 5 GB.
    pub max_shard_size: u64,
    /// The number of attention heads of a GPT-2 whose checkpoint does not contain this number. Default none.
    pub n_head: Option<usize>,
}

impl Default for ConsolidateSettings {
    fn default() -> Self {
        Self { dtype: ConsolidatedDtype::F32, max_shard_size: 5_000_000_000, n_head: None }
    }
}

impl ConsolidateSettings {
    /// Returns the size in bytes of all parameters and buffers of `checkpoint`, as they are written.
    pub fn bytes(&self, checkpoint: &Checkpoint) -> u64 {
        saved_tensors(checkpoint).into_iter().map(|number| tensor(checkpoint, number).bytes(self.dtype)).sum()
    }

    /// Checks that the settings fit `checkpoint`.
    ///
    /// # Errors
    /// Fails with [`CheckpointError::Unusable`] if no valid `config.json` can be written with the given `n_head`.
    pub fn check(&self, checkpoint: &Checkpoint) -> Result<()> {
        match (self.n_head, self.describe(checkpoint).config) {
            (Some(n_head), Err(why)) => {
                let problem = format!("n_head {n_head} is given, but config.json cannot be written: {why}");
                Err(CheckpointError::Unusable { path: checkpoint.path().to_owned(), problem }.into())
            }
            _ => Ok(()),
        }
    }

    fn describe(&self, checkpoint: &Checkpoint) -> HuggingFaceDescription {
        describe(checkpoint.manifest(), self.n_head, self.dtype.names().1)
    }
}

/// The result of [`consolidate`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Consolidated {
    /// The names of the files with parameters.
    pub files: Vec<String>,
    /// The size in bytes of all parameters and buffers.
    pub bytes: u64,
    /// The reason why there is no `config.json`, if there is none.
    pub without_config: Option<String>,
}

impl ConsolidatedDtype {
    #[doc(hidden)]
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Returns the dtype's name in safetensors files and in `config.json`.
    #[doc(hidden)]
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::F32 => ("F32", "float32"),
            Self::Bf16 => ("BF16", "bfloat16"),
            Self::F16 => ("F16", "float16"),
        }
    }

    /// Returns the bytes of `values`, or, as an error, a value that is too large.
    #[doc(hidden)]
    pub fn encode(self, values: &[f32]) -> std::result::Result<Vec<u8>, f32> {
        let check =
            |fits: fn(f32) -> bool| values.iter().find(|v| v.is_finite() && !fits(**v)).map_or(Ok(()), |v| Err(*v));
        Ok(match self {
            Self::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Self::Bf16 => {
                check(|v| half::bf16::from_f32(v).is_finite())?;
                values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect()
            }
            Self::F16 => {
                check(|v| half::f16::from_f32(v).is_finite())?;
                values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect()
            }
        })
    }
}

/// Writes the parameters of `checkpoint`, and its buffers in their own types, into the folder `out`, which must be
/// absent or empty. `on_progress` is called with the number of bytes written so far.
///
/// # Errors
/// Fails with [`CheckpointError::Unusable`] for a folder that is not empty, settings that do not match the checkpoint,
/// a damaged checkpoint, or a value that the precision cannot represent; fails with [`Error::Io`] or [`Error::Output`]
/// if files cannot be written. In all these cases, `out` is unchanged.
pub fn consolidate(
    checkpoint: &Checkpoint,
    out: impl AsRef<Path>,
    settings: &ConsolidateSettings,
    on_progress: &mut dyn FnMut(u64),
) -> Result<Consolidated> {
    let out = out.as_ref();
    let wrong = |action| move |source| Error::Io { action, path: out.to_owned(), source };
    let out = &absent_or_empty(out)?;
    settings.check(checkpoint)?;
    let description = settings.describe(checkpoint);
    let folder = AtomicFolder::create_for(out).map_err(wrong("create"))?;
    check_free_space(folder.path(), settings.bytes(checkpoint))?;
    let mut progress = WriteProgress { written: 0, on_progress };
    let params = saved_tensors(checkpoint);
    let writer = ConsolidateWriter { checkpoint, params, folder: folder.path(), settings, description: &description };
    let files = writer.write_all(&mut progress)?;
    let bytes = progress.written;
    folder.finish().map_err(wrong("write"))?;
    Ok(Consolidated { files, bytes, without_config: description.config.err() })
}

/// Returns the folder that `out` refers to, if it is absent or empty.
#[doc(hidden)]
pub fn absent_or_empty(out: &Path) -> Result<PathBuf> {
    let wrong = |source| Error::Io { action: "read", path: out.to_owned(), source };
    free_folder(out).map_err(wrong)?.map_err(|problem| {
        let problem = format!("{problem}; give another folder");
        CheckpointError::Unusable { path: out.to_owned(), problem }.into()
    })
}

/// Returns the indices of the tensors that the checkpoint contains: first those of parameters in the manifest, without
/// frozen ones that were not saved, then those of buffers.
fn saved_tensors(checkpoint: &Checkpoint) -> Vec<usize> {
    let parameters = &checkpoint.manifest().parameters;
    let saved = (0..parameters.len()).filter(|index| parameters[*index].has(WEIGHTS));
    saved.chain(parameters.len()..parameters.len() + checkpoint.buffers().len()).collect()
}

/// A tensor in the files.
enum ConsolidatedTensor<'a> {
    Parameter(&'a Parameter),
    Buffer(&'a SavedBuffer),
}

fn tensor(checkpoint: &Checkpoint, number: usize) -> ConsolidatedTensor<'_> {
    let parameters = &checkpoint.manifest().parameters;
    match parameters.get(number) {
        Some(parameter) => ConsolidatedTensor::Parameter(parameter),
        None => ConsolidatedTensor::Buffer(&checkpoint.buffers()[number - parameters.len()]),
    }
}

impl ConsolidatedTensor<'_> {
    fn name(&self) -> &str {
        match self {
            Self::Parameter(parameter) => &parameter.name,
            Self::Buffer(buffer) => &buffer.name,
        }
    }

    fn bytes(&self, dtype: ConsolidatedDtype) -> u64 {
        match self {
            Self::Parameter(parameter) => parameter.numel() as u64 * dtype.bytes(),
            Self::Buffer(buffer) => buffer.bytes.len() as u64,
        }
    }
}

/// The number of bytes written so far, and the callback that receives it.
struct WriteProgress<'a> {
    written: u64,
    on_progress: &'a mut dyn FnMut(u64),
}

/// Files under construction.
struct ConsolidateWriter<'a> {
    checkpoint: &'a Checkpoint,
    /// The indices of the tensors to write.
    params: Vec<usize>,
    folder: &'a Path,
    settings: &'a ConsolidateSettings,
    description: &'a HuggingFaceDescription,
}

impl ConsolidateWriter<'_> {
    /// Writes all files and returns the names of those with parameters.
    fn write_all(&self, progress: &mut WriteProgress) -> Result<Vec<String>> {
        let entries: Vec<TensorEntry> = self.params.iter().map(|param| self.entry(*param)).collect();
        let files = write_model_files(self.folder, &entries, self.settings.max_shard_size, |at, put| {
            self.parameter(self.params[at], |bytes| {
                progress.written += bytes.len() as u64;
                (progress.on_progress)(progress.written);
                put(bytes)
            })
        })?;
        if let Ok(config) = &self.description.config {
            write_json(self.folder, "config.json", config)?;
        }
        Ok(files)
    }

    fn entry(&self, param: usize) -> TensorEntry {
        let tensor = tensor(self.checkpoint, param);
        let (dtype, shape) = match tensor {
            ConsolidatedTensor::Parameter(p) => (self.settings.dtype.names().0.to_string(), &p.shape),
            ConsolidatedTensor::Buffer(b) => (format!("{:?}", b.dtype), &b.shape),
        };
        let name = format!("{}{}", self.description.prefix, tensor.name());
        TensorEntry { name, dtype, shape: shape.clone(), bytes: tensor.bytes(self.settings.dtype) }
    }

    /// Passes the bytes of a tensor to `take`: those of a parameter piece by piece, and those of a buffer in a single
    /// call, in the buffer's own type.
    fn parameter(&self, param: usize, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let parameter = match tensor(self.checkpoint, param) {
            ConsolidatedTensor::Parameter(parameter) => parameter,
            ConsolidatedTensor::Buffer(buffer) => return take(&buffer.bytes),
        };
        let numel = parameter.numel();
        for start in (0..numel).step_by(PIECE) {
            let values = self.checkpoint.read(0, param, start..numel.min(start + PIECE))?;
            let bytes = self.settings.dtype.encode(&values).map_err(|value| CheckpointError::Unusable {
                path: self.checkpoint.path().to_owned(),
                problem: format!(
                    "{} has the value {value}, which {} cannot represent; use f32",
                    parameter.name,
                    self.settings.dtype.names().0.to_lowercase()
                ),
            })?;
            take(&bytes)?;
        }
        Ok(())
    }
}
