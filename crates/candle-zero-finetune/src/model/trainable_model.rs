//! The model that a run trains: a decoder or an encoder.

use candle_core::{Result, bail};
use candle_zero::models::{Bert, Decoder};

/// The model that a run trains.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum TrainableModel {
    /// A language model.
    Decoder(Decoder),
    /// An encoder that classifies texts.
    Encoder(Bert),
}

impl TrainableModel {
    /// Returns the language model.
    ///
    /// # Errors
    /// The model is an encoder.
    pub fn decoder(&self) -> Result<&Decoder> {
        match self {
            Self::Decoder(model) => Ok(model),
            Self::Encoder(_) => bail!("the model is an encoder, which generates no text"),
        }
    }

    /// Returns the encoder.
    ///
    /// # Errors
    /// The model is a language model.
    pub fn encoder(&self) -> Result<&Bert> {
        match self {
            Self::Encoder(model) => Ok(model),
            Self::Decoder(_) => bail!("the model is a language model, which predicts no labels"),
        }
    }
}
