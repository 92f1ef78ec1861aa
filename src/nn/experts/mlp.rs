//! The MLP of experts: gate and up, the gated activation, down, and the weighted sum.

use super::options::{ExpertGate, GateUpOrder};
use super::{ExpertProjection, Routing, combine_experts, expert_rows};
use crate::graph::{OpInputs, SavedTensor, can_remake};
use crate::kernels::{buffer, gate_up};
use crate::nn::composed;
use crate::nn::in_f32::has_kernels;
use crate::tensor::element::{TensorElement, with_element, with_elements};
use candle_core::{D, Device, Result, Tensor, bail};

/// Computes the gated activation of `x` `[.., 2 width]`, which holds gate and up, as `[.., width]`, in f32 and rounded
/// once.
///
/// # Errors
/// An odd number of columns.
pub fn gated_activation(x: &Tensor, gate: ExpertGate, order: GateUpOrder) -> Result<Tensor> {
    const NAME: &str = "gated_activation";
    let both = x.dim(D::Minus1)?;
    if !both.is_multiple_of(2) {
        bail!(
            "{NAME}: the input has shape {:?}; its last dimension must be even, because it holds gate and up",
            x.dims()
        )
    }
    if !has_kernels(x) {
        return composed::gated_activation(x, gate, order);
    }
    let (x, width) = (x.contiguous()?, both / 2);
    let mut shape = x.dims().to_vec();
    shape[x.rank() - 1] = width;
    let inputs = OpInputs::of([Some(&x)])?;
    with_element!(x.dtype(), NAME, E => {
        let forward = move |x: &Tensor| with_elements::<E, _>(x, NAME, |x| {
            let mut y = buffer::<E>(x.len() / 2);
            gate_up::gated(gate, order, x, width, &mut y);
            Ok(y)
        });
        let y = forward(&x)?;
        let (kept, wanted, remade_shape) = (SavedTensor::of(&x), inputs.are_wanted(), shape.clone());
        let again = x.clone();
        let y = inputs.result(NAME, E::storage(y), shape, move |grad, [to_x]| {
            to_x.make::<E>(2 * grad.len(), |dx| {
                with_elements::<E, _>(&kept.get()?, NAME, |x| grad.read::<E, _>(NAME, |dy| {
                    gate_up::gated_backward(gate, order, (x, dy), width, dx);
                    Ok(())
                }))
            })
        })?;
        // The product after the activation need not keep its input.
        if wanted {
            can_remake(&y, move || Tensor::from_vec(forward(&again)?, &remade_shape[..], &Device::Cpu));
        }
        Ok(y)
    })
}

/// The MLP of all experts of a layer: for each row, the sum over its experts e of `weight_e down_e(act(gate_e x, up_e
/// x))`.
///
/// A row's experts are added by rising number, whatever their order in the router's choice, starting from 0; the weight
/// is applied after `down` and its bias. The memory of the activations is proportional to the number of choices, not to
/// that of the experts.
#[derive(Debug, Clone)]
pub struct ExpertMlp {
    gate_up: ExpertProjection,
    down: ExpertProjection,
    gate: ExpertGate,
    order: GateUpOrder,
}

impl ExpertMlp {
    /// Creates the MLP from `gate_up` (the projection to gate and up, with one weight for both or one for each), `down`
    /// (the projection from the activation to the output) and the activation `gate`.
    ///
    /// # Errors
    /// Projections of different numbers of experts, or whose sizes do not match.
    pub fn new(
        gate_up: ExpertProjection,
        down: ExpertProjection,
        gate: ExpertGate,
        order: GateUpOrder,
    ) -> Result<Self> {
        let ((_, both), (width, _)) = (gate_up.widths(), down.widths());
        if gate_up.experts() != down.experts() || both != 2 * width {
            bail!(
                "experts: gate and up of {} experts have {both} outputs, and down of {} experts has {width} inputs; the \
                 numbers of experts must be equal, and there must be {} outputs",
                gate_up.experts(),
                down.experts(),
                2 * width
            )
        }
        Ok(Self { gate_up, down, gate, order })
    }

    /// Returns the number of experts.
    pub fn experts(&self) -> usize {
        self.down.experts()
    }

    /// Applies the MLP to `x` `[.., width]`, for whose rows a router has chosen experts.
    ///
    /// # Errors
    /// An input or choices that do not match.
    pub fn forward(&self, x: &Tensor, routing: &Routing) -> Result<Tensor> {
        let assignment = routing.assignment();
        let rows = expert_rows(x, assignment)?;
        let both = self.gate_up.forward(&rows, assignment)?;
        // The backward pass computes the rows and the activation again.
        drop(rows);
        let inner = gated_activation(&both, self.gate, self.order)?;
        let y = self.down.forward(&inner, assignment)?;
        drop(inner);
        let mut shape = x.dims().to_vec();
        shape[x.rank() - 1] = self.down.widths().1;
        combine_experts(&y, routing.weights(), assignment, &shape.into())
    }
}
