//! A trained text classifier without an engine: the folder of a BERT model, its tokenizer, and the labels' names.

use super::base_model::builder_over;
use super::encoder_base::EncoderBase;
use crate::chat::tokenizer::Tokenizer;
use crate::error::{FinetuneError, Result};
use candle_core::{D, DType, Device, Tensor};
use candle_zero::models::Bert;
use std::path::Path;

/// A classifier that predicts the labels of texts. Each text is processed separately, so its result does not depend on
/// other texts.
///
/// ```no_run
/// let classifier = candle_zero_finetune::Classifier::open("model")?;
/// let told = classifier.classify("a fine film")?;
/// println!("{} with probability {:.3}", told.labels[0].0, told.labels[0].1);
/// # Ok::<(), candle_zero::Error>(())
/// ```
#[derive(Debug)]
pub struct Classifier {
    model: Bert,
    tokenizer: Tokenizer,
}

/// The result of classifying a text.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ClassificationOutput {
    /// All labels with their probabilities, the most likely first.
    pub labels: Vec<(String, f64)>,
    /// The number of tokens of the text, including those that the tokenizer adds.
    pub tokens: usize,
    /// The number of tokens cut off at the end because the model's context is too short.
    pub cut: usize,
}

impl Classifier {
    /// Opens the folder of a trained classifier, which `zerorun finetune --task classify` writes and
    /// `AutoModelForSequenceClassification` loads, and reads its weights in f32.
    ///
    /// # Errors
    /// Errors of [`EncoderBase::open_trained`] and [`Tokenizer::open`]; a tokenizer with more ids than the model has
    /// rows; weights that are not finite.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let base = EncoderBase::open_trained(folder)?;
        let tokenizer = Tokenizer::open(base.folder())?;
        base.check_tokens(tokenizer.vocab_size())?;
        let vb = builder_over(base.values(), DType::F32, &Device::Cpu);
        Ok(Self { model: Bert::new(base.config(), vb)?, tokenizer })
    }

    /// Returns the names of the labels, in the order of the classes.
    pub fn labels(&self) -> &[String] {
        &self.model.config().labels
    }

    /// Predicts the label of a text. A text longer than the model's context is cut, but the tokenizer's last token is
    /// kept.
    ///
    /// # Errors
    /// A text that the tokenizer refuses or that yields no tokens; results that are not finite.
    pub fn classify(&self, text: &str) -> Result<ClassificationOutput> {
        let mut ids = self.tokenizer.encode(text)?.ids;
        let (before, after) = self.tokenizer.around();
        let room = self.model.config().max_position_embeddings.saturating_sub(before.len() + after.len());
        let cut = ids.len().saturating_sub(room);
        ids.truncate(room);
        let ids = [before, &ids, after].concat();
        let tokens = ids.len();
        if tokens == 0 {
            return Err(unusable("the tokenizer produces no tokens for it"));
        }
        let ids = Tensor::from_vec(ids, (1, tokens), &Device::Cpu)?;
        let logits = self.model.forward(&ids, None, &[tokens])?.squeeze(0)?.to_dtype(DType::F64)?;
        let exp = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?;
        let probabilities: Vec<f64> = exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?.to_vec1()?;
        if probabilities.iter().any(|p| !p.is_finite()) {
            return Err(unusable("the model's result is not finite: its weights are damaged"));
        }
        let mut labels: Vec<(String, f64)> = self.labels().iter().cloned().zip(probabilities).collect();
        // The sort is stable: labels with equal probabilities keep the order of the classes.
        labels.sort_by(|a, b| b.1.total_cmp(&a.1));
        Ok(ClassificationOutput { labels, tokens, cut })
    }
}

fn unusable(reason: &str) -> candle_zero::Error {
    FinetuneError::Unclassified { reason: reason.into() }.into()
}
