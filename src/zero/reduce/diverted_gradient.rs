//! A gradient that is handed to the caller of the backward pass instead of being reduced: the gradient of a weight
//! that another stage of the pipeline also uses. This gradient is complete only with that stage's part.

use crate::graph::Grad;
use crate::param::ParamId;
use crate::util::lock;
use std::sync::Mutex;

/// The parameter whose gradient is diverted, and the gradient once it has arrived.
#[derive(Default)]
pub(in crate::zero) struct DivertedGradient(Mutex<Option<(ParamId, Option<Grad>)>>);

impl DivertedGradient {
    /// Diverts the gradient of `param` while `run` runs, and returns it.
    pub fn during<T>(&self, param: ParamId, run: impl FnOnce() -> T) -> (T, Option<Grad>) {
        *lock(&self.0) = Some((param, None));
        let result = run();
        let diverted = lock(&self.0).take();
        (result, diverted.and_then(|(_, grad)| grad))
    }

    /// Keeps a gradient that is diverted; returns any other.
    pub fn pass(&self, param: ParamId, grad: Grad) -> Option<Grad> {
        match &mut *lock(&self.0) {
            Some((diverted, slot)) if *diverted == param => {
                *slot = Some(grad);
                None
            }
            _ => Some(grad),
        }
    }
}
