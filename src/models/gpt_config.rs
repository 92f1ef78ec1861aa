//! The sizes of a GPT-2.

use super::config_checks::{find_preset, invalid_field, require_blocks, require_parameters, require_sizes};
use super::{DecoderConfig, IntoDecoderConfig};
use crate::Result;
use serde::{Deserialize, Serialize};

/// The shape of a GPT-2 (Radford et al. 2019).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GptConfig {
    /// The number of transformer blocks.
    pub n_layer: usize,
    /// The number of attention heads per block; divides `n_embd`.
    pub n_head: usize,
    /// The width of the residual stream.
    pub n_embd: usize,
    /// The number of positions, which is the maximum length of an input in tokens.
    pub ctx: usize,
    /// The vocabulary size; token ids are 0 to `vocab - 1`.
    pub vocab: usize,
    /// The number added to the variance in layer norms.
    pub eps: f64,
    /// Whether each block keeps only its input in the forward pass and runs again in the backward pass.
    #[serde(default)]
    pub checkpoint_activations: bool,
    /// The probability with which training drops elements of the sum of the embeddings, and of the output that each
    /// attention and each MLP adds to the residual stream (embd_pdrop and resid_pdrop of Hugging Face's GPT-2).
    /// Attention weights are never dropped.
    #[serde(default)]
    pub dropout: f32,
}

/// The presets: (name, layers, heads, width, context, vocabulary).
const PRESETS: [(&str, usize, usize, usize, usize, usize); 6] = [
    ("nano", 4, 4, 128, 128, 256),
    ("mini", 6, 6, 384, 256, 256),
    ("gpt2", 12, 12, 768, 1024, 50257),
    ("gpt2-medium", 24, 16, 1024, 1024, 50257),
    ("gpt2-large", 36, 20, 1280, 1024, 50257),
    ("gpt2-xl", 48, 25, 1600, 1024, 50257),
];

impl GptConfig {
    /// Returns the preset called `name`: "nano" and "mini" (bytes as tokens, for tests and experiments), "gpt2",
    /// "gpt2-medium", "gpt2-large" and "gpt2-xl" as published.
    ///
    /// # Errors
    /// Returns an error that lists the known names if `name` is not one of them.
    pub fn preset(name: &str) -> Result<Self> {
        let &(_, n_layer, n_head, n_embd, ctx, vocab) = find_preset(&PRESETS, |preset| preset.0, name)?;
        let (eps, checkpoint_activations, dropout) = (1e-5, false, 0.0);
        Ok(Self { n_layer, n_head, n_embd, ctx, vocab, eps, checkpoint_activations, dropout })
    }

    /// Returns the names that [`GptConfig::preset`] accepts.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        PRESETS.iter().map(|preset| preset.0)
    }

    /// Checks that the sizes describe a valid model.
    ///
    /// # Errors
    /// A size of 0 or beyond the limits, a width that is not a multiple of the number of heads, an eps that is not
    /// positive and finite, or a probability outside [0, 1).
    pub fn validate(&self) -> Result<()> {
        require_sizes(&[
            ("n_layer", self.n_layer),
            ("n_head", self.n_head),
            ("n_embd", self.n_embd),
            ("ctx", self.ctx),
            ("vocab", self.vocab),
        ])?;
        require_blocks("n_layer", self.n_layer)?;
        require_parameters(self.elements())?;
        if !self.n_embd.is_multiple_of(self.n_head) {
            let allowed = format!("a multiple of n_head ({}), so that every head has the same width", self.n_head);
            return Err(invalid_field("n_embd", self.n_embd, &allowed));
        }
        if !(self.eps > 0.0 && self.eps.is_finite()) {
            return Err(invalid_field("eps", self.eps, "a positive finite number, such as 1e-5"));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(invalid_field("dropout", self.dropout, "at least 0 and below 1"));
        }
        Ok(())
    }

    /// Returns the number of elements of all parameters. The output projection is the token embedding and counts once.
    pub fn num_parameters(&self) -> usize {
        usize::try_from(self.elements()).unwrap_or(usize::MAX)
    }

    /// Returns the number of elements for sizes that have not been validated.
    fn elements(&self) -> u128 {
        let [layers, d, ctx, vocab] = [self.n_layer, self.n_embd, self.ctx, self.vocab].map(|size| size as u128);
        // 12 d d + 13 d.
        let block = d.saturating_mul(d).saturating_mul(12).saturating_add(13 * d);
        let embeddings = (vocab + ctx + 2).saturating_mul(d);
        layers.saturating_mul(block).saturating_add(embeddings)
    }
}

impl IntoDecoderConfig for GptConfig {
    fn decoder(&self) -> Result<DecoderConfig> {
        self.validate()?;
        Ok(DecoderConfig {
            checkpoint_activations: self.checkpoint_activations,
            norm_eps: self.eps,
            dropout: self.dropout,
            ..DecoderConfig::gpt2(self.vocab, self.ctx, [self.n_embd, self.n_head, self.n_layer])
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
            GptConfig::preset_names().map(|name| GptConfig::preset(name).unwrap().num_parameters()).collect();
        assert_eq!(counts, [842_496, 10_844_160, 124_439_808, 354_823_168, 774_030_080, 1_557_611_200]);
        GptConfig::preset_names().for_each(|name| GptConfig::preset(name).unwrap().validate().unwrap());
    }

    #[test]
    fn an_unknown_preset_is_refused_with_a_suggestion() {
        let text = GptConfig::preset("gpt-2").unwrap_err().to_string();
        insta::assert_snapshot!(text, @r#"there is no model preset "gpt-2" (did you mean "gpt2"?); the presets are nano, mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl"#);
        let text = GptConfig::preset("llama-70b").unwrap_err().to_string();
        insta::assert_snapshot!(text, @r#"there is no model preset "llama-70b"; the presets are nano, mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl"#);
    }

    #[test]
    fn sizes_that_make_no_model_are_refused() {
        let nano = GptConfig::preset("nano").unwrap();
        let text = |config: GptConfig| config.validate().unwrap_err().to_string();
        insta::assert_snapshot!(text(GptConfig { n_head: 3, ..nano.clone() }), @"model configuration: n_embd is 128, but must be a multiple of n_head (3), so that every head has the same width");
        insta::assert_snapshot!(text(GptConfig { vocab: 0, ..nano.clone() }), @"model configuration: vocab is 0, but must be at least 1");
        insta::assert_snapshot!(text(GptConfig { ctx: usize::MAX, ..nano.clone() }), @"model configuration: ctx is 18446744073709551615, but must be at most 4294967295");
        let huge = text(GptConfig { n_embd: u32::MAX as usize, n_head: 1, ..nano.clone() });
        assert!(huge.starts_with("model configuration: the number of parameters is 8854437170"), "{huge}");
        insta::assert_snapshot!(text(GptConfig { eps: f64::NAN, ..nano.clone() }), @"model configuration: eps is NaN, but must be a positive finite number, such as 1e-5");
        insta::assert_snapshot!(text(GptConfig { dropout: 1.0, ..nano.clone() }), @"model configuration: dropout is 1, but must be at least 0 and below 1");
        insta::assert_snapshot!(text(GptConfig { dropout: f32::NAN, ..nano }), @"model configuration: dropout is NaN, but must be at least 0 and below 1");
    }

    #[test]
    fn a_written_configuration_without_dropout_drops_nothing() {
        let text = r#"{"n_layer": 1, "n_head": 1, "n_embd": 8, "ctx": 4, "vocab": 16, "eps": 1e-5}"#;
        assert_eq!(serde_json::from_str::<GptConfig>(text).unwrap().dropout, 0.0);
    }
}
