//! Gradients of parameters between the two parts of a divided backward pass: the first part computes the gradient of a
//! pipeline stage's input, and the second those of the stage's weights.

use crate::graph::DeferredGradient;
use crate::param::ParamId;
use crate::util::lock;
use std::sync::Mutex;

/// The gradients that a backward pass has left for later, in the order of arrival. They keep the inputs of their layers
/// in memory.
pub(crate) type WaitingGradients = Vec<(ParamId, DeferredGradient)>;

/// Whether the backward pass is divided, and the gradients that wait for its second part.
#[derive(Default)]
pub(in crate::zero) struct DividedBackward(Mutex<Option<WaitingGradients>>);

impl DividedBackward {
    /// Keeps the gradients that arrive while `first_part` runs, and returns them.
    pub fn during<T>(&self, first_part: impl FnOnce() -> T) -> (T, WaitingGradients) {
        *lock(&self.0) = Some(Vec::new());
        let result = first_part();
        (result, lock(&self.0).take().unwrap_or_default())
    }

    /// Keeps a gradient if this backward pass is divided; otherwise returns it.
    pub fn keep(&self, param: ParamId, grad: DeferredGradient) -> Option<DeferredGradient> {
        match &mut *lock(&self.0) {
            Some(waiting) => {
                waiting.push((param, grad));
                None
            }
            None => Some(grad),
        }
    }
}
