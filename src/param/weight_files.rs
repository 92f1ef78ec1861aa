//! The safetensors files of parameters: one file, or the shards that an index names.

use super::model_buffer::is_dispensable;
use super::weight_file::{FileTensor, WeightFile};
use crate::error::{Error, ParamError, Result};
use crate::files;
use crate::util::{fnv1a, list};
use candle_core::{DType, Shape};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

/// The name of the weight file in a Hugging Face model folder.
pub const FILE_OF_FOLDER: &str = "model.safetensors";
/// The name of the index in such a folder, if the weights are in several files.
pub const INDEX_OF_FOLDER: &str = "model.safetensors.index.json";

/// The maximum size in bytes of an index, which has a line of about a hundred bytes for each tensor.
const MAX_INDEX: u64 = 256 << 20;

/// Memory-mapped safetensors files of f32, f16 or bf16 tensors.
#[derive(Debug)]
pub struct WeightFiles {
    /// The file or index.
    path: PathBuf,
    files: Vec<WeightFile>,
    /// The file that contains each tensor.
    file_indices: BTreeMap<String, usize>,
}

impl WeightFiles {
    /// Opens and maps a safetensors file, the files of an index, or those in a folder, and reads their headers.
    ///
    /// # Errors
    /// A file that cannot be read, or is neither a safetensors file nor a valid index; an index that names a file
    /// outside its folder, or a tensor that the named file does not have.
    pub fn open(path: &Path) -> Result<Self> {
        let [folder_file, index] = [FILE_OF_FOLDER, INDEX_OF_FOLDER].map(|name| path.join(name));
        if path.extension().is_some_and(|extension| extension == "json") {
            return Self::of_index(path);
        }
        if index.is_file() && !folder_file.is_file() {
            return Self::of_index(&index);
        }
        let path = if folder_file.is_file() { &folder_file } else { path };
        let file = WeightFile::open(path)?;
        let file_indices = file.tensors().map(|(name, _)| (name, 0)).collect();
        Ok(Self { path: path.to_owned(), files: vec![file], file_indices })
    }

    fn of_index(index: &Path) -> Result<Self> {
        let map = weight_map(index)?;
        let names: BTreeSet<&str> = map.values().map(String::as_str).collect();
        let mut shards = Vec::new();
        let mut file_indices = BTreeMap::new();
        for name in &names {
            let path = files::folder_of(index).join(name);
            let file = WeightFile::open(&path).map_err(|error| match error {
                Error::Io { path, source, .. } => {
                    let tensors = map.values().filter(|file| file == name).count();
                    let index = index.to_owned();
                    ParamError::NoShard { index, path, tensors, why: source.to_string() }.into()
                }
                other => other,
            })?;
            file_indices.extend(file.tensors().map(|(tensor, _)| (tensor, shards.len())));
            shards.push(file);
        }
        for (tensor, file) in &map {
            let shard = names.iter().position(|name| name == file).filter(|shard| shards[*shard].has(tensor));
            let Some(shard) = shard else {
                let (path, file) = (index.to_owned(), file.clone());
                return Err(ParamError::NotInShard { path, file, name: tensor.clone() }.into());
            };
            file_indices.insert(tensor.clone(), shard);
        }
        Ok(Self { path: index.to_owned(), files: shards, file_indices })
    }

    /// Returns the path of the file or index.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the tensors, in order of their names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, FileTensor<'_>)> {
        self.file_indices.iter().filter_map(|(name, i)| Some((name.as_str(), self.files[*i].tensor(name)?)))
    }

    /// Returns the tensor of a parameter, with its name in the files.
    pub fn find(&self, parameter: &str) -> Option<(String, FileTensor<'_>)> {
        let name = names_in_files(parameter).into_iter().find(|name| self.file_indices.contains_key(name))?;
        let tensor = self.files[self.file_indices[&name]].tensor(&name)?;
        Some((name, tensor))
    }

    /// Returns elements `range` of a parameter, in f32.
    pub fn values(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>> {
        self.require(name, shape)?.values(name, shape, range)
    }

    /// Returns the bytes of a buffer in `dtype`.
    pub fn buffer(&self, name: &str, shape: &Shape, dtype: DType) -> Result<Vec<u8>> {
        self.require(name, shape.dims())?.buffer(name, shape, dtype)
    }

    fn require(&self, name: &str, shape: &[usize]) -> Result<FileTensor<'_>> {
        self.find(name).map(|(_, tensor)| tensor).ok_or_else(|| self.missing(name, shape))
    }

    /// Returns the error about a missing tensor.
    pub fn missing(&self, name: &str, shape: &[usize]) -> Error {
        let names: Vec<&String> = self.file_indices.keys().collect();
        let (first_names, remaining) = names.split_at(names.len().min(3));
        let remaining = if remaining.is_empty() { String::new() } else { format!(" and {} more", remaining.len()) };
        let first_names: Vec<&str> = first_names.iter().map(|name| name.as_str()).collect();
        let (name, shape, existing) = (name.into(), shape.to_vec(), format!("{}{remaining}", first_names.join(", ")));
        ParamError::MissingTensor { path: self.path.clone(), name, shape, existing }.into()
    }

    /// Returns an error if there are tensors that are not among the parameters `used`, other than dispensable buffers.
    pub fn check_all_used(&self, used: &BTreeSet<&str>) -> Result<()> {
        let extra = self.unused(used);
        match extra.is_empty() {
            true => Ok(()),
            false => Err(ParamError::ExtraTensors { path: self.path.clone(), names: list(&extra) }.into()),
        }
    }

    /// Returns the tensors that are not among the parameters `used`, other than dispensable buffers.
    pub fn unused(&self, used: &BTreeSet<&str>) -> Vec<&str> {
        let used: BTreeSet<String> = used.iter().filter_map(|name| self.find(name)).map(|(name, _)| name).collect();
        let unused =
            self.tensors().filter(|(name, tensor)| !used.contains(*name) && !is_dispensable(name, tensor.shape()));
        unused.map(|(name, _)| name).collect()
    }

    /// Returns a hash of the files' headers and of the bytes at up to a thousand positions in each file.
    pub fn fingerprint(&self) -> u64 {
        match &self.files[..] {
            [file] => file.fingerprint(),
            files => {
                let all = files.iter().flat_map(|file| file.fingerprint().to_le_bytes());
                fnv1a(&all.collect::<Vec<u8>>())
            }
        }
    }
}

/// Returns the names that a parameter may have in files, the most likely first. Hugging Face saves a GPT-2 with a
/// language-modeling head under `transformer.`, and one without a head, like the published files, without that prefix.
/// Other models use the prefixes `model.`, `bert.`, `roberta.`, `electra.` and `distilbert.` in the same way, and a
/// language model inside a vision model also has `language_model.`. The oldest encoders use TensorFlow's names for the
/// parameters of norms.
fn names_in_files(parameter: &str) -> Vec<String> {
    let mut names = vec![parameter.to_owned(), format!("transformer.{parameter}")];
    let bare = ["transformer.", "model.", "bert.", "roberta.", "electra.", "distilbert."];
    let bare = bare.iter().find_map(|prefix| parameter.strip_prefix(prefix));
    names.extend(bare.map(str::to_owned));
    names.push(format!("language_model.{parameter}"));
    names.extend(parameter.strip_prefix("model.").map(|bare| format!("model.language_model.{bare}")));
    if let Some(bare) = parameter.strip_prefix("model.language_model.") {
        names.extend([format!("language_model.model.{bare}"), format!("model.{bare}")]);
    }
    for (new, old) in [(".LayerNorm.weight", ".LayerNorm.gamma"), (".LayerNorm.bias", ".LayerNorm.beta")] {
        let old_name = |name: &str| name.strip_suffix(new).map(|name| format!("{name}{old}"));
        names.extend([Some(parameter), bare].into_iter().flatten().filter_map(old_name));
    }
    names
}

/// Returns the file of each tensor, according to the index at `path`.
pub fn weight_map(path: &Path) -> Result<BTreeMap<String, String>> {
    let bad = |why: String| Error::from(ParamError::BadWeightFile { path: path.to_owned(), why });
    let bytes =
        files::read(path, MAX_INDEX).map_err(|source| Error::Io { action: "read", path: path.to_owned(), source })?;
    let index: Value = serde_json::from_slice(&bytes).map_err(|e| bad(format!("it is not JSON: {e}")))?;
    let map = index["weight_map"].as_object().ok_or_else(|| bad("it has no object \"weight_map\"".into()))?;
    let mut files = BTreeMap::new();
    for (tensor, file) in map {
        let Some(file) = file.as_str() else {
            return Err(bad("\"weight_map\" must give a file name for each tensor".into()));
        };
        let parts: Vec<Component<'_>> = Path::new(file).components().collect();
        if !matches!(parts[..], [Component::Normal(_)]) || file.contains('/') {
            let (path, name, file) = (path.to_owned(), tensor.clone(), file.to_owned());
            return Err(ParamError::ShardOutside { path, name, file }.into());
        }
        files.insert(tensor.clone(), file.to_owned());
    }
    match files.is_empty() {
        true => Err(bad("\"weight_map\" names no tensor".into())),
        false => Ok(files),
    }
}
