//! The product on any machine, by the `gemm` crate, tile by tile of the result.
//!
//! The crate alone does not promise that an element of the result has the same bits whatever the number of rows around
//! it: it takes special paths, with other summation orders, for vectors and for results of at most 256 elements.
//! [`product_step`] pads such cases. Inner dimensions are walked in steps of [`INNER`], short enough that the crate
//! never splits one itself.

use super::epilogue::Sink;
use super::matrix::Matrix;
use super::scratch;
use crate::kernels::element::Element;
use crate::kernels::par;

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
    let tiles_across = n.div_ceil(TILE_COLS);
    par::for_each(m.div_ceil(TILE_ROWS) * tiles_across, |t| {
        let (row, col) = (t / tiles_across * TILE_ROWS, t % tiles_across * TILE_COLS);
        let (rows, cols) = (TILE_ROWS.min(m - row), TILE_COLS.min(n - col));
        with_floats(rows * cols, |sums| {
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
        with_floats(a.rows() * step, |wide_a| {
            with_floats(b.cols() * step, |wide_b| product_step(sums, widened(a, wide_a), widened(b, wide_b)));
        });
    }
}

/// Calls `f` with `n` numbers, of any values.
fn with_floats<R>(n: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    // SAFETY: the words are initialized, aligned for f32, and this closure's alone; every bit pattern is an f32.
    scratch::with_words(n, |words| f(unsafe { std::slice::from_raw_parts_mut(words.cast::<f32>(), n) }))
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
    // SAFETY: a matrix lies inside its slice, and so does `dst` by the assertion above; `dst` is borrowed mutably and
    // so overlaps neither operand; strides of slices in memory fit isize.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            n as isize,
            true,
            a.as_ptr(),
            a.col_stride() as isize,
            a.row_stride() as isize,
            b.as_ptr(),
            b.col_stride() as isize,
            b.row_stride() as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
