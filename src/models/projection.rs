//! The linear layers of a decoder's blocks, as their files store them.

use super::{DecoderConfig, Naming};
use crate::nn::{Conv1D, Linear, Then, normal};
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

/// Standard deviation of the weights at the start.
pub(super) const STD: f64 = 0.02;

/// A linear layer inside of a block.
#[derive(Debug, Clone)]
pub(super) enum Projection {
    /// Weight `[out, in]`.
    Linear(Linear),
    /// Weight `[in, out]`.
    Conv1D(Conv1D),
}

/// The sizes of a projection, and how it starts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub inputs: usize,
    pub outputs: usize,
    /// Those of a GPT-2 have one in any case.
    pub bias: bool,
    /// Standard deviation of the weight at the start.
    pub std: f64,
}

impl Projection {
    /// The layer `name`.
    pub fn new(config: &DecoderConfig, name: &str, sizes: Sizes, vb: &VarBuilder<'_>) -> Result<Self> {
        let Sizes { inputs, outputs, bias, std } = sizes;
        let vb = vb.pp(name);
        match config.naming {
            Naming::Gpt2 => Conv1D::new(inputs, outputs, std, vb).map(Self::Conv1D),
            Naming::Llama | Naming::Phi3 => {
                Linear::with_init(inputs, outputs, bias, normal(std), vb).map(Self::Linear)
            }
        }
    }

    /// The layer and what follows it in the same pass.
    pub fn forward_then(&self, x: &Tensor, then: Then<'_>) -> Result<Tensor> {
        match self {
            Self::Linear(layer) => layer.forward_then(x, then),
            Self::Conv1D(layer) => layer.forward_then(x, then),
        }
    }
}

impl Module for Projection {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_then(x, Then::default())
    }
}
