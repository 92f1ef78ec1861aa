//! The architectures of llama.cpp: which models of transformers they compute, and what they assume about them.
//!
//! A file describes a model by an architecture and a few keys. What an architecture has no keys for, llama.cpp assumes.
//! A model for which it would compute different results is refused ([`GgufArchitecture::problem`]).

use candle_zero::models::{DecoderConfig, RotaryConfig, RotaryScaling};
use candle_zero::nn::{Activation, ExpertGate, RotaryPairs, RouterOrder};

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
    /// The kinds of rotary scaling that need a tensor with a divisor for each frequency.
    pub factors: FrequencyFactors,
    pub scales: ScaleRule,
    tying: Tying,
    /// The biases of queries, keys and values, of attention's output, and of the MLP.
    biases: [Presence; 3],
    activation: Activation,
    /// Whether a head may have a size other than hidden_size / num_attention_heads.
    has_free_head: bool,
    pub mixture: Option<MixtureRule>,
}

/// The blocks to which llama.cpp applies windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WindowRule {
    /// No blocks, and there is no key.
    None,
    /// No blocks, although there is a key.
    Unused,
    /// In each period, the first blocks. If they are optional, a model may have no windows at all.
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
pub(super) struct FrequencyFactors {
    pub llama3: bool,
    pub longrope: bool,
}

/// The factors and caps for which an architecture has keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScaleRule {
    /// There are no keys.
    None,
    /// A factor of attention scores, of embeddings, of residual additions and of logits.
    Granite,
    /// A factor of logits.
    Logits,
    /// The factor of attention scores follows from the width of a head. In models with `largest` blocks, it follows from
    /// hidden_size / num_attention_heads instead. Gemma 2 has caps, and Gemma 3 has none.
    Gemma { largest: usize, has_caps: bool },
}

/// Whether the output projection is the token embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tying {
    Always,
    Never,
    Optional,
}

/// Whether a parameter exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Never,
    Optional,
    Always,
}

/// The assumptions of llama.cpp about a mixture of experts. All blocks have one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct MixtureRule {
    /// The weights of the chosen experts. The metadata has no key for this.
    pub order: RouterOrder,
    /// The gated activation of the experts.
    gate: ExpertGate,
    /// Whether there is a key for the width of an expert. Otherwise, it is that of a dense block.
    pub has_width: bool,
}

const FREE: [Presence; 3] = [Presence::Optional; 3];
const NO_BIASES: [Presence; 3] = [Presence::Never; 3];
/// Biases of queries, keys and values, which are optional.
const QKV_BIASES: [Presence; 3] = [Presence::Optional, Presence::Never, Presence::Never];
const NO_FACTORS: FrequencyFactors = FrequencyFactors { llama3: false, longrope: false };

const LLAMA: GgufArchitecture = GgufArchitecture {
    name: "llama",
    model_types: &["llama", "mistral", "mistral3", "ministral", "ministral3"],
    pairs: RotaryPairs::Adjacent,
    windows: WindowRule::None,
    positions: PositionRule::All,
    factors: FrequencyFactors { llama3: true, longrope: true },
    scales: ScaleRule::None,
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
    scales: ScaleRule::Gemma { largest: 46, has_caps: true },
    tying: Tying::Always,
    activation: Activation::GeluTanh,
    ..QWEN3
};

const COMMAND_R: GgufArchitecture = GgufArchitecture {
    name: "command-r",
    model_types: &["cohere"],
    pairs: RotaryPairs::Adjacent,
    scales: ScaleRule::Logits,
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

/// A mixture of experts with SiLU, whose weights are the probabilities of the chosen experts.
const fn mixture(renormalize: bool, has_width: bool) -> Option<MixtureRule> {
    Some(MixtureRule { order: RouterOrder::SoftmaxThenTop { renormalize }, gate: ExpertGate::Silu, has_width })
}

/// All architectures that are written. llama.cpp has no separate architecture for Mixtral.
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
        scales: ScaleRule::Gemma { largest: 62, has_caps: false },
        tying: Tying::Optional,
        ..GEMMA2
    },
    GgufArchitecture {
        name: "phi3",
        model_types: &["phi3"],
        windows: WindowRule::Unused,
        factors: FrequencyFactors { llama3: false, longrope: true },
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
        scales: ScaleRule::Granite,
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
            gate: ExpertGate::Clamped { alpha: 1.702, limit: 7.0 },
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

    /// Returns the settings of the rotary positions that the metadata describes: those of blocks without a window, if
    /// the blocks differ.
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
    fn rotary_of(&self, config: &DecoderConfig, at: usize) -> Option<RotaryConfig> {
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

    /// Returns why llama.cpp would compute different results with a model, or `None` if it would not.
    pub fn problem(&self, config: &DecoderConfig) -> Option<String> {
        self.mixture_problem(config)
            .or_else(|| self.layout_problem(config))
            .or_else(|| self.scale_problem(config))
            .or_else(|| self.window_problem(config))
            .or_else(|| self.position_problem(config))
    }

    /// Returns the text for a key with a value other than the one that llama.cpp assumes.
    fn assumes(&self, key: &str, found: impl std::fmt::Display, assumed: impl std::fmt::Display) -> String {
        format!("its {key} is {found}, but architecture {} of llama.cpp assumes {assumed}", self.name)
    }

    fn has_no_key(&self, key: &str, found: impl std::fmt::Display) -> String {
        format!("its {key} is {found}, for which architecture {} of llama.cpp has no key", self.name)
    }

    fn mixture_problem(&self, config: &DecoderConfig) -> Option<String> {
        let name = self.name;
        let (rule, mixture) = match (&self.mixture, &config.mixture) {
            (None, None) => return None,
            (None, Some(_)) => return Some(format!("it has experts, but architecture {name} of llama.cpp has none")),
            (Some(_), None) => return Some("it has no experts".into()),
            (Some(rule), Some(mixture)) => (rule, mixture),
        };
        if config.sparse_blocks().count() != config.blocks.len() {
            return Some(format!(
                "some of its blocks are dense, but architecture {name} of llama.cpp has only blocks with experts"
            ));
        }
        if mixture.router.order != rule.order {
            let assumed = rule.order == RouterOrder::SoftmaxThenTop { renormalize: true };
            return Some(self.assumes("norm_topk_prob", !assumed, assumed));
        }
        match (mixture.gate, rule.gate) {
            (ExpertGate::Clamped { alpha, .. }, ExpertGate::Clamped { alpha: assumed, .. }) if alpha != assumed => {
                return Some(self.assumes("swiglu_alpha", alpha, assumed));
            }
            (ExpertGate::Clamped { limit, .. }, ExpertGate::Clamped { limit: assumed, .. }) if limit != assumed => {
                return Some(self.assumes("swiglu_limit", limit, assumed));
            }
            _ => (),
        }
        config.clip_qkv.map(|clip| self.has_no_key("clip_qkv", clip))
    }

    /// Checks the parameters that a model has, and its activation.
    fn layout_problem(&self, config: &DecoderConfig) -> Option<String> {
        let tied = config.tie_word_embeddings;
        match self.tying {
            Tying::Always if !tied => return Some(self.assumes("tie_word_embeddings", tied, true)),
            Tying::Never if tied => return Some(self.assumes("tie_word_embeddings", tied, false)),
            _ => (),
        }
        let of_model = [config.qkv_bias, config.output_bias, config.mlp_bias];
        let what = ["queries, keys and values", "attention's output", "the MLP"];
        for ((rule, has_bias), what) in self.biases.iter().zip(of_model).zip(what) {
            let problem = match (rule, has_bias) {
                (Presence::Never, true) => format!("has biases of {what}"),
                (Presence::Always, false) => format!("has no biases of {what}"),
                _ => continue,
            };
            let assumed = if has_bias { "has none" } else { "requires them" };
            return Some(format!(
                "it {problem} ({}), but architecture {} of llama.cpp {assumed}",
                bias_key(self.model_types[0], what),
                self.name
            ));
        }
        if config.activation != self.activation {
            let [found, assumed] = [config.activation, self.activation].map(activation_name);
            return Some(self.assumes("activation", found, assumed));
        }
        let (head, usual) = (config.head_dim, config.hidden_size / config.num_attention_heads);
        let is_usual = head * config.num_attention_heads == config.hidden_size;
        if !self.has_free_head && !is_usual {
            return Some(self.assumes("head_dim", head, format!("hidden_size / num_attention_heads ({usual})")));
        }
        None
    }

    /// Checks factors and caps.
    fn scale_problem(&self, config: &DecoderConfig) -> Option<String> {
        let mut without_key = vec![];
        let caps =
            [("attn_logit_softcapping", config.attention_soft_cap), ("final_logit_softcapping", config.logit_soft_cap)];
        let scales = [
            ("attention_multiplier", config.query_scale),
            ("embedding_multiplier", config.embedding_scale),
            ("residual_multiplier", config.residual_scale),
        ];
        match self.scales {
            ScaleRule::None => {
                without_key.extend(caps);
                without_key.extend(scales);
                without_key.push(("logit_scale", config.logit_scale));
            }
            ScaleRule::Granite => without_key.extend(caps),
            ScaleRule::Logits => {
                without_key.extend(caps);
                without_key.extend(scales);
            }
            ScaleRule::Gemma { largest, has_caps } => {
                let usual = config.hidden_size as f64 / config.num_attention_heads as f64;
                let is_largest = config.blocks.len() == largest;
                let assumed = if is_largest { usual.floor() } else { config.head_dim as f64 };
                let scalar = config.query_scale.map_or(config.head_dim as f64, |scale| scale.powi(-2));
                if (scalar / assumed - 1.0).abs() > 1e-6 {
                    let scalar = (scalar * 1e6).round() / 1e6;
                    let why = format!("{assumed} for a model with {} blocks", config.blocks.len());
                    return Some(self.assumes("query_pre_attn_scalar", scalar, why));
                }
                match has_caps {
                    true => {
                        let absent = caps.iter().find(|(_, cap)| cap.is_none());
                        if let Some((key, _)) = absent {
                            return Some(self.assumes(key, "null", "a number"));
                        }
                    }
                    false => without_key.extend(caps),
                }
            }
        }
        without_key.into_iter().find_map(|(key, value)| value.map(|value| self.has_no_key(key, value)))
    }

    fn window_problem(&self, config: &DecoderConfig) -> Option<String> {
        let WindowRule::Pattern { period, windowed, is_optional } = self.windows else { return None };
        let blocks = &config.blocks;
        if is_optional && blocks.iter().all(|block| block.window.is_none()) {
            return None;
        }
        let differs = |at: &usize| blocks[*at].window.is_some() != (at % period < windowed);
        let at = (0..blocks.len()).find(differs)?;
        let [found, assumed] = match blocks[at].window {
            Some(_) => ["sliding_attention", "full_attention"],
            None => ["full_attention", "sliding_attention"],
        };
        Some(self.assumes(&format!("layer_types[{at}]"), found, assumed))
    }

    fn position_problem(&self, config: &DecoderConfig) -> Option<String> {
        if self.positions == PositionRule::Learned {
            return None;
        }
        let of_block = |at: usize| {
            let [found, assumed] = [config.blocks[at].rotary.clone(), self.rotary_of(config, at)];
            self.position_difference(at, found.as_ref(), assumed.as_ref())
        };
        let all = config.blocks.iter().filter_map(|block| block.rotary.as_ref());
        all.clone()
            .find_map(|rotary| self.rotary_problem(config, rotary))
            .or_else(|| (0..config.blocks.len()).find_map(of_block))
    }

    /// Returns what about rotary positions llama.cpp does not compute.
    fn rotary_problem(&self, config: &DecoderConfig, rotary: &RotaryConfig) -> Option<String> {
        let name = self.name;
        if let Some(growth) = rotary.query_growth {
            return Some(self.has_no_key("llama_4_scaling_beta", growth.beta));
        }
        if self.pairs != config.rotary_pairs && rotary.width(config.head_dim) != config.head_dim {
            return Some(self.assumes("partial_rotary_factor", rotary.partial, 1));
        }
        let is_missing = |kind: &str| Some(self.has_no_key("rope_type", format!("{kind:?}")));
        match &rotary.scaling {
            RotaryScaling::Dynamic { .. } => {
                Some("its rotary scaling is \"dynamic\", for which GGUF has no keys".into())
            }
            RotaryScaling::Llama3(_) if !self.factors.llama3 => is_missing("llama3"),
            RotaryScaling::LongRope(_) if !self.factors.longrope => is_missing("longrope"),
            // llama.cpp always rounds the bounds of YaRN's ramp. All published files of gpt-oss ask for bounds that are
            // not rounded, but there are such files in llama.cpp's format nonetheless.
            RotaryScaling::Yarn(yarn) if yarn.frequencies.truncate != (name != GPT_OSS) => {
                Some(self.assumes("rope_parameters.truncate", yarn.frequencies.truncate, name != GPT_OSS))
            }
            _ => None,
        }
    }

    /// Returns how the positions of a block differ from those that llama.cpp assumes.
    fn position_difference(
        &self,
        at: usize,
        found: Option<&RotaryConfig>,
        assumed: Option<&RotaryConfig>,
    ) -> Option<String> {
        let name = self.name;
        let (found, assumed) = match (found, assumed) {
            (None, None) => return None,
            (Some(_), None) => {
                return Some(format!(
                    "its block {at} has rotary positions, but architecture {name} of llama.cpp assumes none there"
                ));
            }
            (None, Some(_)) => {
                return Some(format!(
                    "its block {at} has no rotary positions, but architecture {name} of llama.cpp assumes them there"
                ));
            }
            (Some(found), Some(assumed)) => (found, assumed),
        };
        if found.theta != assumed.theta {
            return Some(self.assumes(&format!("rope_theta in block {at}"), found.theta, assumed.theta));
        }
        if found.partial != assumed.partial {
            let key = format!("partial_rotary_factor in block {at}");
            return Some(self.assumes(&key, found.partial, assumed.partial));
        }
        (found.scaling != assumed.scaling).then(|| {
            let [found, assumed] = [found, assumed].map(|rotary| scaling_name(&rotary.scaling));
            let same = if found == assumed { " with the parameters of other blocks" } else { "" };
            self.assumes(&format!("rope_type in block {at}"), found, format!("{assumed}{same}"))
        })
    }
}

/// Returns the key that decides whether a model has biases.
fn bias_key(model_type: &str, what: &str) -> &'static str {
    match (model_type, what) {
        ("starcoder2", _) => "use_bias",
        ("stablelm", "queries, keys and values") => "use_qkv_bias",
        ("qwen2_moe", "queries, keys and values") => "qkv_bias",
        (_, "the MLP") => "mlp_bias",
        _ => "attention_bias",
    }
}

fn activation_name(activation: Activation) -> &'static str {
    match activation {
        Activation::Silu => "silu",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_pytorch_tanh",
        Activation::ReluSquared => "relu2",
        _ => "another function",
    }
}

fn scaling_name(scaling: &RotaryScaling) -> &'static str {
    match scaling {
        RotaryScaling::None => "default",
        RotaryScaling::Linear { .. } => "linear",
        RotaryScaling::Llama3(_) => "llama3",
        RotaryScaling::Yarn(_) => "yarn",
        RotaryScaling::Dynamic { .. } => "dynamic",
        RotaryScaling::LongRope(_) => "longrope",
        _ => "another type",
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
        let mut written: Vec<&str> = ARCHITECTURES.iter().flat_map(|known| known.model_types).copied().collect();
        known.sort_unstable();
        written.sort_unstable();
        assert_eq!(written, known, "{error}");
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
