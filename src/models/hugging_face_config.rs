//! Reads a decoder's configuration from the `config.json` of a Hugging Face model, in the format of transformers 5
//! (`rope_parameters`, `layer_types`) or 4 (`rope_theta`, `rope_scaling`, `sliding_window_pattern`).
//!
//! For keys that a file omits, the defaults of the model's class in transformers apply.

use super::config_checks::MAX_BLOCKS;
use super::json_keys::{JsonKeys, shortened};
use super::{BlockConfig, DecoderConfig, NormKind, ParameterNaming, RotaryConfig, RotaryScaling};
use crate::error::{Error, ModelError, Result};
use crate::files;
use crate::nn::Activation;
use crate::nn::frequencies::Llama3RopeScaling;
use serde_json::Value;
use std::path::Path;

/// The maximum number of bytes in a `config.json`.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

impl DecoderConfig {
    /// Reads the configuration from the `config.json` of a Hugging Face model, as transformers 5 or 4 writes it. `ctx`
    /// is its `max_position_embeddings` (or `n_positions`), and may be lowered before a model is built.
    ///
    /// Known `model_type`s: llama (Llama 2 and 3, TinyLlama, SmolLM2), mistral, qwen2 (and 2.5), qwen3, gemma2, gemma3
    /// (its text part), gemma3_text, phi3, gpt2. Keys that do not affect a forward without dropout are ignored.
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
    let bad = |e: serde_json::Error| ModelError::NoJson { file: file.to_owned(), why: e.to_string() }.into();
    // Some Windows editors write a byte order mark before the text.
    serde_json::from_str(text.strip_prefix('\u{FEFF}').unwrap_or(&text)).map_err(bad)
}

/// Reads the configuration from `config`, the content of `file`.
fn read(config: &Value, file: &Path) -> Result<DecoderConfig> {
    let Value::Object(map) = config else {
        return Err(ModelError::NoJson { file: file.to_owned(), why: "it is not an object".into() }.into());
    };
    let keys = JsonKeys::new(file, "", map);
    if keys.get("model_type").is_some_and(|found| super::ENCODER_TYPES.iter().any(|known| found == known)) {
        return Err(
            keys.refuse("model_type", "that of a language model; an encoder is fine-tuned with --task classify")
        );
    }
    let Some(family) = ModelFamily::of(&keys)? else {
        let (file, found) = (file.to_owned(), map.get("model_type").map_or("absent".to_owned(), shortened));
        let known = FAMILIES.map(|family| family.model_type).join(", ");
        return Err(ModelError::UnknownModelType { file, found, known }.into());
    };
    if keys.get("quantization_config").is_some() {
        return Err(keys.refuse("quantization_config", "absent: weights are read in f32, bf16 or f16"));
    }
    // An absent key has a default in transformers; null does not.
    let sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"];
    if let Some(key) = sizes.into_iter().find(|key| map.get(*key).is_some_and(Value::is_null)) {
        return Err(keys.refuse(key, "a whole number of at least 1"));
    }
    let config = match family.model_type {
        "gpt2" => gpt2(&keys)?,
        "gemma3" => match keys.object("text_config", "text_config.")? {
            Some(text) => decoder(&text, family)?,
            None => return Err(keys.refuse("text_config", "an object, the model's text part")),
        },
        _ => decoder(&keys, family)?,
    };
    match config.validate() {
        Ok(()) => Ok(config),
        Err(Error::Model(ModelError::Config { key, found, allowed })) => {
            Err(ModelError::HuggingFace { file: file.to_owned(), key: key.into(), found, allowed }.into())
        }
        Err(other) => Err(other),
    }
}

/// The models of one class in transformers, with the defaults for keys that their files omit.
#[derive(Debug, Clone, Copy)]
struct ModelFamily {
    model_type: &'static str,
    vocab: usize,
    hidden: usize,
    inner: usize,
    blocks: usize,
    heads: usize,
    /// The number of key and value heads, or `None` for the number of query heads.
    kv_heads: Option<usize>,
    /// The number of elements in a head, or `None` for hidden_size / num_attention_heads.
    head: Option<usize>,
    ctx: usize,
    eps: f64,
    theta: f64,
    tied: bool,
    window: Option<usize>,
    padding: Option<u32>,
}

const LLAMA: ModelFamily = ModelFamily {
    model_type: "llama",
    vocab: 32_000,
    hidden: 4096,
    inner: 11_008,
    blocks: 32,
    heads: 32,
    kv_heads: None,
    head: None,
    ctx: 2048,
    eps: 1e-6,
    theta: 1e4,
    tied: false,
    window: None,
    padding: None,
};

const QWEN2: ModelFamily =
    ModelFamily { model_type: "qwen2", vocab: 151_936, inner: 22_016, ctx: 32_768, window: Some(4096), ..LLAMA };

const GEMMA2: ModelFamily = ModelFamily {
    model_type: "gemma2",
    vocab: 256_000,
    hidden: 2304,
    inner: 9216,
    blocks: 26,
    heads: 8,
    kv_heads: Some(4),
    head: Some(256),
    ctx: 8192,
    tied: true,
    window: Some(4096),
    padding: Some(0),
    ..LLAMA
};

const GEMMA3: ModelFamily =
    ModelFamily { model_type: "gemma3_text", vocab: 262_208, ctx: 131_072, theta: 1e6, ..GEMMA2 };

const FAMILIES: [ModelFamily; 9] = [
    GEMMA2,
    ModelFamily { model_type: "gemma3", ..GEMMA3 },
    GEMMA3,
    ModelFamily {
        model_type: "gpt2",
        vocab: 50_257,
        hidden: 768,
        blocks: 12,
        heads: 12,
        ctx: 1024,
        eps: 1e-5,
        tied: true,
        ..LLAMA
    },
    LLAMA,
    ModelFamily { model_type: "mistral", inner: 14_336, kv_heads: Some(8), ctx: 131_072, window: Some(4096), ..LLAMA },
    ModelFamily {
        model_type: "phi3",
        vocab: 32_064,
        hidden: 3072,
        inner: 8192,
        ctx: 4096,
        eps: 1e-5,
        padding: Some(32_000),
        ..LLAMA
    },
    QWEN2,
    ModelFamily { model_type: "qwen3", head: Some(128), ..QWEN2 },
];

impl ModelFamily {
    fn of(keys: &JsonKeys<'_>) -> Result<Option<&'static Self>> {
        const ALL: &[ModelFamily] = &FAMILIES;
        let model_type = keys.text("model_type")?;
        Ok(ALL.iter().find(|family| Some(family.model_type) == model_type))
    }

    fn is_gemma(&self) -> bool {
        self.model_type.starts_with("gemma")
    }

    fn is_gemma3(&self) -> bool {
        self.model_type.starts_with("gemma3")
    }

    fn is_qwen(&self) -> bool {
        self.model_type.starts_with("qwen")
    }
}

/// Reads the configuration of any model except GPT-2.
fn decoder(keys: &JsonKeys<'_>, family: &ModelFamily) -> Result<DecoderConfig> {
    let size = |key: &str, default: usize| Ok::<usize, Error>(keys.size(key)?.unwrap_or(default));
    let hidden_size = size("hidden_size", family.hidden)?;
    let vocab = size("vocab_size", family.vocab)?;
    let heads = size("num_attention_heads", family.heads)?;
    let own_or = |key: &str, default: Option<usize>| match keys.is_null(key) {
        true => Ok::<Option<usize>, Error>(None),
        false => Ok(keys.size(key)?.or(default)),
    };
    let kv_heads = own_or("num_key_value_heads", family.kv_heads)?.unwrap_or(heads);
    let head_dim = match own_or("head_dim", family.head)? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let allowed = format!("a multiple of num_attention_heads ({heads}) if head_dim is absent");
            return Err(keys.refuse_as("hidden_size", hidden_size, allowed));
        }
    };
    let partial = keys.positive("partial_rotary_factor")?.unwrap_or(1.0);
    if partial != 1.0 {
        return Err(keys.refuse("partial_rotary_factor", "1: complete heads are rotated"));
    }
    let blocks = blocks(keys, "num_hidden_layers", family.blocks)?;
    let tied = keys.flag("tie_word_embeddings", family.tied)?;
    let bias = keys.flag("attention_bias", false)?;
    let (qkv_bias, output_bias) = match family.model_type {
        "qwen2" => (true, false),
        // In transformers, these models do not read the key.
        "mistral" | "phi3" => (false, false),
        _ => (bias, bias),
    };
    if family.is_gemma() {
        keys.only("use_bidirectional_attention", false, "a language model does not see later tokens")?;
    }
    let cap = |key: &str, default: f64| match keys.is_null(key) || family.is_gemma3() {
        true => keys.positive(key),
        false => Ok(keys.positive(key)?.or(Some(default))),
    };
    let is_gemma = family.is_gemma();
    let activation = activation(keys, if is_gemma { "hidden_activation" } else { "hidden_act" }, is_gemma, true)?;
    let scalar = match is_gemma {
        true => Some(keys.positive("query_pre_attn_scalar")?.unwrap_or(256.0)),
        false => None,
    };
    Ok(DecoderConfig {
        naming: if family.model_type == "phi3" { ParameterNaming::Phi3 } else { ParameterNaming::Llama },
        prefix: "model.",
        vocab,
        ctx: size("max_position_embeddings", family.ctx)?,
        hidden_size,
        intermediate_size: size("intermediate_size", family.inner)?,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim,
        blocks: block_rules(keys, family, blocks)?,
        learned_positions: None,
        norm: if is_gemma { NormKind::RmsPlusOne } else { NormKind::Rms },
        norm_eps: keys.positive("rms_norm_eps")?.unwrap_or(family.eps),
        norms_after: is_gemma,
        query_key_norms: family.model_type == "qwen3" || family.is_gemma3(),
        qkv_bias,
        output_bias,
        mlp_bias: family.model_type == "llama" && keys.flag("mlp_bias", false)?,
        gated: true,
        activation,
        query_scale: scalar.map(|scalar| 1.0 / scalar.sqrt()),
        attention_soft_cap: if is_gemma { cap("attn_logit_softcapping", 50.0)? } else { None },
        logit_soft_cap: if is_gemma { cap("final_logit_softcapping", 30.0)? } else { None },
        embedding_scale: is_gemma.then(|| (hidden_size as f64).sqrt()),
        padding: padding(keys, family, vocab)?,
        tie_word_embeddings: tied,
        checkpoint_activations: false,
        dropout: 0.0,
        lora: None,
    })
}

fn gpt2(keys: &JsonKeys<'_>) -> Result<DecoderConfig> {
    let size = |key: &str, default: usize| Ok::<usize, Error>(keys.size(key)?.unwrap_or(default));
    let hidden_size = size("n_embd", 768)?;
    let heads = size("n_head", 12)?;
    if !hidden_size.is_multiple_of(heads) {
        return Err(keys.refuse_as("n_embd", hidden_size, format!("a multiple of n_head ({heads})")));
    }
    keys.only("scale_attn_weights", true, "attention's scores are divided by the square root of a head's width")?;
    keys.only("scale_attn_by_inverse_layer_idx", false, "all layers scale attention's scores in the same way")?;
    keys.only("add_cross_attention", false, "there is no encoder")?;
    let ctx = size("n_positions", 1024)?;
    let sizes = [hidden_size, heads, blocks(keys, "n_layer", 12)?];
    Ok(DecoderConfig {
        prefix: "transformer.",
        intermediate_size: size("n_inner", 4 * hidden_size)?,
        norm_eps: keys.positive("layer_norm_epsilon")?.unwrap_or(1e-5),
        activation: activation(keys, "activation_function", true, false)?,
        tie_word_embeddings: keys.flag("tie_word_embeddings", true)?,
        ..DecoderConfig::gpt2(size("vocab_size", 50_257)?, ctx, sizes)
    })
}

/// Reads the number of blocks, and checks it before memory is allocated for each of them.
fn blocks(keys: &JsonKeys<'_>, key: &str, default: usize) -> Result<usize> {
    match keys.size(key)?.unwrap_or(default) {
        blocks if blocks <= MAX_BLOCKS => Ok(blocks),
        _ => Err(keys.refuse(key, format!("at most {MAX_BLOCKS}"))),
    }
}

/// Reads the padding token. A number below 0 counts from the end of the vocabulary.
fn padding(keys: &JsonKeys<'_>, family: &ModelFamily, vocab: usize) -> Result<Option<u32>> {
    const KEY: &str = "pad_token_id";
    let Some(value) = keys.get(KEY) else { return Ok(family.padding.filter(|_| !keys.is_null(KEY))) };
    let id = value.as_i64().map(|id| if id < 0 { id.saturating_add(vocab as i64) } else { id });
    match id.and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < vocab) {
        Some(id) => Ok(Some(id)),
        None => Err(keys.refuse(KEY, format!("a whole number below vocab_size ({vocab})"))),
    }
}

/// Reads the activation that `key` names. Without the key it is the tanh approximation of GELU if `is_gelu`, otherwise
/// SiLU.
fn activation(keys: &JsonKeys<'_>, key: &str, is_gelu: bool, is_gated: bool) -> Result<Activation> {
    match keys.text(key)? {
        None if is_gelu => Ok(Activation::GeluTanh),
        None => Ok(Activation::Silu),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some("gelu") if !is_gated => Ok(Activation::Gelu),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some(_) if is_gated => Err(keys.refuse(key, "silu, swish, gelu_new or gelu_pytorch_tanh")),
        Some(_) => Err(keys.refuse(key, "silu, swish, gelu, gelu_new or gelu_pytorch_tanh")),
    }
}

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Reads the windows and rotary positions of the blocks.
fn block_rules(keys: &JsonKeys<'_>, family: &ModelFamily, blocks: usize) -> Result<Vec<BlockConfig>> {
    let window = match keys.is_null("sliding_window") {
        true => None,
        false => keys.size("sliding_window")?.or(family.window),
    };
    let types = match family.model_type {
        "llama" => vec![FULL; blocks],
        "mistral" | "phi3" => vec![if window.is_some() { SLIDING } else { FULL }; blocks],
        _ => block_types(keys, family, blocks)?,
    };
    let rotary = |kind: &str| match family.is_gemma3() && kind == SLIDING {
        true => local_rotary(keys),
        false => rotary(keys, kind, family.theta),
    };
    let (full, sliding) = (rotary(FULL)?, rotary(SLIDING)?);
    let rule = |kind: &&str| match (*kind, window) {
        (FULL, _) => Ok(BlockConfig { window: None, rotary: full }),
        (_, Some(window)) => Ok(BlockConfig { window: Some(window), rotary: sliding }),
        (_, None) => Err(keys.refuse("sliding_window", "a number if layer_types contains sliding_attention")),
    };
    types.iter().map(rule).collect()
}

/// Reads the attention type of each block.
fn block_types<'a>(keys: &JsonKeys<'a>, family: &ModelFamily, blocks: usize) -> Result<Vec<&'a str>> {
    let slides = !family.is_qwen() || keys.flag("use_sliding_window", false)?;
    if let Some(given) = keys.get("layer_types") {
        let all = given.as_array().map(|all| all.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        let Some(Some(all)) = all else { return Err(keys.refuse("layer_types", "a list of strings")) };
        if all.len() != blocks {
            let found = format!("a list of length {}", all.len());
            return Err(keys.refuse_as("layer_types", found, format!("of length num_hidden_layers ({blocks})")));
        }
        if let Some(other) = all.iter().find(|kind| ![FULL, SLIDING].contains(kind)) {
            let found = format!("a list with {other:?}");
            return Err(keys.refuse_as("layer_types", found, format!("a list of {FULL} and {SLIDING}")));
        }
        if !slides && all.contains(&SLIDING) {
            let allowed = format!("true if layer_types contains {SLIDING}");
            return Err(keys.refuse("use_sliding_window", allowed));
        }
        return Ok(all);
    }
    let of = |is_full: &dyn Fn(usize) -> bool| (0..blocks).map(|i| if is_full(i) { FULL } else { SLIDING }).collect();
    if family.is_qwen() {
        // Unlike sizes, this number may be 0.
        let first = match keys.get("max_window_layers") {
            None => 28,
            Some(value) => {
                value.as_u64().ok_or_else(|| keys.refuse("max_window_layers", "a whole number of at least 0"))?
            }
        };
        return Ok(of(&|i| !slides || (i as u64) < first));
    }
    let pattern = match family.is_gemma3() {
        false => 2,
        true => match keys.size("sliding_window_pattern")? {
            Some(pattern) => pattern,
            None => keys.size("_sliding_window_pattern")?.unwrap_or(6),
        },
    };
    Ok(of(&|i| (i + 1) % pattern == 0))
}

/// Reads the rotary positions of Gemma 3's blocks with a window.
fn local_rotary(keys: &JsonKeys<'_>) -> Result<RotaryConfig> {
    if keys.get("rope_parameters").is_some() {
        return rotary(keys, SLIDING, 1e4);
    }
    Ok(RotaryConfig { theta: keys.positive("rope_local_base_freq")?.unwrap_or(1e4), scaling: RotaryScaling::None })
}

/// Reads the rotary positions of blocks with attention type `kind`.
fn rotary(keys: &JsonKeys<'_>, kind: &str, theta: f64) -> Result<RotaryConfig> {
    let plain = keys.positive("rope_theta")?;
    let old = keys.object("rope_scaling", "rope_scaling.")?.map(|given| scaling(&given)).transpose()?;
    let Some(given) = keys.object("rope_parameters", "rope_parameters.")? else {
        return Ok(RotaryConfig { theta: plain.unwrap_or(theta), scaling: old.unwrap_or(RotaryScaling::None) });
    };
    // There is an entry for each attention type, or one for all.
    let given = match given.keys().any(|key| [FULL, SLIDING].contains(&key)) {
        false => given,
        true if kind == FULL => given.object(FULL, "rope_parameters.full_attention.")?.unwrap_or(given),
        true => given.object(SLIDING, "rope_parameters.sliding_attention.")?.unwrap_or(given),
    };
    let own = given.positive("rope_theta")?;
    if let (Some(own), Some(plain)) = (own, plain)
        && own != plain
        && kind == FULL
    {
        return Err(given.refuse("rope_theta", format!("equal to the outer rope_theta ({plain})")));
    }
    if given.positive("partial_rotary_factor")?.is_some_and(|part| part != 1.0) {
        return Err(given.refuse("partial_rotary_factor", "1: complete heads are rotated"));
    }
    let scaling = scaling(&given)?;
    if kind == FULL && old.is_some_and(|old| old != scaling) {
        return Err(keys.refuse("rope_scaling", "absent or equal to rope_parameters"));
    }
    Ok(RotaryConfig { theta: own.or(plain).unwrap_or(theta), scaling })
}

/// Reads the frequency scaling.
fn scaling(given: &JsonKeys<'_>) -> Result<RotaryScaling> {
    let (new, old) = (given.text("rope_type")?, given.text("type")?);
    if let (Some(new), Some(old)) = (new, old)
        && new != old
    {
        return Err(given.refuse("type", format!("equal to rope_type ({new:?})")));
    }
    let need = |key: &str| given.positive(key)?.ok_or_else(|| given.refuse(key, "a positive number"));
    match new.or(old) {
        None | Some("default") => Ok(RotaryScaling::None),
        Some("linear") => Ok(RotaryScaling::Linear { factor: need("factor")? }),
        Some("llama3") => {
            const ORIGINAL: &str = "original_max_position_embeddings";
            let original = given.size(ORIGINAL)?.ok_or_else(|| given.refuse(ORIGINAL, "a whole number"))?;
            let (low, high) = (need("low_freq_factor")?, need("high_freq_factor")?);
            if low >= high {
                return Err(given.refuse("high_freq_factor", format!("above low_freq_factor ({low})")));
            }
            Ok(RotaryScaling::Llama3(Llama3RopeScaling {
                factor: need("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            }))
        }
        Some(_) => Err(given.refuse(if new.is_some() { "rope_type" } else { "type" }, "default, linear or llama3")),
    }
}
