//! The operation that a parameter's tensor is the result of. Its backward receives the parameter's gradient.
//!
//! ```text
//!   empty leaf --Capture--> parameter --> the model's operations --> loss
//!                  ^ bwd: the complete gradient, once per backward, when every use has been differentiated
//! ```
//!
//! Candle adds up a node's gradient over all its uses before it calls the node's backward, and visits nodes in
//! reverse order of their making, so the last layer's gradients come first. The gradient is handed to the engine and
//! nothing goes to the leaf (`None`, which Candle allows for leaves). When it has arrived, no operation of this
//! backward needs the parameter's values any more.

use super::ParamId;
use super::prepared::prepared;
use crate::zero::core::Link;
use candle_core::{Result, Storage, Tensor};

/// Makes a parameter's tensor that begins with `storage`.
pub(crate) fn capture(leaf: &Tensor, param: ParamId, link: Link, storage: Storage) -> Result<Tensor> {
    prepared("capture-gradient", leaf, (storage, leaf.shape().clone()), move |_, grad| {
        if let Some(core) = link.core() {
            core.gradient_arrived(param, grad)?;
        }
        Ok(None)
    })
}
