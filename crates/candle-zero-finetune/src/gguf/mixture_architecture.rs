//! The architectures of mixtures of experts in llama.cpp, and their metadata.

use super::architecture_keys::ArchitectureKeys;
use super::writer::GgufValue;
use crate::error::Result;
use candle_zero::models::{DecoderConfig, MixtureConfig};
use candle_zero::nn::RouterOrder;
use serde_json::{Map, Value as Json};

/// The architectures in which all blocks are mixtures. llama.cpp has no separate architecture for Mixtral
/// ([`MIXTRAL`]).
const ARCHITECTURES: [MixtureArchitecture; 3] = [
    MixtureArchitecture {
        name: "qwen2moe",
        model_type: "qwen2_moe",
        class: "Qwen2MoeForCausalLM",
        renormalizes: false,
    },
    MixtureArchitecture { name: "qwen3moe", model_type: "qwen3_moe", class: "Qwen3MoeForCausalLM", renormalizes: true },
    MixtureArchitecture { name: "olmoe", model_type: "olmoe", class: "OlmoeForCausalLM", renormalizes: false },
];
const MIXTRAL: MixtureArchitecture =
    MixtureArchitecture { name: "llama", model_type: "mixtral", class: "MixtralForCausalLM", renormalizes: true };

/// An architecture of mixtures in llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MixtureArchitecture {
    /// The name in GGUF files.
    pub name: &'static str,
    /// The name in transformers.
    pub model_type: &'static str,
    /// The name of the model's class in transformers.
    class: &'static str,
    /// Whether llama.cpp divides the probabilities of the chosen experts by their sum. The metadata has no key for
    /// this.
    renormalizes: bool,
}

impl MixtureArchitecture {
    /// Returns the mixture that a GGUF file of architecture `name` contains, if it contains one.
    pub fn in_file(name: &str, experts: Option<usize>) -> Option<Self> {
        let known = ARCHITECTURES.into_iter().find(|known| known.name == name);
        known.or_else(|| (name == MIXTRAL.name && experts.is_some()).then_some(MIXTRAL))
    }

    /// Returns the architecture for models with the `model_type` of transformers.
    pub fn of_type(model_type: &str) -> Option<Self> {
        ARCHITECTURES.into_iter().chain([MIXTRAL]).find(|known| known.model_type == model_type)
    }

    /// Returns the keys of `config.json` that describe the mixture.
    pub fn config_json(self, keys: &ArchitectureKeys<'_>) -> Result<Map<String, Json>> {
        // 1 is the softmax.
        if keys.number("expert_gating_func")?.is_some_and(|function| function != 1.0) {
            return Err(keys.refuse("expert_gating_func", "1 (softmax)"));
        }
        if keys.number("expert_weights_scale")?.is_some_and(|scale| scale != 1.0 && scale != 0.0) {
            return Err(keys.refuse("expert_weights_scale", "1"));
        }
        let chosen = keys.need_size("expert_used_count")?;
        let dense = keys.need_size("feed_forward_length")?;
        let mut config = Map::new();
        let mut set = |key: &str, value: Json| _ = config.insert(key.to_owned(), value);
        set("model_type", self.model_type.into());
        set("architectures", vec![self.class].into());
        set("num_experts", keys.need_size("expert_count")?.into());
        set("num_experts_per_tok", chosen.into());
        if self.model_type.starts_with("qwen") {
            // Early files have only the width of a dense block, which llama.cpp then divides by the number of chosen
            // experts.
            let width = keys.size("expert_feed_forward_length")?;
            set("moe_intermediate_size", width.unwrap_or(dense / chosen).into());
            set("decoder_sparse_step", 1.into());
            set("mlp_only_layers", Json::Array(Vec::new()));
        }
        if self.model_type == "qwen2_moe" {
            let shared = keys.size("expert_shared_feed_forward_length")?;
            set("shared_expert_intermediate_size", shared.unwrap_or(dense).into());
        }
        if self != MIXTRAL {
            set("norm_topk_prob", self.renormalizes.into());
        }
        Ok(config)
    }

    /// Returns why llama.cpp would compute different results with a model, or `None` if it would not.
    pub fn problem(self, config: &DecoderConfig) -> Option<String> {
        let Some(mixture) = &config.mixture else { return Some("it has no experts".into()) };
        let (name, renormalizes) = (self.name, self.renormalizes);
        if config.sparse_blocks().count() != config.blocks.len() {
            return Some(format!(
                "some of its blocks are dense, but architecture {name} of llama.cpp has only blocks with experts"
            ));
        }
        if mixture.router.order != (RouterOrder::SoftmaxThenTop { renormalize: renormalizes }) {
            return Some(format!(
                "its norm_topk_prob is {}, but architecture {name} of llama.cpp assumes {renormalizes}",
                !renormalizes
            ));
        }
        config
            .clip_qkv
            .map(|clip| format!("its clip_qkv is {clip}, for which architecture {name} of llama.cpp has no key"))
    }
}

/// Returns the metadata that describes a mixture.
pub(super) fn metadata(mixture: &MixtureConfig, architecture: MixtureArchitecture) -> Vec<(&'static str, GgufValue)> {
    let mut keys = vec![
        ("expert_count", GgufValue::size(mixture.experts)),
        ("expert_used_count", GgufValue::size(mixture.router.experts_per_row)),
    ];
    if architecture.model_type.starts_with("qwen") {
        keys.push(("expert_feed_forward_length", GgufValue::size(mixture.expert_width)));
    }
    keys.extend(mixture.shared_width.map(|width| ("expert_shared_feed_forward_length", GgufValue::size(width))));
    keys
}
