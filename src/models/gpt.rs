//! GPT-2 (Radford et al. 2019) with the parameter names and orientations of Hugging Face's files.

use super::{DecoderLayers, GptConfig, LanguageModel};

/// GPT-2: learned positions, layer norms before attention and MLP, and the output projection tied to the token
/// embedding.
///
/// Parameters, in this order: wte.weight `[vocab, n_embd]`, wpe.weight `[ctx, n_embd]`, for each block N
/// h.N.ln_1.{weight, bias}, h.N.attn.c_attn.{weight `[in, out]`, bias}, h.N.attn.c_proj.{..}, h.N.ln_2.{..},
/// h.N.mlp.c_fc.{..} and h.N.mlp.c_proj.{..}, and finally ln_f.{weight, bias}. Each block is a unit
/// ([`crate::zero::unit()`]).
pub type Gpt = LanguageModel<GptLayers>;

/// The layers of a [`Gpt`].
pub type GptLayers = DecoderLayers<GptConfig>;
