//! Lookup of rows of a table by token id.

use crate::error::ModelError;
use crate::graph::Inputs;
use crate::kernels::{self, buffer};
use crate::nn::composed;
use crate::nn::{normal, refuse};
use crate::tensor::element::{Element, with_element, with_elements};
use candle_core::{DType, Result, Tensor, bail};
use candle_nn::{Module, VarBuilder};

/// Rows `ids` (u32, any shape) of `table` `[rows, width]`: a tensor of the ids' shape with `width` added at the end.
///
/// The backward touches only the rows of the table's gradient that were looked up; where one was looked up several
/// times the gradients are summed in f32, in the order of their positions, and rounded once.
///
/// # Errors
/// Ids of another dtype, or not below the table's rows: the message names the id, its position and the rows.
pub fn embedding(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    let (rows, width) = table.dims2()?;
    let host = host_ids(ids, "embedding", "ids")?;
    if let Some(position) = host.iter().position(|id| *id as usize >= rows) {
        return Err(refuse(ModelError::TokenOutOfRange { id: host[position], position, rows }.into()));
    }
    if !table.device().is_cpu() {
        return composed::embedding(ids, table);
    }
    let mut shape = ids.dims().to_vec();
    shape.push(width);
    let table = table.contiguous()?;
    let inputs = Inputs::of([Some(&table)])?;
    with_element!(table.dtype(), NAME, E => {
        let mut y = buffer::<E>(host.len() * width);
        with_elements::<E, _>(&table, NAME, |table| {
            kernels::embedding::embedding(&host, table, width, &mut y);
            Ok(())
        })?;
        inputs.result(NAME, E::storage(y), shape, move |grad, [to_table]| {
            grad.read::<E, _>(NAME, |dy| {
                // What is not looked up has gradient 0: a new gradient comes as zeros.
                to_table.accumulate_zeroed::<E>(rows * width, |dtable| {
                    kernels::embedding::embedding_backward_into(&host, dy, width, dtable);
                    Ok(())
                })
            })
        })
    })
}

const NAME: &str = "embedding";

/// The elements of a u32 tensor on whatever device, in row-major order.
pub(super) fn host_ids(ids: &Tensor, op: &str, what: &str) -> Result<Vec<u32>> {
    if ids.dtype() != DType::U32 {
        bail!("{op}: the {what} have dtype {:?}; u32 is needed: convert them with to_dtype(DType::U32)", ids.dtype())
    }
    ids.flatten_all()?.to_vec1()
}

/// A table of `rows` vectors, named "weight"; starts from N(0, 0.02) as GPT-2's.
#[derive(Debug, Clone)]
pub struct Embedding {
    weight: Tensor,
}

impl Embedding {
    /// A table `[rows, width]`.
    pub fn new(rows: usize, width: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { weight: vb.get_with_hints((rows, width), "weight", normal(0.02))? })
    }

    /// The table, `[rows, width]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Module for Embedding {
    /// Looks up u32 ids; see [`embedding`].
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        embedding(ids, &self.weight)
    }
}
