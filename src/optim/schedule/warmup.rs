//! The schedules WarmupLR, WarmupDecayLR and WarmupCosineLR.

use crate::config::{SchedulerConfig, WarmupType};
use std::f64::consts::PI;

/// Returns the rate of a parameter group in a warm-up schedule at counter `it`, or `None` for other schedules.
/// `base_lr` is the group's own rate.
pub(super) fn lr(config: &SchedulerConfig, base_lr: f64, group: usize, it: f64) -> Option<f64> {
    Some(match config {
        SchedulerConfig::WarmupLr { warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type } => {
            let gamma = WarmupRamp::new(*warmup_num_steps, *warmup_type).at(it).unwrap_or(1.0);
            let (min, max) =
                (warmup_min_lr.for_group(group), warmup_max_lr.as_ref().map_or(base_lr, |max| max.for_group(group)));
            min + (max - min) * gamma
        }
        SchedulerConfig::WarmupDecayLr {
            total_num_steps,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            decay_power,
        } => {
            let warmup = WarmupRamp::new(*warmup_num_steps, *warmup_type);
            let total = *total_num_steps as f64;
            let remaining = || ((total - it) / (total - warmup.steps).max(1.0)).max(0.0);
            let gamma = warmup.at(it).unwrap_or_else(|| match *decay_power {
                1.0 => remaining(),
                power => remaining().powf(power),
            });
            let (min, max) = (warmup_min_lr.for_group(group), warmup_max_lr.for_group(group));
            min + (max - min) * gamma
        }
        // Before the counter advances, the rate is 0, whatever the initial ratio.
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

/// The warm-up that the three schedules share.
struct WarmupRamp {
    steps: f64,
    shape: WarmupType,
}

impl WarmupRamp {
    fn new(steps: u64, shape: WarmupType) -> Self {
        // A warm-up of 1 step is treated as 2 steps, to avoid dividing by the logarithm of 1.
        Self { steps: steps.max(2) as f64, shape }
    }

    /// Returns the progress of the warm-up at `it`, from 0 to 1, or `None` after its end.
    fn at(&self, it: f64) -> Option<f64> {
        match self.shape {
            _ if it < 0.0 => Some(0.0),
            _ if it >= self.steps => None,
            WarmupType::Log => Some((it + 1.0).ln() / self.steps.ln()),
            WarmupType::Linear => Some(it / self.steps),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::PerGroup;

    #[test]
    fn a_decay_power_of_2_is_the_schedule_of_lars() {
        let schedule = |decay_power| SchedulerConfig::WarmupDecayLr {
            total_num_steps: 110,
            warmup_min_lr: PerGroup::All(0.0),
            warmup_max_lr: PerGroup::All(4.0),
            warmup_num_steps: 10,
            warmup_type: WarmupType::Linear,
            decay_power,
        };
        let rate = |power, it: i32| lr(&schedule(power), 0.0, 0, f64::from(it)).expect("a warm-up schedule");
        // The warm-up is linear, whatever the decay.
        assert_eq!([0, 5, 10].map(|it| rate(2.0, it)), [0.0, 2.0, 4.0]);
        for it in [10, 35, 60, 109, 110, 200] {
            let remaining = (f64::from(110 - it) / 100.0).max(0.0);
            assert_eq!(rate(1.0, it), 4.0 * remaining);
            assert!((rate(2.0, it) - 4.0 * remaining * remaining).abs() < 1e-12, "{it}");
            assert!((rate(0.5, it) - 4.0 * remaining.sqrt()).abs() < 1e-12, "{it}");
        }
    }
}
