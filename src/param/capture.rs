//! The leaf under a parameter's tensor, which receives the parameter's gradient.
//!
//! ```text
//!   empty leaf --Capture--> token --> parameter --> the model's operations --> loss
//!                  ^ bwd: the complete gradient, once per backward, when every use has been differentiated
//! ```
//!
//! Candle visits nodes in reverse order of their making, so the last layer's gradients come first. The gradient is
//! handed to the engine and nothing goes to the leaf (`None`, which Candle allows for leaves). When it has arrived, no
//! operation of this backward needs the parameter's values any more. See [`crate::graph`] for the token.

use super::ParamId;
use crate::graph::prepared::{one, prepared};
use crate::graph::{Grad, Slot, only_while, with_token};
use crate::tensor::residency::empty_leaf;
use candle_core::{Device, Result, Shape, Storage, Tensor};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Takes the gradients of parameters as they become complete.
pub(crate) trait GradientSink: Send + Sync {
    /// The gradient of `param` is complete, as far as this backward goes.
    fn gradient_arrived(&self, param: ParamId, grad: Grad) -> Result<()>;
}

/// Makes a parameter's tensor that begins with `storage`; its gradients go to `sink`. This library's operations make
/// none while it is not `trained`; Candle's do, and the sink leaves them out.
pub(crate) fn capture(
    param: ParamId,
    trained: Arc<AtomicBool>,
    sink: Arc<dyn GradientSink>,
    device: &Device,
    (storage, shape): (Storage, Shape),
) -> Result<Tensor> {
    let slot = Arc::new(Slot::default());
    let complete = slot.clone();
    let leaf = empty_leaf(device, &Shape::from(1))?;
    let token = prepared("capture-gradient", &leaf, one(device)?, move |_, _| {
        if let Some(grad) = complete.take() {
            sink.gradient_arrived(param, grad)?;
        }
        Ok(None)
    })?;
    let tensor = with_token(token, slot, "parameter", (storage, shape))?;
    only_while(&tensor, trained);
    Ok(tensor)
}
