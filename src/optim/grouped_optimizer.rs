//! An engine's optimizer with its parameter groups, each of which has a learning-rate schedule.

use super::parameter_groups::{GroupOverrides, GroupSettings};
use super::schedule::{COMPARED_STEPS, GroupBaseRates};
use super::{LrSchedule, Momentum, Optimizer, OptimizerRole, ParameterGrouping, RateRule, Schedule, StepContext};
use crate::config::SchedulerConfig;
use crate::error::{OptimError, Result};
use std::fmt;
use std::sync::Arc;

/// The optimizer of an engine, with the settings of each parameter group.
pub(crate) struct GroupedOptimizer {
    grouping: Arc<ParameterGrouping>,
    groups: Vec<OptimizerGroup>,
}

struct OptimizerGroup {
    role: OptimizerRole,
    /// The base rate of the schedule.
    lr: f64,
    overrides: GroupOverrides,
    schedule: Schedule,
    /// Whether the user gave the group a rate that its schedule ignores.
    ignores_own_rate: bool,
    /// Whether the schedule changes the rate.
    is_scheduled: bool,
    /// The rate that was set. It replaces the schedule's rate until the schedule's next step or, if no schedule changes
    /// the rate, for good.
    set_lr: Option<f64>,
}

impl OptimizerGroup {
    fn lr(&self) -> f64 {
        self.set_lr.unwrap_or_else(|| self.schedule.lr())
    }

    /// Drops the rate that was set, if a schedule changes the rate. This method is called when the schedule has moved
    /// to another step.
    fn follow_schedule(&mut self) {
        self.set_lr = self.set_lr.filter(|_| !self.is_scheduled);
    }
}

/// The settings of one group's parameters in a step.
#[derive(Clone, Copy)]
pub(crate) struct GroupStepSettings<'a> {
    pub optimizer: &'a dyn Optimizer,
    pub ctx: StepContext,
}

impl GroupedOptimizer {
    /// Assigns the final numbers to the groups of registered parameters (`parameter_groups` contains the number of each
    /// parameter's group), and gives each group its schedule: `user_schedule`, or the configuration's. Also returns
    /// the indices of the user's groups that select nothing.
    ///
    /// # Errors
    /// The errors of a schedule; [`OptimError::NoSchedule`] if there is one, but the optimizer cannot follow it.
    pub fn new(
        grouping: Arc<ParameterGrouping>,
        (parameter_groups, used): (Vec<&mut usize>, &[usize]),
        user_schedule: Option<Arc<dyn LrSchedule>>,
        scheduler: Option<&SchedulerConfig>,
    ) -> Result<(Self, Vec<usize>)> {
        let (settled, empty) = grouping.settle(parameter_groups, used);
        let user_schedule = own_schedule(grouping.optimizer(OptimizerRole::Main), user_schedule, scheduler.is_some())?;
        let main = grouping.optimizer(OptimizerRole::Main).map(|o| o.momentum());
        let cycles_momentum = matches!(main, Some(Momentum::Betas(..)));
        let count = settled.len();
        let is_scheduled = user_schedule.is_some() || scheduler.is_some();
        let groups = settled.into_iter().enumerate().map(|(group, GroupSettings { role, lr, overrides })| {
            let optimizer = grouping.optimizer(role);
            let momentum = match (optimizer.map_or(Momentum::Factor(0.0), |o| o.momentum()), overrides.betas) {
                (Momentum::Betas(..), Some((beta1, beta2))) => Momentum::Betas(beta1, beta2),
                (momentum, _) => momentum,
            };
            let has_own_rate = lr.is_some();
            let lr = optimizer.map_or(0.0, |o| lr.unwrap_or(o.lr()));
            let schedule_from = |lr| {
                let base = GroupBaseRates { lr, momentum, cycles_momentum, group, groups: count };
                match &user_schedule {
                    Some(user_schedule) => Ok(Schedule::custom_of_group(user_schedule.clone(), base)),
                    None => Schedule::of_group(scheduler, base),
                }
            };
            let schedule = schedule_from(lr)?;
            let ignores_own_rate = has_own_rate
                && schedule.same_rates(&schedule_from(lr + 1.0)?)
                && user_schedule
                    .as_ref()
                    .is_none_or(|custom| COMPARED_STEPS.iter().all(|n| custom.lr_of_group(*n, group) == custom.lr(*n)));
            Ok(OptimizerGroup { role, lr, overrides, schedule, ignores_own_rate, is_scheduled, set_lr: None })
        });
        let groups = groups.collect::<Result<_>>()?;
        Ok((Self { grouping, groups }, empty))
    }

    /// Returns the indices of the groups whose rate was given by the user but is ignored by their schedule.
    pub fn with_ignored_rates(&self) -> Vec<usize> {
        (0..self.groups.len()).filter(|group| self.groups[*group].ignores_own_rate).collect()
    }

    /// Returns whether there is an optimizer.
    pub fn can_train(&self) -> bool {
        self.name().is_some()
    }

    /// Returns the optimizer's name.
    pub fn name(&self) -> Option<&str> {
        self.grouping.optimizer(OptimizerRole::Main).map(Optimizer::name)
    }

    /// Returns the names of all states.
    pub fn all_state_names(&self) -> Vec<&'static str> {
        self.grouping.all_state_names()
    }

    /// Returns the names of the states that a group's parameters have.
    pub fn state_names(&self, group: usize) -> &'static [&'static str] {
        self.grouping.state_names(self.groups[group].role)
    }

    /// Returns the names of the factored states that a group's parameters have.
    pub fn factored_names(&self, group: usize) -> &'static [&'static str] {
        self.grouping.factored_names(self.groups[group].role)
    }

    /// Returns the learning rate of the next step, by group.
    pub fn lr(&self) -> Vec<f64> {
        self.groups.iter().map(OptimizerGroup::lr).collect()
    }

    /// Sets the learning rate of each group: until the next step of its schedule or, if no schedule changes the rate,
    /// for good.
    pub fn set_lr(&mut self, lr: &[f64]) {
        self.groups.iter_mut().zip(lr).for_each(|(group, lr)| group.set_lr = Some(*lr));
    }

    /// Returns the rates that were set and are in force, by group, or `None` if none was set.
    pub fn set_rates(&self) -> Option<Vec<f64>> {
        let rates: Option<Vec<f64>> = self.groups.iter().map(|group| group.set_lr).collect();
        rates.filter(|rates| !rates.is_empty())
    }

    /// Restores the rates that were set, one per group, or removes them.
    pub fn restore_rates(&mut self, rates: Option<&[f64]>) {
        let mut rates = rates.into_iter().flatten().copied();
        self.groups.iter_mut().for_each(|group| group.set_lr = rates.next());
    }

    /// Returns whether a schedule changes the rates.
    pub fn is_scheduled(&self) -> bool {
        self.groups.iter().any(|group| group.is_scheduled)
    }

    /// Returns the momentum of the next step, by group.
    pub fn momentum(&self) -> Vec<Momentum> {
        self.groups.iter().map(|g| g.schedule.momentum()).collect()
    }

    /// Returns the settings of each group in optimizer step `step`.
    ///
    /// # Errors
    /// Values of a schedule that the optimizer cannot work with; a missing optimizer.
    pub fn for_step(&self, step: u64, grad_scale: f32) -> Result<Vec<GroupStepSettings<'_>>> {
        let settings_of = |group: &OptimizerGroup| {
            let (lr, betas) = group.schedule.current_values()?;
            let lr = group.set_lr.unwrap_or(lr);
            let GroupOverrides { betas: group_betas, eps, weight_decay, trust_ratio } = group.overrides;
            let trust_ratio = trust_ratio.unwrap_or(true);
            let betas = betas.or(group_betas);
            let ctx = StepContext { lr, betas, eps, weight_decay, trust_ratio, step, grad_scale };
            let optimizer = self.grouping.optimizer(group.role).ok_or(OptimError::NoOptimizer)?;
            Ok(GroupStepSettings { optimizer, ctx })
        };
        self.groups.iter().map(settings_of).collect()
    }

    /// Advances the schedules after an applied step.
    pub fn step(&mut self) {
        for group in &mut self.groups {
            group.schedule.step();
            group.follow_schedule();
        }
    }

    /// Returns DeepSpeed's counter, which is the same for all groups.
    pub fn last_batch_iteration(&self) -> i64 {
        self.groups.first().map_or(-1, |g| g.schedule.last_batch_iteration())
    }

    /// Resumes the schedules at a value of the counter.
    pub fn restore(&mut self, last_batch_iteration: i64) {
        for group in &mut self.groups {
            group.schedule.restore(last_batch_iteration);
            group.follow_schedule();
        }
    }
}

/// Returns the schedule to use instead of the configuration's: `user_schedule`, or a rule of the optimizer.
///
/// # Errors
/// [`OptimError::NoSchedule`] if there is a schedule, but the optimizer cannot follow it.
fn own_schedule(
    optimizer: Option<&dyn Optimizer>,
    user_schedule: Option<Arc<dyn LrSchedule>>,
    has_scheduler: bool,
) -> Result<Option<Arc<dyn LrSchedule>>> {
    let Some(optimizer) = optimizer else { return Ok(user_schedule) };
    let rule: Option<Arc<dyn LrSchedule>> = match optimizer.rate_rule() {
        RateRule::Schedule => return Ok(user_schedule),
        RateRule::Constant => None,
        RateRule::OfSteps(rule) => Some(Arc::new(rule)),
    };
    if user_schedule.is_some() || has_scheduler {
        return Err(OptimError::NoSchedule { optimizer: optimizer.name().into() }.into());
    }
    Ok(rule)
}

impl fmt::Debug for GroupedOptimizer {
    /// Writes everything that must be equal on all ranks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let optimizers = OptimizerRole::ALL
            .map(|role| self.grouping.optimizer(role).map(|o| (o.name().to_owned(), o.state_names())));
        write!(f, "{optimizers:?} ")?;
        f.debug_list().entries(self.groups.iter().map(|g| (g.role, g.lr, g.overrides, &g.schedule))).finish()
    }
}
