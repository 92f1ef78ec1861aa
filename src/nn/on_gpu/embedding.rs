//! Looks up rows of a table by token id.

use super::supported_device;
use crate::cuda::embedding::{EmbeddingRowUses, add_rows, look_up};
use crate::graph::OpInputs;
use crate::tensor::device_elements::with_each;
use candle_core::{DType, Result, Tensor};

const NAME: &str = "embedding";

/// Returns the rows of valid ids as a tensor of `shape`; see [`crate::nn::embedding_in`]. Lookups of `padding` add
/// nothing to the table's gradient.
pub(in crate::nn) fn embedding(
    ids: &[u32],
    table: &Tensor,
    dtype: DType,
    padding: Option<u32>,
    shape: &[usize],
) -> Result<Option<Tensor>> {
    let Some(device) = supported_device(&[table]) else { return Ok(None) };
    let (_, width) = table.dims2()?;
    let table = table.contiguous()?;
    let inputs = OpInputs::of([Some(&table)])?;
    let y = with_each([&table], NAME, |[table]| look_up(&device, ids, table, width, dtype))?;
    let uses = inputs.are_wanted().then(|| EmbeddingRowUses::new(ids, padding));
    let (len, table_dtype) = (table.elem_count(), table.dtype());
    let y = inputs.result(NAME, y, shape, move |grad, [to_table]| {
        let Some(uses) = &uses else { return Ok(()) };
        let dy = grad.on_device(&device)?;
        to_table.accumulate_zeroed_on(&device, table_dtype, len, |grad| {
            with_each([&dy], NAME, |[dy]| add_rows(&device, uses, dy, width, grad))
        })
    })?;
    Ok(Some(y))
}
