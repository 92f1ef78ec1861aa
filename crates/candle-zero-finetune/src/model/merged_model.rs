//! Merges an adapter into a model's weights, W + s B A, one tensor at a time, so that the model is never completely in
//! memory.

use super::output_dir::{new_folder, write_companion_files};
use crate::chat::tokenizer_files::TokenizerFiles;
use crate::error::{Error, FinetuneError, Result};
use crate::{Adapter, AdapterTensor, BaseModel};
use candle_zero::checkpoint::{ConsolidatedDtype, TensorEntry, write_model_files};
use candle_zero::engine::InitialValues;
use candle_zero::files;
use candle_zero::models::{DecoderConfig, ExpertPart, ParameterNaming};
use candle_zero::nn::WeightLayout;
use candle_zero::nn::low_rank_update::LowRankUpdate;
use candle_zero::param::FileTensor;
use candle_zero::precision::{FlatRef, has_non_finite};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The model that results from fine-tuning: its weights, with the adapter, if any, merged in (W + s B A). It is written
/// tensor by tensor and read piece by piece, so it is never completely in memory.
///
/// ```no_run
/// use candle_zero_finetune::{Adapter, BaseModel, GgufFormat, MergedModel};
///
/// let base = BaseModel::open("SmolLM2-135M-Instruct")?;
/// let adapter = Adapter::read("adapter")?;
/// let merged = MergedModel::new(&base, Some(&adapter))?;
/// merged.write_hugging_face("merged", None)?;
/// merged.write_gguf("merged.gguf", GgufFormat::Q8_0)?;
/// # Ok::<(), candle_zero::Error>(())
/// ```
pub struct MergedModel<'a> {
    pub(crate) base: &'a BaseModel,
    values: Arc<dyn InitialValues>,
    /// The names and shapes of the base's parameters.
    parameters: Vec<(String, Vec<usize>)>,
    adapter: Option<&'a Adapter>,
    /// A callback that receives the number of tensor bytes written so far, and their total number.
    progress: Option<&'a dyn Fn(u64, u64)>,
}

impl std::fmt::Debug for MergedModel<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (base, adapter) = (&self.base, &self.adapter);
        f.debug_struct("MergedModel").field("base", base).field("adapter", adapter).finish_non_exhaustive()
    }
}

impl<'a> MergedModel<'a> {
    /// Creates the model of `base` with `adapter` merged in.
    ///
    /// # Errors
    /// [`FinetuneError::AdapterDoesNotFit`], [`FinetuneError::IncompleteAdapter`].
    pub fn new(base: &'a BaseModel, adapter: Option<&'a Adapter>) -> Result<Self> {
        let parameters = DecoderConfig { lora: None, ..base.config().clone() }.parameters()?;
        if let Some(adapter) = adapter {
            let lora = Some(adapter.config.clone());
            adapter.check_fits(&DecoderConfig { lora, ..base.config().clone() }.parameters()?)?;
        }
        Ok(Self { base, values: base.values(), parameters, adapter, progress: None })
    }

    /// Sets a callback that receives the number of tensor bytes written so far and their total number, while the model
    /// is written.
    #[must_use]
    pub fn reporting(self, progress: &'a dyn Fn(u64, u64)) -> Self {
        Self { progress: Some(progress), ..self }
    }

    /// Returns the number of tensors, and the number of those that the adapter changes.
    pub fn counts(&self) -> (usize, usize) {
        let is_changed = |name: &str| {
            let module = name.strip_suffix(".weight");
            module.is_some_and(|module| self.adapter_tensor(module, "lora_A.weight").is_some())
                || self.expert_part(name).is_some()
        };
        (self.parameters.len(), self.parameters.iter().filter(|(name, _)| is_changed(name)).count())
    }

    /// Returns a tensor of the adapter for a module.
    fn adapter_tensor(&self, module: &str, end: &str) -> Option<&'a AdapterTensor> {
        self.adapter?.tensor(&format!("{module}.{end}"))
    }

    /// Returns, for a tensor that contains a part of a parameter of all experts, this part and the matrices of the
    /// parameter's adapter. Returns `None` if the tensor belongs to no such parameter or the parameter has no adapter.
    fn expert_part(&self, name: &str) -> Option<(ExpertPart, [&'a AdapterTensor; 2])> {
        let part = self.base.config().expert_part(name, &self.adapter?.config)?;
        let module = part.adapter.as_deref()?;
        let matrices = [self.adapter_tensor(module, "lora_A.weight")?, self.adapter_tensor(module, "lora_B.weight")?];
        Some((part, matrices))
    }

    /// Returns a function that adds up the bytes written and reports their number, together with `total`.
    pub(crate) fn counter(&self, total: u64) -> impl FnMut(usize) + use<'a> {
        let (progress, mut done) = (self.progress, 0);
        move |bytes| {
            done += bytes as u64;
            if let Some(progress) = progress {
                progress(done, total);
            }
        }
    }

    /// Replaces the base's values, for a model whose weights were all trained.
    #[must_use]
    pub fn with_values(self, values: Arc<dyn InitialValues>) -> Self {
        Self { values, ..self }
    }

    /// Returns the names and shapes of the parameters.
    pub(crate) fn shapes(&self) -> &[(String, Vec<usize>)] {
        &self.parameters
    }

    /// Returns a tensor whose values are read a few rows at a time.
    ///
    /// # Errors
    /// Errors in reading the weights.
    pub(crate) fn tensor(&self, name: &str, shape: &[usize]) -> Result<MergedTensor<'_>> {
        let mut tensor = MergedTensor {
            weights: &*self.values,
            adapter: self.adapter.map_or(Path::new(""), Adapter::path),
            name: name.to_owned(),
            shape: shape.to_vec(),
            low_rank: None,
            expert_updates: None,
            factors: None,
        };
        if let (Some((part, [a, b])), Some(adapter)) = (self.expert_part(name), self.adapter) {
            tensor.expert_updates = Some(ExpertUpdates::new(part, [a, b], adapter.config.scale() as f32));
            return Ok(tensor);
        }
        let adapter_tensor = |end: &str| self.adapter_tensor(name.strip_suffix(".weight")?, end);
        let (Some(adapter), Some(a), Some(b), &[rows, cols]) =
            (self.adapter, adapter_tensor("lora_A.weight"), adapter_tensor("lora_B.weight"), shape)
        else {
            return Ok(tensor);
        };
        let layout = layout_of(name);
        let (inputs, outputs) = if layout == WeightLayout::OutIn { (cols, rows) } else { (rows, cols) };
        let scale = adapter.config.scale() as f32;
        let low_rank = LowRankUpdate { layout, inputs, outputs, a: &a.values, b: &b.values, scale };
        tensor.low_rank = Some(low_rank);
        if let Some(magnitude) = adapter_tensor("lora_magnitude_vector") {
            let norms = low_rank.norms(|lines, piece| tensor.read(lines, piece))?;
            tensor.factors = Some(magnitude.values.iter().zip(norms).map(|(m, norm)| m / norm).collect());
        }
        Ok(tensor)
    }
}

impl BaseModel {
    /// Returns the precision that `config.json` specifies. If it specifies none, returns bf16 for quantized weights and
    /// f32 for others.
    pub(crate) fn dtype(&self) -> ConsolidatedDtype {
        let json = self.config_json();
        match json["dtype"].as_str().or_else(|| json["torch_dtype"].as_str()) {
            Some("bfloat16") => ConsolidatedDtype::Bf16,
            Some("float16") => ConsolidatedDtype::F16,
            // The values of MXFP4 are exact in bf16.
            None if !json["quantization_config"].is_null() => ConsolidatedDtype::Bf16,
            _ => ConsolidatedDtype::F32,
        }
    }
}

/// Returns the layout of the weight of a projection of this name. GPT-2 uses Conv1D's layout; StarCoder 2, whose MLP has
/// the same names, does not.
pub(crate) fn layout_of(name: &str) -> WeightLayout {
    const CONV1D_SUFFIXES: [&str; 4] =
        [".attn.c_attn.weight", ".attn.c_proj.weight", ".mlp.c_fc.weight", ".mlp.c_proj.weight"];
    let is_gpt2 = name.strip_prefix("transformer.").unwrap_or(name).starts_with("h.");
    if is_gpt2 && CONV1D_SUFFIXES.iter().any(|end| name.ends_with(end)) {
        WeightLayout::InOut
    } else {
        WeightLayout::OutIn
    }
}

/// One tensor of a [`MergedModel`].
pub(crate) struct MergedTensor<'a> {
    weights: &'a dyn InitialValues,
    /// The adapter's folder.
    adapter: &'a Path,
    name: String,
    shape: Vec<usize>,
    low_rank: Option<LowRankUpdate<'a>>,
    expert_updates: Option<ExpertUpdates<'a>>,
    /// The factor of each output, with DoRA.
    factors: Option<Vec<f32>>,
}

impl MergedTensor<'_> {
    /// Returns the number of rows (the size of the first dimension, or 1 for tensors with fewer than two dimensions) and
    /// the number of elements in each.
    pub fn lines(&self) -> (usize, usize) {
        match self.shape[..] {
            [] => (1, 1),
            [len] => (1, len),
            [lines, ..] => (lines, self.shape[1..].iter().product()),
        }
    }

    /// Splits the rows into pieces that fit into caches. Each piece, except the last one, has a multiple of `unit`
    /// rows.
    pub fn pieces(&self, unit: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        const CHUNK_ELEMENTS: usize = 1 << 20;
        let (lines, width) = self.lines();
        let step = (CHUNK_ELEMENTS / width.max(1)).max(1).next_multiple_of(unit.max(1));
        (0..lines).step_by(step).map(move |first| first..lines.min(first + step))
    }

    /// Returns the merged values of some rows.
    ///
    /// # Errors
    /// Errors in reading the weights; [`FinetuneError::MergedNotFinite`].
    pub fn values(&self, lines: Range<usize>) -> Result<Vec<f32>> {
        let mut values = vec![0f32; lines.len() * self.lines().1];
        self.read(lines.clone(), &mut values)?;
        if let Some(low_rank) = &self.low_rank {
            low_rank.add_to(lines.clone(), &mut values);
            if let Some(factors) = &self.factors {
                low_rank.scale(lines.clone(), &mut values, factors);
            }
            self.check(&values)?;
        }
        if let Some(expert_updates) = &self.expert_updates {
            expert_updates.add_to(lines, &mut values);
            self.check(&values)?;
        }
        Ok(values)
    }

    /// Returns an error if merged values are not finite.
    fn check(&self, values: &[f32]) -> Result<()> {
        if !has_non_finite(FlatRef::F32(values)) {
            return Ok(());
        }
        let value = values.iter().copied().find(|value| !value.is_finite()).unwrap_or(f32::NAN);
        let (tensor, adapter) = (self.name.clone(), self.adapter.to_owned());
        Err(FinetuneError::MergedNotFinite { tensor, adapter, value }.into())
    }

    /// Reads the base's values of some rows.
    fn read(&self, lines: Range<usize>, values: &mut [f32]) -> Result<()> {
        let width = self.lines().1;
        let found = self.weights.values(&self.name, &self.shape, lines.start * width..lines.end * width)?;
        values.copy_from_slice(&found);
        Ok(())
    }
}

/// The updates of the experts whose weights a tensor contains.
struct ExpertUpdates<'a> {
    part: ExpertPart,
    /// The matrices A and B of each expert. B has only the rows of the tensor's outputs.
    matrices: Vec<(&'a [f32], Vec<f32>)>,
    scale: f32,
}

impl<'a> ExpertUpdates<'a> {
    /// Extracts the matrices of individual experts from those of all experts. A is `[experts * r, in]`. B is
    /// `[out, r * experts]`, with the columns of the experts interleaved.
    fn new(part: ExpertPart, [a, b]: [&'a AdapterTensor; 2], scale: f32) -> Self {
        let (columns, inputs) = (a.shape[0], part.inputs);
        let all = b.values.chunks_exact(columns.max(1));
        let rows: Vec<&[f32]> = all.skip(part.outputs.start).take(part.outputs.len()).collect();
        // The adapter was compared with the model, so the number of experts divides the number of A's rows.
        let experts = part.expert_count;
        let rank = columns / experts.max(1);
        let matrices = part.experts.clone().map(|expert| {
            let a = &a.values[expert * rank * inputs..(expert + 1) * rank * inputs];
            let row = |row: &&[f32]| (0..rank).map(|i| row[i * experts + expert]).collect::<Vec<_>>();
            (a, rows.iter().flat_map(row).collect())
        });
        Self { matrices: matrices.collect(), part, scale }
    }

    /// Adds the updates to lines of the tensor: rows of an expert's matrix, or the matrices of several experts.
    fn add_to(&self, lines: Range<usize>, values: &mut [f32]) {
        let ExpertPart { layout, inputs, ref outputs, .. } = self.part;
        let update = |(a, b): &(&'a [f32], Vec<f32>), lines, values: &mut [f32]| {
            LowRankUpdate { layout, inputs, outputs: outputs.len(), a, b, scale: self.scale }.add_to(lines, values);
        };
        match layout {
            WeightLayout::OutIn => update(&self.matrices[0], lines, values),
            WeightLayout::InOut => {
                let expert_values = values.chunks_exact_mut((inputs * outputs.len()).max(1));
                for (matrices, values) in self.matrices[lines].iter().zip(expert_values) {
                    update(matrices, 0..inputs, values);
                }
            }
        }
    }
}

impl MergedModel<'_> {
    /// Writes the model into the folder `out`, which must be absent or empty, in the format of transformers:
    /// safetensors files of at most 5 GB, `config.json`, and the base's tokenizer files. Without a `dtype`, the base's
    /// precision is used.
    ///
    /// # Errors
    /// A folder that is not empty; a value that the precision cannot hold; errors in reading or writing. On an error,
    /// `out` is unchanged.
    pub fn write_hugging_face(&self, out: impl AsRef<Path>, dtype: Option<ConsolidatedDtype>) -> Result<()> {
        let out = out.as_ref();
        let folder = new_folder(out)?;
        self.write_into(folder.path(), dtype)?;
        folder.finish().map_err(|source| Error::Io { action: "write", path: out.to_owned(), source })
    }

    /// Writes the files of [`write_hugging_face`](Self::write_hugging_face) into an existing folder, if its disk has
    /// room for them.
    ///
    /// # Errors
    /// See [`write_hugging_face`](Self::write_hugging_face).
    pub(crate) fn write_into(&self, folder: &Path, dtype: Option<ConsolidatedDtype>) -> Result<()> {
        const MAX_SHARD_BYTES: u64 = 5_000_000_000;
        let dtype = dtype.unwrap_or_else(|| self.base.dtype());
        let shapes = self.shapes();
        let mut entries: Vec<TensorEntry> = shapes
            .iter()
            .map(|(name, shape)| TensorEntry {
                name: self.name_in_files(name),
                dtype: dtype.names().0.into(),
                shape: shape.clone(),
                bytes: dtype.bytes() * shape.iter().product::<usize>() as u64,
            })
            .collect();
        // The tensors of other parts keep their precision.
        let other_tensors: Vec<(&str, FileTensor<'_>)> = match self.base.other_parts() {
            Some(parts) => parts.tensors().collect(),
            None => Vec::new(),
        };
        entries.extend(other_tensors.iter().map(|(name, tensor)| {
            let (dtype, bytes) = tensor.raw();
            let (name, shape) = ((*name).to_owned(), tensor.shape().to_vec());
            TensorEntry { name, dtype, shape, bytes: bytes.len() as u64 }
        }));
        let bytes = entries.iter().map(|entry| entry.bytes).sum();
        files::check_free_space(folder, bytes)?;
        let mut count = self.counter(bytes);
        write_model_files(folder, &entries, MAX_SHARD_BYTES, |at, take| {
            let Some((name, shape)) = shapes.get(at) else {
                let other = &other_tensors[at - shapes.len()].1;
                let (_, bytes) = other.raw();
                count(bytes.len());
                let result = take(bytes);
                other.release();
                return result;
            };
            let tensor = self.tensor(name, shape)?;
            for lines in tensor.pieces(1) {
                let bytes =
                    dtype.encode(&tensor.values(lines)?).map_err(|value| too_large(name, value, dtype.names().0))?;
                take(&bytes)?;
                count(bytes.len());
            }
            Ok(())
        })?;
        write_companion_files(self.base.folder(), self.base.config_json().clone(), folder, dtype)?;
        match self.base.tokenizer_path() {
            file if file.is_file() => TokenizerFiles::read(file)?.write(folder),
            _ => Ok(()),
        }
    }

    /// Returns a parameter's name in the files of transformers' language models, whose blocks have a prefix, or in the
    /// base's files if these contain more than a language model.
    fn name_in_files(&self, name: &str) -> String {
        if let Some((found, _)) = self.base.other_parts().and_then(|parts| parts.files.find(name)) {
            return found;
        }
        let prefix = if self.base.config().naming == ParameterNaming::Gpt2 { "transformer." } else { "model." };
        if name.starts_with(prefix) || name.starts_with("lm_head.") { name.into() } else { format!("{prefix}{name}") }
    }
}

/// Returns the error for a value that a precision cannot hold.
pub(crate) fn too_large(tensor: &str, value: f32, format: &str) -> Error {
    FinetuneError::TooLarge { tensor: tensor.into(), value, format: format.to_lowercase() }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gpt2_stores_inputs_before_outputs() {
        for (name, layout) in [
            ("h.0.mlp.c_fc.weight", WeightLayout::InOut),
            ("transformer.h.11.attn.c_attn.weight", WeightLayout::InOut),
            ("transformer.h.0.ln_1.weight", WeightLayout::OutIn),
            // StarCoder 2
            ("model.layers.0.mlp.c_fc.weight", WeightLayout::OutIn),
            ("model.layers.0.mlp.c_proj.weight", WeightLayout::OutIn),
        ] {
            assert_eq!(layout_of(name), layout, "{name}");
        }
    }
}
