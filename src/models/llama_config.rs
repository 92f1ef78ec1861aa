//! The sizes of a Llama.

use super::config_checks::{
    MAX_POSITIONS, find_preset, invalid_field, require_blocks, require_parameters, require_sizes,
};
use super::{
    BlockConfig, DecoderConfig, IntoDecoderConfig, NormKind, NormPlacement, ParameterNaming, QueryKeyNorms,
    RotaryConfig,
};
use crate::Result;
use crate::nn::{Activation, RotaryPairs};
use serde::{Deserialize, Serialize};

/// The shape of a Llama (Touvron et al. 2023), with the names of Hugging Face's `config.json`, except that the context
/// length and the vocabulary are named as in [`GptConfig`](super::GptConfig).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaConfig {
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of the MLP's intermediate layer.
    pub intermediate_size: usize,
    /// The number of transformer blocks.
    pub num_hidden_layers: usize,
    /// The number of query heads per block; divides `hidden_size` into heads of an even width.
    pub num_attention_heads: usize,
    /// The number of key and value heads per block; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// The number of positions, which is the maximum length of an input in tokens.
    pub ctx: usize,
    /// The vocabulary size; token ids are 0 to `vocab - 1`.
    pub vocab: usize,
    /// The base of the rotary positions' wavelengths.
    pub rope_theta: f64,
    /// The number added to the mean square in norms.
    pub rms_norm_eps: f64,
    /// Whether the output projection is the token embedding.
    pub tie_word_embeddings: bool,
    /// Whether each block keeps only its input in the forward pass and runs again in the backward pass.
    #[serde(default)]
    pub checkpoint_activations: bool,
}

/// A preset's name and sizes.
struct LlamaPreset {
    name: &'static str,
    hidden_size: usize,
    intermediate_size: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    ctx: usize,
    vocab: usize,
    theta: f64,
    tied: bool,
}

#[rustfmt::skip]
const PRESETS: [LlamaPreset; 6] = [
    LlamaPreset { name: "llama-nano", hidden_size: 128, intermediate_size: 344, layers: 4, heads: 4, kv_heads: 2, ctx: 128, vocab: 256, theta: 1e4, tied: true },
    LlamaPreset { name: "llama-mini", hidden_size: 384, intermediate_size: 1024, layers: 6, heads: 6, kv_heads: 2, ctx: 256, vocab: 256, theta: 1e4, tied: true },
    LlamaPreset { name: "tinyllama-1.1b", hidden_size: 2048, intermediate_size: 5632, layers: 22, heads: 32, kv_heads: 4, ctx: 2048, vocab: 32_000, theta: 1e4, tied: false },
    LlamaPreset { name: "llama-3.2-1b", hidden_size: 2048, intermediate_size: 8192, layers: 16, heads: 32, kv_heads: 8, ctx: 8192, vocab: 128_256, theta: 5e5, tied: true },
    LlamaPreset { name: "llama-3.2-3b", hidden_size: 3072, intermediate_size: 8192, layers: 28, heads: 24, kv_heads: 8, ctx: 8192, vocab: 128_256, theta: 5e5, tied: true },
    LlamaPreset { name: "llama-2-7b", hidden_size: 4096, intermediate_size: 11_008, layers: 32, heads: 32, kv_heads: 32, ctx: 4096, vocab: 32_000, theta: 1e4, tied: false },
];

impl LlamaConfig {
    /// Returns the preset called `name`: "llama-nano" and "llama-mini" (bytes as tokens, for tests and experiments),
    /// "tinyllama-1.1b", "llama-3.2-1b", "llama-3.2-3b" and "llama-2-7b" as published.
    ///
    /// Llama 3.2's published weights had their context extended from 8192 to 131072 by further training with reduced
    /// rotary frequencies (`rope_scaling`). In the presets for Llama 3.2, rotary positions are not scaled, and the
    /// context ends at 8192. This is right for training from scratch, but wrong for those weights.
    ///
    /// # Errors
    /// Returns an error that lists the known names if `name` is not one of them.
    pub fn preset(name: &str) -> Result<Self> {
        let preset = find_preset(&PRESETS, |preset| preset.name, name)?;
        Ok(Self {
            hidden_size: preset.hidden_size,
            intermediate_size: preset.intermediate_size,
            num_hidden_layers: preset.layers,
            num_attention_heads: preset.heads,
            num_key_value_heads: preset.kv_heads,
            ctx: preset.ctx,
            vocab: preset.vocab,
            rope_theta: preset.theta,
            rms_norm_eps: 1e-5,
            tie_word_embeddings: preset.tied,
            checkpoint_activations: false,
        })
    }

    /// Returns the names that [`LlamaConfig::preset`] accepts.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        PRESETS.iter().map(|preset| preset.name)
    }

    /// Checks that the sizes describe a valid model.
    ///
    /// # Errors
    /// A size of 0 or beyond the limits, numbers of heads that do not divide the sizes that they must divide, heads of
    /// an odd width, or an eps or theta that is not positive and finite.
    pub fn validate(&self) -> Result<()> {
        require_sizes(&[
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("ctx", self.ctx),
            ("vocab", self.vocab),
        ])?;
        if self.ctx > MAX_POSITIONS {
            return Err(invalid_field(
                "ctx",
                self.ctx,
                &format!("at most {MAX_POSITIONS}: positions are counted in f32"),
            ));
        }
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !self.hidden_size.is_multiple_of(2 * heads) {
            let allowed = format!(
                "a multiple of 2 * num_attention_heads ({}), so that every head has the same even width",
                2 * heads
            );
            return Err(invalid_field("hidden_size", self.hidden_size, &allowed));
        }
        if !heads.is_multiple_of(kv_heads) {
            let allowed = format!(
                "a divisor of num_attention_heads ({heads}), so that each key and value head serves the same number of \
                 query heads"
            );
            return Err(invalid_field("num_key_value_heads", kv_heads, &allowed));
        }
        require_blocks("num_hidden_layers", self.num_hidden_layers)?;
        require_parameters(self.elements())?;
        for (key, value, example) in
            [("rope_theta", self.rope_theta, "10000"), ("rms_norm_eps", self.rms_norm_eps, "1e-5")]
        {
            if !(value > 0.0 && value.is_finite()) {
                return Err(invalid_field(key, value, &format!("a positive finite number, such as {example}")));
            }
        }
        Ok(())
    }

    /// Returns the number of elements in a position's keys, which is also that of its values.
    fn kv_width(&self) -> usize {
        self.hidden_size / self.num_attention_heads * self.num_key_value_heads
    }

    /// Returns the number of elements of all parameters. A tied output projection counts once.
    pub fn num_parameters(&self) -> usize {
        usize::try_from(self.elements()).unwrap_or(usize::MAX)
    }

    /// Returns the number of elements for sizes that need not be valid, except that the number of query heads must not
    /// be 0.
    fn elements(&self) -> u128 {
        let sizes = [self.num_hidden_layers, self.hidden_size, self.intermediate_size, self.vocab, self.kv_width()];
        let [layers, d, inner, vocab, kv] = sizes.map(|size| size as u128);
        // 2 d d + 2 d kv + 3 d inner + 2 d.
        let block = (2 * d + 2 * kv + 3 * inner + 2).saturating_mul(d);
        let embeddings = if self.tie_word_embeddings { 1 } else { 2 };
        layers.saturating_mul(block).saturating_add((embeddings * vocab + 1).saturating_mul(d))
    }
}

impl IntoDecoderConfig for LlamaConfig {
    fn decoder(&self) -> Result<DecoderConfig> {
        self.validate()?;
        let rotary = RotaryConfig { theta: self.rope_theta, ..RotaryConfig::default() };
        Ok(DecoderConfig {
            naming: ParameterNaming::Llama,
            prefix: "model.",
            vocab: self.vocab,
            ctx: self.ctx,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.hidden_size / self.num_attention_heads,
            blocks: vec![BlockConfig { rotary: Some(rotary), ..BlockConfig::default() }; self.num_hidden_layers],
            learned_positions: None,
            norm: NormKind::Rms,
            norm_eps: self.rms_norm_eps,
            norm_placement: NormPlacement::Before,
            query_key_norms: QueryKeyNorms::None,
            rotary_pairs: RotaryPairs::Halves,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            gated: true,
            activation: Activation::Silu,
            mixture: None,
            clip_qkv: None,
            attention_sinks: false,
            query_scale: None,
            attention_soft_cap: None,
            logit_soft_cap: None,
            embedding_scale: None,
            residual_scale: None,
            logit_scale: None,
            padding: None,
            tie_word_embeddings: self.tie_word_embeddings,
            checkpoint_activations: self.checkpoint_activations,
            dropout: 0.0,
            lora: None,
        })
    }

    fn ctx(&self) -> usize {
        self.ctx
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_presets_have_the_published_numbers_of_parameters() {
        let counts: Vec<_> =
            LlamaConfig::preset_names().map(|name| LlamaConfig::preset(name).unwrap().num_parameters()).collect();
        assert_eq!(counts, [758_912, 9_540_480, 1_100_048_384, 1_235_814_400, 3_212_749_824, 6_738_415_616]);
        LlamaConfig::preset_names().for_each(|name| LlamaConfig::preset(name).unwrap().validate().unwrap());
    }

    #[test]
    fn an_unknown_preset_is_refused_with_a_suggestion() {
        let text = LlamaConfig::preset("llama-3.2-2b").unwrap_err().to_string();
        insta::assert_snapshot!(text, @r#"there is no model preset "llama-3.2-2b" (did you mean "llama-3.2-1b"?); the presets are llama-nano, llama-mini, tinyllama-1.1b, llama-3.2-1b, llama-3.2-3b, llama-2-7b"#);
    }

    #[test]
    fn sizes_that_make_no_model_are_refused() {
        let nano = LlamaConfig::preset("llama-nano").unwrap();
        let text = |config: LlamaConfig| config.validate().unwrap_err().to_string();
        insta::assert_snapshot!(text(LlamaConfig { num_attention_heads: 3, ..nano.clone() }), @"model configuration: hidden_size is 128, but must be a multiple of 2 * num_attention_heads (6), so that every head has the same even width");
        insta::assert_snapshot!(text(LlamaConfig { num_attention_heads: 128, ..nano.clone() }), @"model configuration: hidden_size is 128, but must be a multiple of 2 * num_attention_heads (256), so that every head has the same even width");
        insta::assert_snapshot!(text(LlamaConfig { num_key_value_heads: 3, ..nano.clone() }), @"model configuration: num_key_value_heads is 3, but must be a divisor of num_attention_heads (4), so that each key and value head serves the same number of query heads");
        insta::assert_snapshot!(text(LlamaConfig { intermediate_size: 0, ..nano.clone() }), @"model configuration: intermediate_size is 0, but must be at least 1");
        insta::assert_snapshot!(text(LlamaConfig { ctx: usize::MAX, ..nano.clone() }), @"model configuration: ctx is 18446744073709551615, but must be at most 4294967295");
        insta::assert_snapshot!(text(LlamaConfig { ctx: 1 << 30, ..nano.clone() }), @"model configuration: ctx is 1073741824, but must be at most 16777216: positions are counted in f32");
        insta::assert_snapshot!(text(LlamaConfig { rope_theta: 0.0, ..nano.clone() }), @"model configuration: rope_theta is 0, but must be a positive finite number, such as 10000");
        insta::assert_snapshot!(text(LlamaConfig { rms_norm_eps: f64::INFINITY, ..nano }), @"model configuration: rms_norm_eps is inf, but must be a positive finite number, such as 1e-5");
    }
}
