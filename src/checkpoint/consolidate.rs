//! A checkpoint's parameters in Hugging Face's layout, for transformers and everything else that reads it.
//!
//! ```text
//!   OUT/model.safetensors                          all of them, or above the limit:
//!   OUT/model-00001-of-00003.safetensors ...
//!   OUT/model.safetensors.index.json               which file has which parameter
//!   OUT/config.json                                where the model is known
//! ```
//!
//! Everything is written into a folder beside OUT, synced and renamed, so OUT is never half there.

use super::buffers::SavedBuffer;
use super::hugging_face::{HuggingFaceDescription, describe};
use super::load::Checkpoint;
use super::manifest::Parameter;
use super::safetensors_files::{TensorEntry, write_json, write_model_files};
use crate::error::{CheckpointError, Error, Result};
use crate::files::{AtomicFolder, check_free_space, free_folder};
use crate::zero::share::state_access::WEIGHTS;
use std::path::{Path, PathBuf};

/// Elements that are in memory at a time.
const PIECE: usize = 4 << 20;

/// Precision of consolidated parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ConsolidatedDtype {
    /// All digits of the checkpoint.
    #[default]
    F32,
    /// Rounded to the nearest, ties to even.
    Bf16,
    /// Rounded likewise. A value that is too large for it is an error.
    F16,
}

/// How a checkpoint is consolidated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsolidateSettings {
    /// Precision of the files. Default f32.
    pub dtype: ConsolidatedDtype,
    /// Bytes of parameters in a file; a parameter that is larger has a file of its own. Default 5 GB.
    pub max_shard_size: u64,
    /// Attention heads of a GPT-2 whose checkpoint does not contain their number. Default none.
    pub n_head: Option<usize>,
}

impl Default for ConsolidateSettings {
    fn default() -> Self {
        Self { dtype: ConsolidatedDtype::F32, max_shard_size: 5_000_000_000, n_head: None }
    }
}

impl ConsolidateSettings {
    /// Bytes of all parameters and buffers of `checkpoint`, as they are written.
    pub fn bytes(&self, checkpoint: &Checkpoint) -> u64 {
        saved(checkpoint).into_iter().map(|number| tensor(checkpoint, number).bytes(self.dtype)).sum()
    }

    /// Whether they suit `checkpoint`.
    ///
    /// # Errors
    /// [`CheckpointError::Unusable`] for an `n_head` that does not lead to a `config.json`.
    pub fn check(&self, checkpoint: &Checkpoint) -> Result<()> {
        match (self.n_head, self.describe(checkpoint).config) {
            (Some(n_head), Err(why)) => {
                let problem = format!("n_head {n_head} is given for its config.json, and there can be none: {why}");
                Err(CheckpointError::Unusable { path: checkpoint.path().to_owned(), problem }.into())
            }
            _ => Ok(()),
        }
    }

    fn describe(&self, checkpoint: &Checkpoint) -> HuggingFaceDescription {
        describe(checkpoint.manifest(), self.n_head, self.dtype.names().1)
    }
}

/// The written files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Consolidated {
    /// Names of the files with parameters.
    pub files: Vec<String>,
    /// Bytes of all parameters.
    pub bytes: u64,
    /// Why there is no `config.json`, if there is none.
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

    /// In safetensors files, and in `config.json`.
    #[doc(hidden)]
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::F32 => ("F32", "float32"),
            Self::Bf16 => ("BF16", "bfloat16"),
            Self::F16 => ("F16", "float16"),
        }
    }

    /// The bytes of `values`; else the value that is too large.
    #[doc(hidden)]
    pub fn encode(self, values: &[f32]) -> std::result::Result<Vec<u8>, f32> {
        let lost =
            |held: fn(f32) -> bool| values.iter().find(|v| v.is_finite() && !held(**v)).map_or(Ok(()), |v| Err(*v));
        Ok(match self {
            Self::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Self::Bf16 => {
                lost(|v| half::bf16::from_f32(v).is_finite())?;
                values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect()
            }
            Self::F16 => {
                lost(|v| half::f16::from_f32(v).is_finite())?;
                values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect()
            }
        })
    }
}

/// Writes the parameters of `checkpoint`, and its buffers in their own types, into the folder `out`, which must be absent or empty. `tell` learns the bytes
/// that have been written.
///
/// # Errors
/// [`CheckpointError::Unusable`] for a folder that is not empty, settings that do not suit the checkpoint, one that is
/// damaged, or a value that the precision cannot hold; [`Error::Io`] where files cannot be written. `out` is as it was.
pub fn consolidate(
    checkpoint: &Checkpoint,
    out: impl AsRef<Path>,
    settings: &ConsolidateSettings,
    tell: &mut dyn FnMut(u64),
) -> Result<Consolidated> {
    let out = out.as_ref();
    let wrong = |action| move |source| Error::Io { action, path: out.to_owned(), source };
    let out = &absent_or_empty(out)?;
    settings.check(checkpoint)?;
    let described = settings.describe(checkpoint);
    let folder = AtomicFolder::beside(out).map_err(wrong("create"))?;
    check_free_space(folder.path(), settings.bytes(checkpoint))?;
    let mut count = WriteProgress { written: 0, tell };
    let params = saved(checkpoint);
    let writing = ConsolidateWriter { checkpoint, params, folder: folder.path(), settings, described: &described };
    let files = writing.all(&mut count)?;
    let bytes = count.written;
    folder.finish().map_err(wrong("write"))?;
    Ok(Consolidated { files, bytes, without_config: described.config.err() })
}

/// The folder that `out` means, if it can be written to.
#[doc(hidden)]
pub fn absent_or_empty(out: &Path) -> Result<PathBuf> {
    let wrong = |source| Error::Io { action: "read", path: out.to_owned(), source };
    free_folder(out).map_err(wrong)?.map_err(|problem| {
        let problem = format!("{problem}; give another folder");
        CheckpointError::Unusable { path: out.to_owned(), problem }.into()
    })
}

/// Numbers of the tensors that the checkpoint has: places of parameters in the manifest, of which frozen ones may have
/// been left out, and behind all of these those of buffers.
fn saved(checkpoint: &Checkpoint) -> Vec<usize> {
    let parameters = &checkpoint.manifest().parameters;
    let saved = (0..parameters.len()).filter(|place| parameters[*place].has(WEIGHTS));
    saved.chain(parameters.len()..parameters.len() + checkpoint.buffers().len()).collect()
}

/// A tensor of the files.
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

/// How far it is.
struct WriteProgress<'a> {
    written: u64,
    tell: &'a mut dyn FnMut(u64),
}

/// Files under construction.
struct ConsolidateWriter<'a> {
    checkpoint: &'a Checkpoint,
    /// Numbers of the tensors that are written.
    params: Vec<usize>,
    folder: &'a Path,
    settings: &'a ConsolidateSettings,
    described: &'a HuggingFaceDescription,
}

impl ConsolidateWriter<'_> {
    /// Names of the files with parameters.
    fn all(&self, count: &mut WriteProgress) -> Result<Vec<String>> {
        let entries: Vec<TensorEntry> = self.params.iter().map(|param| self.entry(*param)).collect();
        let files = write_model_files(self.folder, &entries, self.settings.max_shard_size, |at, put| {
            self.parameter(self.params[at], |bytes| {
                count.written += bytes.len() as u64;
                (count.tell)(count.written);
                put(bytes)
            })
        })?;
        if let Ok(config) = &self.described.config {
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
        let name = format!("{}{}", self.described.prefix, tensor.name());
        TensorEntry { name, dtype, shape: shape.clone(), bytes: tensor.bytes(self.settings.dtype) }
    }

    /// Gives the bytes of a parameter to `take`, piece by piece; those of a buffer at once, in its own type.
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
                    "{} has the value {value}, which {} cannot hold; take f32",
                    parameter.name,
                    self.settings.dtype.names().0.to_lowercase()
                ),
            })?;
            take(&bytes)?;
        }
        Ok(())
    }
}
