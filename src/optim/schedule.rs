//! Learning rate and momentum by step: DeepSpeed's five schedules with its arithmetic, or a custom schedule.
//!
//! DeepSpeed's counter `it` starts at -1. Constructing a schedule already applies the values of `it = -1`, so optimizer
//! step n (counted from 1) uses those of `it = n - 2`, and the first **two** steps of a warm-up use its minimum.

mod one_cycle;
mod warmup;

use super::{Momentum, base_lr, momentum};
use crate::config::{OptimizerConfig, PerGroup, SchedulerConfig};
use crate::error::{OptimError, Result};
use std::fmt;
use std::sync::Arc;

/// A custom schedule, for [`EngineBuilder::schedule`](crate::EngineBuilder::schedule).
///
/// Its values must depend only on the number of optimizer steps applied so far (skipped steps do not count), so that a
/// run that resumes from a checkpoint gets the values that it would have had without the interruption. All ranks must
/// have the same schedule.
///
/// A closure, such as `rsqrt` below, is a schedule that does not change the betas:
///
/// ```
/// use candle_zero::Engine;
/// use candle_zero::optim::LrSchedule;
///
/// // Divides the rate by 10 every thousand steps, with a beta1 that rises to 0.95.
/// struct Stairs;
///
/// impl LrSchedule for Stairs {
///     fn lr(&self, applied: u64) -> f64 {
///         1e-2 * 0.1f64.powi((applied / 1000) as i32)
///     }
///
///     fn betas(&self, applied: u64) -> Option<(f64, f64)> {
///         Some((0.85 + 0.1 * (applied as f64 / 1000.0).min(1.0), 0.999))
///     }
/// }
///
/// let config = r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW"}}"#;
/// let engine = Engine::builder().schedule(Stairs).initialize(|vb| candle_nn::linear(4, 1, vb), config)?;
/// assert_eq!(engine.lr(), [1e-2]);
///
/// let rsqrt = |applied: u64| 1e-2 / ((applied + 1) as f64).sqrt();
/// let engine = Engine::builder().schedule(rsqrt).initialize(|vb| candle_nn::linear(4, 1, vb), config)?;
/// assert_eq!(engine.lr(), [1e-2]);
/// # Ok::<(), candle_zero::Error>(())
/// ```
pub trait LrSchedule: Send + Sync {
    /// Returns the rate of the optimizer step after `applied` steps: `lr(0)` is that of the first step.
    fn lr(&self, applied: u64) -> f64;

    /// Returns the rate of a parameter group in the optimizer step after `applied` steps. Groups are numbered as in
    /// [`Engine::get_lr`](crate::Engine::get_lr). The default is the rate that all groups share, regardless of the
    /// group's own rate.
    fn lr_of_group(&self, applied: u64, group: usize) -> f64 {
        _ = group;
        self.lr(applied)
    }

    /// Returns the betas of the optimizer step after `applied` steps; `None` means the optimizer's own. An
    /// optimizer without betas keeps its momentum.
    fn betas(&self, applied: u64) -> Option<(f64, f64)> {
        let _ = applied;
        None
    }
}

impl<F: Fn(u64) -> f64 + Send + Sync> LrSchedule for F {
    fn lr(&self, applied: u64) -> f64 {
        self(applied)
    }
}

/// The numbers of applied steps at which schedules are compared.
pub(crate) const COMPARED_STEPS: [u64; 6] = [0, 1, 3, 30, 3000, 1_000_000];

/// A learning rate and a momentum that change with the applied optimizer steps.
///
/// ```
/// use candle_zero::Config;
/// use candle_zero::optim::Schedule;
///
/// let config = Config::load(
///     r#"{"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
///         "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}}"#,
///     1,
/// )?;
/// let mut schedule = Schedule::new(config.scheduler.as_ref(), config.optimizer.as_ref())?;
/// assert_eq!(schedule.lr(), 0.0); // in force for the first optimizer step
/// schedule.step();
/// schedule.step();
/// assert!((schedule.lr() - 0.01).abs() < 1e-12); // in force for the third step
/// # Ok::<(), candle_zero::Error>(())
/// ```
#[derive(Clone)]
pub struct Schedule {
    rule: Arc<dyn LrSchedule>,
    /// The index of the parameter group.
    group: usize,
    /// The optimizer's own momentum, or the group's.
    momentum: Momentum,
    /// Whether the schedule may change the momentum.
    cycles_momentum: bool,
    last_batch_iteration: i64,
    lr: f64,
    betas: Option<(f64, f64)>,
}

/// A schedule from the configuration.
struct ConfigSchedule {
    config: SchedulerConfig,
    /// The optimizer's own `lr`, or the group's: WarmupCosineLR scales it, and WarmupLR ends at it if `warmup_max_lr`
    /// is not given.
    base_lr: f64,
    group: usize,
}

/// The properties of a parameter group that its schedule uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupBaseRates {
    /// The group's own learning rate.
    pub lr: f64,
    /// The group's own momentum.
    pub momentum: Momentum,
    /// Whether the main optimizer has betas that a schedule may change. In DeepSpeed, Muon has none.
    pub cycles_momentum: bool,
    /// The index of the group, below `groups`.
    pub group: usize,
    pub groups: usize,
}

impl LrSchedule for ConfigSchedule {
    fn lr(&self, applied: u64) -> f64 {
        let it = counter(applied);
        match &self.config {
            SchedulerConfig::OneCycle(config) => one_cycle::lr(config, self.group, it),
            SchedulerConfig::LrRangeTest {
                lr_range_test_min_lr,
                lr_range_test_step_size,
                lr_range_test_step_rate,
                lr_range_test_staircase,
            } => {
                let k = applied as f64 / *lr_range_test_step_size as f64;
                let k = if *lr_range_test_staircase { k.floor() } else { k };
                lr_range_test_min_lr.for_group(self.group) * (1.0 + lr_range_test_step_rate * k)
            }
            config => warmup::lr(config, self.base_lr, self.group, it).unwrap_or(self.base_lr),
        }
    }

    fn betas(&self, applied: u64) -> Option<(f64, f64)> {
        match &self.config {
            SchedulerConfig::OneCycle(config) => one_cycle::betas(config, counter(applied)),
            _ => None,
        }
    }
}

/// Returns DeepSpeed's counter.
fn counter(applied: u64) -> f64 {
    applied as f64 - 1.0
}

/// Rejects the parameters that DeepSpeed's constructors reject.
///
/// # Errors
/// [`OptimError::ScheduleParameter`] if `warmup_num_steps` or `lr_range_test_step_size` is 0, `cycle_first_step_size`
/// is not above 0, or `cycle_second_step_size` is negative. (A `total_num_steps` below `warmup_num_steps` is allowed:
/// DeepSpeed only warns.)
fn validate(config: &SchedulerConfig) -> Result<()> {
    const CONSTANT: &str = "leave the scheduler section out to train with the optimizer's constant lr";
    let refused =
        |key, found: String, allowed, fix| Err(OptimError::ScheduleParameter { key, found, allowed, fix }.into());
    match config {
        SchedulerConfig::WarmupLr { warmup_num_steps: 0, .. }
        | SchedulerConfig::WarmupDecayLr { warmup_num_steps: 0, .. }
        | SchedulerConfig::WarmupCosineLr { warmup_num_steps: 0, .. } => {
            refused("scheduler.params.warmup_num_steps", "0".into(), "a positive integer", CONSTANT)
        }
        SchedulerConfig::LrRangeTest { lr_range_test_step_size: 0, .. } => {
            refused("scheduler.params.lr_range_test_step_size", "0".into(), "a positive integer", CONSTANT)
        }
        SchedulerConfig::OneCycle(cycle) if !(f64::MIN_POSITIVE..).contains(&cycle.cycle_first_step_size) => {
            let found = cycle.cycle_first_step_size.to_string();
            refused(
                "scheduler.params.cycle_first_step_size",
                found,
                "a number above 0",
                "set the number of steps in which the learning rate rises",
            )
        }
        SchedulerConfig::OneCycle(cycle) if !(0.0..).contains(&cycle.cycle_second_step_size) => {
            let found = cycle.cycle_second_step_size.to_string();
            let fix = "set the number of steps in which the learning rate falls, 0 for none";
            refused("scheduler.params.cycle_second_step_size", found, "a number of at least 0", fix)
        }
        _ => Ok(()),
    }
}

/// Rejects lists that do not have one number for each of `groups` parameter groups.
fn validate_lists(config: &SchedulerConfig, groups: usize) -> Result<()> {
    let rates = match config {
        SchedulerConfig::WarmupLr { warmup_min_lr, warmup_max_lr, .. } => vec![
            ("scheduler.params.warmup_min_lr", Some(warmup_min_lr)),
            ("scheduler.params.warmup_max_lr", warmup_max_lr.as_ref()),
        ],
        SchedulerConfig::WarmupDecayLr { warmup_min_lr, warmup_max_lr, .. } => vec![
            ("scheduler.params.warmup_min_lr", Some(warmup_min_lr)),
            ("scheduler.params.warmup_max_lr", Some(warmup_max_lr)),
        ],
        SchedulerConfig::OneCycle(cycle) => vec![
            ("scheduler.params.cycle_min_lr", Some(&cycle.cycle_min_lr)),
            ("scheduler.params.cycle_max_lr", Some(&cycle.cycle_max_lr)),
        ],
        SchedulerConfig::LrRangeTest { lr_range_test_min_lr, .. } => {
            vec![("scheduler.params.lr_range_test_min_lr", Some(lr_range_test_min_lr))]
        }
        SchedulerConfig::WarmupCosineLr { .. } => vec![],
    };
    for (key, rate) in rates {
        let Some(PerGroup::Each(rates)) = rate else { continue };
        if rates.len() != groups {
            return Err(OptimError::ScheduleParameter {
                key,
                found: format!("a list of {}, but the number of parameter groups is {groups}", rates.len()),
                allowed: "a number, or a list with one number for each group",
                fix: "correct the list, or the parameter groups given to the engine's builder",
            }
            .into());
        }
    }
    Ok(())
}

impl Schedule {
    /// Creates the schedule from a configuration's scheduler and optimizer sections, for a single group of all
    /// parameters, with the values of the first optimizer step in force. Without a scheduler, the values are the
    /// optimizer's own, and constant; without an optimizer, they are 0.
    ///
    /// # Errors
    /// [`OptimError::ScheduleParameter`] for a parameter that DeepSpeed rejects too, and for a list of rates for
    /// several groups.
    pub fn new(scheduler: Option<&SchedulerConfig>, optimizer: Option<&OptimizerConfig>) -> Result<Self> {
        let momentum = optimizer.map_or(Momentum::Factor(0.0), momentum);
        let lr = optimizer.map_or(0.0, base_lr);
        let base = GroupBaseRates { lr, momentum, cycles_momentum: true, group: 0, groups: 1 };
        Self::of_group(scheduler, base)
    }

    /// Creates the schedule of one parameter group.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub(crate) fn of_group(scheduler: Option<&SchedulerConfig>, base: GroupBaseRates) -> Result<Self> {
        let GroupBaseRates { lr: base_lr, group, groups, .. } = base;
        Ok(match scheduler {
            None => Self::custom_of_group(Arc::new(move |_| base_lr), base),
            Some(config) => {
                validate(config)?;
                validate_lists(config, groups)?;
                Self::custom_of_group(Arc::new(ConfigSchedule { config: config.clone(), base_lr, group }), base)
            }
        })
    }

    /// Creates a custom schedule for this optimizer, with the values of the first step in force.
    pub fn custom(rule: Arc<dyn LrSchedule>, optimizer: Option<&OptimizerConfig>) -> Self {
        let momentum = optimizer.map_or(Momentum::Factor(0.0), momentum);
        Self::custom_of_group(rule, GroupBaseRates { lr: 0.0, momentum, cycles_momentum: true, group: 0, groups: 1 })
    }

    /// Creates a custom schedule for a parameter group.
    pub(crate) fn custom_of_group(rule: Arc<dyn LrSchedule>, base: GroupBaseRates) -> Self {
        let GroupBaseRates { momentum, cycles_momentum, group, .. } = base;
        let mut schedule =
            Self { rule, group, momentum, cycles_momentum, last_batch_iteration: -1, lr: 0.0, betas: None };
        schedule.restore(-1);
        schedule
    }

    /// Returns whether `other` has the same rates, compared at a few steps.
    pub(crate) fn same_rates(&self, other: &Self) -> bool {
        let rate = |schedule: &Self, step| schedule.rule.lr_of_group(step, schedule.group);
        COMPARED_STEPS.iter().all(|step| rate(self, *step) == rate(other, *step))
    }

    /// Returns the learning rate in force for the next optimizer step.
    pub fn lr(&self) -> f64 {
        self.lr
    }

    /// Returns the betas in force for the next step if the schedule changes them; `None` means that the optimizer's own
    /// apply, or that it has none.
    pub fn betas(&self) -> Option<(f64, f64)> {
        self.betas
    }

    /// Returns the momentum in force for the next step: the schedule's betas, otherwise the optimizer's own momentum.
    pub fn momentum(&self) -> Momentum {
        self.betas.map_or(self.momentum, |(beta1, beta2)| Momentum::Betas(beta1, beta2))
    }

    /// Returns the current learning rate and betas, if an optimizer can work with them.
    ///
    /// # Errors
    /// [`OptimError::ScheduleValue`] for a rate that is negative or not finite, and for betas outside [0, 1).
    pub fn current_values(&self) -> Result<(f64, Option<(f64, f64)>)> {
        let refused = |what, found, allowed| {
            let step = self.last_batch_iteration.saturating_add(2);
            Err(OptimError::ScheduleValue { what, step, found, allowed }.into())
        };
        if !(0.0..f64::INFINITY).contains(&self.lr) {
            return refused("the learning rate", self.lr, "a finite number of at least 0");
        }
        let betas = self.betas.into_iter().flat_map(|(beta1, beta2)| [("beta1", beta1), ("beta2", beta2)]);
        for (name, beta) in betas {
            // Kernels use the betas in f32.
            if !(0.0..1.0).contains(&(beta as f32)) {
                return refused(name, beta, "a number of at least 0 and below 1");
            }
        }
        Ok((self.lr, self.betas))
    }

    /// Advances by one step. Call this method once after each applied optimizer step, but not after a skipped one.
    pub fn step(&mut self) {
        self.restore(self.last_batch_iteration.saturating_add(1));
    }

    /// Resumes at a value of the counter.
    pub fn restore(&mut self, last_batch_iteration: i64) {
        self.last_batch_iteration = last_batch_iteration;
        // A counter below -1 is invalid and means the start.
        let applied = u64::try_from(last_batch_iteration.saturating_add(1)).unwrap_or(0);
        self.lr = self.rule.lr_of_group(applied, self.group);
        self.betas = match self.momentum {
            Momentum::Betas(..) if self.cycles_momentum => self.rule.betas(applied),
            _ => None,
        };
    }

    /// Returns DeepSpeed's counter: the number of applied optimizer steps minus 1.
    pub fn last_batch_iteration(&self) -> i64 {
        self.last_batch_iteration
    }
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Schedule")
            .field("group", &self.group)
            .field("last_batch_iteration", &self.last_batch_iteration)
            .field("lr", &self.lr)
            .field("momentum", &self.momentum())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::config::{OneCycleConfig, SgdConfig, WarmupType};

    fn refusal(config: SchedulerConfig) -> String {
        Schedule::new(Some(&config), None).unwrap_err().to_string()
    }

    #[test]
    fn what_no_schedule_can_have_is_refused_with_its_key() {
        let cosine = SchedulerConfig::WarmupCosineLr {
            total_num_steps: 10,
            warmup_min_ratio: 0.0,
            warmup_num_steps: 0,
            cos_min_ratio: 0.0,
            warmup_type: WarmupType::Log,
        };
        insta::assert_snapshot!(refusal(cosine), @"scheduler.params.warmup_num_steps is 0 (allowed: a positive integer); leave the scheduler section out to train with the optimizer's constant lr");
        let range = SchedulerConfig::LrRangeTest {
            lr_range_test_min_lr: 0.1.into(),
            lr_range_test_step_size: 0,
            lr_range_test_step_rate: 1.0,
            lr_range_test_staircase: false,
        };
        insta::assert_snapshot!(refusal(range), @"scheduler.params.lr_range_test_step_size is 0 (allowed: a positive integer); leave the scheduler section out to train with the optimizer's constant lr");
        let cycle = |first, second| {
            SchedulerConfig::OneCycle(OneCycleConfig {
                cycle_first_step_size: first,
                cycle_second_step_size: second,
                ..OneCycleConfig::new(0.1, 0.2)
            })
        };
        insta::assert_snapshot!(refusal(cycle(0.0, 5.0)), @"scheduler.params.cycle_first_step_size is 0 (allowed: a number above 0); set the number of steps in which the learning rate rises");
        insta::assert_snapshot!(refusal(cycle(5.0, -1.0)), @"scheduler.params.cycle_second_step_size is -1 (allowed: a number of at least 0); set the number of steps in which the learning rate falls, 0 for none");
        assert!(Schedule::new(Some(&cycle(5.0, 0.0)), None).is_ok());
    }

    #[test]
    fn without_a_scheduler_rate_and_momentum_stay() {
        let sgd = SgdConfig { lr: 0.25, momentum: 0.9, dampening: 0.0, weight_decay: 0.0, nesterov: false };
        let mut schedule = Schedule::new(None, Some(&OptimizerConfig::Sgd(sgd))).unwrap();
        schedule.step();
        assert_eq!((schedule.lr(), schedule.last_batch_iteration()), (0.25, 0));
        assert_eq!((schedule.momentum(), schedule.betas()), (Momentum::Factor(0.9), None));
    }

    #[test]
    fn every_stair_is_reached_at_its_first_step() {
        let config = OneCycleConfig {
            cycle_first_step_size: 49.0,
            cycle_second_step_size: 30.0,
            cycle_first_stair_count: 7,
            cycle_second_stair_count: 3,
            ..OneCycleConfig::new(0.0, 1.0)
        };
        // This is the height after `applied` steps, in stairs: sevenths on the way up, thirds on the way down.
        let height = |applied: u64, stairs: f64| one_cycle::lr(&config, 0, counter(applied)) * stairs;
        for applied in 0..=49 {
            assert!((height(applied, 7.0) - (applied / 7) as f64).abs() < 1e-12, "{applied}");
        }
        for applied in 50..=79 {
            assert!((height(applied, 3.0) - ((79 - applied) / 10) as f64).abs() < 1e-12, "{applied}");
        }
    }

    #[test]
    fn values_that_no_optimizer_can_take_are_errors() {
        let adam = Config::load(r#"{"train_batch_size": 1, "optimizer": {"type": "Adam"}}"#, 1).unwrap().optimizer;
        for (lr, allowed) in [(0.0, true), (0.5, true), (-0.1, false), (f64::NAN, false), (f64::INFINITY, false)] {
            let schedule = Schedule::custom(Arc::new(move |_| lr), adam.as_ref());
            assert_eq!(schedule.current_values().is_ok(), allowed, "{lr}");
        }
        struct ConstantBetas(f64, f64);
        impl LrSchedule for ConstantBetas {
            fn lr(&self, _: u64) -> f64 {
                0.1
            }
            fn betas(&self, _: u64) -> Option<(f64, f64)> {
                Some((self.0, self.1))
            }
        }
        for (beta1, beta2, allowed) in [(0.0, 0.5, true), (1.0, 0.5, false), (0.5, -0.1, false), (f64::NAN, 0.5, false)]
        {
            let mut schedule = Schedule::custom(Arc::new(ConstantBetas(beta1, beta2)), adam.as_ref());
            schedule.step();
            assert_eq!(schedule.current_values().is_ok(), allowed, "{beta1} {beta2}");
            if let (1.0, Err(error)) = (beta1, schedule.current_values()) {
                insta::assert_snapshot!(error, @"the schedule sets beta1 to 1 in optimizer step 2 (allowed: a number of at least 0 and below 1); correct the schedule (OneCycle: lower decay_mom_rate), or train for fewer steps");
            }
        }
    }
}
