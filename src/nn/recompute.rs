//! The inputs that a layer keeps to recompute its result in backward, for those that need it then and do not keep it.

use crate::graph::OpInputs;
use candle_core::{Result, Tensor};

/// The inputs from which a result is computed again: the input, and copies of the parameters, which may have left
/// memory by then. Nothing where no backward will ask for it.
pub(super) fn kept_inputs<const N: usize>(inputs: &OpInputs<N>, operands: [&Tensor; N]) -> Result<Option<[Tensor; N]>> {
    if !inputs.are_wanted() {
        return Ok(None);
    }
    let mut kept = operands.map(Tensor::detach);
    for parameter in &mut kept[1..] {
        *parameter = parameter.copy()?.detach();
    }
    Ok(Some(kept))
}
