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
use super::hugging_face::{Description, describe};
use super::load::Checkpoint;
use super::manifest::Parameter;
use crate::error::{CheckpointError, Error, Result};
use crate::files::{folder_of, sync_folder};
use crate::zero::share::WEIGHTS;
use serde_json::{Map, Value, json};
use std::fs::{File, Permissions};
use std::io::{BufWriter, Result as IoResult, Write};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
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

    fn describe(&self, checkpoint: &Checkpoint) -> Description {
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
    fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// In safetensors files, and in `config.json`.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::F32 => ("F32", "float32"),
            Self::Bf16 => ("BF16", "bfloat16"),
            Self::F16 => ("F16", "float16"),
        }
    }

    /// The bytes of `values`; else the value that is too large.
    fn encode(self, values: &[f32]) -> std::result::Result<Vec<u8>, f32> {
        Ok(match self {
            Self::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Self::Bf16 => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
            Self::F16 => {
                let is_lost = |v: &&f32| v.is_finite() && half::f16::from_f32(**v).is_infinite();
                if let Some(lost) = values.iter().find(is_lost) {
                    return Err(*lost);
                }
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
    let beside = begin(out).map_err(wrong("create"))?;
    let mut count = Count { written: 0, tell };
    let params = saved(checkpoint);
    let writing = Writer { checkpoint, params, folder: beside.path(), settings, described: &described };
    let files = writing.all(&mut count)?;
    let bytes = count.written;
    finish(beside, out).map_err(wrong("write"))?;
    Ok(Consolidated { files, bytes, without_config: described.config.err() })
}

/// The folder that `out` means, if it can be written to.
pub(crate) fn absent_or_empty(out: &Path) -> Result<PathBuf> {
    let wrong = |source| Error::Io { action: "read", path: out.to_owned(), source };
    // What a link names is replaced, not the link.
    let out = if out.exists() { out.canonicalize().map_err(wrong)? } else { out.to_owned() };
    let problem = match std::fs::read_dir(&out) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(out),
        Ok(mut entries) => match entries.next() {
            None => return Ok(out),
            Some(_) => "files are written into a folder that is absent or empty, and it has files",
        },
        Err(e) if e.kind() == std::io::ErrorKind::NotADirectory => {
            "files are written into a folder that is absent or empty, and it is a file"
        }
        Err(source) => return Err(wrong(source)),
    };
    Err(CheckpointError::Unusable { path: out, problem: format!("{problem}; give another folder") }.into())
}

/// A folder beside `out`, as readable as any new one.
fn begin(out: &Path) -> IoResult<tempfile::TempDir> {
    let parent = folder_of(out);
    std::fs::create_dir_all(parent)?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".candle-zero-consolidating-").permissions(Permissions::from_mode(0o777)).tempdir_in(parent)
}

/// Brings the folder to disk and under its name, which may have an empty folder at most.
fn finish(beside: tempfile::TempDir, out: &Path) -> IoResult<()> {
    sync_folder(beside.path())?;
    std::fs::rename(beside.path(), out)?;
    // It has another name now: there is nothing to remove.
    let _ = beside.keep();
    sync_folder(folder_of(out))
}

/// Parameters of each file: as many as the limit allows, at least one.
fn split(bytes: &[u64], limit: u64) -> Vec<Range<usize>> {
    let mut files: Vec<Range<usize>> = Vec::new();
    let mut filled = 0u64;
    for (param, bytes) in bytes.iter().enumerate() {
        match files.last_mut().filter(|_| filled.saturating_add(*bytes) <= limit) {
            Some(file) => (file.end, filled) = (param + 1, filled + bytes),
            None => {
                files.push(param..param + 1);
                filled = *bytes;
            }
        }
    }
    // A model without parameters has a file all the same.
    if files.is_empty() {
        files.push(0..0);
    }
    files
}

/// Numbers of the tensors that the checkpoint has: places of parameters in the manifest, of which frozen ones may have
/// been left out, and behind all of these those of buffers.
fn saved(checkpoint: &Checkpoint) -> Vec<usize> {
    let parameters = &checkpoint.manifest().parameters;
    let saved = (0..parameters.len()).filter(|place| parameters[*place].has(WEIGHTS));
    saved.chain(parameters.len()..parameters.len() + checkpoint.buffers().len()).collect()
}

/// A tensor of the files.
enum Tensor<'a> {
    Parameter(&'a Parameter),
    Buffer(&'a SavedBuffer),
}

fn tensor(checkpoint: &Checkpoint, number: usize) -> Tensor<'_> {
    let parameters = &checkpoint.manifest().parameters;
    match parameters.get(number) {
        Some(parameter) => Tensor::Parameter(parameter),
        None => Tensor::Buffer(&checkpoint.buffers()[number - parameters.len()]),
    }
}

impl Tensor<'_> {
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
struct Count<'a> {
    written: u64,
    tell: &'a mut dyn FnMut(u64),
}

/// Files under construction.
struct Writer<'a> {
    checkpoint: &'a Checkpoint,
    /// Numbers of the tensors that are written.
    params: Vec<usize>,
    folder: &'a Path,
    settings: &'a ConsolidateSettings,
    described: &'a Description,
}

impl Writer<'_> {
    /// Names of the files with parameters.
    fn all(&self, count: &mut Count) -> Result<Vec<String>> {
        let bytes: Vec<u64> = self.params.iter().map(|p| self.bytes(*p)).collect();
        let parts = split(&bytes, self.settings.max_shard_size);
        let name = |at: usize| match parts.len() {
            1 => "model.safetensors".to_string(),
            n => format!("model-{:05}-of-{n:05}.safetensors", at + 1),
        };
        let files: Vec<String> = (0..parts.len()).map(name).collect();
        for (file, params) in files.iter().zip(&parts) {
            self.file(file, &self.params[params.clone()], count)?;
        }
        if files.len() > 1 {
            let in_file = |(file, params): (&String, &Range<usize>)| {
                let params = self.params[params.clone()].iter();
                params.map(|p| (self.name(*p), Value::from(file.as_str()))).collect::<Vec<_>>()
            };
            let map: Map<String, Value> = files.iter().zip(&parts).flat_map(in_file).collect();
            let index = json!({"metadata": {"total_size": bytes.iter().sum::<u64>()}, "weight_map": map});
            self.json("model.safetensors.index.json", &index)?;
        }
        if let Ok(config) = &self.described.config {
            self.json("config.json", config)?;
        }
        Ok(files)
    }

    fn bytes(&self, param: usize) -> u64 {
        tensor(self.checkpoint, param).bytes(self.settings.dtype)
    }

    fn name(&self, param: usize) -> String {
        format!("{}{}", self.described.prefix, tensor(self.checkpoint, param).name())
    }

    fn json(&self, name: &str, value: &Value) -> Result<()> {
        self.create(name, |file| writeln!(file, "{value:#}").map_err(|source| self.wrong(name, source)))
    }

    fn wrong(&self, name: &str, source: std::io::Error) -> Error {
        Error::Io { action: "write", path: self.folder.join(name), source }
    }

    /// A new file that is on disk in the end.
    fn create(&self, name: &str, fill: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
        let wrong = |source| self.wrong(name, source);
        let mut file = BufWriter::new(File::create_new(self.folder.join(name)).map_err(wrong)?);
        fill(&mut file)?;
        file.into_inner().map_err(|e| wrong(e.into_error()))?.sync_all().map_err(wrong)
    }

    /// A safetensors file with `params`.
    fn file(&self, name: &str, params: &[usize], count: &mut Count) -> Result<()> {
        self.create(name, |file| {
            let header = self.header(params);
            let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(|source| self.wrong(name, source));
            put(&(header.len() as u64).to_le_bytes())?;
            put(&header)?;
            for param in params {
                self.parameter(*param, |bytes| {
                    count.written += bytes.len() as u64;
                    (count.tell)(count.written);
                    put(bytes)
                })?;
            }
            Ok(())
        })
    }

    fn header(&self, params: &[usize]) -> Vec<u8> {
        let mut header = Map::new();
        // transformers refuses files that do not say so.
        header.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut end = 0;
        for param in params {
            let (dtype, shape) = match tensor(self.checkpoint, *param) {
                Tensor::Parameter(p) => (self.settings.dtype.names().0.to_string(), &p.shape),
                Tensor::Buffer(b) => (format!("{:?}", b.dtype), &b.shape),
            };
            let start = end;
            end += self.bytes(*param);
            let info = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
            header.insert(self.name(*param), info);
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        // The format wants the data aligned to 8 bytes; spaces are allowed there.
        header.resize(header.len().next_multiple_of(8), b' ');
        header
    }

    /// Gives the bytes of a parameter to `take`, piece by piece; those of a buffer at once, in its own type.
    fn parameter(&self, param: usize, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let parameter = match tensor(self.checkpoint, param) {
            Tensor::Parameter(parameter) => parameter,
            Tensor::Buffer(buffer) => return take(&buffer.bytes),
        };
        let numel = parameter.numel();
        for start in (0..numel).step_by(PIECE) {
            let values = self.checkpoint.read(0, param, start..numel.min(start + PIECE))?;
            let bytes = self.settings.dtype.encode(&values).map_err(|value| CheckpointError::Unusable {
                path: self.checkpoint.path().to_owned(),
                problem: format!("{} has the value {value}, which f16 cannot hold; take bf16 or f32", parameter.name),
            })?;
            take(&bytes)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_take_what_fits_and_at_least_one_parameter() {
        assert_eq!(split(&[], 10).len(), 1);
        assert_eq!(split(&[4, 6, 1], 10), [0..2, 2..3]);
        assert_eq!(split(&[40, 40, 1, 1], 10), [0..1, 1..2, 2..4]);
        assert_eq!(split(&[1, 1, 1], 1), [0..1, 1..2, 2..3]);
        assert_eq!(split(&[3, 3, 3], u64::MAX).len(), 1);
    }
}
