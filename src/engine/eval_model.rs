//! A separate instance of the model for evaluation.

use super::Engine;
use crate::error::Result;
use crate::zero::gather::eval_var_builder_backend::EvalVarBuilderBackend;
use crate::zero::gather::unit::building;
use candle_nn::VarBuilder;

impl<M> Engine<M> {
    /// Builds the model again, for evaluation: from then on, [`eval`](Self::eval) passes this instance to its closure.
    /// The instance has no separate weights (its tensors are the parameters' values, before and after every step), and
    /// Candle keeps no activations of its operations, so that evaluation needs no more memory than it would with a
    /// model without variables.
    ///
    /// `build` is the closure that the engine was initialized with. State that an instance keeps in addition to its
    /// parameters, such as counters or running statistics in variables that did not come from its `VarBuilder`, is not
    /// shared between the two instances.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use candle_nn::{Linear, Module, VarBuilder};
    /// # use candle_zero::Engine;
    /// # let config = r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW"}}"#;
    /// let build = |vb: VarBuilder<'_>| candle_nn::linear(4, 1, vb);
    /// let mut engine = Engine::initialize(build, config)?;
    /// engine.build_for_eval(build)?;
    /// let x = Tensor::arange(0f32, 32f32, engine.device())?.reshape((8, 4))?;
    /// let y = engine.eval(|model| model.forward(&x))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ParamError::NotTheModel`](crate::error::ParamError::NotTheModel) for a parameter or unit that the engine's
    /// model does not have; the error of `build`.
    pub fn build_for_eval(&mut self, build: impl FnOnce(VarBuilder<'_>) -> candle_core::Result<M>) -> Result<()> {
        let weights = EvalVarBuilderBackend::new(&self.core);
        let vb = VarBuilder::from_backend(Box::new(weights.clone()), self.core.dtype(), self.device.clone());
        self.eval_model = Some(building(&weights, || build(vb)).map_err(|e| weights.explain(e))?);
        Ok(())
    }
}
