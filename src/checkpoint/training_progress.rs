//! The progress of a run: the part of a checkpoint that is not the model's state.

use super::load::LoadOptions;
use super::manifest::Manifest;
use crate::precision::ScalerState;

/// The progress of a run.
pub(crate) struct TrainingProgress {
    pub global_steps: u64,
    pub skipped_steps: u64,
    pub optimizer_steps: u64,
    pub global_samples: u64,
    pub scaler: Option<ScalerState>,
    pub last_batch_iteration: i64,
}

impl TrainingProgress {
    /// Returns the progress stored in a checkpoint. Parts that the options exclude keep their values from `current`,
    /// except the scaler's state, which is `None`: the engine then leaves its scaler unchanged.
    pub fn of(manifest: &Manifest, current: Self, options: &LoadOptions) -> Self {
        let with_optimizer = options.load_optimizer_states;
        Self {
            global_steps: manifest.global_steps,
            skipped_steps: manifest.skipped_steps,
            global_samples: manifest.global_samples,
            optimizer_steps: if with_optimizer { manifest.optimizer_steps } else { current.optimizer_steps },
            scaler: if with_optimizer { manifest.scaler } else { None },
            last_batch_iteration: match options.load_lr_scheduler_states {
                true => manifest.last_batch_iteration,
                false => current.last_batch_iteration,
            },
        }
    }
}
