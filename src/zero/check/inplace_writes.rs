//! Finds writes to parameters by anything other than the engine: Candle's in-place calls (`slice_set`, `zero_set`,
//! `Var::set`) on one of the model's tensors.
//!
//! The optimizer's own copy of the weights does not contain such writes, so the next update would silently overwrite
//! them, at some stages and not at others. A few elements of each parameter are remembered while the engine leaves the
//! weights unchanged, and compared when the parameter is used. This check finds every write of an entire tensor on the
//! CPU, but a write of a few elements only by chance. Parameters on a GPU are not checked.

use crate::error::Result;
use crate::param::{Param, UnitId};
use crate::util::lock;
use crate::zero::rank_core::RankCore;

impl RankCore {
    /// Checks all parameters in memory: remembered elements must be unchanged. If a parameter has none yet, its
    /// elements are remembered from now on.
    ///
    /// # Errors
    /// [`ParamError::Written`](crate::error::ParamError::Written).
    pub fn look_for_writes(&self) -> Result<()> {
        self.compare_samples(|_| true)
    }

    /// Checks the parameters of a unit in the same way.
    pub(in crate::zero) fn look_for_writes_in(&self, unit: UnitId) -> Result<()> {
        self.compare_samples(|param| param.unit == unit)
    }

    /// Checks the parameters of `units`, which are in ascending order, and of the units between them in the same way.
    pub(in crate::zero) fn look_for_writes_in_any(&self, units: &[UnitId]) -> Result<()> {
        let range = units.first().copied().zip(units.last().copied());
        self.compare_samples(|param| range.is_some_and(|(first, last)| (first..=last).contains(&param.unit)))
    }

    /// Reports that the engine has changed weights, or may have changed them: their present values are remembered.
    ///
    /// # Errors
    /// A parameter that cannot be read.
    pub fn remember_weights(&self) -> Result<()> {
        lock(&self.weight_samples).clear();
        self.look_for_writes()
    }

    fn compare_samples(&self, which: impl Fn(&Param) -> bool) -> Result<()> {
        // A check restores the parameters that it moves; after an evaluation, the next forward pass looks for writes.
        if self.is_checking() || self.is_evaluating() {
            return Ok(());
        }
        lock(&self.weight_samples).compare(&self.params, which)
    }
}
