//! The optimizer's hyperparameters for each parameter, and the kinds of values that the optimizer needs.

use crate::optim::{GroupStepSettings, OptimizerNeeds};
use crate::param::ParamId;
use crate::zero::share::sub_group::SubGroup;
use crate::zero::step_executor::StepExecutor;

/// The hyperparameters of each parameter.
pub(crate) type Hyperparameters<'a> = dyn Fn(ParamId) -> GroupStepSettings<'a> + 'a;

/// Returns the kinds of values that the optimizer of a sub-group needs from its parameters; `None` if no optimizer
/// trains them.
pub(in crate::zero) fn needs<'a, R: StepExecutor>(
    group: &SubGroup<R>,
    hyperparameters: &Hyperparameters<'a>,
) -> Option<OptimizerNeeds<'a>> {
    group.slots.first().filter(|_| group.class.is_trained()).map(|slot| hyperparameters(slot.param).optimizer.needs())
}
