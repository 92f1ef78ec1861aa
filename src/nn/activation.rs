//! Activations: GELU, SiLU, the square of ReLU, the gated SwiGLU and GeGLU, and multiplication by a number.

use crate::graph::{Grad, OpInputs};
use crate::kernels::gemm::Activation;
use crate::kernels::{activation, buffer};
use crate::nn::composed;
#[cfg(feature = "cuda")]
use crate::nn::on_gpu;
use crate::tensor::element::{TensorElement, with_all, with_element, with_elements};
use candle_core::{DType, Result, Tensor, bail};
use half::{bf16, f16};

/// Computes GELU by its tanh approximation (Hendrycks and Gimpel 2016), GPT-2's activation: 0.5 x (1 + tanh(sqrt(2/pi)
/// (x + 0.044715 x^3))), elementwise, in f32.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    elementwise("gelu_tanh", Activation::GeluTanh, x, composed::gelu_tanh)
}

/// Computes SiLU (Elfwing et al. 2017): x / (1 + exp(-x)), elementwise, in f32.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    elementwise("silu", Activation::Silu, x, composed::silu)
}

/// Computes the exact GELU (Hendrycks and Gimpel 2016), BERT's activation: x (1 + erf(x / sqrt(2))) / 2, elementwise,
/// in f32.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    elementwise("gelu", Activation::Gelu, x, composed::gelu)
}

/// Computes the square of ReLU (So et al. 2021), Nemotron's activation: max(x, 0)^2, elementwise, in f32.
pub fn relu_squared(x: &Tensor) -> Result<Tensor> {
    elementwise("relu_squared", Activation::ReluSquared, x, composed::relu_squared)
}

/// Applies the activation `function` to a tensor.
pub(super) fn apply_activation(function: Activation, x: &Tensor) -> Result<Tensor> {
    match function {
        Activation::GeluTanh => gelu_tanh(x),
        Activation::Gelu => gelu(x),
        Activation::Silu => silu(x),
        Activation::ReluSquared => relu_squared(x),
    }
}

fn elementwise(
    name: &'static str,
    function: Activation,
    x: &Tensor,
    composed: fn(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    if x.device().is_cpu() {
        return apply(name, x, function);
    }
    #[cfg(feature = "cuda")]
    if let Some(y) = on_gpu::activation::apply(name, function, x)? {
        return Ok(y);
    }
    composed(x)
}

fn apply(name: &'static str, x: &Tensor, function: Activation) -> Result<Tensor> {
    let x = x.contiguous()?;
    let inputs = OpInputs::of([Some(&x)])?;
    let shape = x.shape().clone();
    with_element!(x.dtype(), name, E => {
        let mut y = buffer::<E>(x.elem_count());
        with_elements::<E, _>(&x, name, |x| {
            activation::forward(function, x, &mut y);
            Ok(())
        })?;
        inputs.result(name, E::storage(y), shape, move |grad, [to_x]| {
            to_x.make::<E>(grad.len(), |dx| {
                with_elements::<E, _>(&x, name, |x| {
                    grad.read::<E, _>(name, |dy| {
                        activation::backward(function, x, dy, dx);
                        Ok(())
                    })
                })
            })
        })
    })
}

/// Computes silu(gate) * up, elementwise, in f32 and rounded once (Shazeer 2020): the gated activation of Llama's MLP.
///
/// # Errors
/// Tensors of different shapes or, on the CPU, of different dtypes.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gated("swiglu", Activation::Silu, gate, up, composed::swiglu)
}

/// Computes gelu_tanh(gate) * up, elementwise, in f32 and rounded once (Shazeer 2020): the gated activation of Gemma's
/// MLP.
///
/// # Errors
/// Tensors of different shapes or, on the CPU, of different dtypes.
pub fn gelu_gated(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gated("gelu_gated", Activation::GeluTanh, gate, up, composed::gelu_gated)
}

/// Computes gelu(gate) * up with the exact GELU, elementwise, in f32 and rounded once: the gated activation of
/// ModernBERT's MLP.
///
/// # Errors
/// Tensors of different shapes or, on the CPU, of different dtypes.
pub fn exact_gelu_gated(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gated("exact_gelu_gated", Activation::Gelu, gate, up, composed::exact_gelu_gated)
}

fn gated(
    name: &'static str,
    function: Activation,
    gate: &Tensor,
    up: &Tensor,
    composed: fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    if gate.shape() != up.shape() {
        bail!("{name}: the gate has shape {:?}; it must be that of the other operand, {:?}", gate.dims(), up.dims())
    }
    #[cfg(feature = "cuda")]
    if let Some(y) = on_gpu::activation::gated(name, function, gate, up)? {
        return Ok(y);
    }
    if !gate.device().is_cpu() {
        return composed(gate, up);
    }
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    let inputs = OpInputs::of([Some(&gate), Some(&up)])?;
    let shape = gate.shape().clone();
    with_element!(gate.dtype(), name, E => {
        let mut y = buffer::<E>(gate.elem_count());
        with_all([Some(&gate), Some(&up)], name, |[gate, up]| {
            activation::gated(function, gate.unwrap_or_default(), up.unwrap_or_default(), &mut y);
            Ok(())
        })?;
        inputs.result(name, E::storage(y), shape, move |grad, [to_gate, to_up]| {
            let (mut dgate, mut dup) = (buffer::<E>(grad.len()), buffer::<E>(grad.len()));
            with_all([Some(&gate), Some(&up)], name, |[gate, up]| {
                let inputs = [gate.unwrap_or_default(), up.unwrap_or_default()];
                grad.read::<E, _>(name, |dy| {
                    activation::gated_backward(function, inputs, dy, &mut dgate, &mut dup);
                    Ok(())
                })
            })?;
            to_gate.deliver(Grad::own(dgate))?;
            to_up.deliver(Grad::own(dup))
        })
    })
}

/// Multiplies x by a number, which is rounded to x's dtype as PyTorch rounds a one-element tensor. Gemma scales its
/// embeddings in this way. The product is computed in f32 and rounded once.
pub fn scale(x: &Tensor, factor: f64) -> Result<Tensor> {
    scale_in_f32(x, round_to(factor, x.dtype()))
}

/// Multiplies x by a number as PyTorch multiplies a tensor by a Python number: the factor is in f32 and the product is
/// rounded once, to x's dtype. Granite scales its residual branches in this way.
pub fn scale_in_f32(x: &Tensor, factor: f64) -> Result<Tensor> {
    const NAME: &str = "scaled";
    if !x.device().is_cpu() {
        return composed::scale(x, factor);
    }
    let x = x.contiguous()?;
    let inputs = OpInputs::of([Some(&x)])?;
    let shape = x.shape().clone();
    with_element!(x.dtype(), NAME, E => {
        let mut y = buffer::<E>(x.elem_count());
        with_elements::<E, _>(&x, NAME, |x| {
            activation::scale(x, factor, &mut y);
            Ok(())
        })?;
        inputs.result(NAME, E::storage(y), shape, move |grad, [to_x]| {
            to_x.make::<E>(grad.len(), |dx| {
                grad.read::<E, _>(NAME, |dy| {
                    activation::scale(dy, factor, dx);
                    Ok(())
                })
            })
        })
    })
}

/// Rounds a factor to a dtype.
fn round_to(factor: f64, dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => bf16::from_f64(factor).to_f64(),
        DType::F16 => f16::from_f64(factor).to_f64(),
        DType::F32 => f64::from(factor as f32),
        _ => factor,
    }
}
