//! A linear layer with a low-rank adapter, as one operation: y = x W^T + s D(x) A^T B^T + bias + residual, where D is
//! dropout. With DoRA, the columns of the product are also scaled by m / |W + s B A|.
//!
//! ```text
//!   x [rows, in] --+------------- W -------------+--> sum in f32, rounded once (the adapter's part is rounded too)
//!                  |                             |
//!                  +-- D -- A --> h [rows, r] -- s B
//! ```
//!
//! The adapter's part is computed in f32, whatever the format of the base weight; 16-bit rows are widened a few at a
//! time. In addition to x, the low-rank product h is kept for the backward pass and, with DoRA, also the result before
//! its columns are scaled.

use super::dropout::{DropoutMask, dropout};
use super::f32_weight_linear::{apply_epilogue, is_wider, with_f32_values};
use super::linear_product::LinearSizes;
use super::low_rank_update::LowRankUpdate;
use super::{LinearEpilogue, WeightLayout, add, autocast, linear};
use crate::graph::{Grad, InputGradSink, OpInputs, SavedTensor, without_gradients};
use crate::kernels::buffer;
use crate::kernels::element::ElementDtype;
use crate::kernels::gemm::{Epilogue, Matrix, MatrixMut, column_sums, gemm};
use crate::kernels::parallel::{self, ParallelChunks};
use crate::tensor::element::{TensorElement, with_all, with_element, with_elements};
use crate::util::counted;
use candle_core::{D, DType, Result, Tensor, bail};
use std::cell::Cell;
use std::ops::Range;

thread_local! {
    static ADAPTERS_OFF: Cell<bool> = const { Cell::new(false) };
}

/// Calls `run` with all adapters of this thread's models switched off, and without recording anything for a backward
/// pass. The model is then the base model without adapters, which preference optimization uses as its reference.
pub fn without_adapters<T>(run: impl FnOnce() -> T) -> T {
    struct AdaptersGuard(bool);
    impl Drop for AdaptersGuard {
        fn drop(&mut self) {
            ADAPTERS_OFF.set(self.0);
        }
    }
    let _reset = AdaptersGuard(ADAPTERS_OFF.replace(true));
    without_gradients(run)
}

/// Returns whether adapters are off.
pub(super) fn are_off() -> bool {
    ADAPTERS_OFF.get()
}

/// The operands of one use of an adapter.
pub(super) struct LoraOperands<'a> {
    /// The matrix A, `[r, in]`.
    pub a: &'a Tensor,
    /// The matrix B, `[out, r]`.
    pub b: &'a Tensor,
    /// The magnitude, `[out]`, with DoRA.
    pub magnitude: Option<&'a Tensor>,
    pub scale: f64,
    pub mask: Option<DropoutMask>,
}

const NAME: &str = "linear (adapter)";
/// The number of rows that are widened, or to which dropout is applied, at a time.
const ROWS: usize = 256;

/// Computes [`linear_with_epilogue`](super::linear_with_epilogue) with an adapter. In the fused operation, a residual
/// without an activation is added in the same pass; with an activation, the epilogue takes separate passes.
pub(super) fn linear_with_epilogue(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    layout: WeightLayout,
    adapter: &LoraOperands<'_>,
    epilogue: LinearEpilogue<'_>,
) -> Result<Tensor> {
    let sizes = LinearSizes::new(x.shape(), weight.shape(), bias.map(Tensor::shape), layout)?;
    adapter.check(sizes)?;
    let is_fused = x.device().is_cpu() && autocast::lower_format(x, weight).is_none() && !is_wider(x, weight, bias);
    if !is_fused {
        return apply_epilogue(composed(x, weight, bias, sizes, adapter)?, epilogue);
    }
    let residual = epilogue.residual.filter(|_| epilogue.activation.is_none());
    if let Some(residual) = residual
        && residual.shape() != &sizes.result_shape(x.shape())
    {
        let shape = sizes.result_shape(x.shape());
        bail!("{NAME}: the residual has shape {:?}; the result has {:?}", residual.dims(), shape.dims())
    }
    let y = with_element!(x.dtype(), NAME, E => fused::<E>(x, weight, bias, sizes, adapter, residual))?;
    if epilogue.activation.is_some() { apply_epilogue(y, epilogue) } else { Ok(y) }
}

impl LoraOperands<'_> {
    fn check(&self, sizes: LinearSizes) -> Result<()> {
        let (rank, inputs) = self.a.dims2()?;
        let outputs = self.b.dim(0)?;
        let fits = inputs == sizes.inputs && self.b.dims() == [sizes.outputs, rank] && rank > 0;
        if !fits {
            bail!(
                "{NAME}: the adapter's matrices have shapes {:?} and {:?}; a weight of {} and {} needs \
                 [r, {}] and [{}, r]",
                self.a.dims(),
                self.b.dims(),
                counted(sizes.inputs, "input"),
                counted(sizes.outputs, "output"),
                sizes.inputs,
                sizes.outputs
            )
        }
        match self.magnitude.map(Tensor::dims) {
            Some(found) if found != [outputs] => {
                bail!(
                    "{NAME}: the magnitude has shape {found:?}; a weight of {} needs [{outputs}]",
                    counted(outputs, "output")
                )
            }
            _ => Ok(()),
        }
    }
}

/// Composes the result from this library's and Candle's operations, for devices other than the CPU and for operands of
/// different formats.
fn composed(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    sizes: LinearSizes,
    adapter: &LoraOperands<'_>,
) -> Result<Tensor> {
    let dropped = match adapter.mask {
        Some(mask) => dropout(x, mask.p, mask.seed, mask.draw)?,
        None => x.clone(),
    };
    let h = linear(&dropped, adapter.a, None, WeightLayout::OutIn)?;
    let update = linear(&(h * adapter.scale)?, adapter.b, None, WeightLayout::OutIn)?;
    let Some(magnitude) = adapter.magnitude else {
        return add(&linear(x, weight, bias, sizes.layout)?, &update);
    };
    let v = add(&linear(x, weight, None, sizes.layout)?, &update)?;
    let norms = without_gradients(|| {
        let wide = |t: &Tensor| t.detach().to_dtype(DType::F32);
        let weight = match sizes.layout {
            WeightLayout::OutIn => wide(weight)?,
            WeightLayout::InOut => wide(weight)?.t()?,
        };
        let sum = (weight + (wide(adapter.b)?.matmul(&wide(adapter.a)?)? * adapter.scale)?)?;
        sum.sqr()?.sum(D::Minus1)?.sqrt()
    })?;
    let factors = (magnitude.to_dtype(DType::F32)? / norms.detach())?;
    let y = v.to_dtype(DType::F32)?.broadcast_mul(&factors)?.to_dtype(x.dtype())?;
    bias.map_or(Ok(y.clone()), |bias| y.broadcast_add(&bias.to_dtype(x.dtype())?))
}

/// The sizes of a product and its adapter.
#[derive(Clone, Copy)]
struct AdaptedSizes {
    sizes: LinearSizes,
    rank: usize,
    scale: f32,
    mask: Option<DropoutMask>,
}

impl AdaptedSizes {
    /// Calls `look` with the rows of x in f32 after dropout: all together if they are already f32 and there is no
    /// dropout, otherwise a block at a time.
    fn dropped<E: TensorElement>(&self, x: &[E], mut look: impl FnMut(Range<usize>, &[f32])) {
        let LinearSizes { rows, inputs, .. } = self.sizes;
        let Some(mask) = self.mask else { return in_f32(x, rows, inputs, look) };
        let mut scratch = buffer::<E>(rows.min(ROWS) * inputs);
        in_pieces(rows, |piece| {
            let scratch = &mut scratch[..piece.len() * inputs];
            mask.apply(piece.start * inputs, &x[piece.start * inputs..piece.end * inputs], scratch);
            in_f32(scratch, piece.len(), inputs, |inner, x| {
                look(piece.start + inner.start..piece.start + inner.end, x)
            });
        });
    }

    /// Returns h `[rows, r]`, the low-rank product D(x) A^T.
    fn project_down<E: TensorElement>(&self, x: &[E], a: &[f32]) -> Vec<f32> {
        let (inputs, rank) = (self.sizes.inputs, self.rank);
        let mut h = buffer::<f32>(self.sizes.rows * rank);
        self.dropped(x, |rows, x| {
            let h = MatrixMut::new(&mut h[rows.start * rank..rows.end * rank], rows.len(), rank);
            gemm(h, Matrix::new(x, rows.len(), inputs), Matrix::new(a, rank, inputs).t(), Epilogue::default());
        });
        h
    }

    /// Computes y = s h B^T.
    fn project_up<E: TensorElement>(&self, h: &[f32], b: &[f32], y: &mut [E]) {
        let (LinearSizes { rows, outputs, .. }, rank) = (self.sizes, self.rank);
        let epilogue = Epilogue { scale: self.scale, ..Epilogue::default() };
        let b = Matrix::new(b, outputs, rank).t();
        gemm(MatrixMut::new(y, rows, outputs), Matrix::new(h, rows, rank), b, epilogue);
    }

    /// Computes the gradients of h and, if wanted, B from the gradient of the product, `g`.
    fn low_rank_gradients<E: TensorElement>(&self, g: &[E], h: &[f32], b: &[f32], db: Option<&mut [f32]>) -> Vec<f32> {
        let (LinearSizes { rows, outputs, .. }, rank, scale) = (self.sizes, self.rank, self.scale);
        let mut dh = buffer::<f32>(rows * rank);
        // The gradient of B is computed transposed, with few rows, because g is read fastest that way.
        let mut transposed = buffer::<f32>(if db.is_some() { rank * outputs } else { 0 });
        in_f32(g, rows, outputs, |rows, g| {
            let (g, low_rank_range) = (Matrix::new(g, rows.len(), outputs), rows.start * rank..rows.end * rank);
            let epilogue = Epilogue { scale, ..Epilogue::default() };
            let dh = MatrixMut::new(&mut dh[low_rank_range.clone()], rows.len(), rank);
            gemm(dh, g, Matrix::new(b, outputs, rank), epilogue);
            if db.is_some() {
                let epilogue = Epilogue { scale, accumulate: rows.start > 0, ..Epilogue::default() };
                let h = Matrix::new(&h[low_rank_range], rows.len(), rank);
                gemm(MatrixMut::new(&mut transposed, rank, outputs), h.t(), g, epilogue);
            }
        });
        for (output, db) in db.into_iter().flat_map(|db| db.chunks_exact_mut(rank).enumerate()) {
            db.iter_mut().enumerate().for_each(|(i, db)| *db = transposed[i * outputs + output]);
        }
        dh
    }

    /// Computes the gradient of A from that of h.
    fn gradient_of_a<E: TensorElement>(&self, x: &[E], dh: &[f32]) -> Vec<f32> {
        let (inputs, rank) = (self.sizes.inputs, self.rank);
        let mut da = vec![0f32; rank * inputs];
        self.dropped(x, |rows, x| {
            let epilogue = Epilogue { accumulate: true, ..Epilogue::default() };
            let dh = Matrix::new(&dh[rows.start * rank..rows.end * rank], rows.len(), rank);
            gemm(MatrixMut::new(&mut da, rank, inputs), dh.t(), Matrix::new(x, rows.len(), inputs), epilogue);
        });
        da
    }

    /// Computes the adapter's part of x's gradient, and writes it to `dx` or, with `accumulate`, adds it to `dx`.
    fn gradient_of_x<E: TensorElement>(&self, dh: &[f32], a: &[f32], dx: &mut [E], accumulate: bool) {
        let (LinearSizes { rows, inputs, .. }, rank) = (self.sizes, self.rank);
        let epilogue = |accumulate| Epilogue { accumulate, ..Epilogue::default() };
        let a = Matrix::new(a, rank, inputs);
        let Some(mask) = self.mask else {
            let dh = Matrix::new(dh, rows, rank);
            return gemm(MatrixMut::new(dx, rows, inputs), dh, a, epilogue(accumulate));
        };
        let mut scratch = buffer::<f32>(3 * rows.min(ROWS) * inputs);
        in_pieces(rows, |piece| {
            let (elements, len) = (piece.start * inputs..piece.end * inputs, piece.len() * inputs);
            let (unmasked, rest) = scratch.split_at_mut(len);
            let (masked, rest) = rest.split_at_mut(len);
            let dh = Matrix::new(&dh[piece.start * rank..piece.end * rank], piece.len(), rank);
            gemm(MatrixMut::new(unmasked, piece.len(), inputs), dh, a, Epilogue::<f32>::default());
            mask.apply(elements.start, unmasked, masked);
            let dx = &mut dx[elements];
            if accumulate {
                let before = &mut rest[..len];
                E::widen(dx, before);
                masked.iter_mut().zip(before).for_each(|(sum, before)| *sum += *before);
            }
            E::narrow(masked, dx);
        });
    }
}

fn in_pieces(rows: usize, mut f: impl FnMut(Range<usize>)) {
    (0..rows).step_by(ROWS).for_each(|start| f(start..rows.min(start + ROWS)));
}

/// Calls `look` with rows of `x` in f32: all together if they are already f32, otherwise a block at a time.
fn in_f32<E: TensorElement>(x: &[E], rows: usize, width: usize, mut look: impl FnMut(Range<usize>, &[f32])) {
    if E::KIND == ElementDtype::F32 {
        return look(0..rows, bytemuck::cast_slice(x));
    }
    let mut scratch = buffer::<f32>(rows.min(ROWS) * width);
    in_pieces(rows, |piece| {
        let scratch = &mut scratch[..piece.len() * width];
        E::widen(&x[piece.start * width..piece.end * width], scratch);
        look(piece, scratch);
    });
}

fn fused<E: TensorElement>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    sizes: LinearSizes,
    adapter: &LoraOperands<'_>,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let shape = sizes.result_shape(x.shape());
    let (x, weight, a, b) = (x.contiguous()?, weight.contiguous()?, adapter.a.contiguous()?, adapter.b.contiguous()?);
    let [bias, residual, magnitude] = [bias, residual, adapter.magnitude].map(|t| t.map(Tensor::contiguous));
    let (bias, residual, magnitude) = (bias.transpose()?, residual.transpose()?, magnitude.transpose()?);
    let adapted = AdaptedSizes { sizes, rank: a.dim(0)?, scale: adapter.scale as f32, mask: adapter.mask };
    let operands = [Some(&x), residual.as_ref(), Some(&weight), bias.as_ref(), Some(&a), Some(&b), magnitude.as_ref()];
    let inputs = OpInputs::of(operands)?;
    let mut y = buffer::<E>(shape.elem_count());
    let h = with_f32_values(&a, |a| with_elements::<E, _>(&x, NAME, |x| Ok(adapted.project_down(x, a))))?;
    with_f32_values(&b, |b| {
        adapted.project_up(&h, b, &mut y);
        Ok(())
    })?;
    let dora = match &magnitude {
        None => {
            product(&sizes, &mut y, [&x, &weight], bias.as_ref(), residual.as_ref())?;
            None
        }
        Some(magnitude) => {
            product::<E>(&sizes, &mut y, [&x, &weight], None, None)?;
            let norms = norms::<E>(&weight, &a, &b, &adapted)?;
            let factors: Vec<f32> =
                with_f32_values(magnitude, |m| Ok(m.iter().zip(&norms).map(|(m, norm)| m / norm).collect()))?;
            let product = std::mem::replace(&mut y, buffer::<E>(shape.elem_count()));
            scale_columns(&sizes, &product, &factors, [bias.as_ref(), residual.as_ref()], &mut y)?;
            Some(DoraBackward { norms, factors, product, dtype: magnitude.dtype() })
        }
    };
    let needs_grad = inputs.are_wanted();
    let backward = LoraBackward {
        adapted,
        x: SavedTensor::of(&x),
        weight,
        bias: bias.map(|bias| bias.dtype()),
        a,
        b,
        h: if needs_grad { h } else { Vec::new() },
        dora: dora.filter(|_| needs_grad),
    };
    inputs.result(NAME, E::storage(y), shape, move |grad, sinks| backward.run(grad, sinks))
}

/// Computes y += x W + bias + residual.
fn product<E: TensorElement>(
    sizes: &LinearSizes,
    y: &mut [E],
    [x, weight]: [&Tensor; 2],
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
) -> Result<()> {
    with_all([Some(x), Some(weight), bias, residual], NAME, |[x, weight, bias, residual]| {
        let residual = residual.map(|data| Matrix::new(data, sizes.rows, sizes.outputs));
        let epilogue = Epilogue { accumulate: true, bias, residual, ..Epilogue::default() };
        sizes.product(x.unwrap_or_default(), weight.unwrap_or_default(), y, epilogue);
        Ok(())
    })
}

/// Returns the norms of the rows of W + s B A.
fn norms<E: TensorElement>(weight: &Tensor, a: &Tensor, b: &Tensor, adapted: &AdaptedSizes) -> Result<Vec<f32>> {
    let (LinearSizes { inputs, outputs, layout, .. }, scale) = (adapted.sizes, adapted.scale);
    with_f32_values(a, |a| {
        with_f32_values(b, |b| {
            let update = LowRankUpdate { layout, inputs, outputs, a, b, scale };
            with_elements::<E, _>(weight, NAME, |weight| {
                update.norms(|lines, piece| {
                    let width = update.lines().1;
                    E::widen(&weight[lines.start * width..lines.end * width], piece);
                    Ok(())
                })
            })
        })
    })
}

/// Computes y = product * factors + bias + residual, with one factor for each column.
fn scale_columns<E: TensorElement>(
    sizes: &LinearSizes,
    product: &[E],
    factors: &[f32],
    [bias, residual]: [Option<&Tensor>; 2],
    y: &mut [E],
) -> Result<()> {
    let width = sizes.outputs;
    with_all([bias, residual], NAME, |[bias, residual]: [Option<&[E]>; 2]| {
        parallel::for_each_part(sizes.rows, ParallelChunks::new(y, width.max(1)), |i, y| {
            let mut scratch = vec![0f32; 2 * width];
            let (sum, widened) = scratch.split_at_mut(width);
            let line = i * width..(i + 1) * width;
            E::widen(&product[line.clone()], sum);
            sum.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
            for term in [bias, residual.map(|residual| &residual[line])].into_iter().flatten() {
                E::widen(term, widened);
                sum.iter_mut().zip(&*widened).for_each(|(x, term)| *x += term);
            }
            E::narrow(sum, y);
        });
        Ok(())
    })
}

/// The values that DoRA's backward pass needs.
struct DoraBackward<E> {
    /// The norms of the rows of W + s B A.
    norms: Vec<f32>,
    /// The magnitude divided by the norms.
    factors: Vec<f32>,
    /// The product x W + s D(x) A^T B^T.
    product: Vec<E>,
    /// The dtype of the magnitude.
    dtype: DType,
}

impl<E: TensorElement> DoraBackward<E> {
    /// Computes the gradient of the magnitude from that of the result, `g`.
    fn magnitude_gradient(&self, g: &[E]) -> Vec<f32> {
        /// The number of columns that one task sums.
        const COLUMNS: usize = 128;
        let width = self.norms.len();
        let mut sums = vec![0f32; width];
        parallel::for_each_part(width.div_ceil(COLUMNS), ParallelChunks::new(&mut sums, COLUMNS), |i, sums| {
            let (mut total, mut a, mut b) = ([0f64; COLUMNS], [0f32; COLUMNS], [0f32; COLUMNS]);
            let (first, n) = (i * COLUMNS, sums.len());
            for (g, v) in g.chunks_exact(width).zip(self.product.chunks_exact(width)) {
                E::widen(&g[first..][..n], &mut a[..n]);
                E::widen(&v[first..][..n], &mut b[..n]);
                total.iter_mut().zip(a.iter().zip(&b)).take(n).for_each(|(t, (a, b))| *t += f64::from(a * b));
            }
            let norms = &self.norms[first..][..n];
            sums.iter_mut().zip(total).zip(norms).for_each(|((sum, t), norm)| *sum = (t / f64::from(*norm)) as f32);
        });
        sums
    }
}

/// The values that the backward pass needs.
struct LoraBackward<E> {
    adapted: AdaptedSizes,
    x: SavedTensor,
    weight: Tensor,
    /// The dtype of the bias.
    bias: Option<DType>,
    a: Tensor,
    b: Tensor,
    h: Vec<f32>,
    dora: Option<DoraBackward<E>>,
}

impl<E: TensorElement> LoraBackward<E> {
    fn run(&self, grad: Grad, [x, residual, weight, bias, a, b, magnitude]: &[InputGradSink; 7]) -> Result<()> {
        let sizes = self.adapted.sizes;
        grad.read::<E, _>(NAME, |g| {
            if let (true, Some(dtype)) = (bias.is_wanted(), self.bias) {
                let mut sums = vec![0f32; sizes.outputs];
                column_sums(Matrix::new(g, sizes.rows, sizes.outputs), &mut sums);
                with_element!(dtype, NAME, P => bias.deliver_sums::<P>(&sums))?;
            }
            let Some(dora) = &self.dora else { return self.deliver(g, [x, weight, a, b]) };
            if magnitude.is_wanted() {
                let sums = dora.magnitude_gradient(g);
                with_element!(dora.dtype, NAME, P => magnitude.deliver_sums::<P>(&sums))?;
            }
            let mut inner = buffer::<E>(g.len());
            scale_columns(&sizes, g, &dora.factors, [None, None], &mut inner)?;
            self.deliver(&inner, [x, weight, a, b])
        })?;
        residual.deliver(grad)
    }

    /// Delivers the gradients, given the gradient `g` of the product.
    fn deliver(&self, g: &[E], [to_x, to_weight, to_a, to_b]: [&InputGradSink; 4]) -> Result<()> {
        let (s, adapted) = (self.adapted.sizes, &self.adapted);
        let mut dh = Vec::new();
        if [to_x, to_a, to_b].iter().any(|sink| sink.is_wanted()) {
            let mut db = to_b.is_wanted().then(|| buffer::<f32>(s.outputs * adapted.rank));
            with_f32_values(&self.b, |b| {
                dh = adapted.low_rank_gradients(g, &self.h, b, db.as_deref_mut());
                Ok(())
            })?;
            if let Some(db) = db {
                with_element!(self.b.dtype(), NAME, P => to_b.deliver_sums::<P>(&db))?;
            }
        }
        if to_a.is_wanted() {
            let da = with_elements::<E, _>(&self.x.get()?, NAME, |x| Ok(adapted.gradient_of_a(x, &dh)))?;
            with_element!(self.a.dtype(), NAME, P => to_a.deliver_sums::<P>(&da))?;
        }
        let g = Matrix::new(g, s.rows, s.outputs);
        to_weight.accumulate::<E>(s.inputs * s.outputs, |dw, add| {
            let epilogue = Epilogue { accumulate: add, ..Epilogue::default() };
            with_elements::<E, _>(&self.x.get()?, NAME, |x| {
                s.weight_gradient(x, g, dw, epilogue);
                Ok(())
            })
        })?;
        to_x.accumulate::<E>(s.rows * s.inputs, |dx, add| {
            with_f32_values(&self.a, |a| {
                adapted.gradient_of_x(&dh, a, dx, add);
                Ok(())
            })?;
            let epilogue = Epilogue { accumulate: true, ..Epilogue::default() };
            with_elements::<E, _>(&self.weight, NAME, |w| {
                s.input_gradient(g, w, dx, epilogue);
                Ok(())
            })
        })
    }
}

#[cfg(test)]
pub(super) mod tests;
