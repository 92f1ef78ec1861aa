//! An engine's optimizer with its parameter groups, each with the schedule of its learning rate.

use super::parameter_groups::{GroupOverrides, GroupSettings};
use super::schedule::{GroupBaseRates, STEPS_LOOKED_AT};
use super::{LrSchedule, Momentum, Optimizer, OptimizerRole, ParameterGrouping, Schedule, StepContext};
use crate::config::SchedulerConfig;
use crate::error::{OptimError, Result};
use std::fmt;
use std::sync::Arc;

/// The optimizer of an engine and what each parameter group is trained with.
pub(crate) struct GroupedOptimizer {
    grouping: Arc<ParameterGrouping>,
    groups: Vec<OptimizerGroup>,
}

struct OptimizerGroup {
    role: OptimizerRole,
    /// Where a schedule starts from.
    lr: f64,
    numbers: GroupOverrides,
    schedule: Schedule,
    /// The user has given the group a rate, from which its schedule does not start.
    ignores_own_rate: bool,
    /// Whether the schedule changes the rate.
    is_scheduled: bool,
    /// The rate that stands in for the schedule's, until that goes on.
    set_lr: Option<f64>,
}

impl OptimizerGroup {
    fn lr(&self) -> f64 {
        self.set_lr.unwrap_or_else(|| self.schedule.lr())
    }

    /// The schedule has gone on: what was set is over, unless there is none.
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
    /// Settles the groups of registered parameters (the number of each one's), and gives each its schedule: the user's
    /// `own`, or the configuration's. Also gives the numbers of the user's groups that select nothing.
    ///
    /// # Errors
    /// The errors of a schedule.
    pub fn new(
        grouping: Arc<ParameterGrouping>,
        parameter_groups: Vec<&mut usize>,
        own: Option<Arc<dyn LrSchedule>>,
        scheduler: Option<&SchedulerConfig>,
    ) -> Result<(Self, Vec<usize>)> {
        let (settled, empty) = grouping.settle(parameter_groups);
        let main = grouping.optimizer(OptimizerRole::Main).map(|o| o.momentum());
        let cycles = matches!(main, Some(Momentum::Betas(..)));
        let count = settled.len();
        let is_scheduled = own.is_some() || scheduler.is_some();
        let groups = settled.into_iter().enumerate().map(|(group, GroupSettings { role, lr, numbers })| {
            let optimizer = grouping.optimizer(role);
            let momentum = match (optimizer.map_or(Momentum::Factor(0.0), |o| o.momentum()), numbers.betas) {
                (Momentum::Betas(..), Some((beta1, beta2))) => Momentum::Betas(beta1, beta2),
                (momentum, _) => momentum,
            };
            let has_own_rate = lr.is_some();
            let lr = optimizer.map_or(0.0, |o| lr.unwrap_or(o.lr()));
            let schedule_from = |lr| {
                let base = GroupBaseRates { lr, momentum, cycles, group, groups: count };
                match &own {
                    Some(own) => Ok(Schedule::custom_of_group(own.clone(), base)),
                    None => Schedule::of_group(scheduler, base),
                }
            };
            let schedule = schedule_from(lr)?;
            let ignores_own_rate = has_own_rate
                && schedule.same_rates(&schedule_from(lr + 1.0)?)
                && own
                    .as_ref()
                    .is_none_or(|own| STEPS_LOOKED_AT.iter().all(|n| own.lr_of_group(*n, group) == own.lr(*n)));
            Ok(OptimizerGroup { role, lr, numbers, schedule, ignores_own_rate, is_scheduled, set_lr: None })
        });
        let groups = groups.collect::<Result<_>>()?;
        Ok((Self { grouping, groups }, empty))
    }

    /// The numbers of the groups whose rate was given by the user, and has no effect on their schedule.
    pub fn with_ignored_rates(&self) -> Vec<usize> {
        (0..self.groups.len()).filter(|group| self.groups[*group].ignores_own_rate).collect()
    }

    /// Whether there is an optimizer.
    pub fn can_train(&self) -> bool {
        self.name().is_some()
    }

    /// The optimizer's name.
    pub fn name(&self) -> Option<&str> {
        self.grouping.optimizer(OptimizerRole::Main).map(Optimizer::name)
    }

    /// All names of its states.
    pub fn all_state_names(&self) -> Vec<&'static str> {
        self.grouping.all_state_names()
    }

    /// The states of the parameters of a group.
    pub fn state_names(&self, group: usize) -> &'static [&'static str] {
        self.grouping.state_names(self.groups[group].role)
    }

    /// Learning rate of the coming step, by group.
    pub fn lr(&self) -> Vec<f64> {
        self.groups.iter().map(OptimizerGroup::lr).collect()
    }

    /// Sets the learning rate of each group, until its schedule goes on.
    pub fn set_lr(&mut self, lr: &[f64]) {
        self.groups.iter_mut().zip(lr).for_each(|(group, lr)| group.set_lr = Some(*lr));
    }

    /// The rates that were set and are in force, by group; nothing where none was set.
    pub fn set_rates(&self) -> Option<Vec<f64>> {
        let rates: Option<Vec<f64>> = self.groups.iter().map(|group| group.set_lr).collect();
        rates.filter(|rates| !rates.is_empty())
    }

    /// Goes on with the rates that were set for as many groups, or with none.
    pub fn restore_rates(&mut self, rates: Option<&[f64]>) {
        let mut rates = rates.into_iter().flatten().copied();
        self.groups.iter_mut().for_each(|group| group.set_lr = rates.next());
    }

    /// Whether a schedule changes the rates.
    pub fn is_scheduled(&self) -> bool {
        self.groups.iter().any(|group| group.is_scheduled)
    }

    /// Momentum of the coming step, by group.
    pub fn momentum(&self) -> Vec<Momentum> {
        self.groups.iter().map(|g| g.schedule.momentum()).collect()
    }

    /// The settings of each group in optimizer step `step`.
    ///
    /// # Errors
    /// Values of a schedule that no optimizer can take.
    pub fn for_step(&self, step: u64, grad_scale: f32) -> Result<Vec<GroupStepSettings<'_>>> {
        let of_group = |group: &OptimizerGroup| {
            let (lr, betas) = group.schedule.in_force()?;
            let lr = group.set_lr.unwrap_or(lr);
            let GroupOverrides { betas: own, eps, weight_decay } = group.numbers;
            let ctx = StepContext { lr, betas: betas.or(own), eps, weight_decay, step, grad_scale };
            let optimizer = self.grouping.optimizer(group.role).ok_or(OptimError::NoOptimizer)?;
            Ok(GroupStepSettings { optimizer, ctx })
        };
        self.groups.iter().map(of_group).collect()
    }

    /// A step has been applied.
    pub fn step(&mut self) {
        for group in &mut self.groups {
            group.schedule.step();
            group.follow_schedule();
        }
    }

    /// DeepSpeed's counter, the same in all groups.
    pub fn last_batch_iteration(&self) -> i64 {
        self.groups.first().map_or(-1, |g| g.schedule.last_batch_iteration())
    }

    /// Goes on where a counter says.
    pub fn restore(&mut self, last_batch_iteration: i64) {
        for group in &mut self.groups {
            group.schedule.restore(last_batch_iteration);
            group.follow_schedule();
        }
    }
}

impl fmt::Debug for GroupedOptimizer {
    /// All that ranks have to have in common.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let halves = OptimizerRole::ALL
            .map(|role| self.grouping.optimizer(role).map(|o| (o.name().to_owned(), o.state_names())));
        write!(f, "{halves:?} ")?;
        f.debug_list().entries(self.groups.iter().map(|g| (g.role, g.lr, g.numbers, &g.schedule))).finish()
    }
}
