//! The MLP of a block.

use super::block_parameter_names::BlockParameterNames;
use super::{DecoderConfig, ParameterNaming};
use crate::nn::{Activation, LinearEpilogue, Projection, columns, gelu_gated, swiglu};
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

/// The MLP of a block.
#[derive(Debug, Clone)]
pub(super) struct Mlp {
    input: MlpInput,
    activation: Activation,
    pub down: Projection,
}

/// The first projections of an MLP.
#[derive(Debug, Clone)]
enum MlpInput {
    Plain(Projection),
    /// The gate and the up projection.
    Gated([Projection; 2]),
    /// One projection with gate and up side by side, each with this number of columns.
    FusedGated(Projection, usize),
}

impl Mlp {
    /// Builds an MLP of `config` with an intermediate layer of `inner` elements.
    pub fn new(config: &DecoderConfig, inner: usize, vb: &VarBuilder<'_>) -> Result<Self> {
        let (d, names) = (config.hidden_size, BlockParameterNames::of(config));
        let projection = |name: &str, outputs| config.projection(name, [d, outputs], config.mlp_bias, false, vb);
        let input = match (config.gated, config.naming) {
            (false, _) => MlpInput::Plain(projection(names.up, inner)?),
            (true, ParameterNaming::Phi3 | ParameterNaming::Glm) => {
                MlpInput::FusedGated(projection("gate_up_proj", 2 * inner)?, inner)
            }
            (true, _) => MlpInput::Gated([projection("gate_proj", inner)?, projection(names.up, inner)?]),
        };
        let down = config.projection(names.down, [inner, d], config.mlp_bias, true, vb)?;
        Ok(Self { input, activation: config.activation, down })
    }

    /// Returns the input of the down projection.
    pub fn down_input(&self, x: &Tensor) -> Result<Tensor> {
        match &self.input {
            MlpInput::Plain(up) => up.forward_with_epilogue(
                x,
                LinearEpilogue { activation: Some(self.activation), ..LinearEpilogue::default() },
            ),
            MlpInput::Gated([gate, up]) => self.gated(&gate.forward(x)?, &up.forward(x)?),
            MlpInput::FusedGated(gate_up, inner) => {
                let gate_and_up = gate_up.forward(x)?;
                self.gated(&columns(&gate_and_up, 0..*inner)?, &columns(&gate_and_up, *inner..2 * inner)?)
            }
        }
    }

    /// Returns the product of the activated gate and the up projection.
    fn gated(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        match self.activation {
            Activation::Silu => swiglu(gate, up),
            Activation::GeluTanh => gelu_gated(gate, up),
            Activation::Gelu | Activation::ReluSquared => {
                candle_core::bail!("a gate with the activation {:?} is not supported", self.activation)
            }
        }
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&self.down_input(x)?)
    }
}
