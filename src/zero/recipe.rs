//! What the optimizer trains each parameter with, and what it needs of them.

use super::rank::Rank;
use super::sub_group::SubGroup;
use crate::optim::{GroupStep, Needs};
use crate::param::ParamId;

/// What each parameter is trained with.
pub(crate) type Recipe<'a> = dyn Fn(ParamId) -> GroupStep<'a> + 'a;

/// What the optimizer of a sub-group needs of its parameters.
pub(super) fn needs<'a, R: Rank>(group: &SubGroup<R>, recipe: &Recipe<'a>) -> Needs<'a> {
    group.slots.first().map_or(Needs::Elements, |slot| recipe(slot.param).optimizer.needs())
}
