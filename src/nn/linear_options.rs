//! The memory layout of a linear layer's weight, and the epilogue of the product.

use candle_core::Tensor;

pub use crate::kernels::gemm::Activation;

/// The memory layout of a linear layer's weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[out, in]`, as in PyTorch's and candle-nn's Linear: y = x w^T + b.
    OutIn,
    /// `[in, out]`, as in GPT-2's Conv1D: y = x w + b.
    InOut,
}

/// The operations that are applied to a linear layer's result, in the same pass over memory if possible; none by
/// default.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinearEpilogue<'a> {
    /// The activation that is applied to the result.
    pub activation: Option<Activation>,
    /// The residual that is added after the activation; it has the result's shape.
    pub residual: Option<&'a Tensor>,
}
