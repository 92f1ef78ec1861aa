//! Zero gradients for experts that no row chose, and for everything else if there are no rows.

use super::{ExpertAssignment, ExpertTensors};
use crate::graph::{Grad, InputGradSink, OpInputs, copy_to_result};
use candle_core::{DType, Result, Shape, Tensor};

/// Returns `y` as the result of an operation that delivers zero gradients to the tensors of experts that no row chose.
/// The operations of the other experts leave these tensors out of the graph, but the optimizer must treat them like an
/// unused expert's part of a fused tensor, for which the gradient is zero. If there are no rows at all, no operation
/// adds `others` (the input and the adapter) to the graph, so they get zero gradients too.
pub(super) fn with_zero_gradients<'a>(
    y: Tensor,
    parameters: impl Iterator<Item = &'a ExpertTensors>,
    others: impl Iterator<Item = &'a Tensor>,
    assignment: &ExpertAssignment,
) -> Result<Tensor> {
    let mut unused: Vec<&Tensor> = others.filter(|_| assignment.slots() == 0).collect();
    for parameter in parameters {
        match parameter {
            ExpertTensors::Separate(tensors) => {
                let is_unused = |(expert, _): &(usize, &Tensor)| assignment.slots_of(*expert).is_empty();
                unused.extend(tensors.iter().enumerate().filter(is_unused).map(|(_, tensor)| tensor));
            }
            ExpertTensors::Fused(tensor) if assignment.slots() == 0 => unused.push(tensor),
            ExpertTensors::Fused(_) => {}
        }
    }
    let mut inputs = OpInputs::of([Some(&y)])?;
    let sinks = inputs.add(unused.iter().copied())?;
    if !sinks.iter().any(InputGradSink::is_recorded) {
        return Ok(y);
    }
    let zeros: Vec<(Shape, DType)> = unused.iter().map(|tensor| (tensor.shape().clone(), tensor.dtype())).collect();
    let (device, shape) = (y.device().clone(), y.shape().clone());
    inputs.result("unused experts", copy_to_result(&y)?, shape, move |grad, [to_y]| {
        for (sink, (shape, dtype)) in sinks.iter().zip(&zeros).filter(|(sink, _)| sink.is_wanted()) {
            sink.deliver(Grad::Shared(Tensor::zeros(shape, *dtype, &device)?))?;
        }
        to_y.deliver(grad)
    })
}
