//! The product with AVX2 and FMA, by the kernels of the `gemm` crate for these, tile by tile of the result.
//!
//! The crate's own entrance takes the widest kernels of the processor, whatever the level; so what it calls for AVX2 is
//! called here. What a thread packs lies in memory of the crate, as large as a core's second-level cache and kept for
//! the next product, and in [`scratch`].
//!
//! The crate alone does not promise that an element of the result has the same bits whatever the number of rows around
//! it: it takes special paths, with other summation orders, for vectors and for results of at most 256 elements.
//! [`product_step`] pads such cases. Inner dimensions are walked in steps of [`INNER`], short enough that the crate
//! never splits one itself.

use super::epilogue::Sink;
use super::matrix::Matrix;
use super::scratch;
use super::tiles::for_each_tile;
use crate::kernels::element::Element;
use gemm_common::gemm::gemm_basic_generic;
use gemm_common::simd::V3;
use gemm_f32::microkernel::fma::f32::{H_M, H_N, H_UKR, MR_DIV_N, NR, UKR};

/// f32 elements of a vector.
const LANES: usize = 8;
/// Rows of a tile of the result.
const TILE_ROWS: usize = 128;
/// Columns of a tile of the result.
const TILE_COLS: usize = 256;
/// Step along the inner dimension: the crate sums at least this much in one piece.
const INNER: usize = 512;
/// The crate computes results of up to this many elements in another order.
const SMALL_RESULT: usize = 256;

/// `c = epilogue(a b)`.
pub(super) fn gemm<E: Element, C: Element>(sink: &Sink<'_, C>, a: Matrix<'_, E>, b: Matrix<'_, E>) {
    let (m, n) = (a.rows(), b.cols());
    for_each_tile((m, n), (TILE_ROWS, TILE_COLS), |in_rows, in_cols| {
        let (row, rows, col, cols) = (in_rows.start, in_rows.len(), in_cols.start, in_cols.len());
        scratch::with_floats(rows * cols, |sums| {
            sum(sums, a.block(row, rows, 0, a.cols()), b.block(0, b.rows(), col, cols));
            for (i, sums) in sums.chunks_exact_mut(cols).enumerate() {
                // SAFETY: tiles are disjoint parts of the result, and this task alone has this one.
                unsafe { sink.finish(row + i, col, sums) };
            }
        });
    });
}

/// `sums = a b` for one tile.
fn sum<E: Element>(sums: &mut [f32], a: Matrix<'_, E>, b: Matrix<'_, E>) {
    let k = a.cols();
    sums.fill(0.0);
    for start in (0..k).step_by(INNER) {
        let step = INNER.min(k - start);
        let (a, b) = (a.block(0, a.rows(), start, step), b.block(start, step, 0, b.cols()));
        scratch::with_floats(a.rows() * step, |wide_a| {
            scratch::with_floats(b.cols() * step, |wide_b| product_step(sums, widened(a, wide_a), widened(b, wide_b)));
        });
    }
}

/// The same matrix in f32, copied into `buffer` run by run in the order it lies in memory.
fn widened<'a, E: Element>(m: Matrix<'_, E>, buffer: &'a mut [f32]) -> Matrix<'a, f32> {
    if !m.is_row_major() {
        return widened(m.t(), buffer).t();
    }
    for (i, out) in buffer.chunks_exact_mut(m.cols()).enumerate() {
        E::widen(m.row(i), out);
    }
    Matrix::new(buffer, m.rows(), m.cols())
}

/// `dst += a b` for an inner dimension of at most [`INNER`].
fn product_step(dst: &mut [f32], a: Matrix<'_, f32>, b: Matrix<'_, f32>) {
    let (m, n, k) = (a.rows(), b.cols(), a.cols());
    let padded_n = n.max(2);
    let padded_m = m.max(2).max(SMALL_RESULT / padded_n + 1);
    let padded_k = k.max(3);
    if (padded_m, padded_n, padded_k) == (m, n, k) {
        return product_f32(dst, a, b);
    }
    let padded_a = padded(a, padded_m, padded_k);
    let padded_b = padded(b, padded_k, padded_n);
    let mut result = padded(Matrix::new(dst, m, n), padded_m, padded_n);
    let a = Matrix::new(&padded_a, padded_m, padded_k);
    let b = Matrix::new(&padded_b, padded_k, padded_n);
    product_f32(&mut result, a, b);
    for (to, from) in dst.chunks_exact_mut(n).zip(result.chunks_exact(padded_n)) {
        to.copy_from_slice(&from[..n]);
    }
}

/// A dense copy with rows and columns of zeros added at the end.
fn padded(m: Matrix<'_, f32>, rows: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; rows * cols];
    for (i, row) in out.chunks_exact_mut(cols).take(m.rows()).enumerate() {
        for (j, x) in row.iter_mut().take(m.cols()).enumerate() {
            *x = m.at(i, j);
        }
    }
    out
}

/// `dst += a b` by the crate.
fn product_f32(dst: &mut [f32], a: Matrix<'_, f32>, b: Matrix<'_, f32>) {
    let (m, n, k) = (a.rows(), b.cols(), a.cols());
    assert!(m > 0 && n > 0 && k > 0 && b.rows() == k && dst.len() == m * n);
    let Some(simd) = V3::try_new() else { unreachable!("the level was found in this processor") };
    // The crate's results have columns side by side, ours have rows: it computes the transpose.
    //
    // SAFETY: a matrix lies inside its slice, and so does `dst` by the assertion above; `dst` is borrowed mutably and
    // so overlaps neither operand; strides of slices in memory fit isize; the processor has the kernels' instructions.
    unsafe {
        gemm_basic_generic::<_, f32, LANES, { MR_DIV_N * LANES }, NR, MR_DIV_N, H_M, H_N>(
            simd,
            n,
            m,
            k,
            dst.as_mut_ptr(),
            n as isize,
            1,
            true,
            b.as_ptr(),
            b.row_stride() as isize,
            b.col_stride() as isize,
            a.as_ptr(),
            a.row_stride() as isize,
            a.col_stride() as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            |a, b, c| a * b + c,
            &UKR,
            &H_UKR,
            false,
            gemm_common::Parallelism::None,
        );
    }
}
