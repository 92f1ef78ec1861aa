//! Looks up rows of a table by token id.

use crate::error::ModelError;
use crate::graph::{OpInputs, exclude_from_gradient_check};
use crate::kernels::{self, buffer};
use crate::nn::composed;
#[cfg(feature = "cuda")]
use crate::nn::on_gpu;
use crate::nn::{normal, refuse};
use crate::tensor::element::{TensorElement, with_element, with_elements};
use candle_core::{DType, Result, Tensor, bail};
use candle_nn::{Module, VarBuilder};
use std::borrow::Cow;

/// Returns rows `ids` (u32, any shape) of `table` `[rows, width]`, as a tensor of the ids' shape with `width` appended.
///
/// The backward pass touches only the rows of the table's gradient that were looked up. If a row was looked up several
/// times, its gradients are summed in f32, in the order of their positions, and rounded once.
///
/// # Errors
/// Ids of a dtype other than u32; an id that is not below the number of rows, with a message that names the id, its
/// position and the number of rows.
pub fn embedding(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    embedding_in(ids, table, table.dtype())
}

/// Computes [`embedding()`] with the result in `dtype`: the rows of an f32 table in a 16-bit model are rounded. The
/// table's gradient has the table's dtype.
///
/// # Errors
/// The errors of [`embedding()`]; a dtype other than the table's or, for an f32 table, bf16 or f16.
pub fn embedding_in(ids: &Tensor, table: &Tensor, dtype: DType) -> Result<Tensor> {
    look_up(ids, table, dtype, None)
}

/// Looks up rows of `table`. Lookups of `padding` add nothing to the table's gradient.
fn look_up(ids: &Tensor, table: &Tensor, dtype: DType, padding: Option<u32>) -> Result<Tensor> {
    let is_low = matches!(dtype, DType::BF16 | DType::F16);
    if dtype != table.dtype() && !(is_low && table.dtype() == DType::F32) {
        bail!(
            "embedding: rows of {dtype:?} are requested from a table of {:?}; they must have the table's dtype or, \
             with an f32 table, bf16 or f16",
            table.dtype()
        )
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
        return with_element!(dtype, NAME, E => look_up_rounded::<E>(host, &table, inputs, shape, padding));
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
                // Rows that were not looked up have gradient 0: a new gradient starts as zeros.
                to_table.accumulate_zeroed::<E>(rows * width, |dtable| {
                    kernels::embedding::embedding_backward_into(&host, &dy, width, dtable);
                    Ok(())
                })
            })
        })
    })
}

const NAME: &str = "embedding";

/// Returns the ids that are not `padding`, and the rows of the gradient that belong to them.
fn without_padding<'a, E: TensorElement>(
    ids: &'a [u32],
    dy: &'a [E],
    width: usize,
    padding: Option<u32>,
) -> (Cow<'a, [u32]>, Cow<'a, [E]>) {
    match padding.filter(|padding| ids.contains(padding)) {
        None => (ids.into(), dy.into()),
        Some(padding) => {
            let other_rows = || ids.iter().zip(dy.chunks_exact(width)).filter(|(id, _)| **id != padding);
            (other_rows().map(|(id, _)| *id).collect(), other_rows().flat_map(|(_, row)| row).copied().collect())
        }
    }
}

/// Returns rows of an f32 table, rounded to `E`.
fn look_up_rounded<E: TensorElement>(
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

/// Returns the elements of a u32 tensor on any device, in row-major order.
pub(super) fn host_ids(ids: &Tensor, op: &str, name: &str) -> Result<Vec<u32>> {
    if ids.dtype() != DType::U32 {
        bail!("{op}: the {name} have dtype {:?}, not u32; convert them with to_dtype(DType::U32)", ids.dtype())
    }
    ids.flatten_all()?.to_vec1()
}

/// A table of `rows` vectors, named "weight" and initialized from N(0, 0.02) like GPT-2's. Results have the
/// `VarBuilder`'s dtype, even if the table is kept in f32.
#[derive(Debug, Clone)]
pub struct Embedding {
    weight: Tensor,
    dtype: DType,
    padding: Option<u32>,
}

impl Embedding {
    /// Builds a table `[rows, width]`.
    pub fn new(rows: usize, width: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { weight: vb.get_with_hints((rows, width), "weight", normal(0.02))?, dtype: vb.dtype(), padding: None })
    }

    /// Sets an id whose lookups add nothing to the table's gradient: PyTorch's `padding_idx`.
    #[must_use]
    pub fn padding(mut self, id: Option<u32>) -> Self {
        self.padding = id;
        let width = self.weight.dims().last().copied().unwrap_or(0);
        exclude_from_gradient_check(&self.weight, id.map_or(0..0, |id| id as usize * width..(id as usize + 1) * width));
        self
    }

    /// Returns the table, `[rows, width]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Module for Embedding {
    /// Looks up u32 ids; see [`embedding_in`].
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        look_up(ids, &self.weight, self.dtype, self.padding)
    }
}
