//! The optimizer's settings for each parameter, and the values that it needs of them.

use super::rank::Rank;
use super::sub_group::SubGroup;
use crate::optim::{GroupStep, Needs};
use crate::param::ParamId;

/// The settings of each parameter.
pub(crate) type Recipe<'a> = dyn Fn(ParamId) -> GroupStep<'a> + 'a;

/// The values that the optimizer of a sub-group needs of its parameters.
pub(super) fn needs<'a, R: Rank>(group: &SubGroup<R>, recipe: &Recipe<'a>) -> Needs<'a> {
    group.slots.first().map_or(Needs::Elements, |slot| recipe(slot.param).optimizer.needs())
}
