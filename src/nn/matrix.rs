//! Matrix products in f32 over matrices of any storage dtype.
//!
//! Two promises that the `gemm` crate alone does not give: an element of the result has the same bits whatever the
//! number of rows and columns around it, and whatever the number of threads. `gemm` takes special paths, with other
//! summation orders, for vectors and for results of at most 256 elements; [`product`] pads such cases. Inner
//! dimensions are walked in steps of [`INNER`], short enough that `gemm` never splits one itself.

use crate::nn::element::Element;
use rayon::prelude::*;

/// Rows of a tile of the result.
const TILE_ROWS: usize = 128;
/// Columns of a tile of the result.
const TILE_COLS: usize = 256;
/// Step along the inner dimension: `gemm` sums at least this much in one piece.
const INNER: usize = 512;
/// `gemm` computes results of up to this many elements in another order.
const SMALL_RESULT: usize = 256;

/// A matrix inside a slice: element (i, j) lies at `i * row_stride + j * col_stride`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a, E> {
    data: &'a [E],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, E: Copy> Matrix<'a, E> {
    /// A row-major matrix whose rows lie `row_stride` elements apart.
    pub(crate) fn strided(data: &'a [E], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(cols <= row_stride || rows <= 1, "rows overlap");
        if rows > 0 && cols > 0 {
            assert!((rows - 1) * row_stride + cols <= data.len(), "matrix reaches past its slice");
        }
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// A dense row-major matrix.
    pub(crate) fn new(data: &'a [E], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// The transpose, a view.
    pub(crate) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// The block of `rows` rows from `row` and `cols` columns from `col`, a view.
    fn block(self, row: usize, rows: usize, col: usize, cols: usize) -> Self {
        assert!(row + rows <= self.rows && col + cols <= self.cols, "block reaches past its matrix");
        Self { data: &self.data[row * self.row_stride + col * self.col_stride..], rows, cols, ..self }
    }

    /// The same matrix in f32, copied into `buffer` run by run in the order it lies in memory.
    pub(crate) fn widened_into(self, buffer: &'a mut Vec<f32>) -> Matrix<'a, f32>
    where
        E: Element,
    {
        if self.col_stride != 1 && self.row_stride == 1 {
            return self.t().widened_into(buffer).t();
        }
        assert_eq!(self.col_stride, 1, "a matrix is contiguous along one side");
        // Every element is written below: no need to clear what is there.
        buffer.resize(self.rows * self.cols, 0.0);
        if self.cols > 0 {
            for (i, out) in buffer.chunks_exact_mut(self.cols).enumerate() {
                E::widen(&self.data[i * self.row_stride..][..self.cols], out);
            }
        }
        Matrix::new(&buffer[..], self.rows, self.cols)
    }
}

/// `dst = a b`, or `dst += a b` with `accumulate`. `dst` is dense row-major with `a.rows * b.cols` elements.
pub(crate) fn product(dst: &mut [f32], accumulate: bool, a: Matrix<'_, f32>, b: Matrix<'_, f32>) {
    assert_eq!(a.cols, b.rows, "inner dimensions differ");
    assert_eq!(dst.len(), a.rows * b.cols, "result has another size");
    let mut start = 0;
    loop {
        let step = INNER.min(a.cols - start);
        let accumulate = accumulate || start > 0;
        product_step(dst, accumulate, a.block(0, a.rows, start, step), b.block(start, step, 0, b.cols));
        start += step;
        if start >= a.cols {
            return;
        }
    }
}

/// [`product`] for an inner dimension of at most [`INNER`].
fn product_step(dst: &mut [f32], accumulate: bool, a: Matrix<'_, f32>, b: Matrix<'_, f32>) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    if m == 0 || n == 0 {
        return;
    }
    let padded_n = n.max(2);
    let padded_m = m.max(2).max(SMALL_RESULT / padded_n + 1);
    let padded_k = k.max(3);
    if (padded_m, padded_n, padded_k) == (m, n, k) {
        return gemm_f32(dst, accumulate, a, b);
    }
    let padded_a = padded(a, padded_m, padded_k);
    let padded_b = padded(b, padded_k, padded_n);
    let mut result = vec![0.0; padded_m * padded_n];
    if accumulate {
        for (to, from) in result.chunks_exact_mut(padded_n).zip(dst.chunks_exact(n)) {
            to[..n].copy_from_slice(from);
        }
    }
    let a = Matrix::new(&padded_a, padded_m, padded_k);
    let b = Matrix::new(&padded_b, padded_k, padded_n);
    gemm_f32(&mut result, accumulate, a, b);
    for (to, from) in dst.chunks_exact_mut(n).zip(result.chunks_exact(padded_n)) {
        to.copy_from_slice(&from[..n]);
    }
}

/// A dense copy with rows and columns of zeros added at the end.
fn padded(m: Matrix<'_, f32>, rows: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; rows * cols];
    for (i, row) in out.chunks_exact_mut(cols).take(m.rows).enumerate() {
        for (j, x) in row.iter_mut().take(m.cols).enumerate() {
            *x = m.data[i * m.row_stride + j * m.col_stride];
        }
    }
    out
}

fn gemm_f32(dst: &mut [f32], accumulate: bool, a: Matrix<'_, f32>, b: Matrix<'_, f32>) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    let reach = |x: Matrix<'_, f32>| (x.rows - 1) * x.row_stride + (x.cols - 1) * x.col_stride;
    assert!(m > 0 && n > 0 && k > 0 && b.rows == k && dst.len() == m * n);
    assert!(reach(a) < a.data.len() && reach(b) < b.data.len());
    // SAFETY: the assertions above keep every element that gemm reads or writes inside its slice, `dst` is borrowed
    // mutably and so overlaps neither operand, and strides of slices in memory fit isize.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            n as isize,
            accumulate,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// `a b + bias` (the bias added to every row), summed in f32 and rounded once: dense row-major, `a.rows * b.cols`.
///
/// The work is done tile by tile of the result, tiles in parallel. Operands of 16 bits are widened block by block, so
/// the temporary memory is bounded by the tile, not by the operands.
pub(crate) fn matmul<E: Element>(a: Matrix<'_, E>, b: Matrix<'_, E>, bias: Option<&[E]>) -> Vec<E> {
    assert_eq!(a.cols, b.rows, "inner dimensions differ");
    let (m, n) = (a.rows, b.cols);
    let bias = bias.map(E::widened);
    let mut out = vec![E::default(); m * n];
    if out.is_empty() {
        return out;
    }
    let tiles_across = n.div_ceil(TILE_COLS);
    let mut tiles: Vec<Vec<&mut [E]>> = Vec::new();
    tiles.resize_with(m.div_ceil(TILE_ROWS) * tiles_across, || Vec::with_capacity(TILE_ROWS));
    for (i, row) in out.chunks_exact_mut(n).enumerate() {
        for (j, piece) in row.chunks_mut(TILE_COLS).enumerate() {
            tiles[i / TILE_ROWS * tiles_across + j].push(piece);
        }
    }
    tiles.into_par_iter().enumerate().for_each_init(Default::default, |buffers: &mut [Vec<f32>; 3], (t, mut tile)| {
        let (row, col) = (t / tiles_across * TILE_ROWS, t % tiles_across * TILE_COLS);
        let (rows, cols) = (tile.len(), tile[0].len());
        let [sum, wide_a, wide_b] = buffers;
        sum.clear();
        sum.resize(rows * cols, 0.0);
        for start in (0..a.cols).step_by(INNER) {
            let step = INNER.min(a.cols - start);
            let a = E::matrix_f32(a.block(row, rows, start, step), wide_a);
            let b = E::matrix_f32(b.block(start, step, col, cols), wide_b);
            product_step(sum, start > 0, a, b);
        }
        for (to, sum) in tile.iter_mut().zip(sum.chunks_exact_mut(cols)) {
            if let Some(bias) = &bias {
                sum.iter_mut().zip(&bias[col..]).for_each(|(s, b)| *s += b);
            }
            E::narrow(sum, to);
        }
    });
    out
}

/// The sum of every column of a dense row-major matrix, in f32, rounded once: partial sums of [`TILE_ROWS`] rows,
/// then the sum of those, each in row order.
pub(crate) fn column_sums<E: Element>(data: &[E], cols: usize) -> Vec<E> {
    let mut out = vec![E::default(); cols];
    out.par_chunks_mut(TILE_COLS).enumerate().for_each(|(tile, out)| {
        let (col, width) = (tile * TILE_COLS, out.len());
        let (mut total, mut part, mut row) = (vec![0f32; width], vec![0f32; width], vec![0f32; width]);
        for rows in data.chunks(TILE_ROWS * cols) {
            part.fill(0.0);
            for x in rows.chunks_exact(cols) {
                E::widen(&x[col..][..width], &mut row);
                part.iter_mut().zip(&row).for_each(|(p, x)| *p += x);
            }
            total.iter_mut().zip(&part).for_each(|(t, p)| *t += p);
        }
        E::narrow(&total, out);
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32)
            .map(|i| {
                (i.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(0x85EB_CA77)) >> 8) as f32
                    / (1 << 24) as f32
                    - 0.5
            })
            .collect()
    }

    #[test]
    fn products_of_all_shapes_and_orientations_are_right() {
        for (m, n, k) in [(1, 1, 1), (1, 300, 7), (3, 5, 2), (130, 3, 4), (2, 2, 600), (129, 257, 513), (0, 3, 4)] {
            let (a, b) = (numbers(m * k, 1), numbers(n * k, 2));
            for transposed_b in [false, true] {
                let view = if transposed_b { Matrix::new(&b, n, k).t() } else { Matrix::new(&b, k, n) };
                let got = matmul(Matrix::new(&a, m, k), view, None);
                for i in 0..m {
                    for j in 0..n {
                        let at = |l: usize| if transposed_b { b[j * k + l] } else { b[l * n + j] };
                        let want: f64 = (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(at(l))).sum();
                        assert!(
                            (f64::from(got[i * n + j]) - want).abs() < 5e-6 * (1.0 + want.abs()),
                            "{m} {n} {k} at {i} {j}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_whatever_the_number_of_rows() {
        for (n, k) in [(1, 700), (5, 40), (64, 64), (256, 768), (300, 1025)] {
            let (a, b) = (numbers(200 * k, 3), numbers(n * k, 4));
            for view in [Matrix::new(&b, k, n), Matrix::new(&b, n, k).t()] {
                let all = matmul(Matrix::new(&a, 200, k), view, None);
                for rows in [1, 2, 3, 17, 65, 129] {
                    let some = matmul(Matrix::new(&a[..rows * k], rows, k), view, None);
                    assert!(some == all[..rows * n], "{rows} rows, {n} columns, inner {k}");
                }
            }
        }
    }

    #[test]
    fn half_operands_are_summed_in_f32_and_rounded_once() {
        let (m, n, k) = (3, 4, 4096);
        let ones = vec![bf16::ONE; m.max(n) * k];
        let bias = vec![bf16::from_f32(0.5); n];
        let got = matmul(Matrix::new(&ones[..m * k], m, k), Matrix::new(&ones[..n * k], n, k).t(), Some(&bias));
        assert!(got.iter().all(|x| x.to_f32() == 4096.0), "{got:?}");
        assert!(column_sums(&ones[..4096 * 3], 3).iter().all(|x| x.to_f32() == 4096.0));
    }
}
