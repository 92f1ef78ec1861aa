//! Reads the weights of a GGUF file by their Hugging Face names and in Hugging Face's row order, dequantized as they
//! are read.

use super::mixture;
use crate::error::{Error, FinetuneError, ParamError, Result};
use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};
use candle_core::quantized::{GgmlDType, ggml_file::qtensor_from_ggml};
use candle_core::{Device, Tensor};
use candle_zero::engine::InitialValues;
use candle_zero::files;
use candle_zero::models::DecoderConfig;
use candle_zero::param::check_finite;
use candle_zero::util::{fnv1a, list};
use half::{bf16, f16};
use memmap2::Mmap;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A mapped GGUF file.
#[derive(Debug)]
pub(crate) struct GgufFile {
    pub(super) path: PathBuf,
    map: Mmap,
    pub(super) content: Content,
    /// The source tensor of each parameter, by the parameter's name.
    places: BTreeMap<String, TensorSource>,
}

/// The tensor in the file from which a parameter is read.
#[derive(Debug, Clone)]
struct TensorSource {
    /// The name of the tensor.
    name: String,
    /// The shape of the parameter.
    shape: Vec<usize>,
    /// The number of the tensor's elements before the parameter. A tensor of all experts contains several parameters.
    offset: usize,
    /// The number of heads, if the two halves of each head are interleaved row by row.
    mixed_heads: Option<usize>,
    /// Whether 1 was added to all elements.
    plus_one: bool,
}

/// The supported formats.
const SUPPORTED_FORMATS: &str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K and Q6_K";

impl GgufFile {
    /// Opens and maps a file, and reads its metadata.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io { action: "read", path: path.to_owned(), source };
        let file = files::open(path).map_err(io)?;
        // SAFETY: the map is only read. If another process truncated the file while it was mapped, an access would
        // raise SIGBUS. Nothing in candle-zero writes weights in place, and copying every model into memory to rule
        // this out would be too expensive.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let content = Content::read(&mut AlignmentGuard { file: Cursor::new(&map[..]), of_alignment: None });
        let content = content.map_err(|e| bad(path, candle_zero::error::without_backtrace(&e.to_string())))?;
        Ok(Self { path: path.to_owned(), map, content, places: BTreeMap::new() })
    }

    /// Returns the file after checking that it contains exactly the weights of the model that `config` describes.
    pub fn described_by(mut self, config: &DecoderConfig) -> Result<Self> {
        let architecture = self.architecture()?.to_owned();
        let mut used: BTreeSet<&str> = REDUNDANT_TENSORS.into_iter().collect();
        let parameters = config.parameters()?;
        for (parameter, shape) in &parameters {
            let name = name_in_file(&architecture, parameter);
            let found = name.and_then(|name| self.content.tensor_infos.get_key_value(&name));
            let Some((name, info)) = found else {
                let (path, name, has) = (self.path.clone(), parameter.clone(), self.some_names());
                return Err(ParamError::MissingTensor { path, name, shape: shape.clone(), has }.into());
            };
            let place = module_of(parameter).and_then(|(_, module, _)| mixture::place_of(module));
            let experts = config.mixture.as_ref().map_or(0, |mixture| mixture.experts);
            let stored =
                place.as_ref().map_or_else(|| shape.clone(), |place| mixture::shape_in_file(place, shape, experts));
            if info.shape.dims() != stored {
                let paths = [self.path.as_path(), &self.path];
                return Err(FinetuneError::not_as_described(parameter, paths, info.shape.dims(), &stored).into());
            }
            if used.insert(name) {
                self.check(name, info)?;
            }
            let offset = place.and_then(|place| place.expert).unwrap_or(0) * shape.iter().product::<usize>();
            let mixed_heads = match parameter {
                _ if architecture != "llama" => None,
                q if q.contains(".q_proj.") => Some(config.num_attention_heads),
                k if k.contains(".k_proj.") => Some(config.num_key_value_heads),
                _ => None,
            };
            let plus_one = architecture.starts_with("gemma") && parameter.ends_with("norm.weight");
            let source = TensorSource { name: name.clone(), shape: shape.clone(), offset, mixed_heads, plus_one };
            self.places.insert(parameter.clone(), source);
        }
        let mut extra: Vec<&str> = self.content.tensor_infos.keys().map(String::as_str).collect();
        extra.retain(|name| !used.contains(name));
        extra.sort_unstable();
        match extra.is_empty() {
            true => Ok(self),
            false => Err(ParamError::ExtraTensors { path: self.path, names: list(&extra) }.into()),
        }
    }

    /// Returns the architecture of the model.
    pub fn architecture(&self) -> Result<&str> {
        match self.content.metadata.get("general.architecture") {
            Some(Value::String(architecture)) => Ok(architecture),
            _ => Err(bad(&self.path, "its metadata has no general.architecture")),
        }
    }

    /// Returns the error for a metadata value.
    pub fn refuse(&self, key: &str, found: impl ToString, allowed: impl ToString) -> Error {
        let (path, key) = (self.path.clone(), key.to_owned());
        FinetuneError::GgufValue { path, key, found: found.to_string(), allowed: allowed.to_string() }.into()
    }

    /// Returns all values of a tensor, if the file has one of that name.
    pub fn dequantized(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some(info) = self.content.tensor_infos.get(name) else { return Ok(None) };
        self.check(name, info)?;
        let mut values = Vec::new();
        self.read(info, 0..info.shape.elem_count(), &mut values)?;
        Ok(Some(values))
    }

    fn some_names(&self) -> String {
        let mut names: Vec<&String> = self.content.tensor_infos.keys().collect();
        names.sort_unstable();
        list(&names)
    }

    /// Checks that a tensor can be read, before anything is read.
    fn check(&self, name: &str, info: &TensorInfo) -> Result<()> {
        use GgmlDType::{BF16, F16, F32, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
        let dtype = info.ggml_dtype;
        if ![F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K].contains(&dtype) {
            let (path, name, found) = (self.path.clone(), name.to_owned(), format!("{dtype:?}"));
            return Err(FinetuneError::GgufDtype { path, name, found, allowed: SUPPORTED_FORMATS }.into());
        }
        let row = info.shape.dims().last().copied().unwrap_or(1);
        if !row.is_multiple_of(dtype.block_size()) {
            let block = dtype.block_size();
            return Err(bad(
                &self.path,
                format!("the row length of tensor {name}, {row} elements, is not a multiple of the block size {block}"),
            ));
        }
        let size = (info.shape.elem_count() / dtype.block_size()).checked_mul(dtype.type_size());
        let start = usize::try_from(self.content.tensor_data_offset.saturating_add(info.offset)).ok();
        let end = start.zip(size).and_then(|(start, size)| start.checked_add(size));
        match end.filter(|end| *end <= self.map.len()) {
            Some(_) => Ok(()),
            None => {
                let bytes = self.map.len();
                let reason =
                    format!("tensor {name} ends beyond the end of the file ({bytes} bytes): the file is truncated");
                Err(bad(&self.path, reason))
            }
        }
    }

    /// Returns which bytes of the file contain the blocks with elements `range` of a tensor that was checked.
    fn bytes(&self, info: &TensorInfo, range: Range<usize>) -> Range<usize> {
        let (block, size) = (info.ggml_dtype.block_size(), info.ggml_dtype.type_size());
        let first = (self.content.tensor_data_offset + info.offset) as usize;
        first + range.start / block * size..first + range.end.div_ceil(block) * size
    }

    /// Appends elements `range` of a tensor, in the order of the file, to `values`.
    fn read(&self, info: &TensorInfo, range: Range<usize>, values: &mut Vec<f32>) -> Result<()> {
        /// The number of elements that are dequantized at a time.
        const PIECE: usize = 1 << 18;
        let (dtype, block) = (info.ggml_dtype, info.ggml_dtype.block_size());
        let mut at = range.start;
        while at < range.end {
            let blocks = at / block..range.end.min(at + PIECE).div_ceil(block);
            let end = range.end.min(blocks.end * block);
            let bytes = &self.map[self.bytes(info, at..end)];
            match dtype {
                GgmlDType::F32 => extend(values, bytes, f32::from_le_bytes),
                GgmlDType::F16 => extend(values, bytes, |b| f16::from_le_bytes(b).to_f32()),
                GgmlDType::BF16 => extend(values, bytes, |b| bf16::from_le_bytes(b).to_f32()),
                _ => {
                    // The copy is aligned, as any allocation is.
                    let copy = bytes.to_vec();
                    let elements = blocks.len() * block;
                    let tensor = qtensor_from_ggml(dtype, &copy, vec![elements], &Device::Cpu)?;
                    let tensor: Tensor = tensor.dequantize(&Device::Cpu)?;
                    let start = blocks.start * block;
                    values.extend_from_slice(&tensor.to_vec1::<f32>()?[at - start..end - start]);
                }
            }
            at = end;
        }
        Ok(())
    }
}

impl InitialValues for GgufFile {
    fn has(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    fn values(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>> {
        let place = self.places.get(name);
        let found = place.and_then(|place| Some((place, self.content.tensor_infos.get(&place.name)?)));
        let Some((place, info)) = found else {
            let (path, name, has) = (self.path.clone(), name.to_owned(), self.some_names());
            return Err(ParamError::MissingTensor { path, name, shape: shape.to_vec(), has }.into());
        };
        if place.shape != shape {
            return Err(FinetuneError::not_as_described(name, [&self.path, &self.path], &place.shape, shape).into());
        }
        let mut values = Vec::with_capacity(range.len());
        match place.mixed_heads {
            None => self.read(info, place.offset + range.start..place.offset + range.end, &mut values)?,
            Some(heads) => {
                // The rows of a bias have one element.
                let (rows, row) = (shape[0], shape.get(1).copied().unwrap_or(1));
                let mut at = range.start;
                while at < range.end {
                    let (r, column) = (at / row, at % row);
                    let end = range.end.min((r + 1) * row);
                    let from = mixed_row(r, rows / heads) * row + column;
                    self.read(info, from..from + (end - at), &mut values)?;
                    at = end;
                }
            }
        }
        // The pages of a parameter that was read are seldom needed again. Interleaved rows may come from anywhere in
        // the tensor.
        let read = if place.mixed_heads.is_some() {
            0..info.shape.elem_count()
        } else {
            place.offset + range.start..place.offset + range.end
        };
        files::release_pages(&self.map, self.bytes(info, read));
        if place.plus_one {
            values.iter_mut().for_each(|x| *x -= 1.0);
        }
        check_finite(&self.path, name, range.start, &values)?;
        Ok(values)
    }

    fn fingerprint(&self) -> u64 {
        const MAX_SAMPLED_NAMES: usize = 1000;
        let step = self.map.len().div_ceil(MAX_SAMPLED_NAMES).max(1);
        let header = self.map.len().min(self.content.tensor_data_offset as usize);
        let data = self.map.chunks(step).flat_map(|c| &c[..c.len().min(8)]);
        let sampled: Vec<u8> = self.map[..header].iter().chain(data).copied().collect();
        files::release_pages(&self.map, 0..self.map.len());
        fnv1a(&sampled)
    }
}

/// A reader that refuses files whose `general.alignment` is 0, because Candle's reader would divide by it.
struct AlignmentGuard<'a> {
    file: Cursor<&'a [u8]>,
    /// `None` until the key `general.alignment` has been read; then, whether the type of its value has also been read.
    of_alignment: Option<bool>,
}

impl Read for AlignmentGuard<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let len = self.file.read(buffer)?;
        let bytes = &buffer[..len];
        self.of_alignment = match self.of_alignment {
            None => (bytes == b"general.alignment").then_some(false),
            Some(false) => Some(true),
            Some(true) if bytes.iter().all(|byte| *byte == 0) => {
                let reason = "general.alignment is 0, but must be a positive number";
                return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, reason));
            }
            Some(true) => None,
        };
        Ok(len)
    }
}

impl Seek for AlignmentGuard<'_> {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        self.file.seek(to)
    }
}

fn extend<const N: usize>(values: &mut Vec<f32>, bytes: &[u8], widen: impl Fn([u8; N]) -> f32) {
    values.extend(bytes.as_chunks::<N>().0.iter().map(|b| widen(*b)));
}

/// Returns the position of row `row` of queries or keys in the GGUF file of a Llama, whose rotary embedding rotates
/// adjacent elements: in each head of `head` rows, rows of the first and the second half alternate.
fn mixed_row(row: usize, head: usize) -> usize {
    let (start, inside, half) = (row / head * head, row % head, head / 2);
    start + inside % half * 2 + inside / half
}

/// Tensors that contain no parameters. `config_json` derives the rotary scaling of Llama 3.1 and later from
/// `rope_freqs.weight`.
const REDUNDANT_TENSORS: [&str; 1] = ["rope_freqs.weight"];

/// Returns a parameter's name in a GGUF file, given its Hugging Face name.
fn name_in_file(architecture: &str, parameter: &str) -> Option<String> {
    let gemma = architecture.starts_with("gemma");
    let around = match parameter {
        "model.embed_tokens.weight" => Some("token_embd.weight"),
        "model.norm.weight" => Some("output_norm.weight"),
        "lm_head.weight" => Some("output.weight"),
        _ => None,
    };
    if let Some(name) = around {
        return Some(name.to_owned());
    }
    let (block, module, ending) = module_of(parameter)?;
    let part = match module {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" if gemma => "post_attention_norm",
        "pre_feedforward_layernorm" | "post_attention_layernorm" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.qkv_proj" => "attn_qkv",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" | "mlp.gate_up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        _ => mixture::place_of(module)?.tensor,
    };
    Some(format!("blk.{block}.{part}.{ending}"))
}

/// Splits the name of a block's parameter into the number of the block, the module within the block, and the ending.
fn module_of(parameter: &str) -> Option<(&str, &str, &str)> {
    let (block, part) = parameter.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, ending) = part.rsplit_once('.')?;
    Some((block, module, ending))
}

/// Returns the GGUF files in a folder.
pub(crate) fn gguf_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |source| candle_zero::Error::Io { action: "read", path: folder.to_owned(), source };
    let entries = std::fs::read_dir(folder).map_err(failed)?.map(|entry| Ok(entry.map_err(failed)?.path()));
    let mut files: Vec<PathBuf> = entries.collect::<Result<_>>()?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "gguf"));
    files.sort();
    Ok(files)
}

pub(crate) fn bad(path: &Path, reason: impl ToString) -> Error {
    FinetuneError::BadGguf { path: path.to_owned(), reason: reason.to_string() }.into()
}
