//! The tensors of GGUF files that contain the parameters of decoders. Files are read and written with the same rules.

use candle_zero::models::{DecoderConfig, NormKind, NormPlacement, ParameterNaming};
use candle_zero::nn::RotaryPairs;

/// The mapping of a parameter to the tensors of a GGUF file that contain it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GgufTensorMapping {
    /// The names of the tensors that contain the parameter: one, or two for a parameter that combines the gate and up
    /// projections of all experts.
    pub names: Vec<String>,
    pub form: TensorForm,
    /// Whether 1 is added to all elements in the file.
    pub plus_one: bool,
}

/// The relation between a parameter and the tensor or tensors that contain it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TensorForm {
    /// The tensor is the parameter.
    Same,
    /// Rows become columns.
    Transposed,
    /// In each head, which has this many rows, the rows of the first and the second half alternate: llama.cpp rotates
    /// adjacent elements, while transformers rotates the two halves.
    Interleaved(usize),
    /// The tensor contains one parameter of this kind for each expert; this one belongs to the expert with this index.
    OfExpert(usize),
    /// The parameter has one row, and the tensor is a vector.
    Vector,
    /// The parameter contains a matrix `[in, out]` (or, without inputs, a vector) for each expert. Its outputs
    /// alternate between the tensors, which contain matrices `[out, in]`.
    OfAllExperts {
        /// The number of inputs of a matrix, or 1 for a vector.
        inputs: usize,
    },
}

impl GgufTensorMapping {
    /// Returns the shape of each of the tensors that contain a parameter of `shape`.
    pub fn shape_in_file(&self, shape: &[usize], experts: usize) -> Vec<usize> {
        match self.form {
            TensorForm::Same | TensorForm::Interleaved(_) => shape.to_vec(),
            TensorForm::Transposed => shape.iter().rev().copied().collect(),
            TensorForm::OfExpert(_) => [&[experts], shape].concat(),
            TensorForm::Vector => shape.iter().skip(1).copied().collect(),
            TensorForm::OfAllExperts { .. } => {
                let tensors = self.names.len();
                match *shape {
                    [experts, inputs, outputs] => vec![experts, outputs / tensors, inputs],
                    [experts, outputs] => vec![experts, outputs / tensors],
                    _ => shape.to_vec(),
                }
            }
        }
    }

    /// Returns whether llama.cpp needs the tensors in f32, regardless of their shape.
    pub fn is_always_f32(&self) -> bool {
        let is_f32 = |name: &String| {
            name.starts_with("position_embd") || name.contains(".ffn_gate_inp.") || name.ends_with(".bias")
        };
        self.names.iter().any(is_f32)
    }
}

/// Returns the mapping of a parameter to a file of an architecture whose rotary positions rotate `pairs`, or `None`
/// if llama.cpp has no name for it.
pub(super) fn tensor_mapping(parameter: &str, config: &DecoderConfig, pairs: RotaryPairs) -> Option<GgufTensorMapping> {
    let bare = parameter.strip_prefix(config.prefix).unwrap_or(parameter);
    let has_plus_one = matches!(config.norm, NormKind::RmsPlusOne | NormKind::LayerPlusOne);
    let plus_one = has_plus_one && bare.ends_with("norm.weight");
    let (module, ending) = bare.rsplit_once('.')?;
    let outer_name = match module {
        "embed_tokens" | "wte" => Some("token_embd"),
        "wpe" => Some("position_embd"),
        "norm" | "ln_f" => Some("output_norm"),
        "lm_head" => Some("output"),
        _ => None,
    };
    if let Some(name) = outer_name {
        return Some(GgufTensorMapping { names: vec![format!("{name}.{ending}")], form: TensorForm::Same, plus_one });
    }
    let (block, module) = bare.strip_prefix("layers.").or_else(|| bare.strip_prefix("h."))?.split_once('.')?;
    let (names, form) = block_tensors(module, config, pairs)?;
    let names = names.into_iter().map(|name| format!("blk.{block}.{name}")).collect();
    Some(GgufTensorMapping { names, form, plus_one })
}

/// Returns the names and the form of the tensors that contain the parameter `module` of a block, such as
/// `self_attn.q_proj.weight`. The names are those within the block.
fn block_tensors(module: &str, config: &DecoderConfig, pairs: RotaryPairs) -> Option<(Vec<String>, TensorForm)> {
    if let Some(found) = all_experts_tensors(module, config) {
        return Some(found);
    }
    if module == "self_attn.sinks" {
        return Some((vec!["attn_sinks.weight".into()], TensorForm::Same));
    }
    let (module, ending) = module.rsplit_once('.')?;
    let is_conv1d = config.naming == ParameterNaming::Gpt2 && ending == "weight";
    let conv1d = if is_conv1d { TensorForm::Transposed } else { TensorForm::Same };
    let is_interleaved = config.rotary_pairs == RotaryPairs::Halves && pairs == RotaryPairs::Adjacent;
    let rotated = if is_interleaved { TensorForm::Interleaved(config.head_dim) } else { TensorForm::Same };
    let name = match module {
        "input_layernorm" | "ln_1" => "attn_norm",
        "post_self_attn_layernorm" => "post_attention_norm",
        "post_attention_layernorm" => post_attention_norm(config),
        "pre_feedforward_layernorm" | "ln_2" => "ffn_norm",
        "post_feedforward_layernorm" | "post_mlp_layernorm" => "post_ffw_norm",
        "self_attn.v_proj" => "attn_v",
        "self_attn.qkv_proj" => "attn_qkv",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" | "mlp.gate_up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "self_attn.q_proj" => return Some((vec![format!("attn_q.{ending}")], rotated)),
        "self_attn.k_proj" => return Some((vec![format!("attn_k.{ending}")], rotated)),
        "attn.c_attn" => return Some((vec![format!("attn_qkv.{ending}")], conv1d)),
        "attn.c_proj" => return Some((vec![format!("attn_output.{ending}")], conv1d)),
        "mlp.c_fc" => return Some((vec![format!("ffn_up.{ending}")], conv1d)),
        "mlp.c_proj" => return Some((vec![format!("ffn_down.{ending}")], conv1d)),
        _ => {
            let (name, form) = mixture_tensor(module)?;
            return Some((vec![format!("{name}.{ending}")], form));
        }
    };
    Some((vec![format!("{name}.{ending}")], TensorForm::Same))
}

/// Returns the name of the norm that transformers calls `post_attention_layernorm`.
fn post_attention_norm(config: &DecoderConfig) -> &'static str {
    match config.norm_placement {
        NormPlacement::After => "post_attention_norm",
        NormPlacement::BeforeAndAfter if config.naming != ParameterNaming::Glm => "post_attention_norm",
        // In files of gpt-oss, the norm of the experts' input has this name, too.
        _ if config.attention_sinks => "post_attention_norm",
        _ => "ffn_norm",
    }
}

/// Returns the tensors of a parameter that belongs to all experts.
fn all_experts_tensors(module: &str, config: &DecoderConfig) -> Option<(Vec<String>, TensorForm)> {
    let experts = module.strip_prefix("mlp.experts.")?;
    let width = config.mixture.as_ref()?.expert_width;
    let (projections, ending, inputs): (&[&str], _, _) = match experts {
        "gate_up_proj" => (&["gate", "up"], "weight", config.hidden_size),
        "gate_up_proj_bias" => (&["gate", "up"], "bias", 1),
        "down_proj" => (&["down"], "weight", width),
        "down_proj_bias" => (&["down"], "bias", 1),
        _ => return None,
    };
    let names = projections.iter().map(|projection| format!("ffn_{projection}_exps.{ending}")).collect();
    Some((names, TensorForm::OfAllExperts { inputs }))
}

/// Returns the tensor of a module of a mixture.
fn mixture_tensor(module: &str) -> Option<(&'static str, TensorForm)> {
    let name = module.strip_prefix("mlp.").or_else(|| module.strip_prefix("block_sparse_moe."))?;
    if let Some((expert, projection)) = name.strip_prefix("experts.").and_then(|rest| rest.split_once('.')) {
        let tensor = match projection {
            "gate_proj" | "w1" => "ffn_gate_exps",
            "up_proj" | "w3" => "ffn_up_exps",
            "down_proj" | "w2" => "ffn_down_exps",
            _ => return None,
        };
        return Some((tensor, TensorForm::OfExpert(expert.parse().ok()?)));
    }
    Some(match name {
        "gate" | "router" => ("ffn_gate_inp", TensorForm::Same),
        // The gate has one output.
        "shared_expert_gate" => ("ffn_gate_inp_shexp", TensorForm::Vector),
        "shared_expert.gate_proj" => ("ffn_gate_shexp", TensorForm::Same),
        "shared_expert.up_proj" => ("ffn_up_shexp", TensorForm::Same),
        "shared_expert.down_proj" => ("ffn_down_shexp", TensorForm::Same),
        _ => return None,
    })
}

/// Returns the row of a tensor in [`TensorForm::Interleaved`] that contains row `row` of the parameter.
pub(super) fn interleaved_row(row: usize, head: usize) -> usize {
    let (start, within_head, half) = (row / head * head, row % head, head / 2);
    start + within_head % half * 2 + within_head / half
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(model_type: &str) -> DecoderConfig {
        let config = json!({
            "model_type": model_type, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "num_local_experts": 6, "num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": null,
        });
        DecoderConfig::from_hugging_face(&config).unwrap()
    }

    #[test]
    fn every_parameter_of_a_family_has_a_place_and_no_two_have_the_same() {
        let types =
            ["llama", "mixtral", "qwen2_moe", "qwen3_moe", "gemma3_text", "glm4", "starcoder2", "olmo2", "gpt_oss"];
        for model_type in types {
            let config = config(model_type);
            let mut seen = std::collections::HashSet::new();
            for (parameter, _) in config.parameters().unwrap() {
                let mapping =
                    tensor_mapping(&parameter, &config, RotaryPairs::Adjacent).unwrap_or_else(|| panic!("{parameter}"));
                let expert = if let TensorForm::OfExpert(expert) = mapping.form { expert } else { 0 };
                for name in mapping.names {
                    assert!(seen.insert((name.clone(), expert)), "{model_type}: {parameter} in {name}");
                }
            }
        }
    }

    #[test]
    fn experts_share_a_tensor_and_alternating_outputs_have_one_each() {
        let mapping = |model_type: &str, parameter: &str, shape: &[usize]| {
            let mapping =
                tensor_mapping(&format!("model.layers.1.{parameter}"), &config(model_type), RotaryPairs::Halves)?;
            let stored = mapping.shape_in_file(shape, 6);
            Some((mapping.names.join(" "), mapping.form, stored))
        };
        let of = |names: &str, form, shape: &[usize]| Some((names.to_owned(), form, shape.to_vec()));
        let all = TensorForm::OfAllExperts { inputs: 64 };
        for (model_type, parameter, shape, expected) in [
            (
                "qwen2_moe",
                "mlp.experts.5.up_proj.weight",
                &[3usize, 4][..],
                of("blk.1.ffn_up_exps.weight", TensorForm::OfExpert(5), &[6, 3, 4]),
            ),
            (
                "mixtral",
                "block_sparse_moe.experts.0.w2.weight",
                &[3, 4],
                of("blk.1.ffn_down_exps.weight", TensorForm::OfExpert(0), &[6, 3, 4]),
            ),
            (
                "qwen2_moe",
                "mlp.shared_expert_gate.weight",
                &[1, 4],
                of("blk.1.ffn_gate_inp_shexp.weight", TensorForm::Vector, &[4]),
            ),
            (
                "gpt_oss",
                "mlp.experts.gate_up_proj",
                &[6, 64, 8],
                of("blk.1.ffn_gate_exps.weight blk.1.ffn_up_exps.weight", all, &[6, 4, 64]),
            ),
            (
                "gpt_oss",
                "mlp.experts.gate_up_proj_bias",
                &[6, 8],
                of("blk.1.ffn_gate_exps.bias blk.1.ffn_up_exps.bias", TensorForm::OfAllExperts { inputs: 1 }, &[6, 4]),
            ),
            ("qwen2_moe", "mlp.experts.x.up_proj.weight", &[3, 4], None),
            ("qwen2_moe", "mlp.experts.1.w4.weight", &[3, 4], None),
            ("llama", "self_attn.other.weight", &[3, 4], None),
        ] {
            assert_eq!(mapping(model_type, parameter, shape), expected, "{parameter}");
        }
    }
}
