//! Linear layers in both orientations of the weight, with an epilogue in the same pass.

use super::{Activation, LinearEpilogue, WeightLayout};
use crate::graph::{Grad, InputGradSink, OpInputs, SavedTensor, register_recompute};
use crate::kernels::gemm::{Epilogue, Matrix, MatrixMut, column_sums};
use crate::kernels::{activation, buffer};
use crate::nn::linear_product::LinearSizes;
#[cfg(feature = "cuda")]
use crate::nn::on_gpu;
use crate::nn::{autocast, composed, f32_weight_linear};
use crate::tensor::element::{TensorElement, with_all, with_element, with_elements};
use candle_core::{Device, Result, Tensor, bail};
use candle_nn::{Init, Module, VarBuilder, init};
use std::sync::Arc;

/// Computes y = x w (+ bias), with a correct backward pass, for x `[.., in]` and a bias `[out]`.
///
/// Sums are in f32 for all dtypes and are rounded once, to x's dtype. The weight and the bias have x's dtype or are
/// in f32; in the latter case, the product is computed in f32. A gradient has the dtype of its operand. Parameters are
/// read when they are needed, in the forward pass and again in the backward pass, so they may be released in between.
///
/// # Errors
/// Shapes that do not match, a weight or bias whose dtype is neither that of x nor f32, or a dtype other than f32, bf16
/// or f16 on the CPU.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, layout: WeightLayout) -> Result<Tensor> {
    linear_with_epilogue(x, weight, bias, layout, LinearEpilogue::default())
}

/// Computes [`linear()`] with an epilogue: residual + activation(x w + bias). The activation's input, x w + bias, is
/// rounded to the result's dtype and kept for the backward pass. With an f32 parameter and a 16-bit input, each of
/// these steps is rounded.
///
/// # Errors
/// The errors of [`linear()`]; a residual whose shape differs from that of the result.
pub fn linear_with_epilogue(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    layout: WeightLayout,
    epilogue: LinearEpilogue<'_>,
) -> Result<Tensor> {
    if let Some(dtype) = autocast::lower_format(x, weight) {
        return autocast::linear_with_epilogue(x, weight, bias, layout, epilogue, dtype);
    }
    if f32_weight_linear::is_wider(x, weight, bias) {
        return f32_weight_linear::linear_with_epilogue(x, weight, bias, layout, epilogue);
    }
    let sizes = LinearSizes::new(x.shape(), weight.shape(), bias.map(Tensor::shape), layout)?;
    let shape = sizes.result_shape(x.shape());
    if let Some(residual) = epilogue.residual
        && residual.shape() != &shape
    {
        bail!("linear: the residual has shape {:?}; the result has {:?}", residual.dims(), shape.dims())
    }
    #[cfg(feature = "cuda")]
    if let Some(y) = on_gpu::linear::linear_with_epilogue(x, weight, bias, sizes, epilogue)? {
        return Ok(y);
    }
    if !x.device().is_cpu() {
        return composed::linear_with_epilogue(x, weight, bias, layout, epilogue);
    }
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let residual = epilogue.residual.map(Tensor::contiguous).transpose()?;
    let inputs = OpInputs::of([Some(&x), residual.as_ref(), Some(&weight), bias.as_ref()])?;
    with_element!(x.dtype(), NAME, E => {
        let mut y = buffer::<E>(shape.elem_count());
        // The input of the activation is kept only if there is a backward pass.
        let keeps_input = epilogue.activation.is_some() && inputs.are_wanted();
        let mut pre_activation = buffer::<E>(if keeps_input { y.len() } else { 0 });
        with_all([Some(&x), Some(&weight), bias.as_ref(), residual.as_ref()], NAME, |[x, w, bias, residual]| {
            let (x, w) = (x.unwrap_or_default(), w.unwrap_or_default());
            let matrix = |data| Matrix::new(data, sizes.rows, sizes.outputs);
            let saved_activation = keeps_input.then(|| MatrixMut::new(&mut pre_activation, sizes.rows, sizes.outputs));
            let epilogue = Epilogue {
                bias,
                residual: residual.map(matrix),
                activation: epilogue.activation.map(|activation| (activation, saved_activation)),
                ..Epilogue::default()
            };
            sizes.product(x, w, &mut y, epilogue);
            Ok(())
        })?;
        let saved_activation =
            epilogue.activation.filter(|_| keeps_input).map(|activation| (activation, Arc::new(pre_activation)));
        let recompute = saved_activation.clone().filter(|_| residual.is_none());
        let backward = Arc::new(LinearBackward { x: SavedTensor::of(&x), weight, sizes, saved_activation });
        let y = inputs.result(NAME, E::storage(y), shape.clone(), move |grad, sinks| backward.run(grad, sinks))?;
        if let Some((activation, pre_activation)) = recompute {
            register_recompute(&y, move || {
                let mut values = buffer::<E>(pre_activation.len());
                activation::forward(activation, &pre_activation, &mut values);
                Tensor::from_vec(values, &shape, &Device::Cpu)
            });
        }
        Ok(y)
    })
}

const NAME: &str = "linear";

/// The values that the backward pass needs.
struct LinearBackward<E> {
    x: SavedTensor,
    weight: Tensor,
    sizes: LinearSizes,
    saved_activation: Option<(Activation, Arc<Vec<E>>)>,
}

impl<E: TensorElement> LinearBackward<E> {
    fn run(self: &Arc<Self>, grad: Grad, [x, residual, weight, bias]: &[InputGradSink; 4]) -> Result<()> {
        let Some((activation, pre_activation)) = &self.saved_activation else {
            grad.read::<E, _>(NAME, |g| self.deliver(g, x, weight, bias))?;
            return residual.deliver(grad);
        };
        let mut inner = buffer::<E>(grad.len());
        grad.read::<E, _>(NAME, |g| {
            activation::backward(*activation, pre_activation, g, &mut inner);
            Ok(())
        })?;
        residual.deliver(grad)?;
        self.deliver(&inner, x, weight, bias)
    }

    /// Delivers the gradients, given the gradient `g` of the product.
    fn deliver(
        self: &Arc<Self>,
        g: &[E],
        x: &InputGradSink,
        weight: &InputGradSink,
        bias: &InputGradSink,
    ) -> Result<()> {
        let s = self.sizes;
        if bias.is_wanted() {
            let mut sums = vec![0f32; s.outputs];
            column_sums(Matrix::new(g, s.rows, s.outputs), &mut sums);
            bias.deliver_sums::<E>(&sums)?;
        }
        let this = self.clone();
        let kept_bytes = s.rows * s.inputs * size_of::<E>();
        weight.deliver_or_defer(g, kept_bytes, move |g, weight| this.deliver_weight_gradient(g, weight))?;
        x.accumulate::<E>(s.rows * s.inputs, |dx, add| {
            let epilogue = Epilogue { accumulate: add, ..Epilogue::default() };
            with_elements::<E, _>(&self.weight, NAME, |w| {
                s.input_gradient(Matrix::new(g, s.rows, s.outputs), w, dx, epilogue);
                Ok(())
            })
        })
    }

    fn deliver_weight_gradient(&self, g: &[E], weight: &InputGradSink) -> Result<()> {
        let s = self.sizes;
        weight.accumulate::<E>(s.inputs * s.outputs, |dw, add| {
            let epilogue = Epilogue { accumulate: add, ..Epilogue::default() };
            with_elements::<E, _>(&self.x.get()?, NAME, |x| {
                s.weight_gradient(x, Matrix::new(g, s.rows, s.outputs), dw, epilogue);
                Ok(())
            })
        })
    }
}

/// A layer y = x w^T + b with a weight `[out, in]`, whose parameters are named "weight" and "bias" like those of
/// PyTorch's `nn.Linear` and of candle-nn's `Linear`.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// Builds a layer from `inputs` to `outputs` with a bias. The weight starts from N(0, 0.02), the bias at 0.
    pub fn new(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Self::with_init(inputs, outputs, true, super::normal(0.02), vb)
    }

    /// Builds a layer without a bias. The weight starts from N(0, 0.02).
    pub fn no_bias(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Self::with_init(inputs, outputs, false, super::normal(0.02), vb)
    }

    /// Builds a layer whose weight is initialized by `weight_init`. The bias starts at 0.
    pub fn with_init(inputs: usize, outputs: usize, bias: bool, weight_init: Init, vb: VarBuilder<'_>) -> Result<Self> {
        let weight = vb.get_with_hints((outputs, inputs), "weight", weight_init)?;
        let bias = if bias { Some(vb.get_with_hints(outputs, "bias", init::ZERO)?) } else { None };
        Ok(Self { weight, bias })
    }

    /// Creates a layer from existing tensors, weight `[out, in]` and bias `[out]`, such as tied weights.
    pub fn from_tensors(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }

    /// Returns the weight, `[out, in]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Applies the layer with an epilogue in the same pass; see [`linear_with_epilogue`].
    pub fn forward_with_epilogue(&self, x: &Tensor, epilogue: LinearEpilogue<'_>) -> Result<Tensor> {
        linear_with_epilogue(x, &self.weight, self.bias.as_ref(), WeightLayout::OutIn, epilogue)
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with_epilogue(x, LinearEpilogue::default())
    }
}

/// A layer y = x w + b with a weight `[in, out]`. This is the orientation of GPT-2's Conv1D, whose files can be used
/// directly.
#[derive(Debug, Clone)]
pub struct Conv1D {
    weight: Tensor,
    bias: Tensor,
}

impl Conv1D {
    /// Builds a layer from `inputs` to `outputs`. The weight starts from N(0, `std`), the bias at 0.
    pub fn new(inputs: usize, outputs: usize, std: f64, vb: VarBuilder<'_>) -> Result<Self> {
        let weight = vb.get_with_hints((inputs, outputs), "weight", super::normal(std))?;
        let bias = vb.get_with_hints(outputs, "bias", init::ZERO)?;
        Ok(Self { weight, bias })
    }

    /// Applies the layer with an epilogue in the same pass; see [`linear_with_epilogue`].
    pub fn forward_with_epilogue(&self, x: &Tensor, epilogue: LinearEpilogue<'_>) -> Result<Tensor> {
        linear_with_epilogue(x, &self.weight, Some(&self.bias), WeightLayout::InOut, epilogue)
    }
}

impl Module for Conv1D {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with_epilogue(x, LinearEpilogue::default())
    }
}
