//! The architectures of llama.cpp: the transformers models that they compute, and their assumptions about these models.
//!
//! A file describes a model by an architecture and a few keys. For properties without a key, llama.cpp assumes values.
//! A model for which llama.cpp would therefore compute different results is refused ([`GgufArchitecture::problem`], in
//! `export_compatibility.rs`).

use candle_zero::models::{DecoderConfig, RotaryConfig, RotaryScaling};
use candle_zero::nn::{Activation, ExpertActivation, RotaryPairs, RouterOrder};

/// An architecture of llama.cpp.
#[derive(Debug, Clone, Copy)]
pub(super) struct GgufArchitecture {
    /// The name in GGUF files.
    pub name: &'static str,
    /// The names of its models in transformers.
    pub model_types: &'static [&'static str],
    /// The elements of a head that llama.cpp rotates together.
    pub pairs: RotaryPairs,
    pub windows: WindowRule,
    pub positions: PositionRule,
    /// The supported kinds of rotary scaling among those that need a tensor with a divisor for each frequency.
    pub factors: RopeFactorSupport,
    pub scales: MultiplierRule,
    pub tying: Tying,
    /// The biases of queries, keys and values, of the attention output, and of the MLP.
    pub biases: [Presence; 3],
    pub activation: Activation,
    /// Whether a head may have a size other than hidden_size / num_attention_heads.
    pub has_free_head: bool,
    pub mixture: Option<MixtureRule>,
}

/// The blocks to which llama.cpp applies windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WindowRule {
    /// No blocks, and there is no key.
    None,
    /// No blocks, although there is a key.
    Unused,
    /// In each period of `period` blocks, the first `windowed` ones. If `is_optional` is set, a model may have no
    /// windows at all.
    Pattern { period: usize, windowed: usize, is_optional: bool },
}

/// The rotary positions of the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PositionRule {
    /// Positions are learned.
    Learned,
    /// All blocks have the same rotary positions.
    All,
    /// Every block whose number, counted from 1, is a multiple of this number has no positions.
    ExceptEvery(usize),
    /// Only blocks with a window have positions.
    InWindows,
    /// Blocks with a window have positions with base 10000 and without scaling.
    LocalInWindows,
    /// The positions of blocks with a window are not scaled.
    UnscaledInWindows,
}

/// The kinds of rotary scaling with divisors for which llama.cpp has tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RopeFactorSupport {
    pub llama3: bool,
    pub longrope: bool,
}

/// The factors and caps for which an architecture has keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MultiplierRule {
    /// There are no keys.
    None,
    /// Factors for attention scores, embeddings, residual additions and logits.
    Granite,
    /// A factor for logits.
    Logits,
    /// The factor for attention scores follows from the width of a head. In models with `largest` blocks, it follows
    /// from hidden_size / num_attention_heads instead. Gemma 2 has caps, and Gemma 3 has none.
    Gemma { largest: usize, has_caps: bool },
}

/// Whether the output projection shares the weight of the token embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tying {
    Always,
    Never,
    Optional,
}

/// Whether a parameter exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    Never,
    Optional,
    Always,
}

/// The assumptions of llama.cpp about a mixture of experts. All blocks have one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct MixtureRule {
    /// The computation of the weights of the chosen experts. The metadata has no key for this.
    pub order: RouterOrder,
    /// The gated activation of the experts.
    pub gate: ExpertActivation,
    /// Whether there is a key for the width of an expert. Otherwise, the width is that of a dense block.
    pub has_width: bool,
}

const FREE: [Presence; 3] = [Presence::Optional; 3];
const NO_BIASES: [Presence; 3] = [Presence::Never; 3];
/// Biases of queries, keys and values, which are optional.
const QKV_BIASES: [Presence; 3] = [Presence::Optional, Presence::Never, Presence::Never];
const NO_FACTORS: RopeFactorSupport = RopeFactorSupport { llama3: false, longrope: false };

const LLAMA: GgufArchitecture = GgufArchitecture {
    name: "llama",
    model_types: &["llama", "mistral", "mistral3", "ministral", "ministral3"],
    pairs: RotaryPairs::Adjacent,
    windows: WindowRule::None,
    positions: PositionRule::All,
    factors: RopeFactorSupport { llama3: true, longrope: true },
    scales: MultiplierRule::None,
    tying: Tying::Optional,
    biases: FREE,
    activation: Activation::Silu,
    has_free_head: true,
    mixture: None,
};

const QWEN3: GgufArchitecture = GgufArchitecture {
    name: "qwen3",
    model_types: &["qwen3"],
    pairs: RotaryPairs::Halves,
    factors: NO_FACTORS,
    biases: NO_BIASES,
    ..LLAMA
};

const QWEN2: GgufArchitecture = GgufArchitecture {
    name: "qwen2",
    model_types: &["qwen2"],
    biases: [Presence::Always, Presence::Never, Presence::Never],
    has_free_head: false,
    ..QWEN3
};

const GEMMA2: GgufArchitecture = GgufArchitecture {
    name: "gemma2",
    model_types: &["gemma2"],
    windows: WindowRule::Pattern { period: 2, windowed: 1, is_optional: false },
    scales: MultiplierRule::Gemma { largest: 46, has_caps: true },
    tying: Tying::Always,
    activation: Activation::GeluTanh,
    ..QWEN3
};

const COMMAND_R: GgufArchitecture = GgufArchitecture {
    name: "command-r",
    model_types: &["cohere"],
    pairs: RotaryPairs::Adjacent,
    scales: MultiplierRule::Logits,
    tying: Tying::Always,
    ..QWEN3
};

const CHATGLM: GgufArchitecture = GgufArchitecture {
    name: "chatglm",
    model_types: &["glm"],
    pairs: RotaryPairs::Adjacent,
    biases: QKV_BIASES,
    ..QWEN3
};

/// Returns the rule for a mixture of experts with SiLU in which the weights of the chosen experts are their
/// probabilities.
const fn mixture(renormalize: bool, has_width: bool) -> Option<MixtureRule> {
    Some(MixtureRule { order: RouterOrder::SoftmaxThenTop { renormalize }, gate: ExpertActivation::Silu, has_width })
}

/// All architectures for which GGUF files are written. llama.cpp has no separate architecture for Mixtral.
const ARCHITECTURES: [GgufArchitecture; 22] = [
    LLAMA,
    GgufArchitecture { model_types: &["mixtral"], mixture: mixture(true, false), ..LLAMA },
    QWEN2,
    GgufArchitecture {
        name: "qwen2moe",
        model_types: &["qwen2_moe"],
        tying: Tying::Never,
        mixture: mixture(false, true),
        ..QWEN2
    },
    QWEN3,
    GgufArchitecture { name: "qwen3moe", model_types: &["qwen3_moe"], mixture: mixture(true, true), ..QWEN3 },
    GgufArchitecture {
        name: "olmoe",
        model_types: &["olmoe"],
        tying: Tying::Never,
        mixture: mixture(false, false),
        ..QWEN3
    },
    GEMMA2,
    GgufArchitecture {
        name: "gemma3",
        model_types: &["gemma3_text", "gemma3"],
        windows: WindowRule::Pattern { period: 6, windowed: 5, is_optional: false },
        positions: PositionRule::LocalInWindows,
        scales: MultiplierRule::Gemma { largest: 62, has_caps: false },
        tying: Tying::Optional,
        ..GEMMA2
    },
    GgufArchitecture {
        name: "phi3",
        model_types: &["phi3"],
        windows: WindowRule::Unused,
        factors: RopeFactorSupport { llama3: false, longrope: true },
        has_free_head: false,
        ..QWEN3
    },
    GgufArchitecture {
        name: "gpt2",
        model_types: &["gpt2"],
        positions: PositionRule::Learned,
        biases: [Presence::Always; 3],
        activation: Activation::GeluTanh,
        has_free_head: false,
        ..QWEN3
    },
    COMMAND_R,
    GgufArchitecture {
        name: "cohere2",
        model_types: &["cohere2"],
        windows: WindowRule::Pattern { period: 4, windowed: 3, is_optional: false },
        positions: PositionRule::InWindows,
        ..COMMAND_R
    },
    CHATGLM,
    GgufArchitecture { name: "glm4", model_types: &["glm4"], ..CHATGLM },
    GgufArchitecture {
        name: "granite",
        model_types: &["granite"],
        factors: NO_FACTORS,
        scales: MultiplierRule::Granite,
        ..LLAMA
    },
    GgufArchitecture {
        name: "smollm3",
        model_types: &["smollm3"],
        positions: PositionRule::ExceptEvery(4),
        factors: NO_FACTORS,
        biases: NO_BIASES,
        ..LLAMA
    },
    GgufArchitecture {
        name: "starcoder2",
        model_types: &["starcoder2"],
        biases: [Presence::Always; 3],
        activation: Activation::GeluTanh,
        has_free_head: false,
        ..QWEN3
    },
    GgufArchitecture {
        name: "olmo2",
        model_types: &["olmo2", "olmo3"],
        windows: WindowRule::Pattern { period: 4, windowed: 3, is_optional: true },
        positions: PositionRule::UnscaledInWindows,
        tying: Tying::Never,
        has_free_head: false,
        ..QWEN3
    },
    GgufArchitecture {
        name: "nemotron",
        model_types: &["nemotron"],
        tying: Tying::Never,
        biases: FREE,
        activation: Activation::ReluSquared,
        has_free_head: false,
        ..QWEN3
    },
    GgufArchitecture {
        name: "stablelm",
        model_types: &["stablelm"],
        tying: Tying::Never,
        biases: QKV_BIASES,
        has_free_head: false,
        ..QWEN3
    },
    GgufArchitecture {
        name: GPT_OSS,
        model_types: &["gpt_oss"],
        windows: WindowRule::Pattern { period: 2, windowed: 1, is_optional: false },
        tying: Tying::Never,
        // The biases of the experts are part of the mixture.
        biases: [Presence::Always, Presence::Always, Presence::Never],
        mixture: Some(MixtureRule {
            order: RouterOrder::TopThenSoftmax,
            gate: ExpertActivation::Clamped { alpha: 1.702, limit: 7.0 },
            has_width: true,
        }),
        ..QWEN3
    },
];

/// The name of the architecture of gpt-oss.
pub(super) const GPT_OSS: &str = "gpt-oss";

/// Returns which elements of a head are rotated together in files of the architecture `name`.
pub(super) fn rotary_pairs(name: &str) -> Option<RotaryPairs> {
    ARCHITECTURES.iter().find(|known| known.name == name).map(|known| known.pairs)
}

/// Returns the number of blocks of the largest Gemma of the architecture `name`, or `None` for other architectures.
pub(super) fn largest_gemma(name: &str) -> Option<usize> {
    let known = ARCHITECTURES.iter().find(|known| known.name == name)?;
    if let MultiplierRule::Gemma { largest, .. } = known.scales { Some(largest) } else { None }
}

impl GgufArchitecture {
    /// Returns the architecture for models with the `model_type` of transformers, or why there is none.
    pub fn of_type(model_type: &str) -> Result<Self, String> {
        let found = ARCHITECTURES.into_iter().find(|known| known.model_types.contains(&model_type));
        found.ok_or_else(|| {
            let mut known: Vec<&str> = ARCHITECTURES.iter().flat_map(|known| known.model_types).copied().collect();
            known.sort_unstable();
            format!(
                "its type is {model_type:?}, but must be one of {}; write a Hugging Face folder and convert it with \
                 llama.cpp",
                known.join(", ")
            )
        })
    }

    /// Returns the settings of the rotary positions that the metadata describes. If blocks with and without a window
    /// have different settings, the metadata describes those of blocks without a window.
    pub fn rotary<'a>(&self, config: &'a DecoderConfig) -> Option<&'a RotaryConfig> {
        let mut full = config.blocks.iter().filter(|block| block.window.is_none());
        let mut all = config.blocks.iter();
        match self.positions {
            PositionRule::Learned => None,
            PositionRule::LocalInWindows => full.find_map(|block| block.rotary.as_ref()),
            PositionRule::UnscaledInWindows => full.chain(&config.blocks).find_map(|block| block.rotary.as_ref()),
            _ => all.find_map(|block| block.rotary.as_ref()),
        }
    }

    /// Returns the positions of block `at` as llama.cpp computes them.
    pub fn rotary_of(&self, config: &DecoderConfig, at: usize) -> Option<RotaryConfig> {
        let described = self.rotary(config).cloned();
        let is_windowed = config.blocks[at].window.is_some();
        match self.positions {
            PositionRule::ExceptEvery(period) if (at + 1).is_multiple_of(period) => None,
            PositionRule::InWindows if !is_windowed => None,
            PositionRule::LocalInWindows if is_windowed => Some(RotaryConfig::default()),
            PositionRule::UnscaledInWindows if is_windowed => {
                described.map(|rotary| RotaryConfig { scaling: RotaryScaling::None, ..rotary })
            }
            _ => described,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_known_model_type_has_exactly_one_architecture() {
        // The message for an unknown type lists the known ones.
        let error = DecoderConfig::from_hugging_face(&serde_json::json!({"model_type": "?"})).unwrap_err().to_string();
        let known = error.split_once("the supported types are ").map(|(_, known)| known);
        let mut known: Vec<&str> = known.unwrap_or_else(|| panic!("{error}")).split(", ").map(str::trim).collect();
        let mut exported: Vec<&str> = ARCHITECTURES.iter().flat_map(|known| known.model_types).copied().collect();
        known.sort_unstable();
        exported.sort_unstable();
        assert_eq!(exported, known, "{error}");
    }

    #[test]
    fn the_documentation_lists_all_architectures_with_their_models() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/tools/merge.md");
        let page = std::fs::read_to_string(page).unwrap();
        let mut names: Vec<&str> = ARCHITECTURES.iter().map(|known| known.name).collect();
        names.dedup();
        for name in names {
            let of_name = ARCHITECTURES.iter().filter(|known| known.name == name);
            let types: Vec<String> =
                of_name.flat_map(|known| known.model_types).map(|kind| format!("`{kind}`")).collect();
            let row = format!("| `{name}` | {} |", types.join(", "));
            assert!(page.lines().any(|line| line == row), "docs/tools/merge.md has no line {row}");
        }
    }
}
