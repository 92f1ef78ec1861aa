//! The objectives of a run: their losses, and the sums from which a validation is computed.

use super::classification_batch::ClassificationBatch;
use super::classification_scores::ClassificationScores;
use super::options::Objective;
use crate::data::batches::{NO_TARGET, RowBatch};
use crate::model::trainable_model::TrainableModel;
use candle_core::{DType, Device, Result, Tensor};
use candle_zero::models::{Decoder, DecoderBatch, RouterReport};
use candle_zero::nn::{Rewards, dpo_loss};
use candle_zero::nn::{Sequences, without_adapters};

/// The result of a validation.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct ValidationResult {
    /// The mean loss: over target tokens, over preference pairs, or over labelled texts.
    pub loss: f64,
    /// The share of pairs in which the model prefers the chosen answer more strongly than it does without its adapters,
    /// or of texts whose label it predicts correctly.
    pub accuracy: Option<f64>,
    /// The mean F1 of the labels ([`ClassificationScores::macro_f1`]), if labels are predicted.
    pub f1: Option<f64>,
    /// The rewards of the chosen and rejected answers.
    pub rewards: Option<Rewards>,
}

/// The loss of a batch.
pub(super) struct BatchLoss {
    /// The loss that is differentiated, an f32 scalar.
    pub loss: Tensor,
    /// The rewards of the pairs, for preferences.
    pub rewards: Option<Rewards>,
    /// The report of the routers of a mixture of experts. The load-balancing loss is part of `loss`.
    pub routers: RouterReport,
}

/// Returns the sums of log probabilities of the chosen answers and of the rejected ones. The rows alternate between the
/// two.
fn sums_of_pairs(batch: &DecoderBatch, model: &Decoder) -> Result<[Tensor; 2]> {
    pair_sums(&model.log_probabilities(&batch.ids, &batch.targets, batch.sequences.as_ref())?)
}

/// Returns the sums of the rows of chosen answers and of rejected ones.
fn pair_sums(log_probabilities: &Tensor) -> Result<[Tensor; 2]> {
    let sums = log_probabilities.sum(1)?;
    let pairs = sums.reshape(((), 2))?;
    Ok([pairs.narrow(1, 0, 1)?.flatten_all()?, pairs.narrow(1, 1, 1)?.flatten_all()?])
}

impl Objective {
    /// Returns rows as tensors. The loss of the batch is the sum over targets, divided by `divisor` or, if `divisor` is
    /// `None`, by the number of targets.
    pub(super) fn decoder_batch(rows: &RowBatch, divisor: Option<f64>, device: &Device) -> Result<DecoderBatch> {
        let shape = (rows.rows, rows.time);
        let ids = Tensor::from_slice(&rows.ids, shape, device)?;
        let targets = Tensor::from_slice(&rows.targets, shape, device)?;
        let sequences = Some(Sequences::from_starts(rows.starts.clone(), rows.time)?);
        Ok(DecoderBatch { ids, targets, sequences, divisor })
    }

    /// Returns whether the loss of a batch needs the output of the model without its adapters
    /// ([`Objective::reference`]).
    pub(super) fn needs_reference(self) -> bool {
        matches!(self, Self::Prefer { .. })
    }

    /// Returns the sums of log probabilities of a batch from the model without its adapters, `[2, pairs]`.
    pub(super) fn reference(self, model: &TrainableModel, rows: &RowBatch, device: &Device) -> Result<Tensor> {
        let [chosen, rejected] =
            without_adapters(|| sums_of_pairs(&Self::decoder_batch(rows, None, device)?, model.decoder()?))?;
        Tensor::stack(&[chosen, rejected], 0)
    }

    /// Returns the loss of a batch: the sum over targets or labels, divided by `divisor`. For preferences, returns the
    /// mean loss of the pairs, relative to `reference`, and the rewards of the pairs. A load-balancing loss is added if
    /// the model is trained with one.
    pub(super) fn loss(
        self,
        model: &TrainableModel,
        rows: &RowBatch,
        reference: Option<&Tensor>,
        divisor: f64,
        device: &Device,
    ) -> Result<BatchLoss> {
        if self == Self::Classify {
            let loss = ClassificationBatch::of(rows, device)?.loss(model.classifier()?, divisor)?;
            return Ok(BatchLoss { loss, rewards: None, routers: RouterReport::default() });
        }
        let (batch, model) = (Self::decoder_batch(rows, Some(divisor), device)?, model.decoder()?);
        let DecoderBatch { ids, targets, sequences, divisor } = &batch;
        let (sequences, mask) = (sequences.as_ref(), rows.mask());
        match (self, reference) {
            (Self::Prefer { beta }, Some(reference)) => {
                let (all, routers) = model.routed_log_probabilities(ids, targets, sequences, Some(&mask))?;
                let [chosen, rejected] = pair_sums(&all)?;
                let reference_sums = [reference.get(0)?, reference.get(1)?];
                let dpo = dpo_loss([&chosen, &rejected], [&reference_sums[0], &reference_sums[1]], beta)?;
                Ok(BatchLoss { loss: routers.add_to(&dpo.loss)?, rewards: Some(dpo.rewards), routers })
            }
            (Self::Prefer { .. }, None) => candle_core::bail!("preferences need log probabilities of the reference"),
            _ => {
                let (loss, routers) = model.routed_loss(ids, targets, sequences, *divisor, Some(&mask))?;
                Ok(BatchLoss { loss: routers.add_to(&loss)?, rewards: None, routers })
            }
        }
    }

    /// Returns the contribution of a batch to a validation: the loss, its divisor, and then the rewards of the pairs
    /// (for preferences) or the numbers of [`ClassificationScores`] (for labels). Rows that only pad a batch contribute
    /// nothing.
    pub(super) fn sums(self, model: &TrainableModel, rows: &RowBatch, device: &Device) -> Result<Tensor> {
        let sums = match self {
            Self::Classify => {
                let (model, texts) = (model.classifier()?, ClassificationBatch::of(rows, device)?);
                let mut scores = ClassificationScores::new(model.labels().len());
                let loss = texts.judge(&texts.logits(model)?, &mut scores)?;
                [vec![loss, scores.texts() as f64], scores.to_numbers()].concat()
            }
            Self::Generate => {
                let targets = rows.targets.iter().filter(|target| **target != NO_TARGET).count();
                // The load-balancing loss is not a sum over targets, and is not part of a validation.
                let DecoderBatch { ids, targets: next, sequences, divisor } =
                    Self::decoder_batch(rows, Some(1.0), device)?;
                let loss = model.decoder()?.loss_packed(&ids, &next, sequences.as_ref(), divisor)?;
                let loss = loss.to_scalar::<f32>()?;
                vec![f64::from(loss), targets as f64]
            }
            Self::Prefer { beta } => {
                let reference = self.reference(model, rows, device)?;
                let batch = Self::decoder_batch(rows, None, device)?;
                let [chosen, rejected] = sums_of_pairs(&batch, model.decoder()?)?;
                let mut sums = vec![0.0; 6];
                let is_real = rows.targets.chunks(rows.time).map(|row| row.iter().any(|target| *target != NO_TARGET));
                let is_real: Vec<bool> = is_real.step_by(2).collect();
                let values = |sums: &Tensor| sums.to_dtype(DType::F32)?.to_vec1::<f32>();
                let [chosen, rejected] = [values(&chosen)?, values(&rejected)?];
                let reference = reference.to_dtype(DType::F32)?.to_vec2::<f32>()?;
                for pair in (0..is_real.len()).filter(|pair| is_real[*pair]) {
                    let rewards = [chosen[pair] - reference[0][pair], rejected[pair] - reference[1][pair]];
                    let rewards = rewards.map(|difference| beta * f64::from(difference));
                    let difference = f64::from(chosen[pair] - rejected[pair]);
                    let margin = beta * (difference - f64::from(reference[0][pair] - reference[1][pair]));
                    let is_correct = f64::from(u8::from(margin > 0.0));
                    // -log sigmoid(margin)
                    sums[0] += (-margin).max(0.0) + (-margin.abs()).exp().ln_1p();
                    sums[1] += 1.0;
                    let values = [rewards[0], rewards[1], margin, is_correct];
                    sums[2..].iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
                }
                sums
            }
        };
        Tensor::new(sums, &Device::Cpu)
    }

    /// Returns the result of a validation, given the sums over all batches and ranks.
    pub(super) fn validation(self, sums: &[f64]) -> ValidationResult {
        let mean = |i: usize| sums.get(i).copied().unwrap_or(0.0) / sums.get(1).copied().unwrap_or(0.0).max(1.0);
        let loss_only = ValidationResult { loss: mean(0), accuracy: None, f1: None, rewards: None };
        match self {
            Self::Generate => loss_only,
            Self::Prefer { .. } => {
                let rewards = Rewards::of_numbers([2, 3, 4, 5].map(mean));
                ValidationResult { accuracy: Some(rewards.accuracy), rewards: Some(rewards), ..loss_only }
            }
            Self::Classify => {
                let scores = ClassificationScores::of_numbers(sums.get(2..).unwrap_or_default());
                ValidationResult { accuracy: Some(scores.accuracy()), f1: Some(scores.macro_f1()), ..loss_only }
            }
        }
    }
}
