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
use super::residency::Prepared;
use crate::zero::core::Link;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Storage, Tensor};

struct Capture {
    param: ParamId,
    link: Link,
    /// The storage with which the parameter begins.
    initial: Prepared,
}

/// Makes a parameter's tensor that begins with `storage`.
pub(crate) fn capture(leaf: &Tensor, param: ParamId, link: Link, storage: Storage) -> Result<Tensor> {
    leaf.apply_op1(Capture { param, link, initial: Prepared::new(storage, leaf.shape().clone()) })
}

impl CustomOp1 for Capture {
    fn name(&self) -> &'static str {
        "capture-gradient"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.initial.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.initial.cuda()
    }

    fn bwd(&self, _leaf: &Tensor, _param: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if let Some(core) = self.link.core() {
            core.gradient_arrived(self.param, grad)?;
        }
        Ok(None)
    }
}
