//! Optimizers with 8-bit states (arXiv 2110.02861), named as in bitsandbytes.
//!
//! States are dequantized to f32 for a step and quantized again after it. The weights are updated with the values
//! before quantization. As in bitsandbytes, parameters with few elements, such as norms and biases, keep f32 states.
//! Such parameters are trained by the auxiliary optimizer.

use super::{Momentum, Optimizer, StateFormat, StepContext, adam, lion};
use crate::config::{EightBit, EightBitConfig};
use crate::precision::{FlatMut, FlatRef};

/// Adam, AdamW or Lion with 8-bit states.
pub(super) struct EightBitOptimizer {
    name: &'static str,
    min_8bit_size: usize,
    /// The optimizer that does the arithmetic, for all parameters.
    inner: Box<dyn Optimizer>,
}

impl EightBitOptimizer {
    pub(super) fn new(EightBitConfig { kind, min_8bit_size }: EightBitConfig) -> Self {
        let inner: Box<dyn Optimizer> = match kind {
            EightBit::Adam(config) | EightBit::AdamW(config) => Box::new(adam::Adam::new(config)),
            EightBit::Lion(config) => Box::new(lion::Lion::new(config)),
        };
        Self { name: kind.name(), min_8bit_size, inner }
    }
}

impl Optimizer for EightBitOptimizer {
    fn name(&self) -> &str {
        self.name
    }

    fn lr(&self) -> f64 {
        self.inner.lr()
    }

    fn momentum(&self) -> Momentum {
        self.inner.momentum()
    }

    fn state_names(&self) -> &'static [&'static str] {
        self.inner.state_names()
    }

    fn state_format(&self, state: usize) -> StateFormat {
        // The second moment is a mean of squares, so it is not negative.
        if state == 0 { StateFormat::Signed8 } else { StateFormat::Unsigned8 }
    }

    fn update(
        &self,
        ctx: &StepContext,
        param: &mut [f32],
        grad: FlatRef<'_>,
        state: &mut [&mut [f32]],
        half: Option<FlatMut<'_>>,
    ) {
        self.inner.update(ctx, param, grad, state, half);
    }

    fn trains(&self, _: &str, shape: &[usize]) -> bool {
        shape.iter().product::<usize>() >= self.min_8bit_size
    }

    fn auxiliary(&self) -> Option<&dyn Optimizer> {
        Some(&*self.inner)
    }
}
