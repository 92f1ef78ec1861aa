//! Changes to the set of trained parameters while an engine runs, for gradual unfreezing.

use super::Engine;
use crate::error::{ParamError, Result};
use crate::zero::step::active_weights::ActiveWeights;

impl<M> Engine<M> {
    /// Trains the parameters for which `rule`, given their name and shape, returns true, and freezes all others, from
    /// the next forward pass on. Collective: all ranks must pass the same rule.
    ///
    /// A parameter that is unfrozen starts with fresh optimizer states, and its next update counts as its first. A
    /// parameter that is frozen loses its states; in 16-bit training, only its 16-bit weights remain. Shares are laid
    /// out again; while this is done, this rank's share exists twice, in memory or in the files.
    ///
    /// # Errors
    /// [`EngineError::MidAccumulation`](crate::error::EngineError::MidAccumulation) in the middle of an accumulation;
    /// [`ParamError::NothingTrained`] for a rule that freezes everything; [`ParamError::QuantizedTrained`] for a rule
    /// that trains a quantized parameter;
    /// [`EngineError::TrainableDiffers`](crate::error::EngineError::TrainableDiffers) if ranks have different rules;
    /// [`EngineError::LocalSteps`](crate::error::EngineError::LocalSteps) if ranks take local steps; the error of a
    /// failed background save; too little space for a file. In all these cases, nothing has changed. Also fails if a
    /// collective fails.
    pub fn set_trainable(&mut self, rule: impl Fn(&str, &[usize]) -> bool) -> Result<()> {
        self.not_on_islands("set_trainable")?;
        self.wait_for_checkpoint()?;
        self.between_steps("set_trainable")?;
        let params = self.core.params();
        let trained: Vec<bool> = params.iter().map(|p| rule(&p.name, p.shape.dims())).collect();
        self.attempt(|engine| engine.core.agree_on_trained(&trained))?;
        let params = self.core.params();
        let any = params.iter().zip(&trained).any(|(param, trained)| *trained && param.numel > 0);
        if self.trainer.can_train() && !any {
            return Err(ParamError::NothingTrained { count: params.len() }.into());
        }
        if let Some((param, _)) =
            params.iter().zip(&trained).find(|(param, trained)| **trained && param.packing().is_some())
        {
            return Err(ParamError::QuantizedTrained { name: param.name.clone() }.into());
        }
        self.forget_forward();
        // A parameter that is being frozen keeps the weights that the model holds, so the model gets the averaged
        // weights first.
        self.attempt(|engine| engine.activate_weights(ActiveWeights::Averaged))?;
        let updates = self.optimizer_steps;
        self.settled(|engine| engine.core.set_trained(&trained, updates))
    }

    /// Returns the names of the parameters that are trained, in order of registration.
    pub fn trainable_parameters(&self) -> Vec<String> {
        self.core.params().iter().filter(|param| param.is_trained()).map(|param| param.name.clone()).collect()
    }
}
