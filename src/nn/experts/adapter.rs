//! Low-rank adapters of experts, in the layout of PEFT's `target_parameters`.

use super::ExpertAssignment;
use super::grouped_gemm::ProjectionSizes;
use crate::kernels::buffer;
use crate::kernels::element::ElementDtype;
use crate::kernels::gemm::{Epilogue, Matrix, MatrixMut, Product, gemm_grouped};
use crate::nn::WeightLayout;
use crate::tensor::element::TensorElement;
use crate::util::counted;
use candle_core::{Result, Tensor, bail};
use std::ops::Range;
use std::sync::Arc;

/// A low-rank adapter of all experts of a projection: y += scale x A_e^T B_e^T.
///
/// The matrices have the layout of PEFT: the rows of `a` are those of expert 0, then those of expert 1 and so on, while
/// the columns of `b` are the first column of every expert, then the second:
///
/// ```text
///   a [experts * r, in]    A_e = rows e r .. (e + 1) r
///   b [out, experts * r]   B_e = columns e, e + experts, e + 2 experts, ..
/// ```
///
/// In a grouped product, the adapter's part of the result is computed in f32, whatever the dtype of the projection.
#[derive(Debug, Clone)]
pub struct ExpertAdapter {
    /// The matrices A, `[experts * r, in]`.
    pub a: Tensor,
    /// The matrices B, `[out, experts * r]`.
    pub b: Tensor,
    /// The factor: in PEFT, alpha / r.
    pub scale: f64,
}

impl ExpertAdapter {
    /// Checks that the matrices match a projection.
    pub(super) fn check(&self, sizes: &ProjectionSizes) -> Result<()> {
        let ((rows, inputs), (outputs, columns)) = (self.a.dims2()?, self.b.dims2()?);
        let is_divisible = rows > 0 && rows.is_multiple_of(sizes.experts);
        if !is_divisible || columns != rows || inputs != sizes.inputs || outputs != sizes.outputs() {
            bail!(
                "experts: the adapter's matrices have shapes {:?} and {:?}; {} of {} and {} {} \
                 [{} r, {}] and [{}, {} r]",
                self.a.dims(),
                self.b.dims(),
                counted(sizes.experts, "expert"),
                counted(sizes.inputs, "input"),
                counted(sizes.outputs(), "output"),
                if sizes.experts == 1 { "needs" } else { "need" },
                sizes.experts,
                sizes.inputs,
                sizes.outputs(),
                sizes.experts
            )
        }
        Ok(())
    }

    /// Returns the adapter with matrices in contiguous memory.
    pub(super) fn contiguous(&self) -> Result<Self> {
        Ok(Self { a: self.a.contiguous()?, b: self.b.contiguous()?, scale: self.scale })
    }

    /// Composes the adapter's part of the result from products of single experts.
    pub(super) fn composed(
        &self,
        x: &Tensor,
        assignment: &ExpertAssignment,
        linear: impl Fn(&Tensor, &Tensor, Option<&Tensor>, WeightLayout) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let experts = assignment.experts();
        let rank = self.a.dim(0)? / experts;
        let b = self.b.reshape((self.b.dim(0)?, rank, experts))?;
        let mut parts = Vec::new();
        for expert in assignment.active_experts() {
            let slots = assignment.slots_of(expert);
            let x = x.narrow(0, slots.start, slots.len())?.contiguous()?;
            let b = b.narrow(2, expert, 1)?.squeeze(2)?.contiguous()?;
            let h = linear(&x, &self.a.narrow(0, expert * rank, rank)?.contiguous()?, None, WeightLayout::OutIn)?;
            parts.push(linear(&(h * self.scale)?, &b, None, WeightLayout::OutIn)?);
        }
        if parts.is_empty() {
            Tensor::zeros((0, self.b.dim(0)?), x.dtype(), x.device())
        } else {
            Tensor::cat(&parts, 0)
        }
    }
}

/// The maximum number of rows that are widened together.
const ROWS: usize = 256;

/// The sizes of an adapter, and the assignment of rows to experts.
#[derive(Clone)]
pub(super) struct AdapterSizes {
    inputs: usize,
    outputs: usize,
    rank: usize,
    scale: f32,
    assignment: Arc<ExpertAssignment>,
}

/// The number of an expert, and some of its slots.
type Piece = (usize, Range<usize>);

impl AdapterSizes {
    pub fn new(adapter: &ExpertAdapter, sizes: &ProjectionSizes, assignment: Arc<ExpertAssignment>) -> Self {
        Self {
            inputs: sizes.inputs,
            outputs: sizes.outputs(),
            rank: adapter.a.dims()[0] / sizes.experts,
            scale: adapter.scale as f32,
            assignment,
        }
    }

    /// Returns the rank of the matrices.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the matrices B with experts first, each transposed: `[experts, r, out]`.
    pub fn sort_by_expert(adapter: &ExpertAdapter, sizes: &ProjectionSizes, b: &[f32]) -> Vec<f32> {
        let (experts, outputs) = (sizes.experts, sizes.outputs());
        let rank = adapter.a.dims()[0] / experts;
        let mut sorted = buffer::<f32>(b.len());
        for (output, row) in b.chunks_exact(experts * rank).enumerate() {
            for (i, values) in row.chunks_exact(experts).enumerate() {
                for (expert, value) in values.iter().enumerate() {
                    sorted[(expert * rank + i) * outputs + output] = *value;
                }
            }
        }
        sorted
    }

    /// Writes the matrices B to `b` in the adapter's layout; the inverse of [`AdapterSizes::sort_by_expert`].
    pub fn in_layout(&self, sorted: &[f32], b: &mut [f32]) {
        let (experts, rank, outputs) = (self.assignment.experts(), self.rank, self.outputs);
        for (output, row) in b.chunks_exact_mut(experts * rank).enumerate() {
            for (i, values) in row.chunks_exact_mut(experts).enumerate() {
                for (expert, value) in values.iter_mut().enumerate() {
                    *value = sorted[(expert * rank + i) * outputs + output];
                }
            }
        }
    }

    /// Calls `f` with rows of `x` (`width` elements for each slot) in f32, and their experts: all together if they
    /// are already f32, otherwise a few at a time. The division of an expert's rows does not depend on other experts.
    fn in_f32<E: TensorElement>(&self, x: &[E], width: usize, mut f: impl FnMut(&[Piece], &[f32])) {
        let active_experts =
            || self.assignment.active_experts().map(|expert| (expert, self.assignment.slots_of(expert)));
        if E::KIND == ElementDtype::F32 {
            return f(&active_experts().collect::<Vec<_>>(), bytemuck::cast_slice(x));
        }
        let pieces = active_experts().flat_map(|(expert, slots)| {
            let ends = slots.end;
            slots.step_by(ROWS).map(move |start| (expert, start..ends.min(start + ROWS)))
        });
        let pieces: Vec<Piece> = pieces.collect();
        let mut scratch = buffer::<f32>(self.assignment.slots().min(ROWS) * width);
        let mut rest = &pieces[..];
        while let Some((_, first)) = rest.first() {
            let count = rest.iter().take_while(|(_, slots)| slots.end - first.start <= ROWS).count();
            let (batch, remaining) = rest.split_at(count);
            let end = batch.last().map_or(first.end, |(_, slots)| slots.end);
            let scratch = &mut scratch[..(end - first.start) * width];
            E::widen(&x[first.start * width..end * width], scratch);
            f(batch, scratch);
            rest = remaining;
        }
    }

    /// Returns h `[slots, r]`, the low-rank products x A_e^T.
    pub fn project_down<E: TensorElement>(&self, x: &[E], a: &[f32]) -> Vec<f32> {
        let (inputs, rank) = (self.inputs, self.rank);
        let mut h = buffer::<f32>(self.assignment.slots() * rank);
        self.in_f32(x, inputs, |pieces, x| {
            run_grouped(pieces, &mut h, rank, |expert, rows| {
                let a = Matrix::new(&a[expert * rank * inputs..][..rank * inputs], rank, inputs).t();
                (Matrix::new(&x[rows.start * inputs..rows.end * inputs], rows.len(), inputs), a, Epilogue::default())
            });
        });
        h
    }

    /// Computes y = s h B_e^T, with B from [`AdapterSizes::sort_by_expert`].
    pub fn project_up<E: TensorElement>(&self, h: &[f32], b: &[f32], y: &mut [E]) {
        let (outputs, rank) = (self.outputs, self.rank);
        let pieces: Vec<Piece> =
            self.assignment.active_experts().map(|expert| (expert, self.assignment.slots_of(expert))).collect();
        run_grouped(&pieces, y, outputs, |expert, rows| {
            let b = Matrix::new(&b[expert * rank * outputs..][..rank * outputs], rank, outputs);
            let h = Matrix::new(&h[rows.start * rank..rows.end * rank], rows.len(), rank);
            (h, b, Epilogue { scale: self.scale, ..Epilogue::default() })
        });
    }

    /// Computes the gradient of h from the gradient of the result, `g`, and, if `db` is given, adds the gradient of B
    /// to it. B and `db` have the order of [`AdapterSizes::sort_by_expert`].
    pub fn low_rank_gradients<E: TensorElement>(
        &self,
        g: &[E],
        h: &[f32],
        b: &[f32],
        mut db: Option<&mut [f32]>,
    ) -> Vec<f32> {
        let (outputs, rank, scale) = (self.outputs, self.rank, self.scale);
        let mut dh = buffer::<f32>(self.assignment.slots() * rank);
        self.in_f32(g, outputs, |pieces, g| {
            run_grouped(pieces, &mut dh, rank, |expert, rows| {
                let b = Matrix::new(&b[expert * rank * outputs..][..rank * outputs], rank, outputs).t();
                let g = Matrix::new(&g[rows.start * outputs..rows.end * outputs], rows.len(), outputs);
                (g, b, Epilogue { scale, ..Epilogue::default() })
            });
            if let Some(db) = db.as_deref_mut() {
                self.add_to_matrices(pieces, db, (h, g, outputs), scale);
            }
        });
        dh
    }

    /// Computes the gradient of A from that of h.
    pub fn gradient_of_a<E: TensorElement>(&self, x: &[E], dh: &[f32]) -> Vec<f32> {
        let mut da = vec![0f32; self.assignment.experts() * self.rank * self.inputs];
        self.in_f32(x, self.inputs, |pieces, x| self.add_to_matrices(pieces, &mut da, (dh, x, self.inputs), 1.0));
        da
    }

    /// Adds `scale low_rank^T wide` of each expert's rows to its matrix `[r, width]`. `low_rank` has the rows of all
    /// slots, and `wide` has those of the pieces.
    fn add_to_matrices(
        &self,
        pieces: &[Piece],
        matrices: &mut [f32],
        (low_rank, wide, width): (&[f32], &[f32], usize),
        scale: f32,
    ) {
        let rank = self.rank;
        let Some((_, Range { start, .. })) = pieces.first() else { return };
        let mut products = Vec::new();
        let mut matrices = matrices.chunks_exact_mut(rank * width).enumerate();
        // A list of pieces has at most one of each expert, in ascending order.
        for (expert, slots) in pieces {
            let Some((_, matrix)) = matrices.by_ref().find(|(i, _)| i == expert) else { break };
            let wide = &wide[(slots.start - start) * width..(slots.end - start) * width];
            products.push(Product {
                result: MatrixMut::new(matrix, rank, width),
                a: Matrix::new(&low_rank[slots.start * rank..slots.end * rank], slots.len(), rank).t(),
                b: Matrix::new(wide, slots.len(), width),
                epilogue: Epilogue { accumulate: true, scale, ..Epilogue::default() },
            });
        }
        gemm_grouped(products);
    }

    /// Computes the adapter's part of the gradient of x, and writes it to `dx` or, with `accumulate`, adds it to `dx`.
    pub fn gradient_of_x<E: TensorElement>(&self, dh: &[f32], a: &[f32], dx: &mut [E], accumulate: bool) {
        let (inputs, rank) = (self.inputs, self.rank);
        let pieces: Vec<Piece> =
            self.assignment.active_experts().map(|expert| (expert, self.assignment.slots_of(expert))).collect();
        run_grouped(&pieces, dx, inputs, |expert, rows| {
            let a = Matrix::new(&a[expert * rank * inputs..][..rank * inputs], rank, inputs);
            let dh = Matrix::new(&dh[rows.start * rank..rows.end * rank], rows.len(), rank);
            (dh, a, Epilogue { accumulate, ..Epilogue::default() })
        });
    }
}

/// Computes a product for each piece in one pass. The results are rows of `width` elements in `y`, which has those of
/// all slots. `operands` receives the expert and the rows, counted from the first piece.
fn run_grouped<'a, C: TensorElement>(
    pieces: &[Piece],
    y: &'a mut [C],
    width: usize,
    operands: impl Fn(usize, Range<usize>) -> (Matrix<'a, f32>, Matrix<'a, f32>, Epilogue<'a, C>),
) {
    let Some((_, Range { start, .. })) = pieces.first() else { return };
    let mut rest = &mut y[start * width..];
    let mut products = Vec::new();
    for (expert, slots) in pieces {
        let (part, others) = std::mem::take(&mut rest).split_at_mut(slots.len() * width);
        rest = others;
        let (a, b, epilogue) = operands(*expert, slots.start - start..slots.end - start);
        products.push(Product { result: MatrixMut::new(part, slots.len(), width), a, b, epilogue });
    }
    gemm_grouped(products);
}
