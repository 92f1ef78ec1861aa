//! Activations and gated activations.

use super::supported_device;
use crate::cuda::activation as kernel;
use crate::graph::{Grad, OpInputs};
use crate::kernels::gemm::Activation;
use crate::tensor::device_elements::with_each;
use candle_core::{Result, Tensor};

/// Computes f(x).
pub(in crate::nn) fn apply(name: &'static str, function: Activation, x: &Tensor) -> Result<Option<Tensor>> {
    let Some(device) = supported_device(&[x]) else { return Ok(None) };
    let x = x.contiguous()?;
    let inputs = OpInputs::of([Some(&x)])?;
    let (shape, dtype) = (x.shape().clone(), x.dtype());
    let y = with_each([&x], name, |[x]| kernel::forward(&device, function, x))?;
    let y = inputs.result(name, y, shape, move |grad, [to_x]| {
        let dy = grad.on_device(&device)?;
        to_x.make_on(&device, dtype, x.elem_count(), |dx| {
            with_each([&x, &dy], name, |inputs| kernel::backward(&device, function, inputs, dx))
        })
    })?;
    Ok(Some(y))
}

/// Computes f(gate) up.
pub(in crate::nn) fn gated(
    name: &'static str,
    function: Activation,
    gate: &Tensor,
    up: &Tensor,
) -> Result<Option<Tensor>> {
    let Some(device) = supported_device(&[gate, up]).filter(|_| gate.dtype() == up.dtype()) else { return Ok(None) };
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    let inputs = OpInputs::of([Some(&gate), Some(&up)])?;
    let shape = gate.shape().clone();
    let y = with_each([&gate, &up], name, |inputs| kernel::gated(&device, function, inputs))?;
    let y = inputs.result(name, y, shape, move |grad, [to_gate, to_up]| {
        let (len, dy) = (grad.len(), grad.on_device(&device)?);
        let [dgate, dup] = with_each([&gate, &up, &dy], name, |[gate, up, dy]| {
            kernel::gated_backward(&device, function, [gate, up], dy)
        })?;
        to_gate.deliver(Grad::of_storage(dgate, len))?;
        to_up.deliver(Grad::of_storage(dup, len))
    })?;
    Ok(Some(y))
}
