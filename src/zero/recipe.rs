//! The optimizer's settings for each parameter, and the values that it needs of them.

use super::rank::Rank;
use super::sub_group::SubGroup;
use crate::optim::{GroupStep, Needs};
use crate::param::ParamId;

/// The settings of each parameter.
pub(crate) type Recipe<'a> = dyn Fn(ParamId) -> GroupStep<'a> + 'a;

/// The values that the optimizer of a sub-group needs of its parameters; nothing where none trains them.
pub(super) fn needs<'a, R: Rank>(group: &SubGroup<R>, recipe: &Recipe<'a>) -> Option<Needs<'a>> {
    group.slots.first().filter(|_| group.class.is_trained()).map(|slot| recipe(slot.param).optimizer.needs())
}
