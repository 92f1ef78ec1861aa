//! The activation between the projections of experts.

use super::options::{ExpertActivation, GateUpOrder};
use crate::graph::{OpInputs, SavedTensor, register_recompute};
use crate::kernels::{buffer, gate_up_activation};
use crate::nn::composed;
use crate::nn::in_f32::has_kernels;
use crate::tensor::element::{TensorElement, with_element, with_elements};
use candle_core::{D, Device, Result, Tensor, bail};

/// Computes the gated activation of `x` `[.., 2 width]`, which holds gate and up. The result `[.., width]` is computed
/// in f32 and rounded once.
///
/// # Errors
/// An odd number of columns.
pub fn gated_activation(x: &Tensor, gate: ExpertActivation, order: GateUpOrder) -> Result<Tensor> {
    const NAME: &str = "gated_activation";
    let columns = x.dim(D::Minus1)?;
    if !columns.is_multiple_of(2) {
        bail!(
            "{NAME}: the input has shape {:?}; its last dimension must be even, because it holds gate and up",
            x.dims()
        )
    }
    if !has_kernels(x) {
        return composed::gated_activation(x, gate, order);
    }
    let (x, width) = (x.contiguous()?, columns / 2);
    let mut shape = x.dims().to_vec();
    shape[x.rank() - 1] = width;
    let inputs = OpInputs::of([Some(&x)])?;
    with_element!(x.dtype(), NAME, E => {
        let forward = move |x: &Tensor| with_elements::<E, _>(x, NAME, |x| {
            let mut y = buffer::<E>(x.len() / 2);
            gate_up_activation::gated(gate, order, x, width, &mut y);
            Ok(y)
        });
        let y = forward(&x)?;
        let (saved_x, needs_grad, recompute_shape) = (SavedTensor::of(&x), inputs.are_wanted(), shape.clone());
        let x_for_recompute = x.clone();
        let y = inputs.result(NAME, E::storage(y), shape, move |grad, [to_x]| {
            to_x.make::<E>(2 * grad.len(), |dx| {
                with_elements::<E, _>(&saved_x.get()?, NAME, |x| grad.read::<E, _>(NAME, |dy| {
                    gate_up_activation::gated_backward(gate, order, (x, dy), width, dx);
                    Ok(())
                }))
            })
        })?;
        // The projection after the activation need not keep its input, because the input can be recomputed.
        if needs_grad {
            register_recompute(&y, move || Tensor::from_vec(forward(&x_for_recompute)?, &recompute_shape[..], &Device::Cpu));
        }
        Ok(y)
    })
}
