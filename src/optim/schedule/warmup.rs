//! WarmupLR, WarmupDecayLR, WarmupCosineLR.

use crate::config::{SchedulerConfig, WarmupType};
use std::f64::consts::PI;

/// The rate of a parameter group in a warm-up at counter `it`; `None` for the schedules that are none. `base_lr` is the
/// group's own.
pub(super) fn lr(config: &SchedulerConfig, base_lr: f64, group: usize, it: f64) -> Option<f64> {
    Some(match config {
        SchedulerConfig::WarmupLr { warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type } => {
            let gamma = WarmupRamp::new(*warmup_num_steps, *warmup_type).at(it).unwrap_or(1.0);
            let (min, max) = (warmup_min_lr.of(group), warmup_max_lr.as_ref().map_or(base_lr, |max| max.of(group)));
            min + (max - min) * gamma
        }
        SchedulerConfig::WarmupDecayLr {
            total_num_steps,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
        } => {
            let warmup = WarmupRamp::new(*warmup_num_steps, *warmup_type);
            let total = *total_num_steps as f64;
            let gamma = warmup.at(it).unwrap_or_else(|| ((total - it) / (total - warmup.steps).max(1.0)).max(0.0));
            let (min, max) = (warmup_min_lr.of(group), warmup_max_lr.of(group));
            min + (max - min) * gamma
        }
        // Before the counter moves, the rate is 0, whatever the ratio at the start.
        SchedulerConfig::WarmupCosineLr { .. } if it < 0.0 => 0.0,
        SchedulerConfig::WarmupCosineLr {
            total_num_steps,
            warmup_min_ratio,
            warmup_num_steps,
            cos_min_ratio,
            warmup_type,
        } => {
            let warmup = WarmupRamp::new(*warmup_num_steps, *warmup_type);
            let ratio = match warmup.at(it) {
                Some(gamma) => warmup_min_ratio + (1.0 - warmup_min_ratio) * gamma,
                None => {
                    let span = (*total_num_steps as f64 - warmup.steps).max(1.0);
                    let progress = ((it - warmup.steps + 1.0) / span).min(1.0);
                    let cosine = (1.0 + (PI * progress).cos()) / 2.0;
                    (cos_min_ratio + (1.0 - cos_min_ratio) * cosine).max(0.0)
                }
            };
            base_lr * ratio
        }
        SchedulerConfig::OneCycle(_) | SchedulerConfig::LrRangeTest { .. } => return None,
    })
}

/// The rise that the three have in common.
struct WarmupRamp {
    steps: f64,
    shape: WarmupType,
}

impl WarmupRamp {
    fn new(steps: u64, shape: WarmupType) -> Self {
        // A warm-up of one step is one of two: the logarithm of one would be divided by.
        Self { steps: steps.max(2) as f64, shape }
    }

    /// How far it has come at `it`, from 0 to 1; `None` when it is over.
    fn at(&self, it: f64) -> Option<f64> {
        match self.shape {
            _ if it < 0.0 => Some(0.0),
            _ if it >= self.steps => None,
            WarmupType::Log => Some((it + 1.0).ln() / self.steps.ln()),
            WarmupType::Linear => Some(it / self.steps),
        }
    }
}
