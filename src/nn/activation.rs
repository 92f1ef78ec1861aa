//! Activations: GELU, SiLU, and the gated SwiGLU.

use crate::graph::{Grad, Inputs};
use crate::kernels::gemm::Activation;
use crate::kernels::{activation, buffer};
use crate::nn::composed;
use crate::tensor::element::{Element, with_all, with_element, with_elements};
use candle_core::{Result, Tensor, bail};

/// GELU by its tanh approximation (Hendrycks and Gimpel 2016), GPT-2's activation:
/// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), elementwise, computed in f32.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    if x.device().is_cpu() { apply("gelu_tanh", x, Activation::GeluTanh) } else { composed::gelu_tanh(x) }
}

/// SiLU (Elfwing et al. 2017): x / (1 + exp(-x)), elementwise, computed in f32.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    if x.device().is_cpu() { apply("silu", x, Activation::Silu) } else { composed::silu(x) }
}

/// y = the function of x.
pub(super) fn forward<E: Element>(function: Activation, x: &[E], y: &mut [E]) {
    match function {
        Activation::GeluTanh => activation::gelu_tanh(x, y),
        Activation::Silu => activation::silu(x, y),
    }
}

/// `dx`, the gradient of `x`, by that of the result.
pub(super) fn backward<E: Element>(function: Activation, x: &[E], dy: &[E], dx: &mut [E]) {
    match function {
        Activation::GeluTanh => activation::gelu_tanh_backward(x, dy, dx),
        Activation::Silu => activation::silu_backward(x, dy, dx),
    }
}

fn apply(name: &'static str, x: &Tensor, function: Activation) -> Result<Tensor> {
    let x = x.contiguous()?;
    let inputs = Inputs::of([Some(&x)])?;
    let shape = x.shape().clone();
    with_element!(x.dtype(), name, E => {
        let mut y = buffer::<E>(x.elem_count());
        with_elements::<E, _>(&x, name, |x| {
            forward(function, x, &mut y);
            Ok(())
        })?;
        inputs.result(name, E::storage(y), shape, move |grad, [to_x]| {
            to_x.make::<E>(grad.len(), |dx| {
                with_elements::<E, _>(&x, name, |x| {
                    grad.read::<E, _>(name, |dy| {
                        backward(function, x, dy, dx);
                        Ok(())
                    })
                })
            })
        })
    })
}

/// silu(gate) * up, elementwise, computed in f32 and rounded once (Shazeer 2020): the middle of Llama's MLP.
///
/// # Errors
/// Tensors of different shapes.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    const NAME: &str = "swiglu";
    if gate.shape() != up.shape() {
        bail!("swiglu: the gate has shape {:?}; it must be that of the other operand, {:?}", gate.dims(), up.dims())
    }
    if !gate.device().is_cpu() {
        return composed::swiglu(gate, up);
    }
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    let inputs = Inputs::of([Some(&gate), Some(&up)])?;
    let shape = gate.shape().clone();
    with_element!(gate.dtype(), NAME, E => {
        let mut y = buffer::<E>(gate.elem_count());
        with_all([Some(&gate), Some(&up)], NAME, |[gate, up]| {
            activation::swiglu(gate.unwrap_or_default(), up.unwrap_or_default(), &mut y);
            Ok(())
        })?;
        inputs.result(NAME, E::storage(y), shape, move |grad, [to_gate, to_up]| {
            let (mut dgate, mut dup) = (buffer::<E>(grad.len()), buffer::<E>(grad.len()));
            with_all([Some(&gate), Some(&up)], NAME, |[gate, up]| {
                let (gate, up) = (gate.unwrap_or_default(), up.unwrap_or_default());
                grad.read::<E, _>(NAME, |dy| {
                    activation::swiglu_backward(gate, up, dy, &mut dgate, &mut dup);
                    Ok(())
                })
            })?;
            to_gate.give(Grad::own(dgate))?;
            to_up.give(Grad::own(dup))
        })
    })
}
