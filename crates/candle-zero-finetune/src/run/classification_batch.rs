//! Rows of labelled texts in the form that a classifier takes.

use super::classification_scores::ClassificationScores;
use crate::data::batches::{NO_TARGET, RowBatch};
use candle_core::{Device, Result, Tensor};
use candle_zero::models::SequenceClassifier;
use candle_zero::nn::{LossOptions, cross_entropy_with};

/// The texts of a micro batch with their labels.
#[derive(Debug, Clone)]
pub struct ClassificationBatch {
    /// The token ids, `[rows, time]`.
    ids: Tensor,
    lengths: Vec<usize>,
    /// The labels, `[rows]` of i64, with [`NO_TARGET`] for a row without a text.
    labels: Tensor,
}

impl ClassificationBatch {
    /// Builds the micro batch from rows for [`TrainingTask::Classify`](crate::TrainingTask::Classify), each text in its
    /// own row ([`SequencePacking::Padded`](crate::SequencePacking::Padded)).
    ///
    /// # Errors
    /// Errors in creating tensors on `device`.
    pub fn of(rows: &RowBatch, device: &Device) -> Result<Self> {
        // Rows beyond the end of the validation data come last and have no text. They hold a single token.
        let length = |row: usize| match rows.labels.get(row) {
            Some(_) => rows.starts[row].get(1).copied().unwrap_or(rows.time),
            None => 1,
        };
        let label = |row: usize| rows.labels.get(row).map_or(NO_TARGET, |label| i64::from(*label));
        Ok(Self {
            ids: Tensor::from_slice(&rows.ids, (rows.rows, rows.time), device)?,
            lengths: (0..rows.rows).map(length).collect(),
            labels: Tensor::from_iter((0..rows.rows).map(label), device)?,
        })
    }

    /// Returns an f32 scalar: the sum of the cross entropies, divided by `divisor`. It is 0 if no row has a text.
    ///
    /// # Errors
    /// Errors of [`SequenceClassifier::logits`].
    pub fn loss(&self, model: &(impl SequenceClassifier + ?Sized), divisor: f64) -> Result<Tensor> {
        let options = LossOptions { divisor: Some(divisor), ..LossOptions::default() };
        cross_entropy_with(&self.logits(model)?, &self.labels, options)
    }

    /// Returns the logits `[rows, labels]`.
    ///
    /// # Errors
    /// Errors of [`SequenceClassifier::logits`].
    pub fn logits(&self, model: &(impl SequenceClassifier + ?Sized)) -> Result<Tensor> {
        model.logits(&self.ids, &self.lengths)
    }

    /// Adds the predictions (the labels with the largest logits) to the counts of `scores`, and returns the sum of the
    /// cross entropies.
    ///
    /// # Errors
    /// Logits with a different number of rows.
    pub fn judge(&self, logits: &Tensor, scores: &mut ClassificationScores) -> Result<f64> {
        let sum = LossOptions { divisor: Some(1.0), ..LossOptions::default() };
        let loss = cross_entropy_with(logits, &self.labels, sum)?.to_scalar::<f32>()?;
        let found = logits.argmax(1)?.to_vec1::<u32>()?;
        for (found, label) in found.into_iter().zip(self.labels.to_vec1::<i64>()?) {
            if let Ok(label) = usize::try_from(label) {
                scores.count(found as usize, label);
            }
        }
        Ok(f64::from(loss))
    }
}
