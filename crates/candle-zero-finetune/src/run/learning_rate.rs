//! The learning rate of each step: warm-up, then decay.

use super::options::{LrDecay, WarmupLength};
use candle_zero::optim::LrSchedule;
use std::f64::consts::PI;

/// A schedule that rises linearly and reaches its peak at the last step of the warm-up. Then it stays constant, or
/// decays so that it would reach 0 one step after the last step of the run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LearningRates {
    peak: f64,
    warmup: u64,
    total: u64,
    shape: LrDecay,
}

impl LearningRates {
    pub fn new(peak: f64, warmup: WarmupLength, total: u64, shape: LrDecay) -> Self {
        let warmup = match warmup {
            WarmupLength::Fraction(fraction) => (total as f64 * fraction).round() as u64,
            WarmupLength::Steps(steps) => steps.min(total),
        };
        Self { peak, warmup, total, shape }
    }

    /// Returns the shape of the decay.
    pub fn shape(&self) -> LrDecay {
        self.shape
    }

    /// Returns the number of warm-up steps.
    pub fn warmup(&self) -> u64 {
        self.warmup
    }
}

impl LrSchedule for LearningRates {
    fn lr(&self, applied: u64) -> f64 {
        if applied < self.warmup {
            return self.peak * (applied + 1) as f64 / self.warmup as f64;
        }
        let decay_steps = self.total.saturating_sub(self.warmup).max(1);
        let progress = ((applied - self.warmup) as f64 / decay_steps as f64).min(1.0);
        match self.shape {
            LrDecay::Cosine => self.peak * 0.5 * (1.0 + (PI * progress).cos()),
            LrDecay::Linear => self.peak * (1.0 - progress),
            LrDecay::Constant => self.peak,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(warmup: WarmupLength, shape: LrDecay) -> Vec<f64> {
        let rates = LearningRates::new(1.0, warmup, 8, shape);
        (0..9).map(|step| (rates.lr(step) * 1000.0).round() / 1000.0).collect()
    }

    #[test]
    fn the_rate_rises_to_its_peak_and_falls_to_nothing_behind_the_last_step() {
        let cosine = rates(WarmupLength::Steps(4), LrDecay::Cosine);
        assert_eq!(cosine, [0.25, 0.5, 0.75, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]);
        let linear = rates(WarmupLength::Fraction(0.25), LrDecay::Linear);
        assert_eq!(linear, [0.5, 1.0, 1.0, 0.833, 0.667, 0.5, 0.333, 0.167, 0.0]);
    }

    #[test]
    fn no_step_is_without_effect() {
        for shape in [LrDecay::Cosine, LrDecay::Linear, LrDecay::Constant] {
            for warmup in [
                WarmupLength::Fraction(0.0),
                WarmupLength::Steps(1),
                WarmupLength::Steps(100),
                WarmupLength::Fraction(1.0),
            ] {
                let rates = rates(warmup, shape);
                assert!(rates[..8].iter().all(|rate| *rate > 0.0 && *rate <= 1.0), "{rates:?}");
            }
        }
        assert_eq!(rates(WarmupLength::Fraction(0.0), LrDecay::Constant), [1.0; 9]);
    }
}
