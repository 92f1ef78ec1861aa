//! Reports of a run: the measurements of each optimizer step, and why the run has ended.

use super::expert_loads::ExpertShares;
use candle_zero::nn::Rewards;
use serde::Serialize;

/// The outcome of an optimizer step. As JSON, it has the keys of the bundled examples' metrics.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StepReport {
    /// The index of the step, counted from 0.
    pub step: u64,
    /// The mean loss over the target tokens of the step, over its pairs, or over its labelled texts.
    pub loss: f64,
    /// The learning rate of this step.
    pub lr: f64,
    /// The gradient norm before clipping, without the loss scale.
    pub grad_norm: Option<f64>,
    /// The loss scale of this step.
    pub loss_scale: f64,
    /// Whether the step was skipped because of overflow, leaving the weights unchanged.
    pub skipped: bool,
    /// The number of tokens of all ranks, without padding.
    pub tokens: u64,
    /// The number of tokens per second.
    pub tokens_per_s: f64,
    /// The duration of the forward pass on this rank in milliseconds.
    pub forward_ms: f64,
    /// The duration of the backward pass on this rank in milliseconds.
    pub backward_ms: f64,
    /// The duration of the optimizer step on this rank in milliseconds.
    pub step_ms: f64,
    /// The time spent waiting for collectives in milliseconds, which is part of the other durations.
    pub comm_ms: f64,
    /// The time spent waiting for files of offloaded state in milliseconds, which is part of the other durations.
    pub disk_ms: f64,
    /// The number of bytes that this rank read from files.
    pub disk_read_bytes: u64,
    /// The number of bytes that this rank wrote to files.
    pub disk_written_bytes: u64,
    /// The throughput of this rank's file requests while they were in progress, in bytes per second.
    pub disk_bytes_per_s: f64,
    /// The peak memory, in bytes, of the rank that used the most.
    pub rss_peak_bytes: Option<u64>,
    /// The load-balancing loss of the step's routers, if the model is trained with one. Multiplied by a factor, this loss
    /// is included in `loss`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_aux_loss: Option<f64>,
    /// How evenly the routers of a mixture chose their experts.
    #[serde(flatten)]
    pub experts: Option<ExpertShares>,
    /// The mean loss on the validation data, if the model was validated after this step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// The accuracy of the validation, for preferences and labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_accuracy: Option<f64>,
    /// The mean F1 of the labels in the validation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_f1: Option<f64>,
    /// The rewards of the step's pairs, if the model is trained on preferences.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rewards: Option<Rewards>,
    /// The rewards of the validation's pairs, if the model is trained on preferences and was validated after this step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_rewards: Option<Rewards>,
}

impl StepReport {
    /// Returns the names and values of the metrics of routers.
    pub(super) fn router_metrics(&self) -> Vec<(&'static str, f64)> {
        let mut values = Vec::new();
        values.extend(self.router_aux_loss.map(|loss| ("router_aux_loss", loss)));
        if let Some(shares) = &self.experts {
            values.push(("largest_expert_share", shares.largest_expert_share));
            values.push(("smallest_expert_share", shares.smallest_expert_share));
            values.push(("unused_experts", shares.unused_experts as f64));
        }
        values
    }
}

/// The reason why a run has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// All steps were completed.
    Complete,
    /// Validations no longer improved.
    NoImprovement,
    /// A signal, the user (in `zerorun dash`) or `CANDLE_ZERO_STOP_AT` requested the end of the run. The last step is
    /// saved, if there is a folder for checkpoints.
    Requested,
}
