//! Checks once for parameters that no backward pass reaches: they cause an error, or their gradients are zero.
//!
//! The first accumulation is checked as a whole and over all ranks, so that alternating between the parts of a
//! model, by micro step or by rank, does not cause an error. A model that has already been trained was checked when its
//! training began, so a run that loads its checkpoint may skip a part in its first step.

use super::gradient_reducer::is_expected;
use crate::error::{EngineError, Result};
use crate::notice::emit;
use crate::param::Param;
use crate::util::{counted, list, lock};
use crate::zero::gather::leaf_units::LeafPosition;
use crate::zero::rank_core::RankCore;

impl RankCore {
    /// Checks the parameters in the first optimizer step, in which this call is collective. Does nothing in later
    /// steps.
    ///
    /// # Errors
    /// [`EngineError::NoGradient`] if no rank has a gradient of a parameter that a backward pass must reach, unless
    /// unused parameters are ignored; a failed collective.
    pub(in crate::zero) fn check_unused(&self) -> Result<()> {
        let Some(seen) = lock(&self.gradients).take_seen() else { return Ok(()) };
        let seen = self.comm.gather_bytes(seen.into_iter().map(u8::from).collect()).wait()?;
        let is_missing = |param: usize| seen.iter().all(|rank| rank.get(param) == Some(&0));
        // An expert that received no input does not cause an error.
        let is_in_leaf = |p: &Param| self.leaves[p.unit] != LeafPosition::Outside;
        let params = self.params.iter().enumerate();
        let missing = params.filter(|(id, p)| is_expected(p) && !is_in_leaf(p) && is_missing(*id));
        let names: Vec<&str> = missing.map(|(_, p)| p.name.as_str()).collect();
        let (count, list) = (names.len(), list(&names));
        match (count, self.zero.ignore_unused_parameters) {
            (0, _) => Ok(()),
            (_, false) => Err(EngineError::NoGradient { count, names: list }.into()),
            (_, true) => {
                if self.comm.rank() == 0 {
                    emit(&format!(
                        "{} received no gradient in the first step (a missing gradient counts as zero): {list}",
                        counted(count, "parameter")
                    ));
                }
                Ok(())
            }
        }
    }

    /// Skips the check: the model was checked when its training began.
    pub fn skip_unused_check(&self) {
        lock(&self.gradients).take_seen();
    }
}
