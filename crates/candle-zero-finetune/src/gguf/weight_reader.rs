//! Reads the weights of a GGUF file by their Hugging Face names and in Hugging Face's row order, dequantized as they
//! are read.

use super::architectures::rotary_pairs;
use super::header::{GgufHeader, TensorInfo};
use super::tensor_names::{TensorForm, interleaved_row, tensor_mapping};
use super::tensor_types::SUPPORTED_FORMATS;
use crate::error::{Error, FinetuneError, ParamError, Result};
use candle_core::quantized::gguf_file::Value;
use candle_zero::engine::InitialValues;
use candle_zero::files;
use candle_zero::models::DecoderConfig;
use candle_zero::param::check_finite;
use candle_zero::util::{counted, fnv1a, list};
use memmap2::Mmap;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A mapped GGUF file.
#[derive(Debug)]
pub(crate) struct GgufFile {
    pub(super) path: PathBuf,
    map: Mmap,
    pub(super) header: GgufHeader,
    /// The source of each parameter, by the parameter's name.
    sources: BTreeMap<String, TensorSource>,
}

/// The tensors in the file from which a parameter is read.
#[derive(Debug, Clone)]
struct TensorSource {
    /// The names of the tensors.
    names: Vec<String>,
    /// The shape of the parameter.
    shape: Vec<usize>,
    form: TensorForm,
    /// Whether 1 was added to all elements in the file.
    plus_one: bool,
}

impl GgufFile {
    /// Opens and maps a file, and reads its metadata.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io { action: "read", path: path.to_owned(), source };
        let file = files::open(path).map_err(io)?;
        // SAFETY: the map is only read. If another process truncated the file while it was mapped, an access would
        // raise SIGBUS. Nothing in candle-zero writes weights in place, and copying every model into memory to rule
        // this out would be too expensive.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let header = GgufHeader::read(&map).map_err(|reason| bad_gguf(path, reason))?;
        Ok(Self { path: path.to_owned(), map, header, sources: BTreeMap::new() })
    }

    /// Returns the file after checking that it contains exactly the weights of the model that `config` describes.
    pub fn described_by(mut self, config: &DecoderConfig) -> Result<Self> {
        let architecture = self.architecture()?.to_owned();
        let mut used: BTreeSet<&str> = REDUNDANT_TENSORS.into_iter().collect();
        let parameters = config.parameters()?;
        let pairs = rotary_pairs(&architecture).unwrap_or(config.rotary_pairs);
        let experts = config.mixture.as_ref().map_or(0, |mixture| mixture.experts);
        for (parameter, shape) in &parameters {
            let missing = || {
                let (path, name, existing) = (self.path.clone(), parameter.clone(), self.some_names());
                Error::from(ParamError::MissingTensor { path, name, shape: shape.clone(), existing })
            };
            let mapping = tensor_mapping(parameter, config, pairs).ok_or_else(missing)?;
            let stored = mapping.shape_in_file(shape, experts);
            for name in &mapping.names {
                let (name, info) = self.header.tensors.get_key_value(name).ok_or_else(missing)?;
                if info.shape != stored {
                    let paths = [self.path.as_path(), &self.path];
                    return Err(FinetuneError::not_as_described(parameter, paths, &info.shape, &stored).into());
                }
                if used.insert(name) {
                    self.check(name, info)?;
                }
            }
            let source = TensorSource {
                names: mapping.names,
                shape: shape.clone(),
                form: mapping.form,
                plus_one: mapping.plus_one,
            };
            self.sources.insert(parameter.clone(), source);
        }
        let mut extra: Vec<&str> = self.header.tensors.keys().map(String::as_str).collect();
        extra.retain(|name| !used.contains(name));
        extra.sort_unstable();
        match extra.is_empty() {
            true => Ok(self),
            false => Err(ParamError::ExtraTensors { path: self.path, names: list(&extra) }.into()),
        }
    }

    /// Returns the architecture of the model.
    pub fn architecture(&self) -> Result<&str> {
        match self.header.metadata.get("general.architecture") {
            Some(Value::String(architecture)) => Ok(architecture),
            _ => Err(bad_gguf(&self.path, "its metadata has no general.architecture")),
        }
    }

    /// Returns the error for a metadata value.
    pub fn refuse(&self, key: &str, found: impl ToString, allowed: impl ToString) -> Error {
        let (path, key) = (self.path.clone(), key.to_owned());
        FinetuneError::GgufValue { path, key, found: found.to_string(), allowed: allowed.to_string() }.into()
    }

    /// Returns all values of a tensor, if the file has one of that name.
    pub fn dequantized(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some(info) = self.header.tensors.get(name) else { return Ok(None) };
        self.check(name, info)?;
        let mut values = Vec::new();
        self.read(info, 0..info.elements(), &mut values)?;
        Ok(Some(values))
    }

    fn some_names(&self) -> String {
        let mut names: Vec<&String> = self.header.tensors.keys().collect();
        names.sort_unstable();
        list(&names)
    }

    /// Checks that a tensor can be read, before anything is read.
    fn check(&self, name: &str, info: &TensorInfo) -> Result<()> {
        let format = info.format;
        if !format.is_supported() {
            let (path, name, found) = (self.path.clone(), name.to_owned(), format.to_string());
            return Err(FinetuneError::GgufDtype { path, name, found, allowed: SUPPORTED_FORMATS }.into());
        }
        let (row, block) = (info.shape.last().copied().unwrap_or(1), format.block());
        if !row.is_multiple_of(block) {
            return Err(bad_gguf(
                &self.path,
                format!(
                    "the row length of tensor {name}, {}, is not a multiple of the block size {block}",
                    counted(row, "element")
                ),
            ));
        }
        let size = (info.elements() / block).checked_mul(format.block_bytes());
        let start = usize::try_from(info.offset).ok().and_then(|offset| self.header.data_start.checked_add(offset));
        let end = start.zip(size).and_then(|(start, size)| start.checked_add(size));
        match end.filter(|end| *end <= self.map.len()) {
            Some(_) => Ok(()),
            None => {
                let bytes = self.map.len();
                let reason = format!(
                    "tensor {name} ends beyond the end of the file ({bytes} bytes): the file is truncated or damaged"
                );
                Err(bad_gguf(&self.path, reason))
            }
        }
    }

    /// Returns which bytes of the file contain the blocks with elements `range` of a tensor that was checked.
    fn bytes(&self, info: &TensorInfo, range: Range<usize>) -> Range<usize> {
        let (block, size) = (info.format.block(), info.format.block_bytes());
        let first = self.header.data_start + info.offset as usize;
        first + range.start / block * size..first + range.end.div_ceil(block) * size
    }

    /// Appends elements `range` of a tensor, in the order of the file, to `values`.
    fn read(&self, info: &TensorInfo, range: Range<usize>, values: &mut Vec<f32>) -> Result<()> {
        /// The number of elements that are dequantized at a time.
        const PIECE: usize = 1 << 18;
        let block = info.format.block();
        let mut at = range.start;
        while at < range.end {
            let blocks = at / block..range.end.min(at + PIECE).div_ceil(block);
            let end = range.end.min(blocks.end * block);
            let first = values.len();
            info.format.decode(&self.map[self.bytes(info, at..end)], values)?;
            // Of the first and the last block, only a part may be needed.
            let start = blocks.start * block;
            values.truncate(first + end - start);
            values.drain(first..first + at - start);
            at = end;
        }
        Ok(())
    }

    /// Returns elements `range` of a parameter `[experts, inputs, outputs]` that is stored as
    /// [`TensorForm::OfAllExperts`], or of a parameter `[inputs, outputs]` that is stored as
    /// [`TensorForm::Transposed`]. The outputs alternate between the tensors, which contain matrices
    /// `[outputs, inputs]`.
    fn read_transposed(
        &self,
        infos: &[&TensorInfo],
        [inputs, outputs]: [usize; 2],
        range: Range<usize>,
    ) -> Result<Vec<f32>> {
        /// The number of elements that are read at a time from complete matrices.
        const PIECE: usize = 1 << 18;
        let mut values = vec![0f32; range.len()];
        let (tensors, tensor_outputs) = (infos.len(), outputs / infos.len());
        let (mut row, end) = (range.start / outputs, range.end.div_ceil(outputs));
        let mut piece = Vec::new();
        while row < end && !range.is_empty() {
            let (expert, input) = (row / inputs, row % inputs);
            let rows = (inputs - input).min(end - row);
            // Complete lines of a tensor follow one another.
            let lines = if rows == inputs { (PIECE / inputs).max(1) } else { 1 };
            for (tensor, info) in infos.iter().enumerate() {
                for first in (0..tensor_outputs).step_by(lines) {
                    let lines = lines.min(tensor_outputs - first);
                    let start = (expert * tensor_outputs + first) * inputs + input;
                    piece.clear();
                    self.read(info, start..start + (lines - 1) * inputs + rows, &mut piece)?;
                    for (at, value) in piece.iter().enumerate() {
                        let output = (first + at / rows) * tensors + tensor;
                        let to = (row + at % rows) * outputs + output;
                        if range.contains(&to) {
                            values[to - range.start] = *value;
                        }
                    }
                }
            }
            row += rows;
        }
        Ok(values)
    }

    /// Returns elements `range` of a parameter that is read from these tensors, and the range of elements that
    /// were needed from each tensor.
    fn read_source(
        &self,
        source: &TensorSource,
        infos: &[&TensorInfo],
        range: Range<usize>,
    ) -> Result<(Vec<f32>, Range<usize>)> {
        let (info, shape) = (infos[0], &source.shape);
        let elements = shape.iter().product::<usize>();
        let needed = match source.form {
            TensorForm::Same | TensorForm::Vector => range,
            TensorForm::OfExpert(expert) => expert * elements + range.start..expert * elements + range.end,
            TensorForm::Interleaved(head) => {
                // The rows of a bias have one element.
                let row = shape.get(1).copied().unwrap_or(1);
                let mut values = Vec::with_capacity(range.len());
                let mut at = range.start;
                while at < range.end {
                    let (r, column) = (at / row, at % row);
                    let end = range.end.min((r + 1) * row);
                    let from = interleaved_row(r, head) * row + column;
                    self.read(info, from..from + (end - at), &mut values)?;
                    at = end;
                }
                // Rows may come from anywhere in the tensor.
                return Ok((values, 0..elements));
            }
            TensorForm::Transposed | TensorForm::OfAllExperts { .. } => {
                let outputs = shape.last().copied().unwrap_or(1);
                let inputs = match source.form {
                    TensorForm::OfAllExperts { inputs } => inputs,
                    _ => elements / outputs,
                };
                let values = self.read_transposed(infos, [inputs, outputs], range.clone())?;
                let matrix = inputs * outputs;
                let matrices = range.start / matrix..range.end.div_ceil(matrix);
                let tensor_outputs = matrix / infos.len();
                return Ok((values, matrices.start * tensor_outputs..matrices.end * tensor_outputs));
            }
        };
        let mut values = Vec::with_capacity(needed.len());
        self.read(info, needed.clone(), &mut values)?;
        Ok((values, needed))
    }
}

impl InitialValues for GgufFile {
    fn has(&self, name: &str) -> bool {
        self.sources.contains_key(name)
    }

    fn values(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>> {
        let source = self.sources.get(name);
        let infos = source.and_then(|source| {
            let infos: Option<Vec<&TensorInfo>> =
                source.names.iter().map(|name| self.header.tensors.get(name)).collect();
            Some((source, infos?))
        });
        let Some((source, infos)) = infos else {
            let (path, name, existing) = (self.path.clone(), name.to_owned(), self.some_names());
            return Err(ParamError::MissingTensor { path, name, shape: shape.to_vec(), existing }.into());
        };
        if source.shape != shape {
            return Err(FinetuneError::not_as_described(name, [&self.path, &self.path], &source.shape, shape).into());
        }
        let (mut values, needed) = self.read_source(source, &infos, range.clone())?;
        // The pages of a parameter that was read are seldom needed again.
        infos.iter().for_each(|info| files::release_pages(&self.map, self.bytes(info, needed.clone())));
        if source.plus_one {
            values.iter_mut().for_each(|x| *x -= 1.0);
        }
        check_finite(&self.path, name, range.start, &values)?;
        Ok(values)
    }

    fn fingerprint(&self) -> u64 {
        const MAX_SAMPLED_NAMES: usize = 1000;
        let step = self.map.len().div_ceil(MAX_SAMPLED_NAMES).max(1);
        let header = self.map.len().min(self.header.data_start);
        let data = self.map.chunks(step).flat_map(|c| &c[..c.len().min(8)]);
        let sampled: Vec<u8> = self.map[..header].iter().chain(data).copied().collect();
        files::release_pages(&self.map, 0..self.map.len());
        fnv1a(&sampled)
    }
}

/// Tensors that contain no parameters. `config_json` derives the rotary scaling of Llama 3.1 and later from
/// `rope_freqs.weight`.
const REDUNDANT_TENSORS: [&str; 1] = ["rope_freqs.weight"];

/// Returns the GGUF files in a folder.
pub(crate) fn gguf_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |source| candle_zero::Error::Io { action: "read", path: folder.to_owned(), source };
    let entries = std::fs::read_dir(folder).map_err(failed)?.map(|entry| Ok(entry.map_err(failed)?.path()));
    let mut files: Vec<PathBuf> = entries.collect::<Result<_>>()?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "gguf"));
    files.sort();
    Ok(files)
}

pub(crate) fn bad_gguf(path: &Path, reason: impl ToString) -> Error {
    FinetuneError::BadGguf { path: path.to_owned(), reason: reason.to_string() }.into()
}
