//! The metadata of mixtures of experts in llama.cpp.

use super::architecture_keys::ArchitectureMetadataReader;
use super::architectures::{GPT_OSS, MixtureRule};
use super::writer::GgufValue;
use crate::error::Result;
use candle_zero::models::MixtureConfig;
use serde_json::{Map, Value as Json};

/// The mixtures that are read: their architecture, and their type and class in transformers. llama.cpp has no separate
/// architecture for Mixtral, the last entry.
const SUPPORTED_MIXTURES: [(&str, &str, &str); 5] = [
    ("qwen2moe", "qwen2_moe", "Qwen2MoeForCausalLM"),
    ("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM"),
    ("olmoe", "olmoe", "OlmoeForCausalLM"),
    (GPT_OSS, "gpt_oss", "GptOssForCausalLM"),
    ("llama", "mixtral", "MixtralForCausalLM"),
];

/// Returns the transformers type and class of the mixture in a file of architecture `name`, or `None` if the file
/// contains no mixture or the architecture is not one of [`SUPPORTED_MIXTURES`].
pub(super) fn mixture_in_file(name: &str, experts: Option<usize>) -> Option<(&'static str, &'static str)> {
    let has_mixture = name != "llama" || experts.is_some();
    let known = SUPPORTED_MIXTURES.into_iter().find(|(known, ..)| *known == name && has_mixture);
    known.map(|(_, model_type, class)| (model_type, class))
}

/// Returns the keys of `config.json` that describe a mixture.
pub(super) fn config_json(
    (model_type, class): (&str, &str),
    keys: &ArchitectureMetadataReader<'_>,
) -> Result<Map<String, Json>> {
    // 1 is the softmax over all experts, and 3 the one over the chosen experts.
    let function = if model_type == "gpt_oss" { 3.0 } else { 1.0 };
    if keys.number("expert_gating_func")?.is_some_and(|found| found != function) {
        let of_chosen = if model_type == "gpt_oss" { " of the chosen experts" } else { "" };
        return Err(keys.refuse("expert_gating_func", format!("{function} (softmax{of_chosen})")));
    }
    if keys.number("expert_weights_scale")?.is_some_and(|scale| scale != 1.0 && scale != 0.0) {
        return Err(keys.refuse("expert_weights_scale", "1"));
    }
    let chosen = keys.need_size("expert_used_count")?;
    let dense = keys.need_size("feed_forward_length")?;
    let mut config = Map::new();
    let mut set = |key: &str, value: Json| _ = config.insert(key.to_owned(), value);
    set("model_type", model_type.into());
    set("architectures", vec![class].into());
    let count = if model_type == "gpt_oss" { "num_local_experts" } else { "num_experts" };
    set(count, keys.need_size("expert_count")?.into());
    set("num_experts_per_tok", chosen.into());
    if model_type.starts_with("qwen") {
        // Early files have only the width of a dense block, which llama.cpp then divides by the number of chosen
        // experts.
        let width = keys.size("expert_feed_forward_length")?;
        set("moe_intermediate_size", width.unwrap_or(dense / chosen).into());
        set("decoder_sparse_step", 1.into());
        set("mlp_only_layers", Json::Array(Vec::new()));
    }
    match model_type {
        "qwen2_moe" => {
            let shared = keys.size("expert_shared_feed_forward_length")?;
            set("shared_expert_intermediate_size", shared.unwrap_or(dense).into());
            set("norm_topk_prob", false.into());
        }
        "qwen3_moe" => set("norm_topk_prob", true.into()),
        "olmoe" => set("norm_topk_prob", false.into()),
        // All blocks are mixtures, and this key specifies the experts' width.
        "gpt_oss" => set("intermediate_size", keys.size("expert_feed_forward_length")?.unwrap_or(dense).into()),
        _ => (),
    }
    Ok(config)
}

/// Returns the metadata that describes a mixture.
pub(super) fn metadata(mixture: &MixtureConfig, rule: MixtureRule) -> Vec<(&'static str, GgufValue)> {
    let mut keys = vec![
        ("expert_count", GgufValue::size(mixture.experts)),
        ("expert_used_count", GgufValue::size(mixture.router.experts_per_row)),
    ];
    if rule.has_width {
        keys.push(("expert_feed_forward_length", GgufValue::size(mixture.expert_width)));
    }
    keys.extend(mixture.shared_width.map(|width| ("expert_shared_feed_forward_length", GgufValue::size(width))));
    keys
}
