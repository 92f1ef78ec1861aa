//! Lookup of rows of a table by token id.

use crate::Error;
use crate::nn::composed;
use crate::nn::element::{Element, elements, with_element, with_elements};
use crate::nn::{normal, refuse};
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
use candle_nn::{Module, VarBuilder};
use rayon::prelude::*;

/// Rows of the table's gradient that one task computes.
const ROWS_PER_TASK: usize = 64;

/// Rows `ids` (u32, any shape) of `table` `[rows, width]`: a tensor of the ids' shape with `width` added at the end.
///
/// The backward gives the dense gradient of the table; rows that were looked up several times are summed in f32, in the
/// order of their positions, and rounded once.
///
/// Errors: ids of another dtype, or not below the table's rows: the message names the id, its position and the rows.
pub fn embedding(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    let (rows, width) = table.dims2()?;
    let host = host_ids(ids, "embedding", "ids")?;
    if let Some(position) = host.iter().position(|id| *id as usize >= rows) {
        return Err(refuse(Error::TokenOutOfRange { id: host[position], position, rows }));
    }
    if !table.device().is_cpu() {
        return composed::embedding(ids, table);
    }
    let mut shape = ids.dims().to_vec();
    shape.push(width);
    table.contiguous()?.apply_op1(EmbeddingOp { ids: host, shape: Shape::from(shape) })
}

/// The elements of a u32 tensor on whatever device, in row-major order.
pub(super) fn host_ids(ids: &Tensor, op: &str, what: &str) -> Result<Vec<u32>> {
    if ids.dtype() != DType::U32 {
        bail!("{op}: the {what} have dtype {:?}; u32 is needed: convert them with to_dtype(DType::U32)", ids.dtype())
    }
    ids.flatten_all()?.to_vec1()
}

struct EmbeddingOp {
    /// Each below the table's rows.
    ids: Vec<u32>,
    shape: Shape,
}

const NAME: &str = "embedding";

impl EmbeddingOp {
    fn gather<E: Element>(&self, table: &[E], width: usize) -> Vec<E> {
        let mut out = Vec::with_capacity(self.ids.len() * width);
        for id in &self.ids {
            out.extend_from_slice(&table[*id as usize * width..][..width]);
        }
        out
    }

    fn scatter<E: Element>(&self, grad: &[E], rows: usize, width: usize) -> Vec<E> {
        let mut out = vec![E::default(); rows * width];
        if width == 0 {
            return out;
        }
        // Sorted by id, then by position: what belongs to a row lies together, in a fixed order.
        let mut order: Vec<(u32, u32)> = self.ids.iter().copied().zip(0..).collect();
        order.sort_unstable();
        out.par_chunks_mut(ROWS_PER_TASK * width).enumerate().for_each(|(task, out)| {
            let (mut sum, mut one) = (vec![0f32; width], vec![0f32; width]);
            let first = task * ROWS_PER_TASK;
            let mut rest = &order[order.partition_point(|(id, _)| (*id as usize) < first)..];
            while let Some(&(id, _)) = rest.first()
                && (id as usize - first + 1) * width <= out.len()
            {
                let (same, after) = rest.split_at(rest.partition_point(|(other, _)| *other == id));
                rest = after;
                sum.fill(0.0);
                for (_, position) in same {
                    E::widen(&grad[*position as usize * width..][..width], &mut one);
                    sum.iter_mut().zip(&one).for_each(|(s, x)| *s += x);
                }
                E::narrow(&sum, &mut out[(id as usize - first) * width..][..width]);
            }
        });
        out
    }
}

impl CustomOp1 for EmbeddingOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, table: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let (_, width) = layout.shape().dims2()?;
        let storage = with_element!(table.dtype(), NAME, E => {
            Ok(E::storage(self.gather(elements::<E>(table, layout, NAME)?, width)))
        })?;
        Ok((storage, self.shape.clone()))
    }

    fn bwd(&self, table: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let (rows, width) = table.dims2()?;
        let grad = grad.contiguous()?;
        with_element!(grad.dtype(), NAME, E => {
            let data = with_elements::<E, _>(&grad, NAME, |g| Ok(self.scatter(g, rows, width)))?;
            Ok(Some(Tensor::from_vec(data, table.shape(), table.device())?))
        })
    }
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
