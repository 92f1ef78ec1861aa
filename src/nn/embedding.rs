//! Lookup of rows of a table by token id.

use crate::error::ModelError;
use crate::graph::{OpInputs, hold_still};
use crate::kernels::{self, buffer};
use crate::nn::composed;
#[cfg(feature = "cuda")]
use crate::nn::on_gpu;
use crate::nn::{normal, refuse};
use crate::tensor::element::{TensorElement, with_element, with_elements};
use candle_core::{DType, Result, Tensor, bail};
use candle_nn::{Module, VarBuilder};
use std::borrow::Cow;

/// Rows `ids` (u32, any shape) of `table` `[rows, width]`: a tensor of the ids' shape with `width` added at the end.
///
/// The backward touches only the rows of the table's gradient that were looked up; where one was looked up several
/// times the gradients are summed in f32, in the order of their positions, and rounded once.
///
/// # Errors
/// Ids of another dtype, or not below the table's rows: the message names the id, its position and the rows.
pub fn embedding(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    embedding_in(ids, table, table.dtype())
}

/// [`embedding()`] with the rows in `dtype`: of a table in f32 in a model of 16 bits, rounded. The table's gradient is in
/// the table's dtype.
///
/// # Errors
/// As [`embedding()`]; a dtype other than the table's or, of a table in f32, bf16 or f16.
pub fn embedding_in(ids: &Tensor, table: &Tensor, dtype: DType) -> Result<Tensor> {
    looked_up(ids, table, dtype, None)
}

/// The rows; lookups of `padding` add nothing to the table's gradient.
fn looked_up(ids: &Tensor, table: &Tensor, dtype: DType, padding: Option<u32>) -> Result<Tensor> {
    let is_low = matches!(dtype, DType::BF16 | DType::F16);
    if dtype != table.dtype() && !(is_low && table.dtype() == DType::F32) {
        bail!("embedding: the table has dtype {:?}; rows of {dtype:?} are made of f32 only", table.dtype())
    }
    let (rows, width) = table.dims2()?;
    let host = host_ids(ids, "embedding", "ids")?;
    if let Some(position) = host.iter().position(|id| *id as usize >= rows) {
        return Err(refuse(ModelError::TokenOutOfRange { id: host[position], position, rows }.into()));
    }
    let mut shape = ids.dims().to_vec();
    shape.push(width);
    #[cfg(feature = "cuda")]
    if let Some(y) = on_gpu::embedding::embedding(&host, table, dtype, padding, &shape)? {
        return Ok(y);
    }
    if !table.device().is_cpu() {
        let rows = match padding {
            Some(padding) => composed::padded_embedding(ids, table, padding)?,
            None => composed::embedding(ids, table)?,
        };
        return rows.to_dtype(dtype);
    }
    let table = table.contiguous()?;
    let inputs = OpInputs::of([Some(&table)])?;
    if dtype != table.dtype() {
        return with_element!(dtype, NAME, E => rounded::<E>(host, &table, inputs, shape, padding));
    }
    with_element!(table.dtype(), NAME, E => {
        let mut y = buffer::<E>(host.len() * width);
        with_elements::<E, _>(&table, NAME, |table| {
            kernels::embedding::embedding(&host, table, width, &mut y);
            Ok(())
        })?;
        inputs.result(NAME, E::storage(y), shape, move |grad, [to_table]| {
            grad.read::<E, _>(NAME, |dy| {
                let (host, dy) = without_padding(&host, dy, width, padding);
                // What is not looked up has gradient 0: a new gradient comes as zeros.
                to_table.accumulate_zeroed::<E>(rows * width, |dtable| {
                    kernels::embedding::embedding_backward_into(&host, &dy, width, dtable);
                    Ok(())
                })
            })
        })
    })
}

const NAME: &str = "embedding";

/// The ids that are not `padding`, and the rows of the gradient that belong to them.
fn without_padding<'a, E: TensorElement>(
    ids: &'a [u32],
    dy: &'a [E],
    width: usize,
    padding: Option<u32>,
) -> (Cow<'a, [u32]>, Cow<'a, [E]>) {
    match padding.filter(|padding| ids.contains(padding)) {
        None => (ids.into(), dy.into()),
        Some(padding) => {
            let kept = || ids.iter().zip(dy.chunks_exact(width)).filter(|(id, _)| **id != padding);
            (kept().map(|(id, _)| *id).collect(), kept().flat_map(|(_, row)| row).copied().collect())
        }
    }
}

/// Rows of a table in f32, in `E`.
fn rounded<E: TensorElement>(
    ids: Vec<u32>,
    table: &Tensor,
    inputs: OpInputs<1>,
    shape: Vec<usize>,
    padding: Option<u32>,
) -> Result<Tensor> {
    let (rows, width) = table.dims2()?;
    let mut wide = buffer::<f32>(ids.len() * width);
    with_elements::<f32, _>(table, NAME, |table| {
        kernels::embedding::embedding(&ids, table, width, &mut wide);
        Ok(())
    })?;
    let mut y = buffer::<E>(wide.len());
    E::narrow(&wide, &mut y);
    inputs.result(NAME, E::storage(y), shape, move |grad, [to_table]| {
        let mut wide = buffer::<f32>(grad.len());
        grad.read::<E, _>(NAME, |dy| {
            E::widen(dy, &mut wide);
            Ok(())
        })?;
        let (ids, wide) = without_padding(&ids, &wide, width, padding);
        to_table.accumulate_zeroed::<f32>(rows * width, |dtable| {
            kernels::embedding::embedding_backward_into(&ids, &wide, width, dtable);
            Ok(())
        })
    })
}

/// The elements of a u32 tensor on whatever device, in row-major order.
pub(super) fn host_ids(ids: &Tensor, op: &str, what: &str) -> Result<Vec<u32>> {
    if ids.dtype() != DType::U32 {
        bail!("{op}: the {what} have dtype {:?}; u32 is needed: convert them with to_dtype(DType::U32)", ids.dtype())
    }
    ids.flatten_all()?.to_vec1()
}

/// A table of `rows` vectors, named "weight"; starts from N(0, 0.02) as GPT-2's. Its results have the `VarBuilder`'s dtype,
/// also where the table is kept in f32.
#[derive(Debug, Clone)]
pub struct Embedding {
    weight: Tensor,
    dtype: DType,
    padding: Option<u32>,
}

impl Embedding {
    /// A table `[rows, width]`.
    pub fn new(rows: usize, width: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { weight: vb.get_with_hints((rows, width), "weight", normal(0.02))?, dtype: vb.dtype(), padding: None })
    }

    /// Lookups of this id add nothing to the table's gradient: PyTorch's `padding_idx`.
    #[must_use]
    pub fn padding(mut self, id: Option<u32>) -> Self {
        self.padding = id;
        let width = self.weight.dims().last().copied().unwrap_or(0);
        hold_still(&self.weight, id.map_or(0..0, |id| id as usize * width..(id as usize + 1) * width));
        self
    }

    /// The table, `[rows, width]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Module for Embedding {
    /// Looks up u32 ids; see [`embedding_in`].
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        looked_up(ids, &self.weight, self.dtype, self.padding)
    }
}
