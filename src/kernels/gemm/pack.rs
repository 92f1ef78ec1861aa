//! Packing of operands into the order and the words in which the microkernels read them.

use super::arithmetic::ElementArithmetic;
use crate::kernels::element::{Element, ElementDtype};
use crate::kernels::simd::prefetch_at;
use crate::kernels::vector::{MAX_LANES, SimdVector};

/// The prefetch distance of packing, in steps. If columns are adjacent, it is also the number of steps of a panel that
/// are packed before the steps of the next panel, except in wide pieces. Prefetching is needed because the contiguous
/// pieces are too short, or too numerous, for the processor to predict the reads.
pub(super) const PREFETCH_STEPS: usize = 32;
/// The number of steps of a piece of `b`. It is large enough that sums are rarely loaded and stored, and small enough
/// that the packed words of a panel stay in the first-level cache.
pub(super) const PIECE_STEPS: usize = 128;
/// The number of steps of a wide piece that are packed together.
pub(super) const STEPS_OF_WIDE_PIECES: usize = 4;
/// The prefetch distance in adjacent elements, for tasks that pack only a few steps of each row.
const PREFETCH_NEIGHBORS: usize = 96;
/// The prefetch distance in bytes, for elements that are adjacent along the inner dimension.
const PREFETCH_BYTES: usize = 256;

/// The size of a cache line in bytes.
const LINE: usize = 64;

/// An operand: `outer` rows of `a` or columns of `b`, with `inner` elements each.
#[derive(Clone, Copy)]
pub(super) struct GemmOperand<E> {
    pub(super) data: *const E,
    pub(super) outer: usize,
    pub(super) inner: usize,
    pub(super) outer_stride: usize,
    pub(super) inner_stride: usize,
}

// SAFETY: an address that is only read, inside a slice that outlives the product.
unsafe impl<E: Sync> Sync for GemmOperand<E> {}

impl<E: Element> GemmOperand<E> {
    #[inline(always)]
    pub(super) fn at(&self, outer: usize, inner: usize) -> *const E {
        self.data.wrapping_add(outer * self.outer_stride + inner * self.inner_stride)
    }

    /// Prefetches a cache line of adjacent columns for each element of a step. The elements need not exist.
    #[inline(always)]
    fn prefetch<W: ElementArithmetic<E>>(&self, from: *const E) {
        (0..W::DEPTH).for_each(|depth| prefetch_at(from.wrapping_add(depth * self.inner_stride)));
    }

    /// Packs `steps` words, starting at word `step`, of as many columns of `b` as fill `vectors` vectors, starting at
    /// column `outer`. For each step, the words of all these columns are adjacent. Columns and elements that do not
    /// exist are zeros.
    ///
    /// # Safety
    /// The processor must have the instructions of `W`; `to` must have room for `steps` times the vectors.
    pub(super) unsafe fn pack_columns<W: ElementArithmetic<E>>(
        &self,
        outer: usize,
        vectors: usize,
        step: usize,
        steps: usize,
        to: *mut f32,
    ) {
        // SAFETY: as the caller promises.
        unsafe {
            W::V::with(
                #[inline(always)]
                move || match self.inner_stride {
                    1 => self.transpose_columns::<W>(outer, vectors, step, steps, to),
                    _ => self.copy_columns::<W>(outer, vectors, step, steps, to),
                },
            )
        }
    }

    /// Does the same as [`GemmOperand::pack_columns`] for adjacent columns.
    ///
    /// # Safety
    /// Same as for [`GemmOperand::pack_columns`]. The call must also be inside `W::V::with`.
    #[inline(always)]
    unsafe fn copy_columns<W: ElementArithmetic<E>>(
        &self,
        outer: usize,
        vectors: usize,
        step: usize,
        steps: usize,
        to: *mut f32,
    ) {
        for s in 0..steps {
            self.prefetch_columns::<W>(outer, vectors, step + s);
            for v in 0..vectors {
                // SAFETY: as the caller promises.
                unsafe {
                    let words = self.words::<W>(outer + v * W::LANES, step + s);
                    words.store(to.add((s * vectors + v) * W::LANES));
                }
            }
        }
    }

    /// Prefetches the words of a later step for some vectors of adjacent columns.
    #[inline(always)]
    pub(super) fn prefetch_columns<W: ElementArithmetic<E>>(&self, outer: usize, vectors: usize, step: usize) {
        let ahead = self.at(outer, (step + PREFETCH_STEPS) * W::DEPTH);
        for line in (0..vectors * W::LANES).step_by(LINE / size_of::<E>()) {
            self.prefetch::<W>(ahead.wrapping_add(line));
        }
    }

    /// Returns the words of a step for a vector of adjacent columns.
    ///
    /// # Safety
    /// The call must be inside `W::V::with`, and the step must exist.
    #[inline(always)]
    pub(super) unsafe fn words<W: ElementArithmetic<E>>(&self, outer: usize, step: usize) -> W::V {
        let inner = step * W::DEPTH;
        let (depth, n) = (self.inner - inner, self.outer.saturating_sub(outer));
        // SAFETY: the elements that are read exist.
        unsafe { W::load_across_rows(self.at(outer, inner), self.inner_stride, depth, n) }
    }

    /// Does the same as [`GemmOperand::pack_columns`] for columns whose elements are adjacent.
    ///
    /// # Safety
    /// Same as for [`GemmOperand::pack_columns`]. The call must also be inside `W::V::with`.
    #[inline(always)]
    unsafe fn transpose_columns<W: ElementArithmetic<E>>(
        &self,
        outer: usize,
        vectors: usize,
        step: usize,
        steps: usize,
        to: *mut f32,
    ) {
        for v in 0..vectors {
            // SAFETY: as the caller promises.
            unsafe {
                self.for_each_transposed_step::<W>(
                    outer + v * W::LANES,
                    step,
                    steps,
                    #[inline(always)]
                    |s, words| words.store(to.add((s * vectors + v) * W::LANES)),
                );
            }
        }
    }

    /// Calls `take` with the index and the words of each of `steps` steps, in order, starting at `step`. The indexes
    /// start at 0. The words are those of a vector of columns whose elements are adjacent.
    ///
    /// # Safety
    /// The call must be inside `W::V::with`, and the steps must exist.
    #[inline(always)]
    pub(super) unsafe fn for_each_transposed_step<W: ElementArithmetic<E>>(
        &self,
        outer: usize,
        step: usize,
        steps: usize,
        mut take: impl FnMut(usize, W::V),
    ) {
        // Words of f32 that are converted from bf16 are transposed two at a time, before they are widened.
        let pair_steps = 2 * W::LANES;
        let paired = if W::DEPTH == 1 && E::KIND == ElementDtype::BF16 { steps / pair_steps * pair_steps } else { 0 };
        // SAFETY: the elements that are read exist.
        unsafe {
            for s in (0..paired).step_by(pair_steps) {
                let mut rows = [W::V::zero(); MAX_LANES];
                for (i, row) in rows.iter_mut().enumerate().take(W::LANES) {
                    if outer + i < self.outer {
                        let from = self.at(outer + i, step + s);
                        prefetch_at(from.wrapping_add(PREFETCH_BYTES / size_of::<E>()));
                        *row = W::V::load(from.cast());
                    }
                }
                W::V::transpose(&mut rows);
                for (i, row) in rows.iter().enumerate().take(W::LANES) {
                    let [first, second] = row.split_bf16();
                    take(s + 2 * i, first);
                    take(s + 2 * i + 1, second);
                }
            }
            for s in (paired..steps).step_by(W::LANES) {
                let inner = (step + s) * W::DEPTH;
                let mut rows = [W::V::zero(); MAX_LANES];
                for (i, row) in rows.iter_mut().enumerate().take(W::LANES) {
                    if outer + i < self.outer {
                        prefetch_at(self.at(outer + i, inner).wrapping_add(PREFETCH_BYTES / size_of::<E>()));
                        *row = W::load_along_row(self.at(outer + i, inner), self.inner - inner);
                    }
                }
                W::V::transpose(&mut rows);
                if steps - s < W::LANES {
                    return rows.iter().take(steps - s).enumerate().for_each(|(i, row)| take(s + i, *row));
                }
                // The compiler knows this number of rows, so the rows stay in registers.
                for (i, row) in rows.iter().enumerate().take(W::LANES) {
                    take(s + i, *row);
                }
            }
        }
    }

    /// Packs `steps` words, starting at word `step`, of as many rows of `a` as a vector covers, starting at row
    /// `outer`. `inner_stride` must not be 1. For each step, the result contains the words of `ROWS` rows, or of a part
    /// of them. If a vector covers twice as many rows, the second half starts `group` words after the first.
    ///
    /// # Safety
    /// The processor must have the instructions of `W`; `to` must have room for the words.
    pub(super) unsafe fn pack_rows<W: ElementArithmetic<E>>(
        &self,
        outer: usize,
        step: usize,
        steps: usize,
        to: *mut f32,
        group: usize,
    ) {
        const { assert!(W::LANES <= 2 * W::ROWS && W::LANES.is_power_of_two()) };
        // SAFETY: as the caller promises; the elements that are read exist.
        unsafe {
            W::V::with(
                #[inline(always)]
                move || {
                    for s in 0..steps {
                        let inner = (step + s) * W::DEPTH;
                        let from = self.at(outer, inner);
                        self.prefetch::<W>(from.wrapping_add(PREFETCH_NEIGHBORS));
                        let words =
                            W::load_across_rows(from, self.inner_stride, self.inner - inner, self.outer - outer);
                        let to = to.add(s * W::ROWS);
                        if W::LANES > W::ROWS { words.store_halves(to, to.add(group)) } else { words.store(to) }
                    }
                },
            )
        }
    }

    /// Packs `steps` contiguous words, starting at word `step`, of row `outer` of `a`, whose `inner_stride` is 1.
    /// Writes full vectors.
    ///
    /// # Safety
    /// The processor must have the instructions of `W`; `to` must have room for `steps` words rounded up to full
    /// vectors.
    pub(super) unsafe fn copy_row<W: ElementArithmetic<E>>(
        &self,
        outer: usize,
        step: usize,
        steps: usize,
        to: *mut f32,
    ) {
        // SAFETY: as the caller promises; the elements that are read exist.
        unsafe {
            W::V::with(
                #[inline(always)]
                move || {
                    for s in (0..steps).step_by(W::LANES) {
                        let inner = (step + s) * W::DEPTH;
                        W::load_along_row(self.at(outer, inner), self.inner - inner).store(to.add(s));
                    }
                },
            )
        }
    }

    /// Returns whether words can be read directly from the matrix: each row consists of complete words, and the
    /// elements already have the dtype that the words hold.
    pub(super) fn is_words<W: ElementArithmetic<E>>(&self) -> bool {
        self.inner_stride == 1
            && self.inner.is_multiple_of(W::DEPTH)
            && size_of::<E>() * W::DEPTH == size_of::<f32>()
            && (W::DEPTH == 1 || self.outer_stride.is_multiple_of(W::DEPTH))
    }
}
