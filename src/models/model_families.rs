//! The families of decoders: the model classes of transformers, with their differences and their defaults for keys that
//! files omit.

use super::json_object_reader::JsonObjectReader;
use super::mixture_families::{
    GPT_OSS_MIXTURE, MIXTRAL_MIXTURE, MixtureFamily, OLMOE_MIXTURE, QWEN2_MIXTURE, QWEN3_MIXTURE,
};
use super::{NormKind, NormPlacement, ParameterNaming, QueryKeyNorms};
use crate::error::Result;
use crate::nn::{Activation, RotaryPairs};

/// The models of one class in transformers.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelFamily {
    pub model_type: &'static str,
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate_size: usize,
    pub blocks: usize,
    pub heads: usize,
    /// The number of key and value heads, or `None` for the number of query heads.
    pub kv_heads: Option<usize>,
    pub head: HeadDimRule,
    pub ctx: usize,
    pub eps: f64,
    pub eps_key: &'static str,
    pub theta: f64,
    /// The fraction of a head that is rotated.
    pub partial_rotary_factor: f64,
    pub pairs: RotaryPairs,
    pub tied: bool,
    pub window: Option<usize>,
    pub layers: SlidingWindowRule,
    pub padding: Option<u32>,
    pub naming: ParameterNaming,
    pub norm: NormKind,
    pub norms: NormPlacement,
    pub query_key_norms: QueryKeyNorms,
    pub gated: bool,
    pub activation_key: &'static str,
    pub activation: Activation,
    pub qkv_bias: BiasRule,
    pub output_bias: BiasRule,
    pub mlp_bias: BiasRule,
    /// The mixture of experts of sparse blocks, if the family has one.
    pub mixture: Option<MixtureFamily>,
    /// The keys of options that this library's blocks do not have, each with the only value that is allowed and the
    /// reason.
    pub unsupported_options: &'static [(&'static str, bool, &'static str)],
}

/// The rule for the number of elements in a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeadDimRule {
    /// hidden_size / num_attention_heads; there is no key.
    OfHiddenSize,
    /// The key's value, or hidden_size / num_attention_heads.
    Key,
    /// The key's value, or this number.
    KeyOr(usize),
}

/// The rule that determines which blocks of a family have a sliding window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlidingWindowRule {
    /// All blocks attend to all earlier positions.
    Full,
    /// All blocks have a window if the configuration has one.
    Windowed,
    /// The key `layer_types` gives the types. Without it, all blocks have a window if the configuration has one.
    TypesOrWindowed,
    /// The key `layer_types` gives the types. Without it, the first `max_window_layers` blocks have full attention, and
    /// the others have a window if `use_sliding_window` is set.
    Qwen,
    /// The key `layer_types` gives the types. Without it, blocks whose number, counted from 1, is a multiple of the
    /// pattern have full attention, and the others have a window.
    Pattern { default: usize, keys: &'static [&'static str] },
    /// The key `layer_types` gives the types. Without it, the blocks without positions have a window if
    /// `use_sliding_window` is set.
    SmolLm3,
}

/// Whether projections have biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BiasRule {
    Never,
    Always,
    /// The key's value, or the default.
    Key(&'static str, bool),
}

impl BiasRule {
    pub fn read(self, keys: &JsonObjectReader<'_>) -> Result<bool> {
        match self {
            Self::Never => Ok(false),
            Self::Always => Ok(true),
            Self::Key(key, default) => keys.flag(key, default),
        }
    }
}

const ATTENTION_BIAS: BiasRule = BiasRule::Key("attention_bias", false);

const LLAMA: ModelFamily = ModelFamily {
    model_type: "llama",
    vocab: 32_000,
    hidden: 4096,
    intermediate_size: 11_008,
    blocks: 32,
    heads: 32,
    kv_heads: None,
    head: HeadDimRule::Key,
    ctx: 2048,
    eps: 1e-6,
    eps_key: "rms_norm_eps",
    theta: 1e4,
    partial_rotary_factor: 1.0,
    pairs: RotaryPairs::Halves,
    tied: false,
    window: None,
    layers: SlidingWindowRule::Full,
    padding: None,
    naming: ParameterNaming::Llama,
    norm: NormKind::Rms,
    norms: NormPlacement::Before,
    query_key_norms: QueryKeyNorms::None,
    gated: true,
    activation_key: "hidden_act",
    activation: Activation::Silu,
    qkv_bias: ATTENTION_BIAS,
    output_bias: ATTENTION_BIAS,
    mlp_bias: BiasRule::Key("mlp_bias", false),
    mixture: None,
    unsupported_options: &[],
};

/// A model whose projections never have biases. Its class in transformers does not read the keys for biases.
const WITHOUT_BIAS: ModelFamily =
    ModelFamily { qkv_bias: BiasRule::Never, output_bias: BiasRule::Never, mlp_bias: BiasRule::Never, ..LLAMA };

const MISTRAL: ModelFamily = ModelFamily {
    model_type: "mistral",
    intermediate_size: 14_336,
    kv_heads: Some(8),
    ctx: 131_072,
    window: Some(4096),
    layers: SlidingWindowRule::Windowed,
    ..WITHOUT_BIAS
};

const QWEN3: ModelFamily = ModelFamily {
    model_type: "qwen3",
    vocab: 151_936,
    intermediate_size: 22_016,
    kv_heads: Some(32),
    head: HeadDimRule::KeyOr(128),
    ctx: 32_768,
    window: Some(4096),
    layers: SlidingWindowRule::Qwen,
    query_key_norms: QueryKeyNorms::PerHead,
    mlp_bias: BiasRule::Never,
    ..LLAMA
};

const GEMMA2: ModelFamily = ModelFamily {
    model_type: "gemma2",
    vocab: 256_000,
    hidden: 2304,
    intermediate_size: 9216,
    blocks: 26,
    heads: 8,
    kv_heads: Some(4),
    head: HeadDimRule::KeyOr(256),
    ctx: 8192,
    tied: true,
    window: Some(4096),
    layers: SlidingWindowRule::Pattern { default: 2, keys: &[] },
    padding: Some(0),
    norm: NormKind::RmsPlusOne,
    norms: NormPlacement::BeforeAndAfter,
    activation_key: "hidden_activation",
    activation: Activation::GeluTanh,
    mlp_bias: BiasRule::Never,
    unsupported_options: &[("use_bidirectional_attention", false, "a language model does not see later tokens")],
    ..LLAMA
};

const GEMMA3: ModelFamily = ModelFamily {
    model_type: "gemma3_text",
    vocab: 262_208,
    ctx: 131_072,
    theta: 1e6,
    layers: SlidingWindowRule::Pattern { default: 6, keys: &["sliding_window_pattern", "_sliding_window_pattern"] },
    query_key_norms: QueryKeyNorms::PerHead,
    ..GEMMA2
};

const OLMO2: ModelFamily = ModelFamily {
    model_type: "olmo2",
    vocab: 50_304,
    head: HeadDimRule::OfHiddenSize,
    eps: 1e-5,
    padding: Some(1),
    norms: NormPlacement::After,
    query_key_norms: QueryKeyNorms::AllHeads,
    mlp_bias: BiasRule::Never,
    ..LLAMA
};

const GLM4: ModelFamily = ModelFamily {
    model_type: "glm4",
    vocab: 151_552,
    intermediate_size: 13_696,
    blocks: 40,
    kv_heads: Some(2),
    head: HeadDimRule::KeyOr(128),
    ctx: 131_072,
    eps: 0.000_000_156_25,
    partial_rotary_factor: 0.5,
    pairs: RotaryPairs::Adjacent,
    padding: Some(151_329),
    naming: ParameterNaming::Glm,
    norms: NormPlacement::BeforeAndAfter,
    qkv_bias: BiasRule::Key("attention_bias", true),
    output_bias: BiasRule::Never,
    mlp_bias: BiasRule::Never,
    ..LLAMA
};

const COHERE: ModelFamily = ModelFamily {
    model_type: "cohere",
    vocab: 256_000,
    hidden: 8192,
    intermediate_size: 22_528,
    blocks: 40,
    heads: 64,
    head: HeadDimRule::OfHiddenSize,
    ctx: 8192,
    eps: 1e-5,
    eps_key: "layer_norm_eps",
    theta: 500_000.0,
    pairs: RotaryPairs::Adjacent,
    tied: true,
    padding: Some(0),
    norm: NormKind::LayerWithoutBias,
    norms: NormPlacement::Parallel,
    mlp_bias: BiasRule::Never,
    unsupported_options: &[("use_qk_norm", false, "layer norms of queries and keys are not supported")],
    ..LLAMA
};

const MINISTRAL3: ModelFamily = ModelFamily {
    model_type: "ministral3",
    vocab: 131_072,
    blocks: 34,
    head: HeadDimRule::KeyOr(128),
    ctx: 262_144,
    eps: 1e-5,
    theta: 1e6,
    window: None,
    padding: Some(11),
    ..MISTRAL
};

/// Windows are refused for Qwen's mixtures, because versions of transformers differ in which blocks have one.
const QWEN_MOE_UNSUPPORTED_OPTIONS: &[(&str, bool, &str)] =
    &[("use_sliding_window", false, "windows are not supported in this model")];

const QWEN3_MOE: ModelFamily = ModelFamily {
    model_type: "qwen3_moe",
    hidden: 2048,
    intermediate_size: 6144,
    blocks: 24,
    kv_heads: Some(4),
    head: HeadDimRule::Key,
    mixture: Some(QWEN3_MIXTURE),
    unsupported_options: QWEN_MOE_UNSUPPORTED_OPTIONS,
    ..QWEN3
};

/// All families, in the order of their names.
pub(super) const FAMILIES: [ModelFamily; 26] = [
    COHERE,
    ModelFamily {
        model_type: "cohere2",
        theta: 1e4,
        window: Some(4096),
        layers: SlidingWindowRule::Pattern { default: 4, keys: &["sliding_window_pattern"] },
        unsupported_options: &[],
        ..COHERE
    },
    GEMMA2,
    GEMMA3,
    ModelFamily { model_type: "glm", norms: NormPlacement::Before, ..GLM4 },
    GLM4,
    ModelFamily {
        model_type: "gpt2",
        vocab: 50_257,
        hidden: 768,
        blocks: 12,
        heads: 12,
        ctx: 1024,
        eps: 1e-5,
        tied: true,
        naming: ParameterNaming::Gpt2,
        ..LLAMA
    },
    ModelFamily {
        model_type: "gpt_oss",
        vocab: 201_088,
        hidden: 2880,
        intermediate_size: 2880,
        blocks: 36,
        heads: 64,
        kv_heads: Some(8),
        head: HeadDimRule::KeyOr(64),
        ctx: 131_072,
        eps: 1e-5,
        theta: 150_000.0,
        window: Some(128),
        layers: SlidingWindowRule::Pattern { default: 2, keys: &[] },
        qkv_bias: BiasRule::Key("attention_bias", true),
        output_bias: BiasRule::Key("attention_bias", true),
        mlp_bias: BiasRule::Never,
        mixture: Some(GPT_OSS_MIXTURE),
        ..LLAMA
    },
    ModelFamily { model_type: "granite", head: HeadDimRule::Key, ..LLAMA },
    LLAMA,
    ModelFamily { model_type: "ministral", layers: SlidingWindowRule::TypesOrWindowed, ..MISTRAL },
    MINISTRAL3,
    MISTRAL,
    ModelFamily {
        model_type: "mixtral",
        eps: 1e-5,
        theta: 1e6,
        window: None,
        mixture: Some(MIXTRAL_MIXTURE),
        ..MISTRAL
    },
    ModelFamily {
        model_type: "nemotron",
        vocab: 256_000,
        hidden: 6144,
        intermediate_size: 24_576,
        heads: 48,
        ctx: 4096,
        eps: 1e-5,
        eps_key: "norm_eps",
        partial_rotary_factor: 0.5,
        norm: NormKind::LayerPlusOne,
        gated: false,
        activation: Activation::ReluSquared,
        ..LLAMA
    },
    OLMO2,
    ModelFamily {
        model_type: "olmo3",
        theta: 500_000.0,
        window: Some(4096),
        layers: SlidingWindowRule::Pattern { default: 4, keys: &[] },
        ..OLMO2
    },
    ModelFamily {
        model_type: "olmoe",
        hidden: 2048,
        intermediate_size: 2048,
        blocks: 16,
        heads: 16,
        ctx: 4096,
        norms: NormPlacement::Before,
        mixture: Some(OLMOE_MIXTURE),
        ..OLMO2
    },
    ModelFamily {
        model_type: "phi3",
        vocab: 32_064,
        hidden: 3072,
        intermediate_size: 8192,
        ctx: 4096,
        eps: 1e-5,
        layers: SlidingWindowRule::Windowed,
        padding: Some(32_000),
        naming: ParameterNaming::Phi3,
        ..WITHOUT_BIAS
    },
    ModelFamily {
        model_type: "qwen2",
        head: HeadDimRule::Key,
        query_key_norms: QueryKeyNorms::None,
        qkv_bias: BiasRule::Always,
        output_bias: BiasRule::Never,
        ..QWEN3
    },
    ModelFamily {
        model_type: "qwen2_moe",
        intermediate_size: 5632,
        heads: 16,
        kv_heads: Some(16),
        query_key_norms: QueryKeyNorms::None,
        qkv_bias: BiasRule::Key("qkv_bias", true),
        output_bias: BiasRule::Never,
        mixture: Some(QWEN2_MIXTURE),
        ..QWEN3_MOE
    },
    QWEN3,
    QWEN3_MOE,
    ModelFamily {
        model_type: "smollm3",
        vocab: 128_256,
        hidden: 2048,
        blocks: 36,
        heads: 16,
        kv_heads: Some(4),
        head: HeadDimRule::Key,
        ctx: 32_768,
        theta: 2e6,
        tied: true,
        layers: SlidingWindowRule::SmolLm3,
        padding: Some(128_004),
        ..LLAMA
    },
    ModelFamily {
        model_type: "stablelm",
        vocab: 50_304,
        hidden: 2560,
        intermediate_size: 6912,
        kv_heads: Some(32),
        head: HeadDimRule::OfHiddenSize,
        ctx: 4096,
        eps: 1e-5,
        eps_key: "layer_norm_eps",
        partial_rotary_factor: 0.25,
        norm: NormKind::Layer,
        qkv_bias: BiasRule::Key("use_qkv_bias", false),
        output_bias: BiasRule::Never,
        mlp_bias: BiasRule::Never,
        unsupported_options: &[("qk_layernorm", false, "layer norms of queries and keys are not supported")],
        ..LLAMA
    },
    ModelFamily {
        model_type: "starcoder2",
        vocab: 49_152,
        hidden: 3072,
        intermediate_size: 12_288,
        blocks: 30,
        heads: 24,
        kv_heads: Some(2),
        head: HeadDimRule::OfHiddenSize,
        ctx: 4096,
        eps: 1e-5,
        eps_key: "norm_epsilon",
        tied: true,
        layers: SlidingWindowRule::Windowed,
        naming: ParameterNaming::StarCoder2,
        norm: NormKind::Layer,
        gated: false,
        activation: Activation::GeluTanh,
        qkv_bias: BiasRule::Key("use_bias", true),
        output_bias: BiasRule::Key("use_bias", true),
        mlp_bias: BiasRule::Key("use_bias", true),
        ..LLAMA
    },
];

/// The models for images and text whose text part is read, and the family of a text part that has no `model_type`.
pub(super) const WITH_TEXT_PART: [(&str, &str); 2] = [("gemma3", "gemma3_text"), ("mistral3", "mistral")];

impl ModelFamily {
    /// Returns the family called `model_type`.
    pub fn named(model_type: &str) -> Option<&'static Self> {
        const ALL: &[ModelFamily] = &FAMILIES;
        ALL.iter().find(|family| family.model_type == model_type)
    }

    /// Returns the family called `model_type` if it can be the text part of a model for images and text.
    pub fn of_text_part(model_type: &str) -> Option<&'static Self> {
        Self::named(model_type).filter(|family| family.is_text_part())
    }

    fn is_text_part(&self) -> bool {
        self.naming != ParameterNaming::Gpt2
    }

    /// Returns whether the model belongs to a lineage: models whose `model_type`s begin with `lineage`.
    pub fn is(&self, lineage: &str) -> bool {
        self.model_type.starts_with(lineage)
    }
}

/// Returns the names of all models that are read, in alphabetical order.
pub(super) fn known_model_types() -> Vec<&'static str> {
    let mut names: Vec<&str> = FAMILIES.iter().map(|family| family.model_type).collect();
    names.extend(WITH_TEXT_PART.iter().map(|(name, _)| *name));
    names.sort_unstable();
    names
}

/// Returns the names of the models that can be the text part of a model for images and text, in alphabetical order.
pub(super) fn text_part_types() -> Vec<&'static str> {
    let mut names: Vec<&str> = FAMILIES.iter().filter(|family| family.is_text_part()).map(|f| f.model_type).collect();
    names.sort_unstable();
    names
}
