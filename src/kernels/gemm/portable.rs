//! The product on any machine, in plain loops: the same bits everywhere.
//!
//! A tile of the result is summed block by block of the inner dimension. A block of both operands is widened to f32 and
//! packed into panels, as wide as the result of a microkernel, which keeps its sums in registers. The sums of a block
//! are added in the order of the inner dimension, and those of the blocks in theirs; a product and a sum are never
//! fused.

use super::epilogue::Sink;
use super::matrix::Matrix;
use super::scratch;
use super::tiles::for_each_tile;
use crate::kernels::element::Element;
use crate::kernels::wide::{get, widen};

/// Rows of a tile of the result.
const TILE_ROWS: usize = 64;
/// Columns of a tile of the result.
const TILE_COLS: usize = 128;
/// Steps along the inner dimension that are packed, and summed in registers, at a time.
const STEPS: usize = 256;
/// Rows that a microkernel computes.
const ROWS: usize = 4;
/// Columns that a microkernel computes: with [`ROWS`], the sums fill half of the sixteen registers of four f32.
const COLS: usize = 8;

/// `c = epilogue(a b)`.
pub(super) fn gemm<E: Element, C: Element>(sink: &Sink<'_, C>, a: Matrix<'_, E>, b: Matrix<'_, E>) {
    let (m, n) = (a.rows(), b.cols());
    for_each_tile((m, n), (TILE_ROWS, TILE_COLS), |in_rows, in_cols| {
        let (row, rows, col, cols) = (in_rows.start, in_rows.len(), in_cols.start, in_cols.len());
        let (a, b) = (a.block(row, rows, 0, a.cols()), b.block(0, b.rows(), col, cols));
        scratch::with_floats(rows.next_multiple_of(ROWS) * cols.next_multiple_of(COLS), |sums| {
            sum(sums, a, b);
            for (i, sums) in sums.chunks_exact_mut(cols.next_multiple_of(COLS)).take(rows).enumerate() {
                // SAFETY: tiles are disjoint parts of the result, and this task alone has this one.
                unsafe { sink.finish(row + i, col, &mut sums[..cols]) };
            }
        });
    });
}

/// `sums = a b` for one tile, whose rows and columns are filled up to whole microkernels.
fn sum<E: Element>(sums: &mut [f32], a: Matrix<'_, E>, b: Matrix<'_, E>) {
    let k = a.cols();
    sums.fill(0.0);
    for start in (0..k).step_by(STEPS) {
        let steps = STEPS.min(k - start);
        let (a, b) = (a.block(0, a.rows(), start, steps), b.block(start, steps, 0, b.cols()));
        scratch::with_floats(a.rows().next_multiple_of(ROWS) * steps, |packed_a| {
            scratch::with_floats(b.cols().next_multiple_of(COLS) * steps, |packed_b| {
                let packed_a = pack::<E, ROWS>(a.t(), packed_a);
                let packed_b = pack::<E, COLS>(b, packed_b);
                let stride = b.cols().next_multiple_of(COLS);
                for (j, b) in packed_b.chunks_exact(steps).enumerate() {
                    for (i, a) in packed_a.chunks_exact(steps).enumerate() {
                        let block = product(a, b);
                        for (r, block) in block.iter().enumerate() {
                            let sums = &mut sums[(i * ROWS + r) * stride + j * COLS..][..COLS];
                            sums.iter_mut().zip(block).for_each(|(sum, x)| *sum += x);
                        }
                    }
                }
            });
        });
    }
}

/// A matrix in panels of `W` columns: of each the rows one after the other, the last filled up with columns of zeros.
fn pack<'a, E: Element, const W: usize>(m: Matrix<'_, E>, panels: &'a mut [f32]) -> &'a [[f32; W]] {
    let (panels, _) = panels.as_chunks_mut::<W>();
    for (p, panel) in panels.chunks_exact_mut(m.rows()).enumerate() {
        let width = W.min(m.cols() - p * W);
        let m = m.block(0, m.rows(), p * W, width);
        if width < W {
            panel.fill([0.0; W]);
        }
        if m.is_row_major() {
            for (i, to) in panel.iter_mut().enumerate() {
                widen(m.row(i), &mut to[..width]);
            }
        } else {
            for j in 0..width {
                for (to, from) in panel.iter_mut().zip(m.t().row(j)) {
                    to[j] = get(*from);
                }
            }
        }
    }
    panels
}

/// The product of a panel of `a`, by columns, and one of `b`, by rows.
#[inline(always)]
fn product(a: &[[f32; ROWS]], b: &[[f32; COLS]]) -> [[f32; COLS]; ROWS] {
    let mut sums = [[0.0; COLS]; ROWS];
    for (a, b) in a.iter().zip(b) {
        for (sums, a) in sums.iter_mut().zip(a) {
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum += a * b;
            }
        }
    }
    sums
}
