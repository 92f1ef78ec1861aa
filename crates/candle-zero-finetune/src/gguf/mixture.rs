//! The conventions of llama.cpp for mixtures of experts: the tensors, of which one contains a projection of all experts, and the
//! keys of the metadata.

use super::config::ArchitectureKeys;
use super::writer::GgufValue;
use crate::error::Result;
use candle_zero::models::{DecoderConfig, MixtureConfig};
use candle_zero::nn::RouterOrder;
use serde_json::{Map, Value as Json};

/// The architectures in which all blocks are mixtures. Those of Mixtral are named llama, and have experts as well.
const ARCHITECTURES: [MixtureArchitecture; 3] = [
    MixtureArchitecture { name: "qwen2moe", model_type: "qwen2_moe", renormalizes: false },
    MixtureArchitecture { name: "qwen3moe", model_type: "qwen3_moe", renormalizes: true },
    MixtureArchitecture { name: "olmoe", model_type: "olmoe", renormalizes: false },
];
const MIXTRAL: MixtureArchitecture = MixtureArchitecture { name: "llama", model_type: "mixtral", renormalizes: true };

/// An architecture of mixtures in llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MixtureArchitecture {
    /// The name in GGUF files.
    pub name: &'static str,
    /// The name in transformers.
    pub model_type: &'static str,
    /// Whether llama.cpp divides the probabilities of the chosen experts by their sum. The metadata has no key for this.
    renormalizes: bool,
}

/// The place of a parameter of a mixture in a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MixturePlace {
    /// The name of the tensor within the block, without its ending.
    pub tensor: &'static str,
    /// The position along the first dimension, if the tensor contains a matrix for each expert.
    pub expert: Option<usize>,
}

/// Returns the place of the parameter `module` of a block, such as `mlp.experts.3.up_proj`, or `None` if it does not belong to a
/// mixture.
pub(super) fn place_of(module: &str) -> Option<MixturePlace> {
    let in_mixture = module.strip_prefix("mlp.").or_else(|| module.strip_prefix("block_sparse_moe."))?;
    if let Some((expert, projection)) = in_mixture.strip_prefix("experts.").and_then(|rest| rest.split_once('.')) {
        let tensor = match projection {
            "gate_proj" | "w1" => "ffn_gate_exps",
            "up_proj" | "w3" => "ffn_up_exps",
            "down_proj" | "w2" => "ffn_down_exps",
            _ => return None,
        };
        return Some(MixturePlace { tensor, expert: Some(expert.parse().ok()?) });
    }
    let tensor = match in_mixture {
        "gate" => ROUTER,
        "shared_expert_gate" => SHARED_GATE,
        "shared_expert.gate_proj" => "ffn_gate_shexp",
        "shared_expert.up_proj" => "ffn_up_shexp",
        "shared_expert.down_proj" => "ffn_down_shexp",
        _ => return None,
    };
    Some(MixturePlace { tensor, expert: None })
}

/// The name of the router's tensor within a block. It is always stored in f32.
pub(super) const ROUTER: &str = "ffn_gate_inp";

/// The name of the tensor of the shared expert's gate within a block. It is a vector, because the gate has one output.
const SHARED_GATE: &str = "ffn_gate_inp_shexp";

/// Returns the shape of the tensor that holds a parameter of `shape` in a GGUF file.
pub(super) fn shape_in_file(place: &MixturePlace, shape: &[usize], experts: usize) -> Vec<usize> {
    match place.expert {
        Some(_) => [&[experts], shape].concat(),
        None if place.tensor == SHARED_GATE => shape.iter().skip(1).copied().collect(),
        None => shape.to_vec(),
    }
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
        set("num_experts", keys.need_size("expert_count")?.into());
        set("num_experts_per_tok", chosen.into());
        if self.model_type.starts_with("qwen") {
            // Early files have only the width of a dense block, which llama.cpp then divides.
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

    /// Returns why llama.cpp would compute something else with a model, if it would.
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

/// Returns the metadata that describe a mixture.
pub(super) fn metadata(mixture: &MixtureConfig, architecture: MixtureArchitecture) -> Vec<(&'static str, GgufValue)> {
    let number = |value: usize| GgufValue::U32(u32::try_from(value).unwrap_or(u32::MAX));
    let mut keys =
        vec![("expert_count", number(mixture.experts)), ("expert_used_count", number(mixture.router.experts_per_row))];
    if architecture.model_type.starts_with("qwen") {
        keys.push(("expert_feed_forward_length", number(mixture.expert_width)));
    }
    keys.extend(mixture.shared_width.map(|width| ("expert_shared_feed_forward_length", number(width))));
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_share_a_tensor_and_other_parameters_have_their_own() {
        let place = |tensor, expert| Some(MixturePlace { tensor, expert });
        for (module, expected) in [
            ("mlp.experts.12.up_proj", place("ffn_up_exps", Some(12))),
            ("block_sparse_moe.experts.0.w1", place("ffn_gate_exps", Some(0))),
            ("block_sparse_moe.experts.7.w2", place("ffn_down_exps", Some(7))),
            ("block_sparse_moe.experts.7.w3", place("ffn_up_exps", Some(7))),
            ("block_sparse_moe.gate", place("ffn_gate_inp", None)),
            ("mlp.gate", place("ffn_gate_inp", None)),
            ("mlp.shared_expert_gate", place("ffn_gate_inp_shexp", None)),
            ("mlp.shared_expert.down_proj", place("ffn_down_shexp", None)),
            ("mlp.gate_proj", None),
            ("mlp.experts.x.up_proj", None),
            ("mlp.experts.1.w4", None),
            ("self_attn.q_proj", None),
        ] {
            assert_eq!(place_of(module), expected, "{module}");
        }
    }

    #[test]
    fn tensors_of_all_experts_have_a_dimension_more_and_gates_of_one_output_one_less() {
        let shape = |module, shape: &[usize]| place_of(module).map(|place| shape_in_file(&place, shape, 6));
        assert_eq!(shape("mlp.experts.1.up_proj", &[3, 4]), Some(vec![6, 3, 4]));
        assert_eq!(shape("mlp.shared_expert_gate", &[1, 4]), Some(vec![4]));
        assert_eq!(shape("mlp.gate", &[6, 4]), Some(vec![6, 4]));
    }
}
