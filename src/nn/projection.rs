//! A linear layer in either orientation of the weight, with or without a low-rank adapter.

use super::lora::{self, LoraOperands};
use super::{Dropout, LinearEpilogue, LoraConfig, WeightLayout, linear_with_epilogue, normal};
use crate::graph::exclude_from_gradient_check;
use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder, init};

/// The options of a [`Projection`] besides its sizes.
#[derive(Debug, Clone, Copy)]
pub struct ProjectionOptions<'a> {
    /// The layout of the weight in memory and in files.
    pub layout: WeightLayout,
    /// Whether there is a bias.
    pub bias: bool,
    /// The standard deviation of the initial weight, if it is not read from a file.
    pub std: f64,
    /// The settings of the model's adapters: this projection gets an adapter if they select its name.
    pub lora: Option<&'a LoraConfig>,
}

/// A linear layer, y = x W + b, with or without a low-rank adapter ([`LoraConfig`]).
///
/// Parameters: "weight" (`[out, in]` or, as in GPT-2's Conv1D, `[in, out]`), "bias" `[out]` and, with an adapter, the
/// following, named as in PEFT: "lora_A.weight" `[r, in]`, "lora_B.weight" `[out, r]` and, with DoRA,
/// "lora_magnitude_vector" `[out]`. As in PEFT, the initial values of A are uniform between -1 / sqrt(in) and
/// 1 / sqrt(in), and those of B are 0, so the adapter adds nothing at first. The magnitude should start as the norms of
/// the weight's rows. The source of initial values must provide these norms, because the magnitude's init hint is 1.
///
/// An adapter's parameters may be in f32 in a 16-bit model
/// ([`ParameterGroup::keep_f32`](crate::optim::ParameterGroup::keep_f32)). Frozen parameters get no gradient.
#[derive(Debug, Clone)]
pub struct Projection {
    weight: Tensor,
    bias: Option<Tensor>,
    layout: WeightLayout,
    adapter: Option<LoraTensors>,
}

#[derive(Debug, Clone)]
struct LoraTensors {
    a: Tensor,
    b: Tensor,
    magnitude: Option<Tensor>,
    scale: f64,
    dropout: Option<Dropout>,
}

impl Projection {
    /// Builds a layer from `inputs` to `outputs`. Whether it gets an adapter depends on the path of `vb`.
    pub fn new(inputs: usize, outputs: usize, options: ProjectionOptions<'_>, vb: VarBuilder<'_>) -> Result<Self> {
        let ProjectionOptions { layout, bias, std, lora } = options;
        let shape = match layout {
            WeightLayout::OutIn => (outputs, inputs),
            WeightLayout::InOut => (inputs, outputs),
        };
        let weight = vb.get_with_hints(shape, "weight", normal(std))?;
        let bias = if bias { Some(vb.get_with_hints(outputs, "bias", init::ZERO)?) } else { None };
        let lora = lora.filter(|lora| lora.selects(&vb.prefix()));
        let adapter = lora.map(|lora| LoraTensors::new(inputs, outputs, lora, &vb)).transpose()?;
        // In the backward pass, DoRA treats the norms of the adapted weight as constants (its paper, section 4.3).
        if let Some(LoraTensors { a, b, magnitude: Some(_), .. }) = &adapter {
            [&weight, a, b].into_iter().for_each(|tensor| exclude_from_gradient_check(tensor, 0..tensor.elem_count()));
        }
        Ok(Self { weight, bias, layout, adapter })
    }

    /// Returns the weight, in its layout.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns whether there is an adapter.
    pub fn is_adapted(&self) -> bool {
        self.adapter.is_some()
    }

    /// Applies the layer with an epilogue; see [`linear_with_epilogue`]. With an adapter, an activation takes a
    /// separate pass.
    pub fn forward_with_epilogue(&self, x: &Tensor, epilogue: LinearEpilogue<'_>) -> Result<Tensor> {
        let (weight, bias) = (&self.weight, self.bias.as_ref());
        let Some(adapter) = self.adapter.as_ref().filter(|_| !lora::are_off()) else {
            return linear_with_epilogue(x, weight, bias, self.layout, epilogue);
        };
        let mask = adapter.dropout.as_ref().map(Dropout::draw).transpose()?.flatten();
        let (a, b, magnitude) = (&adapter.a, &adapter.b, adapter.magnitude.as_ref());
        let adapter = LoraOperands { a, b, magnitude, scale: adapter.scale, mask };
        lora::linear_with_epilogue(x, weight, bias, self.layout, &adapter, epilogue)
    }
}

impl Module for Projection {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with_epilogue(x, LinearEpilogue::default())
    }
}

impl LoraTensors {
    fn new(inputs: usize, outputs: usize, lora: &LoraConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        lora.validate().map_err(super::refuse)?;
        let bound = 1.0 / (inputs as f64).sqrt();
        let a = Init::Uniform { lo: -bound, up: bound };
        Ok(Self {
            a: vb.pp("lora_A").get_with_hints((lora.r, inputs), "weight", a)?,
            b: vb.pp("lora_B").get_with_hints((outputs, lora.r), "weight", init::ZERO)?,
            magnitude: lora.dora.then(|| vb.get_with_hints(outputs, "lora_magnitude_vector", init::ONE)).transpose()?,
            scale: lora.scale(),
            dropout: (lora.dropout > 0.0).then(|| Dropout::new(lora.dropout, 0)),
        })
    }
}
