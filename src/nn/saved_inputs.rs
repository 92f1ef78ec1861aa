//! The inputs that a layer keeps so that its result can be recomputed in the backward pass, for other layers that need
//! the result in the backward pass but do not keep it.

use crate::graph::OpInputs;
use candle_core::{Result, Tensor};

/// Returns the operands from which a result can be recomputed in the backward pass: the input, and copies of the
/// parameters, because these may have been released by then. Returns `None` if no backward pass will need them.
pub(super) fn saved_inputs<const N: usize>(
    inputs: &OpInputs<N>,
    operands: [&Tensor; N],
) -> Result<Option<[Tensor; N]>> {
    if !inputs.are_wanted() {
        return Ok(None);
    }
    let mut kept = operands.map(Tensor::detach);
    for parameter in &mut kept[1..] {
        *parameter = parameter.copy()?.detach();
    }
    Ok(Some(kept))
}
