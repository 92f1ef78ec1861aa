//! Products whose operands are exchanged.
//!
//! Packing columns of `b` whose elements are adjacent along the inner dimension transposes them, which takes a
//! considerable part of the time unless `a` has many rows. If the words of such columns can be read in place, the
//! operands of a product with few rows are exchanged: the transposed result is the product of the transposed operands,
//! and only the rows of `a` are packed.
//!
//! ```text
//!   c = a b      a: few rows, b: many columns, packed
//!   c' = b' a'   b': many rows, read in place, a': few columns, packed; strips of c' are transposed when stored
//! ```
//!
//! The products of an element are summed in the same order, so exchanging the operands changes no bits.

use super::arithmetic::ElementArithmetic;
use super::blocked::GemmPart;
use super::microkernel::{self, AccumulatorInit, Microkernels};
use super::panels::ColumnPanels;
use super::tile_epilogue::{TilePosition, finish};
use crate::kernels::element::Element;
use crate::kernels::vector::{MAX_LANES, SimdVector};
use std::ops::Range;

impl<E: Element, C: Element> GemmPart<'_, E, C> {
    /// Does the same as `compute` for exchanged operands, in strips of as many rows as a vector has lanes.
    /// `strips` has room for the sums of a strip, and for their transpose.
    pub(super) fn compute_exchanged<W: ElementArithmetic<E> + Microkernels>(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        panels: ColumnPanels,
        packed_b: *const f32,
        strips: *mut f32,
    ) {
        let steps = self.steps();
        let width = panels.vectors() * W::LANES;
        let transposed = strips.wrapping_add(W::LANES * width);
        for first in rows.clone().step_by(W::LANES) {
            let count = W::LANES.min(rows.end - first);
            let (sums, stride) = match &self.sums {
                Some(sums) => {
                    let stride = self.b.outer.next_multiple_of(W::LANES);
                    (sums.at(first * stride + cols.start), stride)
                }
                None => (strips, width),
            };
            for block in self.span.clone() {
                let block_steps = self.blocks.piece(block);
                let step = block_steps.start - steps.start;
                let start = if block > 0 { AccumulatorInit::Add } else { AccumulatorInit::Zero };
                let mut row = 0;
                while row < count {
                    let n_rows = microkernel::rows::<W>(count - row);
                    let a = self.words_of_a::<W>(first + row, step);
                    for (vector, vectors) in (0..panels.count()).map(|panel| panels.get(panel)) {
                        let b = packed_b.wrapping_add((vector * steps.len() + vectors * step) * W::LANES);
                        let sums = sums.wrapping_add(row * stride + vector * W::LANES);
                        // SAFETY: the processor has the instructions; the operands exist or are packed; the kernel
                        // reads `n_rows` rows and `vectors` vectors of them for the block's steps; the sums have room
                        // for these rows and vectors, and only this task accesses them.
                        unsafe {
                            microkernel::select::<W>(n_rows, vectors)(block_steps.len(), &a, b, sums, stride, start);
                        }
                    }
                    row += n_rows;
                }
            }
            if self.span.end == self.blocks.count {
                let col = self.rows.start + first;
                let tile = TilePosition { row: cols.start, rows: cols.len(), col, cols: count };
                // SAFETY: the processor has the instructions; both strips have full vectors, and only this task
                // accesses them and these elements of the result.
                unsafe {
                    transpose::<W::V>((sums, stride), (count, width), transposed);
                    finish::<W::V, C>(self.output, tile, transposed, W::LANES);
                }
            }
        }
    }
}

/// Transposes a strip of sums: `rows` rows, which start `stride` apart, of `cols` columns (a multiple of a vector's
/// lanes). Each row of the result has as many elements as a vector has lanes, of which the first `rows` are sums.
///
/// # Safety
/// The processor must have the vectors' instructions; `rows` is at most the number of lanes, and all elements exist.
unsafe fn transpose<V: SimdVector>(
    (sums, stride): (*const f32, usize),
    (rows, cols): (usize, usize),
    transposed: *mut f32,
) {
    // SAFETY: as the caller promises.
    unsafe {
        V::with(
            #[inline(always)]
            || {
                for col in (0..cols).step_by(V::LANES) {
                    let mut vectors = [V::zero(); MAX_LANES];
                    for (row, vector) in vectors.iter_mut().enumerate().take(rows) {
                        *vector = V::load(sums.add(row * stride + col));
                    }
                    V::transpose(&mut vectors);
                    for (i, vector) in vectors.iter().enumerate().take(V::LANES) {
                        vector.store(transposed.add((col + i) * V::LANES));
                    }
                }
            },
        )
    }
}
