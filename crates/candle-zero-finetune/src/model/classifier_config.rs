//! The shape of a classifier: that of an encoder or of a decoder with a classification head.

use super::trainable_model::TrainableModel;
use crate::error::Result;
use candle_nn::VarBuilder;
use candle_zero::models::{DecoderClassifier, DecoderClassifierConfig, DecoderConfig, Encoder, EncoderConfig, SCORE};
use candle_zero::nn::LoraConfig;

/// The shape of a model that classifies texts.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ClassifierConfig {
    /// An encoder.
    Encoder(EncoderConfig),
    /// A decoder.
    Decoder(DecoderClassifierConfig),
}

impl ClassifierConfig {
    /// Builds the model with parameters from `vb`.
    ///
    /// # Errors
    /// Invalid sizes, and any error of the builder about a parameter.
    pub fn build(&self, vb: VarBuilder<'_>) -> candle_core::Result<TrainableModel> {
        match self {
            Self::Encoder(config) => Encoder::new(config, vb).map(TrainableModel::Encoder),
            Self::Decoder(config) => DecoderClassifier::new(config, vb).map(TrainableModel::DecoderClassifier),
        }
    }

    /// Returns the names of the classes.
    pub fn labels(&self) -> &[String] {
        match self {
            Self::Encoder(config) => &config.labels,
            Self::Decoder(config) => &config.labels,
        }
    }

    /// Returns the maximum length of a text, in tokens.
    pub fn ctx(&self) -> usize {
        match self {
            Self::Encoder(config) => config.ctx(),
            Self::Decoder(config) => config.decoder.ctx,
        }
    }

    /// Returns the vocabulary size.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Encoder(config) => config.vocab_size,
            Self::Decoder(config) => config.decoder.vocab,
        }
    }

    /// Returns the width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        match self {
            Self::Encoder(config) => config.hidden_size,
            Self::Decoder(config) => config.decoder.hidden_size,
        }
    }

    /// Returns the names and shapes of the parameters. Their memory is not allocated.
    ///
    /// # Errors
    /// Invalid sizes.
    pub fn parameters(&self) -> Result<Vec<(String, Vec<usize>)>> {
        match self {
            Self::Encoder(config) => config.parameters(),
            Self::Decoder(config) => config.parameters(),
        }
    }

    /// Returns the paths of the projections that can have an adapter.
    ///
    /// # Errors
    /// Invalid sizes.
    pub fn projections(&self) -> Result<Vec<String>> {
        match self {
            Self::Encoder(config) => config.projections(),
            Self::Decoder(config) => config.decoder.projections(),
        }
    }

    /// Returns the names of the parameters of experts that can have an adapter.
    pub(crate) fn expert_parameters(&self) -> Vec<String> {
        match self {
            Self::Encoder(_) => Vec::new(),
            Self::Decoder(config) => config.decoder.expert_parameters(),
        }
    }

    /// Returns the number of blocks.
    pub(crate) fn blocks(&self) -> usize {
        match self {
            Self::Encoder(config) => config.blocks.len(),
            Self::Decoder(config) => config.decoder.blocks.len(),
        }
    }

    /// Returns the settings of the adapters, if there are any.
    pub fn lora(&self) -> Option<&LoraConfig> {
        match self {
            Self::Encoder(config) => config.lora.as_ref(),
            Self::Decoder(config) => config.decoder.lora.as_ref(),
        }
    }

    /// Returns the shape with these adapters.
    #[must_use]
    pub fn with_lora(self, lora: Option<LoraConfig>) -> Self {
        match self {
            Self::Encoder(config) => Self::Encoder(EncoderConfig { lora, ..config }),
            Self::Decoder(config) => {
                let decoder = DecoderConfig { lora, ..config.decoder };
                Self::Decoder(DecoderClassifierConfig { decoder, ..config })
            }
        }
    }

    /// Returns the shape of a model whose blocks keep only their inputs if `checkpoint_activations` is set.
    #[must_use]
    pub(crate) fn recomputing(self, checkpoint_activations: bool) -> Self {
        match self {
            Self::Encoder(config) => Self::Encoder(EncoderConfig { checkpoint_activations, ..config }),
            Self::Decoder(config) => {
                let decoder = DecoderConfig { checkpoint_activations, ..config.decoder };
                Self::Decoder(DecoderClassifierConfig { decoder, ..config })
            }
        }
    }

    /// Sets a decoder's context length, and thereby the size of its tables of rotary positions.
    pub(crate) fn set_ctx(&mut self, ctx: usize) {
        if let Self::Decoder(config) = self {
            config.decoder.ctx = ctx;
        }
    }

    pub(super) fn set_labels(&mut self, labels: Vec<String>) {
        match self {
            Self::Encoder(config) => config.labels = labels,
            Self::Decoder(config) => config.labels = labels,
        }
    }

    /// Returns the name of the module that computes the logits.
    pub(crate) fn classifier(&self) -> &'static str {
        match self {
            Self::Encoder(config) => config.naming.classifier(),
            Self::Decoder(_) => SCORE,
        }
    }

    pub(super) fn has_classifier_bias(&self) -> bool {
        matches!(self, Self::Encoder(_))
    }

    pub(super) fn initializer_range(&self) -> f64 {
        match self {
            Self::Encoder(config) => config.initializer_range,
            Self::Decoder(config) => config.initializer_range,
        }
    }
}
