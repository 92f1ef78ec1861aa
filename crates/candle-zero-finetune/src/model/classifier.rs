//! A trained classifier of texts, without an engine: a BERT's folder, its tokenizer, and the labels' names.

use super::base_model::builder_over;
use super::encoder_base::EncoderBase;
use crate::chat::tokenizer::Tokenizer;
use crate::error::{FinetuneError, Result};
use candle_core::{D, DType, Device, Tensor};
use candle_zero::models::Bert;
use std::path::Path;

/// Tells the labels of texts. Each text is computed by itself, so its result does not depend on the others.
///
/// ```no_run
/// let classifier = candle_zero::finetune::Classifier::open("model")?;
/// let told = classifier.classify("a fine film")?;
/// println!("{} with probability {:.3}", told.labels[0].0, told.labels[0].1);
/// # Ok::<(), candle_zero::Error>(())
/// ```
#[derive(Debug)]
pub struct Classifier {
    model: Bert,
    tokenizer: Tokenizer,
}

/// What a text was taken for.
#[derive(Debug, Clone, PartialEq)]
pub struct Classification {
    /// All labels with their probabilities, the likeliest first.
    pub labels: Vec<(String, f64)>,
    /// Tokens of the text, with those that the tokenizer adds.
    pub tokens: usize,
    /// Tokens that the model's context has no room for, which were cut off at the end.
    pub cut: usize,
}

impl Classifier {
    /// Opens the folder of a trained classifier, as `zerorun finetune --task classify` writes it and
    /// `AutoModelForSequenceClassification` loads it, and reads its weights in f32.
    ///
    /// # Errors
    /// Those of [`EncoderBase::open_trained`] and [`Tokenizer::open`]; a tokenizer with more ids than the model has rows;
    /// weights that are not finite.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let base = EncoderBase::open_trained(folder)?;
        let tokenizer = Tokenizer::open(base.folder())?;
        base.check_tokens(tokenizer.vocab_size())?;
        let vb = builder_over(base.values(), DType::F32, &Device::Cpu);
        Ok(Self { model: Bert::new(base.config(), vb)?, tokenizer })
    }

    /// The names of the labels, in the order of the classes.
    pub fn labels(&self) -> &[String] {
        &self.model.config().labels
    }

    /// Tells the label of a text. A text beyond the model's context is cut, with the tokenizer's last token kept.
    ///
    /// # Errors
    /// A text that the tokenizer cannot take, or of which it makes no token; results that are not finite.
    pub fn classify(&self, text: &str) -> Result<Classification> {
        let mut ids = self.tokenizer.encode(text)?.ids;
        let (before, after) = self.tokenizer.around();
        let room = self.model.config().max_position_embeddings.saturating_sub(before.len() + after.len());
        let cut = ids.len().saturating_sub(room);
        ids.truncate(room);
        let ids = [before, &ids, after].concat();
        let tokens = ids.len();
        if tokens == 0 {
            return Err(unusable("the tokenizer makes no token of it"));
        }
        let ids = Tensor::from_vec(ids, (1, tokens), &Device::Cpu)?;
        let logits = self.model.forward(&ids, None, &[tokens])?.squeeze(0)?.to_dtype(DType::F64)?;
        let exp = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?;
        let probabilities: Vec<f64> = exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?.to_vec1()?;
        if probabilities.iter().any(|p| !p.is_finite()) {
            return Err(unusable("the model's result is not finite: its weights are damaged"));
        }
        let mut labels: Vec<(String, f64)> = self.labels().iter().cloned().zip(probabilities).collect();
        // Stable: equal ones stay in the order of the classes.
        labels.sort_by(|a, b| b.1.total_cmp(&a.1));
        Ok(Classification { labels, tokens, cut })
    }
}

fn unusable(reason: &str) -> candle_zero::Error {
    FinetuneError::Unclassified { reason: reason.into() }.into()
}
