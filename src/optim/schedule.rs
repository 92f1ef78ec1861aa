//! Learning-rate schedules: WarmupLR, WarmupDecayLR and WarmupCosineLR with DeepSpeed's arithmetic.
//!
//! A counter `it` starts at -1. Constructing the schedule already puts the rate of `it = -1` in force, so optimizer
//! step n (from 1) runs with the rate of `it = n - 2`, and the first **two** steps of a warm-up run at its minimum.

use crate::config::{SchedulerConfig, WarmupType};
use crate::{Error, Result};
use std::f64::consts::PI;

/// A learning rate that changes with the applied optimizer steps.
///
/// ```
/// use candle_zero::config::{SchedulerConfig, WarmupType};
/// use candle_zero::optim::Schedule;
///
/// let config = SchedulerConfig::WarmupLr {
///     warmup_min_lr: 0.0,
///     warmup_max_lr: Some(0.1),
///     warmup_num_steps: 10,
///     warmup_type: WarmupType::Linear,
/// };
/// let mut schedule = Schedule::new(&config, 0.1)?;
/// assert_eq!(schedule.lr(), 0.0); // in force for the first optimizer step
/// schedule.step();
/// schedule.step();
/// assert!((schedule.lr() - 0.01).abs() < 1e-12); // for the third
/// # Ok::<(), candle_zero::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    config: Option<SchedulerConfig>,
    base_lr: f64,
    last_batch_iteration: i64,
    lr: f64,
}

/// Refuses the parameter sets that DeepSpeed's constructors refuse.
///
/// # Errors
///
/// [`Error::ScheduleParameter`] when `warmup_num_steps` is 0. (A `total_num_steps` below it is allowed: DeepSpeed
/// only warns.)
pub fn validate(config: &SchedulerConfig) -> Result<()> {
    if warmup_steps(config) == 0 {
        return Err(Error::ScheduleParameter {
            key: "scheduler.params.warmup_num_steps",
            found: "0".into(),
            allowed: "a positive integer",
            mend: "leave the scheduler section out to train with the optimizer's constant lr",
        });
    }
    Ok(())
}

fn warmup_steps(config: &SchedulerConfig) -> u64 {
    match config {
        SchedulerConfig::WarmupLr { warmup_num_steps, .. }
        | SchedulerConfig::WarmupDecayLr { warmup_num_steps, .. }
        | SchedulerConfig::WarmupCosineLr { warmup_num_steps, .. } => *warmup_num_steps,
    }
}

impl Schedule {
    /// The schedule of `config`, with the rate of the first optimizer step in force. `base_lr` is the optimizer's
    /// own `lr`: WarmupCosineLR scales it, WarmupLR ends at it when `warmup_max_lr` is not given.
    ///
    /// # Errors
    ///
    /// What [`validate`] refuses.
    pub fn new(config: &SchedulerConfig, base_lr: f64) -> Result<Self> {
        validate(config)?;
        let mut schedule = Self { config: Some(*config), base_lr, last_batch_iteration: -1, lr: base_lr };
        schedule.lr = schedule.lr_at(-1);
        Ok(schedule)
    }

    /// No schedule: `lr` for ever.
    pub fn constant(lr: f64) -> Self {
        Self { config: None, base_lr: lr, last_batch_iteration: -1, lr }
    }

    /// The learning rate in force for the coming optimizer step.
    pub fn lr(&self) -> f64 {
        self.lr
    }

    /// Goes on by one step. To be called once per applied optimizer step, after it; a skipped one does not count.
    pub fn step(&mut self) {
        self.last_batch_iteration += 1;
        self.lr = self.lr_at(self.last_batch_iteration);
    }

    /// Goes on where a counter says.
    pub fn restore(&mut self, last_batch_iteration: i64) {
        self.last_batch_iteration = last_batch_iteration;
        self.lr = self.lr_at(last_batch_iteration);
    }

    /// DeepSpeed's counter: applied optimizer steps - 1.
    pub fn last_batch_iteration(&self) -> i64 {
        self.last_batch_iteration
    }

    /// The rate at counter `it`.
    fn lr_at(&self, it: i64) -> f64 {
        let Some(config) = &self.config else { return self.base_lr };
        // A warm-up of one step is one of two: the logarithm of one would be divided by.
        let warmup = warmup_steps(config).max(2) as f64;
        let before = it < 0;
        let it = it as f64;
        match *config {
            SchedulerConfig::WarmupLr { warmup_min_lr, warmup_max_lr, warmup_type, .. } => {
                let gamma = match () {
                    _ if before => 0.0,
                    _ if it < warmup => warm_up(it, warmup, warmup_type),
                    _ => 1.0,
                };
                warmup_min_lr + (warmup_max_lr.unwrap_or(self.base_lr) - warmup_min_lr) * gamma
            }
            SchedulerConfig::WarmupDecayLr { total_num_steps, warmup_min_lr, warmup_max_lr, warmup_type, .. } => {
                let total = total_num_steps as f64;
                let gamma = match () {
                    _ if before => 0.0,
                    _ if it < warmup => warm_up(it, warmup, warmup_type),
                    _ => ((total - it) / (total - warmup).max(1.0)).max(0.0),
                };
                warmup_min_lr + (warmup_max_lr - warmup_min_lr) * gamma
            }
            SchedulerConfig::WarmupCosineLr {
                total_num_steps, warmup_min_ratio, cos_min_ratio, warmup_type, ..
            } => {
                let total = total_num_steps as f64;
                let ratio = match () {
                    _ if before => 0.0,
                    _ if it < warmup => warmup_min_ratio + (1.0 - warmup_min_ratio) * warm_up(it, warmup, warmup_type),
                    _ => {
                        let progress = ((it - warmup + 1.0) / (total - warmup).max(1.0)).min(1.0);
                        let cosine = (1.0 + (PI * progress).cos()) / 2.0;
                        (cos_min_ratio + (1.0 - cos_min_ratio) * cosine).max(0.0)
                    }
                };
                self.base_lr * ratio
            }
        }
    }
}

/// How far a warm-up of `steps` has come at `it < steps`, from 0 to 1.
fn warm_up(it: f64, steps: f64, shape: WarmupType) -> f64 {
    match shape {
        WarmupType::Log => (it + 1.0).ln() / steps.ln(),
        WarmupType::Linear => it / steps,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_warm_up_of_no_steps_is_refused_with_its_key() {
        let config = SchedulerConfig::WarmupCosineLr {
            total_num_steps: 10,
            warmup_min_ratio: 0.0,
            warmup_num_steps: 0,
            cos_min_ratio: 0.0,
            warmup_type: WarmupType::Log,
        };
        insta::assert_snapshot!(Schedule::new(&config, 0.1).unwrap_err(), @"scheduler.params.warmup_num_steps is 0; allowed is a positive integer: leave the scheduler section out to train with the optimizer's constant lr");
    }

    #[test]
    fn without_a_scheduler_the_rate_stays() {
        let mut schedule = Schedule::constant(0.25);
        schedule.step();
        assert_eq!((schedule.lr(), schedule.last_batch_iteration()), (0.25, 0));
    }
}
