//! The model that a run trains: a language model or a classifier.

use candle_core::{Result, bail};
use candle_zero::models::{Decoder, DecoderClassifier, Encoder, SequenceClassifier};

/// The model that a run trains.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum TrainableModel {
    /// A language model.
    Decoder(Decoder),
    /// An encoder that classifies texts.
    Encoder(Encoder),
    /// A decoder that classifies texts.
    DecoderClassifier(DecoderClassifier),
}

impl TrainableModel {
    /// Returns the language model.
    ///
    /// # Errors
    /// The model is a classifier.
    pub fn decoder(&self) -> Result<&Decoder> {
        match self {
            Self::Decoder(model) => Ok(model),
            Self::Encoder(_) | Self::DecoderClassifier(_) => {
                bail!("the model is a classifier, which generates no text")
            }
        }
    }

    /// Returns the classifier.
    ///
    /// # Errors
    /// The model is a language model.
    pub fn classifier(&self) -> Result<&dyn SequenceClassifier> {
        match self {
            Self::Encoder(model) => Ok(model),
            Self::DecoderClassifier(model) => Ok(model),
            Self::Decoder(_) => bail!("the model is a language model, which predicts no labels"),
        }
    }
}
