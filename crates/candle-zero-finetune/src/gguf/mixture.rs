//! The tensors of mixtures of experts in llama.cpp's files. A single tensor contains a projection of all experts.

/// The place of a parameter of a mixture in a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MixturePlace {
    /// The name of the tensor within the block, without its ending.
    pub tensor: &'static str,
    /// The position along the first dimension, if the tensor contains a matrix for each expert.
    pub expert: Option<usize>,
}

/// Returns the place of the parameter `module` of a block, such as `mlp.experts.3.up_proj`, or `None` if it does not
/// belong to a mixture.
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

/// The name of the router's tensor within a block. The tensor is always stored in f32.
pub(super) const ROUTER: &str = "ffn_gate_inp";

/// The name of the tensor of the shared expert's gate within a block. The tensor is a vector, because the gate has one
/// output.
const SHARED_GATE: &str = "ffn_gate_inp_shexp";

/// Returns the shape of the tensor that holds a parameter of `shape` in a GGUF file.
pub(super) fn shape_in_file(place: &MixturePlace, shape: &[usize], experts: usize) -> Vec<usize> {
    match place.expert {
        Some(_) => [&[experts], shape].concat(),
        None if place.tensor == SHARED_GATE => shape.iter().skip(1).copied().collect(),
        None => shape.to_vec(),
    }
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
