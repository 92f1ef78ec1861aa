//! The path of rows to their experts and back.

use super::ExpertAssignment;
use crate::graph::{Grad, OpInputs, SavedTensor, register_recompute};
use crate::kernels::buffer;
use crate::kernels::embedding::embedding;
use crate::kernels::expert_combine::{self, sum_slots, sum_slots_backward};
use crate::nn::composed;
use crate::nn::f32_weight_linear::with_f32_values;
use crate::nn::in_f32::has_kernels;
use crate::tensor::element::{TensorElement, with_all, with_element, with_elements};
use crate::util::counted;
use candle_core::{Device, Result, Shape, Tensor, bail};
use std::sync::Arc;

/// Returns the rows of `x` `[.., width]` in the order of the slots, `[slots, width]`: a row occurs once for each of its
/// experts. The gradients of a row's slots are summed in ascending order of the experts' numbers, in f32, and rounded
/// once.
///
/// # Errors
/// A number of rows that differs from that of the assignment.
pub fn expert_rows(x: &Tensor, assignment: &Arc<ExpertAssignment>) -> Result<Tensor> {
    const NAME: &str = "expert_rows";
    let width = x.dims().last().copied().unwrap_or(0);
    check_rows(NAME, x, width, assignment)?;
    if !has_kernels(x) {
        return composed::expert_rows(&x.reshape((assignment.rows(), width))?, assignment);
    }
    let x = x.contiguous()?;
    let inputs = OpInputs::of([Some(&x)])?;
    let assignment = assignment.clone();
    let shape = Shape::from((assignment.slots(), width));
    with_element!(x.dtype(), NAME, E => {
        let gather = move |x: &Tensor, assignment: &ExpertAssignment| with_elements::<E, _>(x, NAME, |x| {
            let mut y = buffer::<E>(assignment.slots() * width);
            embedding(assignment.row_of_slots(), x, width, &mut y);
            Ok(y)
        });
        let y = gather(&x, &assignment)?;
        let (needs_grad, saved_x, for_recompute) = (inputs.are_wanted(), SavedTensor::of(&x), assignment.clone());
        let y = inputs.result(NAME, E::storage(y), shape.clone(), move |grad, [to_x]| {
            grad.read::<E, _>(NAME, |dy| {
                to_x.accumulate::<E>(assignment.rows() * width, |dx, add| {
                    sum_slots(assignment.by_row(), dy, width, None, dx, add);
                    Ok(())
                })
            })
        })?;
        if needs_grad {
            register_recompute(&y, move || Tensor::from_vec(gather(&saved_x.get()?, &for_recompute)?, &shape, &Device::Cpu));
        }
        Ok(y)
    })
}

/// Returns the sum of the experts' results for each row: the slots of `y` `[slots, width]`, multiplied by their
/// `weights` `[rows, experts per row]`, are added to 0 in ascending order of the experts' numbers. The sum is computed
/// in f32 and rounded once. The result has the shape `shape`, `[.., width]`.
///
/// # Errors
/// Shapes that do not match the assignment.
pub fn combine_experts(
    y: &Tensor,
    weights: &Tensor,
    assignment: &Arc<ExpertAssignment>,
    shape: &Shape,
) -> Result<Tensor> {
    const NAME: &str = "combine_experts";
    let (slots, width) = y.dims2()?;
    let rows = assignment.rows();
    let min_weights = assignment.choice_of_slots().iter().max().map_or(0, |choice| *choice as usize + 1);
    if slots != assignment.slots() || weights.elem_count() < min_weights || shape.elem_count() != rows * width {
        bail!(
            "{NAME}: y has the shape [{slots}, {width}], the weights {:?}, and the result {:?}; y must have {}, the \
             weights at least {}, and the result {} of {}",
            weights.dims(),
            shape.dims(),
            counted(assignment.slots(), "slot"),
            counted(min_weights, "element"),
            counted(rows, "row"),
            counted(width, "element")
        )
    }
    if !has_kernels(y) {
        return composed::combine_experts(y, weights, assignment)?.reshape(shape);
    }
    let (y, weights) = (y.contiguous()?, weights.contiguous()?);
    let inputs = OpInputs::of([Some(&y), Some(&weights)])?;
    let (assignment, n_weights, weights_dtype) = (assignment.clone(), weights.elem_count(), weights.dtype());
    let slot_weights: Vec<f32> = with_f32_values(&weights, |weights| {
        Ok(assignment.choice_of_slots().iter().map(|choice| weights[*choice as usize]).collect())
    })?;
    with_element!(y.dtype(), NAME, E => {
        let mut out = buffer::<E>(rows * width);
        with_elements::<E, _>(&y, NAME, |y| {
            sum_slots(assignment.by_row(), y, width, Some(&slot_weights), &mut out, false);
            Ok(())
        })?;
        inputs.result(NAME, E::storage(out), shape.clone(), move |grad, [to_y, to_weights]| {
            let mut dy = to_y.is_wanted().then(|| buffer::<E>(slots * width));
            let mut slot_weight_grads = to_weights.is_wanted().then(|| vec![0f32; slots]);
            grad.read::<E, _>(NAME, |dout| with_elements::<E, _>(&y, NAME, |y| {
                let (dy, grads) = (dy.as_deref_mut(), slot_weight_grads.as_deref_mut());
                sum_slots_backward(assignment.row_of_slots(), (y, dout), width, &slot_weights, dy, grads);
                Ok(())
            }))?;
            if let Some(grads) = slot_weight_grads {
                let mut dweights = vec![0f32; n_weights];
                for (choice, grad) in assignment.choice_of_slots().iter().zip(grads) {
                    dweights[*choice as usize] = grad;
                }
                with_element!(weights_dtype, NAME, W => to_weights.deliver_sums::<W>(&dweights))?;
            }
            dy.map_or(Ok(()), |dy| to_y.deliver(Grad::own(dy)))
        })
    })
}

/// Computes `base + sigmoid(gate) * x`, with one gate `[.., 1]` for each row of `x` `[.., width]`, in f32 and rounded
/// once. In Qwen2-MoE, `x` is the output of the shared expert, and its gate is a linear layer with one output.
///
/// # Errors
/// Shapes that do not match; a gate or, on the CPU, a `base` whose dtype is not that of `x`.
pub fn add_gated(base: &Tensor, gate: &Tensor, x: &Tensor) -> Result<Tensor> {
    const NAME: &str = "add_gated";
    let width = x.dims().last().copied().unwrap_or(0);
    let rows = x.elem_count() / width.max(1);
    if base.shape() != x.shape() || gate.elem_count() != rows || gate.dtype() != x.dtype() {
        bail!(
            "{NAME}: the operands have shapes {:?} and {:?}, and the gate has shape {:?} and dtype {:?}; the operands must \
             have the same shape, and the gate one element of {:?} for each row",
            base.dims(),
            x.dims(),
            gate.dims(),
            gate.dtype(),
            x.dtype()
        )
    }
    if !has_kernels(x) {
        return composed::add_gated(base, gate, x);
    }
    let (base, gate, x) = (base.contiguous()?, gate.contiguous()?, x.contiguous()?);
    let inputs = OpInputs::of([Some(&base), Some(&gate), Some(&x)])?;
    with_element!(x.dtype(), NAME, E => {
        let mut y = buffer::<E>(x.elem_count());
        with_f32_values(&gate, |gates| with_all([Some(&base), Some(&x)], NAME, |[base, x]| {
            expert_combine::add_gated(base.unwrap_or_default(), gates, x.unwrap_or_default(), width, &mut y);
            Ok(())
        }))?;
        inputs.result(NAME, E::storage(y), x.shape().clone(), move |grad, [to_base, to_gate, to_x]| {
            if to_gate.is_wanted() || to_x.is_wanted() {
                let (mut dgates, mut dx) = (vec![0f32; rows], buffer::<E>(rows * width));
                with_f32_values(&gate, |gates| with_elements::<E, _>(&x, NAME, |x| grad.read::<E, _>(NAME, |dy| {
                    expert_combine::add_gated_backward(gates, (x, dy), width, &mut dgates, &mut dx);
                    Ok(())
                })))?;
                to_gate.deliver_sums::<E>(&dgates)?;
                to_x.deliver(Grad::own(dx))?;
            }
            to_base.deliver(grad)
        })
    })
}

/// Checks that `x` has the rows of the assignment.
fn check_rows(name: &str, x: &Tensor, width: usize, assignment: &ExpertAssignment) -> Result<()> {
    if x.rank() == 0 || x.elem_count() != assignment.rows() * width {
        bail!(
            "{name}: the input has shape {:?}; the router chose experts for {}",
            x.dims(),
            counted(assignment.rows(), "row")
        )
    }
    Ok(())
}
