//! Bytes of what a decoder keeps for backward, from its description.

use super::DecoderConfig;

/// A forward and backward of a decoder whose activations are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActivationPass {
    /// Tokens of the micro batch, padding included.
    pub tokens: usize,
    /// Bytes of an element of the model's precision.
    pub element: usize,
    /// Blocks keep their inputs alone, and run again in backward.
    pub recompute: bool,
    /// The base's parameters are trained, not adapters alone.
    pub trains_base: bool,
}

/// Bytes of logits that exist at a time, or a few rows more, and as many for their products' operands.
const LOGITS: usize = 2 * (26 << 20);
/// Rows of logits at least.
const ROWS: usize = 64;

impl DecoderConfig {
    /// Bytes of activations that an [`ActivationPass`] holds, at most: what the blocks keep for backward, the gradients on their way
    /// through one of them, and the loss with its gradients. Parameters and their gradients are not in it.
    ///
    /// For layers of [`crate::nn`] on the CPU, where normalized values are computed again.
    pub fn activation_bytes(&self, pass: ActivationPass) -> usize {
        let ActivationPass { tokens, element, recompute, trains_base } = pass;
        let (width, blocks) = (self.hidden_size, self.blocks.len());
        let of_tokens = |bytes: usize| tokens.saturating_mul(bytes);
        let whole = of_tokens(self.kept_by_block(element));
        // The gradients of the MLP's middle and of the stream, with the values that are computed again beside them.
        let passing = of_tokens((2 * self.intermediate_size + 3 * width) * element);
        let output = if trains_base { self.vocab.saturating_mul(width).saturating_mul(4 + element) } else { 0 };
        let logits = LOGITS.min(2 * of_tokens(self.vocab * element)).max(ROWS.min(tokens) * self.vocab * element);
        let loss = of_tokens(width * (4 + 3 * element)).saturating_add(logits).saturating_add(output);
        if !recompute {
            return whole.saturating_mul(blocks).saturating_add(passing.max(loss));
        }
        let inputs = of_tokens(blocks.saturating_mul(width * element));
        // An embedding that is frozen has no graph, and then the first block keeps everything.
        let first = if trains_base { 0 } else { whole };
        inputs.saturating_add(first).saturating_add(loss.max(whole.saturating_add(passing)))
    }

    /// Bytes of a token that a block keeps.
    fn kept_by_block(&self, element: usize) -> usize {
        let (width, inner) = (self.hidden_size, self.intermediate_size);
        let (q, kv) = (self.query_width(), self.kv_width());
        // The stream before attention and before the MLP; queries, keys, values, and what attention gives.
        let mut elements = 2 * width + 2 * q + 2 * kv;
        // The gate, what it is multiplied with and the product; or the input of an activation.
        elements += if self.gated { 3 * inner } else { inner };
        if self.query_key_norms {
            elements += q + kv;
        }
        if self.norms_after {
            elements += 2 * width;
        }
        if self.dropout > 0.0 {
            elements += 2 * width;
        }
        let adapted = |lora: &crate::nn::LoraConfig| {
            // As all projections are adapted, which is the most.
            let thin = 7 * 4 * lora.r;
            let products = if lora.dora { (q + 2 * kv + width + 2 * inner + width) * element } else { 0 };
            let middle = if self.gated { 0 } else { inner * element };
            thin + products + middle
        };
        // A sum of exponentials for each head.
        elements * element + self.num_attention_heads * 4 + self.lora.as_ref().map_or(0, adapted)
    }
}
