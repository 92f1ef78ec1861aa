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
use crate::graph::{Slot, with_token};
use crate::tensor::residency::empty_leaf;
use crate::zero::core::Link;
use candle_core::{Device, Result, Shape, Storage, Tensor};
use std::sync::Arc;

/// Makes a parameter's tensor that begins with `storage`.
pub(crate) fn capture(
    param: ParamId,
    link: Link,
    device: &Device,
    (storage, shape): (Storage, Shape),
) -> Result<Tensor> {
    let slot = Arc::new(Slot::default());
    let complete = slot.clone();
    let leaf = empty_leaf(device, &Shape::from(1))?;
    let token = prepared("capture-gradient", &leaf, one(device)?, move |_, _| {
        if let (Some(grad), Some(core)) = (complete.take(), link.core()) {
            core.gradient_arrived(param, grad)?;
        }
        Ok(None)
    })?;
    with_token(token, slot, "parameter", (storage, shape))
}
