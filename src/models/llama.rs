//! Llama (Touvron et al. 2023) with the parameter names of Hugging Face's files.

use super::{DecoderLayers, LanguageModel, LlamaConfig};

/// Llama: rotary positions, RMS norms before attention and the MLP, grouped key and value heads, a gated MLP, and no
/// biases.
///
/// Parameters, in this order: `model.embed_tokens.weight` `[vocab, hidden_size]`; for each block N, with the prefix
/// `model.layers.N.`: `input_layernorm.weight`, `self_attn.{q_proj, k_proj, v_proj, o_proj}.weight`,
/// `post_attention_layernorm.weight` and `mlp.{gate_proj, up_proj, down_proj}.weight`, where weights of projections are
/// `[out, in]`; then `model.norm.weight` and, unless it is the token embedding, `lm_head.weight`
/// `[vocab, hidden_size]`. Each block is a unit ([`crate::zero::unit()`]).
pub type Llama = LanguageModel<LlamaLayers>;

/// The layers of a [`Llama`].
pub type LlamaLayers = DecoderLayers<LlamaConfig>;
