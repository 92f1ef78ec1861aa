//! Writes into parameters that the engine does not make: Candle's in-place calls (`slice_set`, `zero_set`, `Var::set`) on a tensor
//! of the model's.
//!
//! The optimizer's own copy of the weights knows nothing of them, so the next update would overwrite them without a word, at some
//! stages and not at others. A few elements of each parameter are remembered while the engine leaves the weights as they are, and
//! looked at again where they are used: a write of a whole tensor is found, a write of a few elements by chance.

use crate::error::Result;
use crate::param::{Param, UnitId};
use crate::util::lock;
use crate::zero::rank_core::RankCore;

impl RankCore {
    /// Looks at all parameters in memory: those that are remembered must be what they were, the others are remembered from now on.
    ///
    /// # Errors
    /// [`ParamError::Written`](crate::error::ParamError::Written).
    pub fn look_for_writes(&self) -> Result<()> {
        self.look_at(|_| true)
    }

    /// The same for the parameters of a unit.
    pub(in crate::zero) fn look_for_writes_in(&self, unit: UnitId) -> Result<()> {
        self.look_at(|param| param.unit == unit)
    }

    /// The engine has changed weights, or may have: they are remembered as they are now.
    ///
    /// # Errors
    /// A parameter that cannot be read.
    pub fn remember_weights(&self) -> Result<()> {
        lock(&self.weight_samples).clear();
        self.look_for_writes()
    }

    fn look_at(&self, which: impl Fn(&Param) -> bool) -> Result<()> {
        // A check puts back what it moves, and an evaluation is followed by a forward.
        if self.is_checking() || self.is_evaluating() {
            return Ok(());
        }
        lock(&self.weight_samples).compare(&self.params, which)
    }
}
