//! The interface of all models that classify texts.

use candle_core::{Result, Tensor};

/// A model that predicts the labels of texts.
pub trait SequenceClassifier {
    /// Returns the logits `[batch, labels]` for ids `[batch, time]` (u32). The rows contain texts of the given lengths,
    /// each at least 1, followed by arbitrary ids.
    ///
    /// # Errors
    /// A text that is longer than the model's context, an id outside the vocabulary, or lengths that do not match the
    /// tokens.
    fn logits(&self, ids: &Tensor, lengths: &[usize]) -> Result<Tensor>;

    /// Returns the names of the labels, in the order of the classes.
    fn labels(&self) -> &[String];
}
