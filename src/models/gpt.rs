//! GPT-2 (Radford et al. 2019) with the parameter names and orientations of Hugging Face's files.

use super::{DecoderLayers, GptConfig, LanguageModel};

/// GPT-2: learned positions, layer norms before attention and the MLP, and the output projection tied to the token
/// embedding.
///
/// Parameters, in this order: `wte.weight` `[vocab, n_embd]` and `wpe.weight` `[ctx, n_embd]`; for each block N, with
/// the prefix `h.N.`: `ln_1.{weight, bias}`, `attn.c_attn.{weight, bias}`, `attn.c_proj.{weight, bias}`,
/// `ln_2.{weight, bias}`, `mlp.c_fc.{weight, bias}` and `mlp.c_proj.{weight, bias}`, where weights of projections are
/// `[in, out]`; and finally `ln_f.{weight, bias}`. Each block is a unit ([`crate::zero::unit()`]).
pub type Gpt = LanguageModel<GptLayers>;

/// The layers of a [`Gpt`].
pub type GptLayers = DecoderLayers<GptConfig>;
