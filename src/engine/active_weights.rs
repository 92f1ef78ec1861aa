//! The weights that the model computes with, if the optimizer averages weights (AdamWScheduleFree).

use super::Engine;
use crate::error::Result;
use crate::zero::step::active_weights::ActiveWeights;

impl<M> Engine<M> {
    /// Collective if the optimizer averages weights: makes the model compute with `weights`, unless it already does.
    pub(super) fn activate_weights(&mut self, weights: ActiveWeights) -> Result<()> {
        if self.active_weights == weights || !self.core.averages_weights() {
            return Ok(());
        }
        let steps = self.trainer.for_step(self.optimizer_steps, 1.0)?;
        self.core.publish_weights(weights == ActiveWeights::Averaged, &steps)?;
        self.active_weights = weights;
        Ok(())
    }
}
