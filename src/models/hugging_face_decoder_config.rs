//! Reads a decoder's configuration from the `config.json` of a Hugging Face model, in the format of transformers 5
//! (`rope_parameters`, `layer_types`) or 4 (`rope_theta`, `rope_scaling`, `sliding_window_pattern`).
//!
//! For keys that a file omits, the defaults of the model's class in transformers apply.

use super::config_checks::{MAX_BLOCKS, MAX_POSITIONS};
use super::hugging_face_mixture::mixture;
use super::hugging_face_rotary::block_configs;
use super::json_object_reader::{JsonObjectReader, shortened};
use super::model_families::{HeadDimRule, ModelFamily, WITH_TEXT_PART, known_model_types, text_part_types};
use super::{BlockConfig, DecoderConfig, NormPlacement, ParameterNaming, RotaryScaling};
use crate::error::{Error, ModelError, Result};
use crate::files;
use crate::nn::Activation;
use serde_json::Value;
use std::path::Path;

/// The maximum number of bytes in a `config.json`.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

impl DecoderConfig {
    /// Reads the configuration from the `config.json` of a Hugging Face model, as transformers 5 or 4 writes it. The
    /// configuration's `ctx` is the file's `max_position_embeddings` (or `n_positions`), times the scaling factor of
    /// dynamic frequencies if the file requests them; `ctx` can be lowered before a model is built.
    ///
    /// Known `model_type`s: cohere, cohere2, gemma2, gemma3 (its text part), gemma3_text, glm, glm4, gpt2, gpt_oss,
    /// granite, llama (Llama 2 and 3, TinyLlama, SmolLM2), ministral, ministral3, mistral, mistral3 (its text part),
    /// mixtral, nemotron, olmo2, olmo3, olmoe, phi3 (and 4), qwen2 (and 2.5), qwen2_moe, qwen3, qwen3_moe, smollm3,
    /// stablelm, starcoder2. Keys that do not affect a forward pass without dropout are ignored.
    ///
    /// # Errors
    /// A file that cannot be read; an unknown model; a value that this library does not support, or that contradicts
    /// another value.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_parsed(&Self::parse(path)?, path)
    }

    /// Parses a `config.json`.
    #[doc(hidden)]
    pub fn parse(path: &Path) -> Result<Value> {
        parse(path)
    }

    /// Reads the configuration from the parsed content of `file`.
    #[doc(hidden)]
    pub fn from_parsed(content: &Value, file: &Path) -> Result<Self> {
        read(content, file)
    }

    /// Reads the configuration from the parsed content of a `config.json`.
    ///
    /// # Errors
    /// The errors of [`DecoderConfig::read`].
    pub fn from_hugging_face(config: &Value) -> Result<Self> {
        Self::from_parsed(config, Path::new("config.json"))
    }
}

/// Reads and parses a file.
fn parse(file: &Path) -> Result<Value> {
    let io = |source| Error::Io { action: "read", path: file.to_owned(), source };
    let text = files::read_text(file, MAX_CONFIG_BYTES).map_err(io)?;
    let invalid_json = |e: serde_json::Error| ModelError::NoJson { file: file.to_owned(), why: e.to_string() }.into();
    // Some Windows editors write a byte order mark before the text.
    serde_json::from_str(text.strip_prefix('\u{FEFF}').unwrap_or(&text)).map_err(invalid_json)
}

/// Reads the configuration from `config`, the content of `file`.
fn read(config: &Value, file: &Path) -> Result<DecoderConfig> {
    let Value::Object(map) = config else {
        return Err(ModelError::NoJson { file: file.to_owned(), why: "it is not an object".into() }.into());
    };
    let keys = JsonObjectReader::new(file, "", map);
    if keys.get("model_type").is_some_and(|found| super::ENCODER_TYPES.iter().any(|known| found == known)) {
        return Err(
            keys.refuse("model_type", "that of a language model; an encoder is fine-tuned with --task classify")
        );
    }
    check_quantization(&keys)?;
    // An absent key has a default in transformers; null does not.
    let sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"];
    if let Some(key) = sizes.into_iter().find(|key| map.get(*key).is_some_and(Value::is_null)) {
        return Err(keys.refuse(key, "a whole number of at least 1"));
    }
    let model_type = keys.text("model_type")?;
    let config = match WITH_TEXT_PART.iter().find(|(outer, _)| Some(*outer) == model_type) {
        Some((_, inner)) => text_part(&keys, inner)?,
        None => match model_type.and_then(ModelFamily::named) {
            Some(family) if family.naming == ParameterNaming::Gpt2 => gpt2(&keys)?,
            Some(family) => decoder(&keys, family)?,
            None => {
                let (file, found) = (file.to_owned(), map.get("model_type").map_or("absent".to_owned(), shortened));
                return Err(ModelError::UnknownModelType { file, found, known: known_model_types().join(", ") }.into());
            }
        },
    };
    match config.validate() {
        Ok(()) => Ok(config),
        Err(Error::Model(ModelError::Config { key, found, allowed })) => {
            Err(ModelError::HuggingFace { file: file.to_owned(), key: key.into(), found, allowed }.into())
        }
        Err(other) => Err(other),
    }
}

/// Checks that weights are not quantized, except the experts of gpt-oss in MXFP4.
fn check_quantization(keys: &JsonObjectReader<'_>) -> Result<()> {
    let Some(quantization) = keys.get("quantization_config") else { return Ok(()) };
    let is_mxfp4 = quantization.get("quant_method").is_some_and(|method| method == "mxfp4");
    match keys.text("model_type")? {
        Some("gpt_oss") if is_mxfp4 => Ok(()),
        Some("gpt_oss") => Err(keys.refuse("quantization_config", "absent or of quant_method mxfp4")),
        _ => Err(keys.refuse("quantization_config", "absent: weights are read in f32, bf16 or f16")),
    }
}

/// Reads the configuration of the text part of a model for images and text. `inner` is the family of a text part that
/// does not name its own.
fn text_part(keys: &JsonObjectReader<'_>, inner: &str) -> Result<DecoderConfig> {
    let Some(text) = keys.object("text_config", "text_config.")? else {
        return Err(keys.refuse("text_config", "an object, the model's text part"));
    };
    let Some(family) = ModelFamily::of_text_part(text.text("model_type")?.unwrap_or(inner)) else {
        return Err(text.refuse("model_type", format!("one of {}", text_part_types().join(", "))));
    };
    let config = decoder(&text, family)?;
    // In transformers, the key of the complete model decides.
    let tie_word_embeddings = keys.flag("tie_word_embeddings", config.tie_word_embeddings)?;
    Ok(DecoderConfig { prefix: "model.language_model.", tie_word_embeddings, ..config })
}

/// Reads the configuration of any model except GPT-2.
fn decoder(keys: &JsonObjectReader<'_>, family: &ModelFamily) -> Result<DecoderConfig> {
    let size = |key: &str, default: usize| Ok::<usize, Error>(keys.size(key)?.unwrap_or(default));
    let hidden_size = size("hidden_size", family.hidden)?;
    let vocab = size("vocab_size", family.vocab)?;
    let heads = size("num_attention_heads", family.heads)?;
    let size_or = |key: &str, default: Option<usize>| match keys.is_null(key) {
        true => Ok::<Option<usize>, Error>(None),
        false => Ok(keys.size(key)?.or(default)),
    };
    let kv_heads = size_or("num_key_value_heads", family.kv_heads)?.unwrap_or(heads);
    let head_dim = match family.head {
        HeadDimRule::OfHiddenSize => None,
        HeadDimRule::Key => size_or("head_dim", None)?,
        HeadDimRule::KeyOr(default) => size_or("head_dim", Some(default))?,
    };
    let head_dim = match head_dim {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let allowed = format!("a multiple of num_attention_heads ({heads}) if head_dim is absent");
            return Err(keys.refuse_as("hidden_size", hidden_size, allowed));
        }
    };
    let blocks = blocks(keys, "num_hidden_layers", family.blocks)?;
    family.unsupported_options.iter().try_for_each(|(key, allowed, why)| keys.only(key, *allowed, why))?;
    let ctx = size("max_position_embeddings", family.ctx)?;
    let (is_gemma, is_granite) = (family.is("gemma"), family.is("granite"));
    let cap = |key: &str, default: f64| match keys.is_null(key) || family.is("gemma3") {
        true => keys.positive(key),
        false => Ok(keys.positive(key)?.or(Some(default))),
    };
    let query_scale = match is_gemma {
        true => Some(1.0 / keys.positive("query_pre_attn_scalar")?.unwrap_or(256.0).sqrt()),
        false if is_granite => Some(keys.positive("attention_multiplier")?.unwrap_or(1.0)),
        false => None,
    };
    let logit_scale = match is_granite {
        true => keys.positive("logits_scaling")?.map(|divisor| 1.0 / divisor),
        false if family.is("cohere") => Some(keys.positive("logit_scale")?.unwrap_or(0.0625)),
        false => None,
    };
    // Multiplications by 1 take time and change nothing.
    let factor = |factor: Option<f64>| factor.filter(|factor| *factor != 1.0);
    let is_parallel = family.is("stablelm") && keys.flag("use_parallel_residual", false)?;
    let mut block_configs = block_configs(keys, family, blocks, ctx)?;
    let (mixture, mlps) = mixture(keys, family, blocks)?;
    let activation = activation(keys, family.activation_key, family.activation, family.gated)?;
    if mixture.is_some() && activation != Activation::Silu {
        return Err(keys.refuse(family.activation_key, "silu or swish in a mixture of experts"));
    }
    block_configs.iter_mut().zip(mlps).for_each(|(block, mlp)| block.mlp = mlp);
    Ok(DecoderConfig {
        naming: family.naming,
        prefix: "model.",
        vocab,
        ctx: longest_input(ctx, &block_configs),
        hidden_size,
        intermediate_size: size("intermediate_size", family.intermediate_size)?,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim,
        blocks: block_configs,
        learned_positions: None,
        norm: family.norm,
        norm_eps: keys.positive(family.eps_key)?.unwrap_or(family.eps),
        norm_placement: if is_parallel { NormPlacement::Parallel } else { family.norms },
        query_key_norms: family.query_key_norms,
        rotary_pairs: family.pairs,
        qkv_bias: family.qkv_bias.read(keys)?,
        output_bias: family.output_bias.read(keys)?,
        mlp_bias: family.mlp_bias.read(keys)?,
        gated: family.gated,
        activation,
        mixture: mixture.map(Box::new),
        clip_qkv: if family.is("olmoe") { keys.positive("clip_qkv")? } else { None },
        attention_sinks: family.is("gpt_oss"),
        query_scale,
        attention_soft_cap: if is_gemma { cap("attn_logit_softcapping", 50.0)? } else { None },
        logit_soft_cap: if is_gemma { cap("final_logit_softcapping", 30.0)? } else { None },
        embedding_scale: match is_granite {
            true => factor(keys.positive("embedding_multiplier")?),
            false => is_gemma.then(|| (hidden_size as f64).sqrt()),
        },
        residual_scale: if is_granite { factor(keys.positive("residual_multiplier")?) } else { None },
        logit_scale: factor(logit_scale),
        padding: padding(keys, family, vocab)?,
        tie_word_embeddings: keys.flag("tie_word_embeddings", family.tied)?,
        checkpoint_activations: false,
        dropout: 0.0,
        lora: None,
    })
}

/// Returns the maximum length of an input to a model with this `max_position_embeddings`. With dynamic frequencies,
/// this is `max_position_embeddings` times the scaling factor, but at most [`MAX_POSITIONS`].
fn longest_input(ctx: usize, block_configs: &[BlockConfig]) -> usize {
    let factor = |block: &BlockConfig| match block.rotary.as_ref()?.scaling {
        RotaryScaling::Dynamic { factor, .. } => Some(factor),
        _ => None,
    };
    let longest = block_configs.iter().filter_map(factor).fold(1.0, f64::max) * ctx as f64;
    (longest as usize).clamp(ctx, MAX_POSITIONS.max(ctx))
}

fn gpt2(keys: &JsonObjectReader<'_>) -> Result<DecoderConfig> {
    let size = |key: &str, default: usize| Ok::<usize, Error>(keys.size(key)?.unwrap_or(default));
    let hidden_size = size("n_embd", 768)?;
    let heads = size("n_head", 12)?;
    if !hidden_size.is_multiple_of(heads) {
        return Err(keys.refuse_as("n_embd", hidden_size, format!("a multiple of n_head ({heads})")));
    }
    keys.only("scale_attn_weights", true, "attention scores are divided by the square root of a head's width")?;
    keys.only("scale_attn_by_inverse_layer_idx", false, "all layers scale attention scores in the same way")?;
    keys.only("add_cross_attention", false, "there is no encoder")?;
    let ctx = size("n_positions", 1024)?;
    let sizes = [hidden_size, heads, blocks(keys, "n_layer", 12)?];
    Ok(DecoderConfig {
        prefix: "transformer.",
        intermediate_size: size("n_inner", 4 * hidden_size)?,
        norm_eps: keys.positive("layer_norm_epsilon")?.unwrap_or(1e-5),
        activation: activation(keys, "activation_function", Activation::GeluTanh, false)?,
        tie_word_embeddings: keys.flag("tie_word_embeddings", true)?,
        ..DecoderConfig::gpt2(size("vocab_size", 50_257)?, ctx, sizes)
    })
}

/// Reads the number of blocks, and checks it before memory is allocated for each of them.
fn blocks(keys: &JsonObjectReader<'_>, key: &str, default: usize) -> Result<usize> {
    match keys.size(key)?.unwrap_or(default) {
        blocks if blocks <= MAX_BLOCKS => Ok(blocks),
        _ => Err(keys.refuse(key, format!("at most {MAX_BLOCKS}"))),
    }
}

/// Reads the padding token. A number below 0 counts from the end of the vocabulary.
fn padding(keys: &JsonObjectReader<'_>, family: &ModelFamily, vocab: usize) -> Result<Option<u32>> {
    const KEY: &str = "pad_token_id";
    let Some(value) = keys.get(KEY) else { return Ok(family.padding.filter(|_| !keys.is_null(KEY))) };
    let id = value.as_i64().map(|id| if id < 0 { id.saturating_add(vocab as i64) } else { id });
    match id.and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < vocab) {
        Some(id) => Ok(Some(id)),
        None => Err(keys.refuse(KEY, format!("a whole number below vocab_size ({vocab})"))),
    }
}

/// Reads the activation that `key` names, or returns `default` if the key is absent.
fn activation(keys: &JsonObjectReader<'_>, key: &str, default: Activation, is_gated: bool) -> Result<Activation> {
    match keys.text(key)? {
        None => Ok(default),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some("gelu") if !is_gated => Ok(Activation::Gelu),
        Some("relu2") if !is_gated => Ok(Activation::ReluSquared),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some(_) if is_gated => Err(keys.refuse(key, "silu, swish, gelu_new or gelu_pytorch_tanh")),
        Some(_) => Err(keys.refuse(key, "silu, swish, gelu, gelu_new, gelu_pytorch_tanh or relu2")),
    }
}
