//! Selects the weights that QLoRA holds in 4 bits.

use candle_zero::nn::is_adapter;
use candle_zero::precision::{Nf4Scales, WeightPacking};

/// The packing of these weights: NF4 with 8-bit scales (QLoRA, arXiv 2305.14314).
pub(crate) const PACKING: WeightPacking = WeightPacking::Nf4(Nf4Scales::DoubleQuantized);

/// Returns whether QLoRA quantizes a parameter of a decoder or an encoder, given its name and shape. It quantizes the weights of all
/// linear layers in the model's blocks. As in PEFT, embeddings, the output projection, norms and biases stay in the
/// model's precision.
///
/// This is the rule for [`EngineBuilder::quantized`](candle_zero::EngineBuilder::quantized).
pub fn is_quantized(name: &str, shape: &[usize]) -> bool {
    let is_in_block = name.split('.').any(|part| part.parse::<usize>().is_ok());
    shape.len() == 2 && is_in_block && !is_adapter(name)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        ];
        assert!(others.iter().all(|(name, shape)| !is_quantized(name, shape)));
    }
}
