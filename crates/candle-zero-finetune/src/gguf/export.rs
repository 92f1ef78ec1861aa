//! Writes a decoder as a GGUF file following llama.cpp's conventions for keys, tensor names and the layout of some
//! tensors.

use super::mixture::{self, MixturePlace, ROUTER};
use super::mixture_architecture::{MixtureArchitecture, metadata as mixture_metadata};
use super::tokenizer_export::keys;
use super::weights::GgufFile;
use super::writer::{BLOCK, GgmlFormat, GgufTensor, GgufValue, write};
use crate::BaseModel;
use crate::error::{Error, FinetuneError, Result};
use crate::model::merged_model::{MergedModel, MergedTensor, too_large};
use candle_zero::files;
use candle_zero::models::{DecoderConfig, ParameterNaming, RotaryConfig, RotaryScaling, YarnScaling};
use std::io::{BufWriter, Write};
use std::path::Path;

/// The storage format of the weights in a GGUF file. Vectors, routers and learned positions are stored in f32 in either
/// format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GgufFormat {
    /// f16.
    F16,
    /// Blocks of 32 8-bit integers with an f16 scale. Tensors whose row length is not a multiple of 32 elements are
    /// stored in f16.
    Q8_0,
}

/// A model of an architecture that llama.cpp supports.
struct GgufArchitecture<'a> {
    architecture: &'static str,
    mixture: Option<MixtureArchitecture>,
    config: &'a DecoderConfig,
}

/// The change to the layout of a tensor's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LayoutChange {
    None,
    /// Rows become columns.
    Transposed,
    /// In each head, which has this many rows, the first and the second half are interleaved: llama.cpp rotates
    /// adjacent elements, while transformers rotates the two halves.
    Interleaved(usize),
}

impl MergedModel<'_> {
    /// Writes the model to the file `out` in llama.cpp's format, with the tokenizer of the base's folder or GGUF file.
    /// An existing file is replaced.
    ///
    /// # Errors
    /// A model or a tokenizer that cannot be represented; a value that f16 cannot hold; errors in reading or writing.
    /// On an error, `out` is unchanged.
    pub fn write_gguf(&self, out: impl AsRef<Path>, format: GgufFormat) -> Result<()> {
        write_gguf(self, self.base, format, out.as_ref())
    }
}

fn write_gguf(merged: &MergedModel<'_>, base: &BaseModel, format: GgufFormat, out: &Path) -> Result<()> {
    let (json, config) = (base.config_json(), base.config());
    let wrong = |problem| FinetuneError::Gguf { path: base.folder().to_owned(), problem };
    let kind = json["model_type"].as_str().unwrap_or_default();
    let model = GgufArchitecture::of(kind, config).map_err(wrong)?;
    let mut metadata = model.keys(base.folder(), format);
    let tokenizer = base.tokenizer_path();
    metadata.extend(match tokenizer.is_file() {
        true => GgufFile::open(tokenizer)?.tokenizer_keys(),
        false => keys(tokenizer, json, config.vocab)?,
    });
    let mut entries = Vec::new();
    let mut sources = Vec::new();
    for (name, factors) in model.rotary_factors() {
        let (name, shape) = (name.to_owned(), vec![factors.len()]);
        entries.push(GgufTensor { name, shape, format: GgmlFormat::F32 });
        sources.push(TensorOrigin::Values(factors));
    }
    for (name, shape) in merged.shapes() {
        let unknown = || wrong(format!("llama.cpp has no name for tensor {name} of a {kind} model"));
        let target = model.tensor(name).ok_or_else(unknown)?;
        let expert = target.place.as_ref().and_then(|place| place.expert);
        // The matrices of all experts for a projection are one tensor in the file.
        let known = expert.and_then(|_| entries.iter().rposition(|entry: &GgufTensor| entry.name == target.name));
        if let Some(TensorOrigin::Tensors(parts, ..)) = known.and_then(|known| sources.get_mut(known)) {
            parts.push((expert, name.as_str()));
            continue;
        }
        let new_shape = target.shape(shape, config);
        let is_small = new_shape.len() < 2 || target.is_always_f32();
        let row = new_shape.last().copied().unwrap_or(1);
        let format = match format {
            _ if is_small => GgmlFormat::F32,
            GgufFormat::Q8_0 if row.is_multiple_of(BLOCK) => GgmlFormat::Q8_0,
            _ => GgmlFormat::F16,
        };
        sources.push(TensorOrigin::Tensors(vec![(expert, name)], shape, target.change));
        entries.push(GgufTensor { name: target.name, shape: new_shape, format });
    }
    for source in &mut sources {
        if let TensorOrigin::Tensors(parts, ..) = source {
            parts.sort_unstable();
        }
    }
    let wrong = |source| Error::Io { action: "write", path: out.to_owned(), source };
    let mut file = files::AtomicFile::beside(out).map_err(wrong)?;
    let bytes = entries.iter().map(GgufTensor::bytes).sum();
    files::check_free_space(files::folder_of(out), bytes)?;
    let mut buffered = BufWriter::new(file.file());
    let mut count = merged.counter(bytes);
    let mut put = |bytes: &[u8]| buffered.write_all(bytes).map_err(wrong);
    write(&metadata, &entries, &mut put, |at, take| match &sources[at] {
        TensorOrigin::Values(values) => {
            take(&entries[at].format.encode(values).map_err(|v| too_large(&entries[at].name, v, "f16"))?)
        }
        TensorOrigin::Tensors(parts, shape, change) => parts.iter().try_for_each(|(_, name)| {
            give(&merged.tensor(name, shape)?, *change, entries[at].format, name, &mut |bytes| {
                count(bytes.len());
                take(bytes)
            })
        }),
    })?;
    buffered.flush().map_err(wrong)?;
    drop(buffered);
    file.finish().map(drop).map_err(wrong)
}

/// The source of a written tensor.
enum TensorOrigin<'a> {
    Values(Vec<f32>),
    /// The indices of experts and the names of tensors, each of which has this shape: the tensors of all experts, or a
    /// single tensor.
    Tensors(Vec<(Option<usize>, &'a str)>, &'a [usize], LayoutChange),
}

/// The tensor in the file to which a tensor of the model belongs.
struct TensorTarget {
    name: String,
    change: LayoutChange,
    /// The place of a tensor of a mixture.
    place: Option<MixturePlace>,
}

impl TensorTarget {
    /// Returns the shape of the tensor in the file, given that of the model's tensor.
    fn shape(&self, shape: &[usize], config: &DecoderConfig) -> Vec<usize> {
        let experts = config.mixture.as_ref().map_or(0, |mixture| mixture.experts);
        match &self.place {
            Some(place) => mixture::shape_in_file(place, shape, experts),
            None if self.change == LayoutChange::Transposed => shape.iter().rev().copied().collect(),
            None => shape.to_vec(),
        }
    }

    fn is_always_f32(&self) -> bool {
        self.name.starts_with("position_embd") || self.place.as_ref().is_some_and(|place| place.tensor == ROUTER)
    }
}

/// Passes the bytes of a tensor to `take`, with the layout changed.
fn give(
    tensor: &MergedTensor<'_>,
    change: LayoutChange,
    format: GgmlFormat,
    name: &str,
    take: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let (lines, width) = tensor.lines();
    let mut put = |values: &[f32]| take(&format.encode(values).map_err(|value| too_large(name, value, format.name()))?);
    match change {
        LayoutChange::None => tensor.pieces(1).try_for_each(|lines| put(&tensor.values(lines)?)),
        LayoutChange::Transposed => {
            // All rows are needed: each row of the result contains one element from each row of the tensor.
            let values = tensor.values(0..lines)?;
            let mut line = vec![0f32; lines];
            for column in 0..width {
                line.iter_mut().enumerate().for_each(|(i, x)| *x = values[i * width + column]);
                put(&line)?;
            }
            Ok(())
        }
        LayoutChange::Interleaved(head) => {
            // The rows of a vector are its elements.
            let (lines_of_head, width) = if lines == 1 { (1, 1) } else { (head, width) };
            for piece in tensor.pieces(lines_of_head) {
                let values = tensor.values(piece)?;
                let mut changed = Vec::with_capacity(values.len());
                for values in values.chunks(head * width) {
                    let line = |i: usize| &values[i * width..(i + 1) * width];
                    (0..head / 2)
                        .for_each(|i| [i, i + head / 2].iter().for_each(|i| changed.extend_from_slice(line(*i))));
                }
                put(&changed)?;
            }
            Ok(())
        }
    }
}

impl<'a> GgufArchitecture<'a> {
    /// Returns the architecture of a model whose transformers type is `kind`, or why it cannot be written.
    fn of(kind: &str, config: &'a DecoderConfig) -> std::result::Result<Self, String> {
        let mixture = MixtureArchitecture::of_type(kind);
        let architecture = match kind {
            "llama" | "mistral" => "llama",
            "qwen2" => "qwen2",
            "qwen3" => "qwen3",
            "gpt2" => "gpt2",
            other => match mixture {
                Some(mixture) => mixture.name,
                None => {
                    return Err(format!(
                        "its type is {other:?}, but must be llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, \
                         qwen3_moe, olmoe or gpt2; write a Hugging Face folder and convert it with llama.cpp"
                    ));
                }
            },
        };
        if let Some(problem) = mixture.and_then(|mixture| mixture.problem(config)) {
            return Err(problem);
        }
        let model = Self { architecture, mixture, config };
        let first = config.blocks.first().and_then(|block| block.rotary.as_ref());
        if config.learned_positions.is_none() && config.blocks.iter().any(|block| block.rotary.as_ref() != first) {
            return Err("its blocks use different settings for rotary positions, for which GGUF has no keys".into());
        }
        if first.is_some_and(|rotary| matches!(rotary.scaling, RotaryScaling::Dynamic { .. })) {
            return Err("its rotary scaling is \"dynamic\", for which GGUF has no keys".into());
        }
        Ok(model)
    }

    fn keys(&self, base: &Path, format: GgufFormat) -> Vec<(String, GgufValue)> {
        let DecoderConfig { hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, .. } =
            *self.config;
        let mut keys: Vec<(String, GgufValue)> = Vec::new();
        let text = |text: &str| GgufValue::String(text.to_owned());
        keys.push(("general.architecture".into(), text(self.architecture)));
        keys.push(("general.type".into(), text("model")));
        if let Some(name) = base.file_name() {
            keys.push(("general.name".into(), text(&name.to_string_lossy())));
        }
        keys.push(("general.file_type".into(), GgufValue::U32(if format == GgufFormat::F16 { 1 } else { 7 })));
        keys.push(("general.quantization_version".into(), GgufValue::U32(2)));
        // Beyond its window, a block attends to fewer positions than it would in llama.cpp, so the context ends at the
        // smallest window.
        let windows = self.config.blocks.iter().filter_map(|block| block.window);
        let ctx = windows.fold(self.config.ctx, usize::min);
        let mut put = |key: &str, value| keys.push((format!("{}.{key}", self.architecture), value));
        put("block_count", GgufValue::size(self.config.blocks.len()));
        put("context_length", GgufValue::size(ctx));
        put("embedding_length", GgufValue::size(hidden_size));
        put("feed_forward_length", GgufValue::size(intermediate_size));
        put("attention.head_count", GgufValue::size(num_attention_heads));
        let eps = GgufValue::F32(self.config.norm_eps as f32);
        if self.config.naming == ParameterNaming::Gpt2 {
            put("attention.layer_norm_epsilon", eps);
            return keys;
        }
        put("attention.head_count_kv", GgufValue::size(num_key_value_heads));
        put("attention.layer_norm_rms_epsilon", eps);
        put("attention.key_length", GgufValue::size(self.config.head_dim));
        put("attention.value_length", GgufValue::size(self.config.head_dim));
        put("rope.dimension_count", GgufValue::size(self.config.head_dim));
        put("vocab_size", GgufValue::size(self.config.vocab));
        if let (Some(architecture), Some(mixture)) = (self.mixture, &self.config.mixture) {
            mixture_metadata(mixture, architecture).into_iter().for_each(|(key, value)| put(key, value));
        }
        if let Some(rotary) = self.rotary() {
            put("rope.freq_base", GgufValue::F32(rotary.theta as f32));
            let mut scaled = |kind: &str, factor: f64| {
                put("rope.scaling.type", GgufValue::String(kind.into()));
                put("rope.scaling.factor", GgufValue::F32(factor as f32));
            };
            match &rotary.scaling {
                RotaryScaling::Linear { factor } => scaled("linear", *factor),
                RotaryScaling::Yarn(YarnScaling { frequencies, attention_factor }) => {
                    scaled("yarn", frequencies.factor);
                    put(
                        "rope.scaling.original_context_length",
                        GgufValue::size(frequencies.original_max_position_embeddings),
                    );
                    // llama.cpp multiplies the factor that follows from YaRN's paper by the value of attn_factor.
                    let usual = 1.0 + 0.1 * frequencies.factor.max(1.0).ln();
                    put("rope.scaling.attn_factor", GgufValue::F32((attention_factor / usual) as f32));
                    put("rope.scaling.yarn_beta_fast", GgufValue::F32(frequencies.beta_fast as f32));
                    put("rope.scaling.yarn_beta_slow", GgufValue::F32(frequencies.beta_slow as f32));
                }
                RotaryScaling::LongRope(scaling) => {
                    put("rope.scaling.original_context_length", GgufValue::size(scaling.original));
                    put("rope.scaling.attn_factor", GgufValue::F32(scaling.attention_factor as f32));
                }
                _ => (),
            }
        }
        keys
    }

    /// Returns the settings of rotary positions, which are the same in all blocks.
    fn rotary(&self) -> Option<&RotaryConfig> {
        self.config.blocks.first()?.rotary.as_ref()
    }

    /// Returns the tensors with divisors of the rotary frequencies, by name.
    fn rotary_factors(&self) -> Vec<(&'static str, Vec<f32>)> {
        let Some(rotary) = self.rotary() else { return Vec::new() };
        let narrow = |factors: &[f64]| factors.iter().map(|factor| *factor as f32).collect();
        match &rotary.scaling {
            RotaryScaling::Llama3(_) => {
                let head = self.config.head_dim;
                let plain = RotaryConfig { scaling: RotaryScaling::None, ..rotary.clone() };
                let (Ok(plain), Ok(scaled)) = (plain.frequencies(head, 1), rotary.frequencies(head, 1)) else {
                    return Vec::new();
                };
                let factors = plain.iter().zip(scaled).map(|(plain, scaled)| (plain / scaled) as f32);
                vec![("rope_freqs.weight", factors.collect())]
            }
            RotaryScaling::LongRope(scaling) => vec![
                ("rope_factors_long.weight", narrow(&scaling.long)),
                ("rope_factors_short.weight", narrow(&scaling.short)),
            ],
            _ => Vec::new(),
        }
    }

    /// Returns the tensor in the file to which a tensor of the model belongs.
    fn tensor(&self, name: &str) -> Option<TensorTarget> {
        let bare = name.strip_prefix(self.config.prefix).unwrap_or(name);
        let (module, kind) = bare.rsplit_once('.')?;
        let around = match module {
            "embed_tokens" | "wte" => Some("token_embd"),
            "wpe" => Some("position_embd"),
            "norm" | "ln_f" => Some("output_norm"),
            "lm_head" => Some("output"),
            _ => None,
        };
        if let Some(new) = around {
            return Some(TensorTarget { name: format!("{new}.{kind}"), change: LayoutChange::None, place: None });
        }
        let (block, module) = module.strip_prefix("layers.").or_else(|| module.strip_prefix("h."))?.split_once('.')?;
        let head = self.config.head_dim;
        let turned = if self.architecture == "llama" { LayoutChange::Interleaved(head) } else { LayoutChange::None };
        let conv1d = if kind == "weight" { LayoutChange::Transposed } else { LayoutChange::None };
        let place = mixture::place_of(module);
        let (new, change) = match module {
            "input_layernorm" | "ln_1" => ("attn_norm", LayoutChange::None),
            "self_attn.q_proj" => ("attn_q", turned),
            "self_attn.k_proj" => ("attn_k", turned),
            "self_attn.v_proj" => ("attn_v", LayoutChange::None),
            "self_attn.o_proj" => ("attn_output", LayoutChange::None),
            "self_attn.q_norm" => ("attn_q_norm", LayoutChange::None),
            "self_attn.k_norm" => ("attn_k_norm", LayoutChange::None),
            "post_attention_layernorm" | "ln_2" => ("ffn_norm", LayoutChange::None),
            "mlp.gate_proj" => ("ffn_gate", LayoutChange::None),
            "mlp.up_proj" => ("ffn_up", LayoutChange::None),
            "mlp.down_proj" => ("ffn_down", LayoutChange::None),
            "attn.c_attn" => ("attn_qkv", conv1d),
            "attn.c_proj" => ("attn_output", conv1d),
            "mlp.c_fc" => ("ffn_up", conv1d),
            "mlp.c_proj" => ("ffn_down", conv1d),
            _ => (place.as_ref()?.tensor, LayoutChange::None),
        };
        Some(TensorTarget { name: format!("blk.{block}.{new}.{kind}"), change, place })
    }
}
