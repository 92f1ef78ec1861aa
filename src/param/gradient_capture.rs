//! The leaf under a parameter's tensor, which receives the parameter's gradient.
//!
//! ```text
//!   empty leaf --Capture--> token --> parameter --> the model's operations --> loss
//!                  ^ bwd: the complete gradient, once per backward, when every use has been differentiated
//! ```
//!
//! Candle visits nodes in the reverse order of their creation, so the last layer's gradients come first. The gradient
//! is handed to the engine, and the leaf receives none (`None`, which Candle allows for leaves). Once the gradient has
//! arrived, no operation of this backward needs the parameter's values any longer. See [`crate::graph`] for the token.
//!
//! Gradients count only in the backward of the engine that owns the parameter. Any other backward that passes through
//! the parameter (Candle's own `loss.backward()`, another engine's) only reports that it no longer needs the parameter.

use super::ParamId;
use crate::graph::prepared_op::{one, prepared};
use crate::graph::{Grad, GradSlot, only_while, with_token};
use crate::tensor::residency::empty_leaf;
use candle_core::{Device, Result, Shape, Storage, Tensor};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Receives the gradients of parameters as they become complete.
pub(crate) trait GradientSink: Send + Sync {
    /// Returns whether gradients count in the backward that this thread runs. Otherwise they are dropped, or not even
    /// computed if an operation can do without them.
    fn takes_gradients(&self) -> bool;
    /// Takes the gradient of `param`, which is complete as far as this backward is concerned.
    fn gradient_arrived(&self, param: ParamId, grad: Grad) -> Result<()>;
    /// Reports that a backward in which gradients do not count has differentiated all uses of `param`.
    fn passed_by(&self, param: ParamId) -> Result<()>;
}

/// Creates a parameter's tensor, whose first storage is `storage`. Its gradients go to `sink`. While the parameter is
/// not `trained`, this library's operations compute no gradients; Candle's do, and the sink ignores them.
pub(crate) fn capture(
    param: ParamId,
    trained: Arc<AtomicBool>,
    sink: Arc<dyn GradientSink>,
    device: &Device,
    (storage, shape): (Storage, Shape),
) -> Result<Tensor> {
    let gate = sink.clone();
    let slot = Arc::new(GradSlot::behind(Box::new(move || gate.takes_gradients())));
    let complete = slot.clone();
    let leaf = empty_leaf(device, &Shape::from(1))?;
    let token = prepared("capture-gradient", &leaf, one(device)?, move |_, _| {
        match complete.take() {
            _ if !sink.takes_gradients() => sink.passed_by(param)?,
            Some(grad) => sink.gradient_arrived(param, grad)?,
            None => {}
        }
        Ok(None)
    })?;
    let tensor = with_token(token, slot, "parameter", (storage, shape))?;
    only_while(&tensor, trained);
    Ok(tensor)
}
