//! Selects the weights that QLoRA holds in 4 bits.

use candle_zero::nn::is_adapter;
use candle_zero::precision::{Nf4Scales, WeightPacking};

/// The packing of the weights that QLoRA quantizes: NF4 with 8-bit scales (QLoRA, arXiv 2305.14314).
pub(crate) const PACKING: WeightPacking = WeightPacking::Nf4(Nf4Scales::DoubleQuantized);

/// Returns whether QLoRA quantizes a parameter of a decoder or an encoder, given its name and shape. QLoRA quantizes
/// the weights of all linear layers in the model's blocks, including those of experts. As in PEFT, embeddings, the
/// output projection, norms, biases, routers and the gates of shared experts stay in the model's precision.
///
/// This is the rule for [`EngineBuilder::quantized`](candle_zero::EngineBuilder::quantized).
pub fn is_quantized(name: &str, shape: &[usize]) -> bool {
    let is_in_block = name.split('.').any(|part| part.parse::<usize>().is_ok());
    let is_linear = match *shape {
        // The biases of all experts also have two dimensions.
        [_, _] => name.ends_with(".weight") && !ROUTERS.iter().any(|router| name.ends_with(router)),
        // The matrices of all experts, if no block of packed elements would contain elements of two experts.
        [_, rows, columns] => name.contains(".experts.") && (rows * columns).is_multiple_of(BLOCK),
        _ => false,
    };
    is_in_block && is_linear && !is_adapter(name)
}

/// Suffixes of the weight names of routers and of the gates of shared experts. These weights are small, and errors in
/// router weights would change which experts are chosen.
const ROUTERS: [&str; 3] = [".gate.weight", ".router.weight", ".shared_expert_gate.weight"];
/// The number of elements with a common scale.
const BLOCK: usize = 64;

/// Returns the rule that selects the parameters that QLoRA quantizes, except those of the blocks with these numbers.
pub(crate) fn quantized_except(blocks: &[usize]) -> impl Fn(&str, &[usize]) -> bool + Clone + Send + Sync + 'static {
    let blocks = blocks.to_vec();
    move |name, shape| is_quantized(name, shape) && !block_of(name).is_some_and(|block| blocks.contains(&block))
}

/// Returns the number of the block that a parameter belongs to.
fn block_of(name: &str) -> Option<usize> {
    name.split('.').find_map(|part| part.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_blocks_are_left_out() {
        let rule = quantized_except(&[0, 5]);
        let name = |block: usize| format!("model.layers.{block}.mlp.experts.3.up_proj.weight");
        let found: Vec<bool> = (0..7).map(|block| rule(&name(block), &[4, 4])).collect();
        assert_eq!(found, [false, true, true, true, true, false, true]);
    }

    #[test]
    fn linear_layers_of_blocks_are_quantized_and_nothing_else() {
        let quantized = ["model.layers.3.mlp.up_proj.weight", "h.0.attn.c_attn.weight"];
        assert!(quantized.iter().all(|name| is_quantized(name, &[4, 4])));
        let others = [
            ("model.embed_tokens.weight", &[9, 4][..]),
            ("lm_head.weight", &[9, 4]),
            ("transformer.wpe.weight", &[9, 4]),
            ("model.layers.3.input_layernorm.weight", &[4]),
            ("model.layers.3.mlp.up_proj.lora_A.weight", &[2, 4]),
            ("model.layers.3.mlp.gate.weight", &[8, 4]),
            ("model.layers.3.block_sparse_moe.gate.weight", &[8, 4]),
            ("model.layers.3.mlp.router.weight", &[8, 4]),
            ("model.layers.3.mlp.shared_expert_gate.weight", &[1, 4]),
            ("model.layers.3.mlp.experts.gate_up_proj_bias", &[8, 64]),
            ("model.layers.3.mlp.experts.gate_up_proj", &[8, 4, 8]),
            ("model.layers.3.mlp.experts.base_layer.lora_A.weight", &[8, 4]),
        ];
        assert!(is_quantized("model.layers.3.mlp.experts.7.gate_proj.weight", &[4, 4]));
        assert!(is_quantized("model.layers.3.mlp.experts.down_proj", &[8, 8, 16]));
        assert!(others.iter().all(|(name, shape)| !is_quantized(name, shape)));
    }
}
