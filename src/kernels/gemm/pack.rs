//! Packing: operands in the order, and as the words, in which the microkernels read them.

use super::arithmetic::Word;
use crate::kernels::element::Element;
use crate::kernels::simd::prefetch_at;
use crate::kernels::vector::{MOST_LANES, Vector};

/// How far reading is ahead of packing: what lies side by side is too short, or in too many places, for the processor
/// to see where reading goes. In steps, for columns that are packed in turns of this many steps;
pub(super) const STEPS_AHEAD: usize = 32;
/// in elements side by side, for rows of which a task packs few steps;
const NEIGHBORS_AHEAD: usize = 96;
/// in bytes, for elements that lie side by side along the inner dimension.
const BYTES_AHEAD: usize = 256;

/// An operand: `outer` rows of `a`, or columns of `b`, and `inner` elements in each.
#[derive(Clone, Copy)]
pub(super) struct Operand<E> {
    pub(super) data: *const E,
    pub(super) outer: usize,
    pub(super) inner: usize,
    pub(super) outer_stride: usize,
    pub(super) inner_stride: usize,
}

// SAFETY: a place that is only read, inside a slice that outlives the product.
unsafe impl<E: Sync> Sync for Operand<E> {}

impl<E: Element> Operand<E> {
    #[inline(always)]
    pub(super) fn at(&self, outer: usize, inner: usize) -> *const E {
        self.data.wrapping_add(outer * self.outer_stride + inner * self.inner_stride)
    }

    /// Brings a step's elements near that lie side by side across the inner dimension, if they exist.
    #[inline(always)]
    fn prefetch<W: Word<E>>(&self, from: *const E) {
        (0..W::DEPTH).for_each(|depth| prefetch_at(from.wrapping_add(depth * self.inner_stride)));
    }

    /// Packs `steps` words from word `step` of the columns of `b` from `outer` that `vectors` vectors hold: for each
    /// step the words of all columns. Columns and elements that do not exist are zeros.
    ///
    /// # Safety
    /// The processor has the instructions of `W`; `to` has room for `steps` times the vectors.
    pub(super) unsafe fn pack_columns<W: Word<E>>(
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

    /// [`Operand::pack_columns`] where columns lie side by side.
    ///
    /// # Safety
    /// As there, and inside of `W::V::with`.
    #[inline(always)]
    unsafe fn copy_columns<W: Word<E>>(&self, outer: usize, vectors: usize, step: usize, steps: usize, to: *mut f32) {
        for s in 0..steps {
            let inner = (step + s) * W::DEPTH;
            let depth = self.inner - inner;
            for v in 0..vectors {
                let outer = outer + v * W::LANES;
                // SAFETY: the elements that are read exist; `to` has room.
                unsafe {
                    let from = self.at(outer, inner);
                    self.prefetch::<W>(from.wrapping_add(STEPS_AHEAD * W::DEPTH * self.inner_stride));
                    let words = W::across(from, self.inner_stride, depth, self.outer.saturating_sub(outer));
                    words.store(to.add((s * vectors + v) * W::LANES));
                }
            }
        }
    }

    /// [`Operand::pack_columns`] where the elements of a column lie side by side.
    ///
    /// # Safety
    /// As there, and inside of `W::V::with`.
    #[inline(always)]
    unsafe fn transpose_columns<W: Word<E>>(
        &self,
        outer: usize,
        vectors: usize,
        step: usize,
        steps: usize,
        to: *mut f32,
    ) {
        for v in 0..vectors {
            let outer = outer + v * W::LANES;
            for s in (0..steps).step_by(W::LANES) {
                let inner = (step + s) * W::DEPTH;
                // SAFETY: the elements that are read exist; `to` has room.
                unsafe {
                    let mut rows = [W::V::zero(); MOST_LANES];
                    for (i, row) in rows.iter_mut().enumerate().take(W::LANES) {
                        if outer + i < self.outer {
                            prefetch_at(self.at(outer + i, inner).wrapping_add(BYTES_AHEAD / size_of::<E>()));
                            *row = W::along(self.at(outer + i, inner), self.inner - inner);
                        }
                    }
                    W::V::transpose(&mut rows);
                    for (i, row) in rows.iter().enumerate().take(W::LANES.min(steps - s)) {
                        row.store(to.add(((s + i) * vectors + v) * W::LANES));
                    }
                }
            }
        }
    }

    /// Packs `steps` words from word `step` of the rows of `a` from `outer` that a vector holds, of which `inner_stride`
    /// is not 1: for each step the words of `ROWS` rows, or of a part of so many. Where a vector holds
    /// twice as many, the second half begins `group` words after the first.
    ///
    /// # Safety
    /// The processor has the instructions of `W`; `to` has room.
    pub(super) unsafe fn pack_rows<W: Word<E>>(
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
                        self.prefetch::<W>(from.wrapping_add(NEIGHBORS_AHEAD));
                        let words = W::across(from, self.inner_stride, self.inner - inner, self.outer - outer);
                        let to = to.add(s * W::ROWS);
                        if W::LANES > W::ROWS { words.store_halves(to, to.add(group)) } else { words.store(to) }
                    }
                },
            )
        }
    }

    /// Packs `steps` words from word `step` of row `outer` of `a`, of which `inner_stride` is 1, one after the other.
    /// Writes whole vectors.
    ///
    /// # Safety
    /// The processor has the instructions of `W`; `to` has room for `steps` words rounded up to whole vectors.
    pub(super) unsafe fn copy_row<W: Word<E>>(&self, outer: usize, step: usize, steps: usize, to: *mut f32) {
        // SAFETY: as the caller promises; the elements that are read exist.
        unsafe {
            W::V::with(
                #[inline(always)]
                move || {
                    for s in (0..steps).step_by(W::LANES) {
                        let inner = (step + s) * W::DEPTH;
                        W::along(self.at(outer, inner), self.inner - inner).store(to.add(s));
                    }
                },
            )
        }
    }

    /// Whether words can be read where the elements are: rows of whole words, of the words' own dtype.
    pub(super) fn is_words<W: Word<E>>(&self) -> bool {
        self.inner_stride == 1
            && self.inner.is_multiple_of(W::DEPTH)
            && size_of::<E>() * W::DEPTH == size_of::<f32>()
            && (W::DEPTH == 1 || self.outer_stride.is_multiple_of(W::DEPTH))
    }
}
