//! How a linear layer's weight lies in memory, and what follows the product.

use candle_core::Tensor;

pub use crate::kernels::gemm::Activation;

/// How a linear layer's weight lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[out, in]`, as PyTorch's and candle-nn's Linear: y = x w^T + b.
    OutIn,
    /// `[in, out]`, as GPT-2's Conv1D: y = x w + b.
    InOut,
}

/// Operations on a linear layer's result in the same pass over memory. Default: none.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinearEpilogue<'a> {
    /// Applied to the result.
    pub activation: Option<Activation>,
    /// Added after that; of the result's shape.
    pub residual: Option<&'a Tensor>,
}
