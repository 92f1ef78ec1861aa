//! `scheduler`: the schedules of the learning rate and their parameters.

/// The shape of a warm-up. In the formulas, `it` is the number of the step, counted from 0, and `steps` is the number
/// of warm-up steps, but at least 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WarmupType {
    /// ln(it + 1) / ln(steps) (default).
    Log,
    /// it / steps.
    Linear,
}

/// One number for all parameter groups, or one for each.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum PerGroup {
    /// The same number for all groups.
    All(f64),
    /// One number per group.
    Each(Vec<f64>),
}

impl PerGroup {
    /// Returns the number for a group. If the list is too short, returns its last number; schedules refuse a list that
    /// is too short.
    pub fn for_group(&self, group: usize) -> f64 {
        match self {
            Self::All(number) => *number,
            Self::Each(numbers) => numbers.get(group).or(numbers.last()).copied().unwrap_or_default(),
        }
    }
}

impl From<f64> for PerGroup {
    fn from(number: f64) -> Self {
        Self::All(number)
    }
}

/// `scheduler` with its parameters.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum SchedulerConfig {
    /// `WarmupLR`.
    WarmupLr {
        /// The initial learning rate. Default 0.
        warmup_min_lr: PerGroup,
        /// The final learning rate. `None`: the optimizer's own lr.
        warmup_max_lr: Option<PerGroup>,
        /// The number of warm-up steps. Default 1000.
        warmup_num_steps: u64,
        /// The shape of the warm-up. Default log.
        warmup_type: WarmupType,
    },
    /// `WarmupDecayLR`.
    WarmupDecayLr {
        /// The total number of steps. Required.
        total_num_steps: u64,
        /// The learning rate at the start and at the end. Default 0.
        warmup_min_lr: PerGroup,
        /// The learning rate after the warm-up. Default 0.001.
        warmup_max_lr: PerGroup,
        /// The number of warm-up steps. Default 1000.
        warmup_num_steps: u64,
        /// The shape of the warm-up. Default log.
        warmup_type: WarmupType,
        /// After the warm-up, the difference between the rate and `warmup_min_lr` is proportional to the share of steps
        /// that remain, raised to this power. Default 1: linear decay.
        decay_power: f64,
    },
    /// `WarmupCosineLR`.
    WarmupCosineLr {
        /// The total number of steps. Required.
        total_num_steps: u64,
        /// The learning rate at the start of the warm-up as a fraction of the optimizer's. Default 0. In the first
        /// step, the rate is always 0, as in DeepSpeed.
        warmup_min_ratio: f64,
        /// The number of warm-up steps. Default 1000.
        warmup_num_steps: u64,
        /// The final learning rate as a fraction of the optimizer's. Default 0.0001.
        cos_min_ratio: f64,
        /// The shape of the warm-up. Default log.
        warmup_type: WarmupType,
    },
    /// `OneCycle`.
    OneCycle(OneCycleConfig),
    /// `LRRangeTest`.
    LrRangeTest {
        /// The initial learning rate. Default 0.001.
        lr_range_test_min_lr: PerGroup,
        /// The number of steps per increase. Default 2000.
        lr_range_test_step_size: u64,
        /// The increase, as a multiple of the initial rate. Default 1.
        lr_range_test_step_rate: f64,
        /// Whether the rate rises in a staircase instead of continuously. Default false.
        lr_range_test_staircase: bool,
    },
}

/// The parameters of OneCycle. Step sizes are given as numbers of steps.
#[derive(Debug, Clone, PartialEq)]
pub struct OneCycleConfig {
    /// The learning rate at both ends of the cycle. Required.
    pub cycle_min_lr: PerGroup,
    /// The learning rate at the top of the cycle. Required.
    pub cycle_max_lr: PerGroup,
    /// After the cycle, the rate is divided by 1 + `decay_lr_rate` * k, where k is the number of steps since the end of
    /// the cycle, divided by `decay_step_size`. Default 0.
    pub decay_lr_rate: f64,
    /// The length of the rise. Default 2000.
    pub cycle_first_step_size: f64,
    /// The length of the fall. Default: the same as that of the rise.
    pub cycle_second_step_size: f64,
    /// The number of stairs in the rise. Default 0: none.
    pub cycle_first_stair_count: u64,
    /// The number of stairs in the fall. Default: the same as in the rise.
    pub cycle_second_stair_count: u64,
    /// The number of steps per unit of decay after the cycle. Default 0: no decay.
    pub decay_step_size: f64,
    /// Whether beta1 falls while the rate rises and rises while the rate falls, and beta2 is 0.99. Default true.
    pub cycle_momentum: bool,
    /// beta1 at the top of the cycle, and in the first step. Default 0.8.
    pub cycle_min_mom: f64,
    /// beta1 at both ends of the cycle, except in the first step. Default 0.9.
    pub cycle_max_mom: f64,
    /// After the cycle, beta1 is multiplied by 1 + `decay_mom_rate` * k, with the same k as for the rate. Default 0.
    pub decay_mom_rate: f64,
}

impl OneCycleConfig {
    /// Creates a cycle between two rates with DeepSpeed's defaults.
    pub fn new(cycle_min_lr: impl Into<PerGroup>, cycle_max_lr: impl Into<PerGroup>) -> Self {
        Self {
            cycle_min_lr: cycle_min_lr.into(),
            cycle_max_lr: cycle_max_lr.into(),
            decay_lr_rate: 0.0,
            cycle_first_step_size: 2000.0,
            cycle_second_step_size: 2000.0,
            cycle_first_stair_count: 0,
            cycle_second_stair_count: 0,
            decay_step_size: 0.0,
            cycle_momentum: true,
            cycle_min_mom: 0.8,
            cycle_max_mom: 0.9,
            decay_mom_rate: 0.0,
        }
    }
}
