//! Decoders that classify sequences, with the parameter names of Hugging Face's files.

use super::unpadded_batch::{UnpaddedBatch, rows};
use super::{Architecture, DecoderConfig, DecoderLayers, SequenceClassifier};
use crate::error::Result as CrateResult;
use crate::models::config_checks::{invalid_field, require_sizes};
use crate::nn::{Linear, normal, refuse};
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

/// The name, in the files, of the projection to logits.
#[doc(hidden)]
pub const SCORE: &str = "score";

/// The shape of a decoder that classifies texts.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderClassifierConfig {
    /// The decoder. Its output projection and the settings of its logits are not used.
    pub decoder: DecoderConfig,
    /// The names of the classes.
    pub labels: Vec<String>,
    /// The padding token. A text is classified by its last token that is not padding.
    pub pad_token_id: Option<u32>,
    /// The standard deviation of a randomly initialized projection to logits.
    pub initializer_range: f64,
}

impl DecoderClassifierConfig {
    /// Checks that the values describe a valid model.
    ///
    /// # Errors
    /// The errors of [`DecoderConfig::validate`]; no labels; a padding token outside the vocabulary; a standard
    /// deviation that is negative or not finite.
    pub fn validate(&self) -> CrateResult<()> {
        self.decoder.validate()?;
        require_sizes(&[("the number of labels", self.labels.len())])?;
        if let Some(padding) = self.pad_token_id.filter(|padding| *padding as usize >= self.decoder.vocab) {
            return Err(invalid_field("pad_token_id", padding, &format!("below vocab_size ({})", self.decoder.vocab)));
        }
        if !(self.initializer_range >= 0.0 && self.initializer_range.is_finite()) {
            let allowed = "a finite number of at least 0, such as 0.02";
            return Err(invalid_field("initializer_range", self.initializer_range, allowed));
        }
        Ok(())
    }

    /// Returns the description of the layers up to the last norm.
    fn layers(&self) -> DecoderConfig {
        // A tied output projection has no separate parameters.
        DecoderConfig { tie_word_embeddings: true, logit_scale: None, logit_soft_cap: None, ..self.decoder.clone() }
    }
}

/// A decoder that classifies texts by the state of their last token that is not padding: transformers'
/// `AutoModelForSequenceClassification` for language models.
///
/// The parameters are those of the decoder, without a separate output projection, and "score.weight" `[labels, width]`.
/// Rows of a batch are padded after their texts, and padding is skipped, as in [`Encoder`](super::Encoder).
#[derive(Debug, Clone)]
pub struct DecoderClassifier {
    config: DecoderClassifierConfig,
    layers: DecoderLayers,
    score: Linear,
}

impl DecoderClassifier {
    /// Builds the model with parameters from `vb`.
    ///
    /// # Errors
    /// Invalid sizes, and any error of the builder about a parameter.
    pub fn new(config: &DecoderClassifierConfig, vb: VarBuilder<'_>) -> Result<Self> {
        config.validate().map_err(refuse)?;
        let layers = DecoderLayers::build(&config.layers(), vb.clone())?;
        let (width, labels) = (config.decoder.hidden_size, config.labels.len());
        let score = Linear::with_init(width, labels, false, normal(config.initializer_range), vb.pp(SCORE))?;
        Ok(Self { config: config.clone(), layers, score })
    }

    /// Returns the sizes that the model was built with.
    pub fn config(&self) -> &DecoderClassifierConfig {
        &self.config
    }
}

/// Returns the position of the last token that is not padding, or 0 if there is none, as transformers does.
fn last_token(ids: &[u32], padding: Option<u32>) -> usize {
    ids.iter().rposition(|id| Some(*id) != padding).unwrap_or(0)
}

impl SequenceClassifier for DecoderClassifier {
    fn logits(&self, ids: &Tensor, lengths: &[usize]) -> Result<Tensor> {
        let texts = UnpaddedBatch::new(ids, lengths, self.config.decoder.ctx)?;
        let states = self.layers.states(&texts.ids, Some(&texts.sequences))?.squeeze(0)?;
        let ids = texts.texts()?;
        let last = texts.starts().into_iter().zip(&ids);
        let last = last.map(|(start, ids)| start + last_token(ids, self.config.pad_token_id));
        self.score.forward(&rows(&states, last)?)
    }

    fn labels(&self) -> &[String] {
        &self.config.labels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_is_the_last_one_that_is_not_padding() {
        assert_eq!(last_token(&[4, 5, 3, 3], Some(3)), 1);
        assert_eq!(last_token(&[4, 3, 5], Some(3)), 2);
        assert_eq!(last_token(&[3, 3], Some(3)), 0);
        assert_eq!(last_token(&[4, 5, 3, 3], None), 3);
    }
}
