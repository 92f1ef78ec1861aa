//! Rows of texts with labels, as an encoder takes them.

use super::scores::Scores;
use crate::data::batches::{NO_TARGET, RowBatch};
use candle_core::{Device, Result, Tensor};
use candle_zero::models::Bert;
use candle_zero::nn::{LossOptions, cross_entropy_with};

/// Texts of a micro batch with their labels.
#[derive(Debug, Clone)]
pub struct LabelledTexts {
    /// `[rows, time]`.
    ids: Tensor,
    lengths: Vec<usize>,
    /// `[rows]` of i64: [`NO_TARGET`] for a row without a text.
    labels: Tensor,
}

impl LabelledTexts {
    /// The texts of rows of a [`Task::Classify`](crate::Task::Classify), each in a row of its own
    /// ([`SequencePacking::Padded`](crate::SequencePacking::Padded)).
    ///
    /// # Errors
    /// Those of making tensors on `device`.
    pub fn of(rows: &RowBatch, device: &Device) -> Result<Self> {
        // Rows behind the end of a validation come last and have no text; one token stands for it.
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

    /// The sum of the cross entropies over `divisor`, a scalar of f32: 0 where no row has a text.
    ///
    /// # Errors
    /// Those of [`Bert::loss`].
    pub fn loss(&self, model: &Bert, divisor: f64) -> Result<Tensor> {
        model.loss(&self.ids, None, &self.lengths, &self.labels, Some(divisor))
    }

    /// Logits `[rows, labels]`.
    ///
    /// # Errors
    /// Those of [`Bert::forward`].
    pub fn logits(&self, model: &Bert) -> Result<Tensor> {
        model.forward(&self.ids, None, &self.lengths)
    }

    /// Counts which labels these logits take for the largest, and gives the sum of the cross entropies.
    ///
    /// # Errors
    /// Logits of other rows.
    pub fn judge(&self, logits: &Tensor, scores: &mut Scores) -> Result<f64> {
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
