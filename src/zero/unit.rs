//! A unit is what is gathered and released together: one transformer block.

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};
use std::sync::Arc;

/// A part of a model whose parameters are gathered and released together.
#[derive(Debug, Clone)]
pub struct Unit<M> {
    inner: Arc<M>,
}

/// Builds a unit: parameters that `build` registers through `vb` belong to it.
pub fn unit<M>(vb: VarBuilder<'_>, build: impl FnOnce(VarBuilder<'_>) -> Result<M>) -> Result<Unit<M>> {
    Ok(Unit { inner: Arc::new(build(vb)?) })
}

impl<M: Module + Send + Sync + 'static> Module for Unit<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.inner.forward(x)
    }
}
