//! What a run reports: of each optimizer step, and why it has ended.

use candle_zero::nn::Rewards;
use serde::Serialize;

/// What became of an optimizer step. As JSON it has the keys of the bundled examples' metrics.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StepReport {
    /// From 0.
    pub step: u64,
    /// The mean over the target tokens of the step, over its pairs, or over its texts with labels.
    pub loss: f64,
    /// The learning rate of this step.
    pub lr: f64,
    /// Before clipping, with the loss scale taken out.
    pub grad_norm: Option<f64>,
    /// The scale of this step's gradients.
    pub loss_scale: f64,
    /// Whether overflow kept the weights as they were.
    pub skipped: bool,
    /// Tokens of all ranks, without what fills rows up.
    pub tokens: u64,
    /// The same in a second.
    pub tokens_per_s: f64,
    /// Milliseconds of this rank.
    pub forward_ms: f64,
    /// Milliseconds of this rank.
    pub backward_ms: f64,
    /// Milliseconds of this rank.
    pub step_ms: f64,
    /// Waiting for collectives, a part of the others.
    pub comm_ms: f64,
    /// Waiting for files of offloaded state, a part of the others.
    pub disk_ms: f64,
    /// Bytes from files, of this rank.
    pub disk_read_bytes: u64,
    /// Bytes to files, of this rank.
    pub disk_written_bytes: u64,
    /// While requests to files were under way, of this rank.
    pub disk_bytes_per_s: f64,
    /// The peak of the rank that used most.
    pub rss_peak_bytes: Option<u64>,
    /// The mean loss on the validation data, where the model was validated after this step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// Of preferences and labels, then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_accuracy: Option<f64>,
    /// Of labels, then: the mean of the labels' F1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_f1: Option<f64>,
    /// The rewards of the step's pairs, where preferences are learned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rewards: Option<Rewards>,
    /// Of the validation's pairs, where the model was validated after this step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_rewards: Option<Rewards>,
}

/// Why a run has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// All steps are made.
    Complete,
    /// Validations did not improve any more.
    NoImprovement,
    /// A signal asked for it. The last step is saved, if there is a folder for checkpoints.
    Asked,
}
