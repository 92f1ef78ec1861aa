//! Counts the activation bytes that a decoder keeps for the backward pass, from its configuration.

use super::{BlockMlp, DecoderConfig, QueryKeyNorms};
use crate::nn::MAX_LOGITS_BYTES;

/// The properties of a forward and a backward pass on which the number of activation bytes depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActivationBytesOptions {
    /// The number of tokens in the micro batch, padding included.
    pub tokens: usize,
    /// The bytes per element in the model's precision.
    pub element: usize,
    /// Whether blocks keep only their inputs and run again in the backward pass.
    pub recompute: bool,
    /// Whether the base model's parameters are trained, rather than only adapters.
    pub trains_base: bool,
}

/// The minimum number of rows whose logits exist at a time.
const MIN_LOGITS_ROWS: usize = 64;

impl DecoderConfig {
    /// Returns the maximum number of activation bytes during a forward and a backward pass with these options: the
    /// values that the blocks keep for the backward pass, the gradients that pass through one block, and the loss with
    /// its gradients. Parameters and their gradients are not included.
    ///
    /// This applies to the layers of [`crate::nn`] on the CPU, where normalized values are recomputed.
    pub fn activation_bytes(&self, pass: ActivationBytesOptions) -> usize {
        let ActivationBytesOptions { tokens, element, recompute, trains_base } = pass;
        let (width, blocks) = (self.hidden_size, self.blocks.len());
        let times_tokens = |bytes: usize| tokens.saturating_mul(bytes);
        // Blocks differ in the layers that follow attention.
        let sparse = self.sparse_blocks().count();
        let [dense_bytes, sparse_bytes] =
            [BlockMlp::Dense, BlockMlp::Mixture].map(|mlp| self.bytes_per_token(mlp, element));
        let largest = match (sparse, blocks - sparse) {
            (0, _) => dense_bytes,
            (_, 0) => sparse_bytes,
            _ => dense_bytes.max(sparse_bytes),
        };
        let all_blocks = times_tokens(sparse * sparse_bytes + (blocks - sparse) * dense_bytes);
        let largest_block = times_tokens(largest);
        // The gradients of the MLP's intermediate values and of the residual stream, together with the values that are
        // recomputed.
        let (has_dense, has_sparse) = (blocks == 0 || sparse < blocks, blocks == 0 || sparse > 0);
        let dense = if has_dense { self.intermediate_size } else { 0 };
        let inner = self.mixture.as_ref().filter(|_| has_sparse).map_or(0, |mixture| mixture.intermediate(width));
        let block_gradients = times_tokens((2 * dense.max(inner) + 3 * width) * element);
        let output = if trains_base { self.vocab.saturating_mul(width).saturating_mul(4 + element) } else { 0 };
        // If there are few logits, they are counted twice, because the operands of their products have a similar size.
        let logits = MAX_LOGITS_BYTES
            .min(2 * times_tokens(self.vocab * element))
            .max(MIN_LOGITS_ROWS.min(tokens) * self.vocab * element);
        let loss = times_tokens(width * (4 + 3 * element)).saturating_add(logits).saturating_add(output);
        if !recompute {
            return all_blocks.saturating_add(block_gradients.max(loss));
        }
        let inputs = times_tokens(blocks.saturating_mul(width * element));
        // The result of a frozen embedding has no graph. The first block is then not recomputed, and keeps everything.
        let first = if trains_base { 0 } else { largest_block };
        inputs.saturating_add(first).saturating_add(loss.max(largest_block.saturating_add(block_gradients)))
    }

    /// Returns the number of bytes per token that a block keeps.
    fn bytes_per_token(&self, mlp: BlockMlp, element: usize) -> usize {
        let width = self.hidden_size;
        let mixture = self.mixture.as_ref().filter(|_| mlp == BlockMlp::Mixture);
        let inner = mixture.map_or(self.intermediate_size, |mixture| mixture.intermediate(width));
        let (q, kv) = (self.query_width(), self.kv_width());
        // The residual stream before attention and before the MLP; queries, keys, values, and the output of attention.
        let mut elements = 2 * width + 2 * q + 2 * kv;
        // The gate, the up projection that it multiplies, and their product; or, without a gate, the input of the
        // activation.
        elements += if self.gated { 3 * inner } else { inner };
        // The logits and the softmax of a router in f32.
        elements += mixture.map_or(0, |mixture| 2 * 4 * mixture.experts / element.max(1));
        if self.query_key_norms != QueryKeyNorms::None {
            elements += q + kv;
        }
        if self.norm_placement.is_after() {
            elements += 2 * width;
        }
        if self.residual_scale.is_some() {
            elements += 2 * width;
        }
        if self.dropout > 0.0 {
            elements += 2 * width;
        }
        let adapted = |lora: &crate::nn::LoraConfig| {
            // Assumes that all projections are adapted, which is the maximum.
            let low_rank = 7 * 4 * lora.r;
            let products = if lora.dora { (q + 2 * kv + width + 2 * inner + width) * element } else { 0 };
            let middle = if self.gated { 0 } else { inner * element };
            low_rank + products + middle
        };
        // One sum of exponentials per head.
        elements * element + self.num_attention_heads * 4 + self.lora.as_ref().map_or(0, adapted)
    }
}
