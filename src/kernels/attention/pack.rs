//! Packs rows of elements into working memory, and writes rows of results back.

use super::shape::BLOCK;
use super::strided::{HeadRows, HeadRowsMut};
use crate::kernels::element::Element;
use crate::kernels::simd::{prefetch_at, prefetch_to_write};
use crate::kernels::vector::{MAX_LANES, PackElementsToWords, SimdVector, TransposeBlock};
use std::ops::Range;

/// The prefetch distance in rows: rows are on separate pages, and the processor cannot predict which one is next.
const PREFETCH_ROWS: usize = 8;

/// Prefetches row `t` if it is before `end`.
#[inline(always)]
fn prefetch<E: Element>(src: HeadRows<'_, E>, t: usize, end: usize) {
    if t < end {
        src.row(t).chunks(LINE / size_of::<E>()).for_each(|line| prefetch_at(line.as_ptr()));
    }
}

/// The size of a cache line in bytes.
const LINE: usize = 64;

/// Returns a vector of words of a row, starting at word `w`.
#[inline(always)]
unsafe fn load_words<W: PackElementsToWords<E>, E: Element>(row: &[E], w: usize) -> W::V {
    let offset = (w * W::DEPTH).min(row.len());
    // SAFETY: the caller is inside `with`; only the rest of the row is read.
    unsafe { W::load_along_row(row.as_ptr().add(offset), row.len() - offset) }
}

/// Packs rows as words along them: word (t, w) is at `t * words + w`. Both dimensions are padded with zeros.
///
/// # Safety
/// The processor must have the instructions of `W`.
pub(super) unsafe fn by_rows<W: PackElementsToWords<E>, E: Element>(
    src: HeadRows<'_, E>,
    rows: Range<usize>,
    words: usize,
    dst: &mut [f32],
) {
    let (used, padding) = dst.split_at_mut(rows.len() * words);
    // SAFETY: as the caller promises; `words` is a multiple of the number of lanes.
    unsafe {
        W::V::with(
            #[inline(always)]
            || {
                for (t, dst) in rows.clone().zip(used.chunks_exact_mut(words)) {
                    prefetch(src, t + PREFETCH_ROWS, rows.end);
                    let row = src.row(t);
                    for (i, dst) in dst.chunks_exact_mut(W::V::LANES).enumerate() {
                        load_words::<W, E>(row, i * W::V::LANES).store(dst.as_mut_ptr());
                    }
                }
            },
        )
    }
    padding.fill(0.0);
}

/// Packs rows as words across them: word (t, column) is at `t * width + column`, where `t` counts words, not rows. Both
/// dimensions are padded with zeros.
///
/// # Safety
/// The processor must have the instructions of `W`.
pub(super) unsafe fn by_columns<W: PackElementsToWords<E>, E: Element>(
    src: HeadRows<'_, E>,
    rows: Range<usize>,
    width: usize,
    dst: &mut [f32],
) {
    let (used, padding) = dst.split_at_mut(rows.len().div_ceil(W::DEPTH) * width);
    // SAFETY: as the caller promises; `width` is a multiple of the number of lanes, and the next row is read only if it
    // exists.
    unsafe {
        W::V::with(
            #[inline(always)]
            || {
                for (t, dst) in rows.clone().step_by(W::DEPTH).zip(used.chunks_exact_mut(width)) {
                    (0..W::DEPTH).for_each(|next| prefetch(src, t + PREFETCH_ROWS + next, rows.end));
                    let row = src.row(t);
                    for (i, dst) in dst.chunks_exact_mut(W::V::LANES).enumerate() {
                        let column = (i * W::V::LANES).min(row.len());
                        let (from, n) = (row.as_ptr().add(column), row.len() - column);
                        W::load_across_rows(from, src.row_stride(), rows.end - t, n).store(dst.as_mut_ptr());
                    }
                }
            },
        )
    }
    padding.fill(0.0);
}

/// Packs a block of rows, transposed: word (w, t) is at `w * BLOCK + t`. Both dimensions are padded with zeros to full
/// vectors.
///
/// # Safety
/// The processor must have the instructions of `W`.
pub(super) unsafe fn transposed<W: PackElementsToWords<E>, E: Element>(
    src: HeadRows<'_, E>,
    rows: Range<usize>,
    words: usize,
    padded: usize,
    dst: &mut [f32],
) {
    assert!(padded <= BLOCK && padded.is_multiple_of(MAX_LANES) && words.is_multiple_of(MAX_LANES));
    let dst = dst[..words * BLOCK].as_mut_ptr();
    // SAFETY: as the caller promises; only full squares inside the block are accessed.
    unsafe {
        W::V::with(
            #[inline(always)]
            || {
                for t in (0..padded).step_by(W::V::LANES) {
                    (0..W::V::LANES).for_each(|i| prefetch(src, rows.start + t + W::V::LANES + i, rows.end));
                    for w in (0..words).step_by(W::V::LANES) {
                        let mut square: TransposeBlock<W::V> = [W::V::zero(); MAX_LANES];
                        for (i, x) in square.iter_mut().enumerate().take(W::V::LANES) {
                            if t + i < rows.len() {
                                *x = load_words::<W, E>(src.row(rows.start + t + i), w);
                            }
                        }
                        W::V::transpose(&mut square);
                        for (i, x) in square.iter().enumerate().take(W::V::LANES) {
                            x.store(dst.add((w + i) * BLOCK + t));
                        }
                    }
                }
            },
        )
    }
}

/// Multiplies f32 rows by their factors, and writes them, rounded once, to the rows of `dst`, starting at row
/// `start`.
///
/// # Safety
/// The processor must have the instructions of `V`.
pub(super) unsafe fn write<V: SimdVector, E: Element>(
    (sums, width): (&[f32], usize),
    factors: impl Iterator<Item = f32>,
    dst: &mut HeadRowsMut<'_, E>,
    (start, columns): (usize, Range<usize>),
) {
    // SAFETY: as the caller promises; `width` is a multiple of the number of lanes.
    unsafe {
        V::with(
            #[inline(always)]
            || {
                for ((i, row), factor) in sums.chunks_exact(width).enumerate().zip(factors) {
                    if let Some(row_ahead) = dst.row_if(start + i + PREFETCH_ROWS) {
                        row_ahead[columns.clone()]
                            .chunks(LINE / size_of::<E>())
                            .for_each(|x| prefetch_to_write(x.as_ptr()));
                    }
                    let (factor, dst) = (V::splat(factor), &mut dst.row(start + i)[columns.clone()]);
                    for (row, dst) in row.chunks_exact(V::LANES).zip(dst.chunks_mut(V::LANES)) {
                        V::load(row.as_ptr()).mul(factor).narrow(dst.as_mut_ptr(), dst.len());
                    }
                }
            },
        )
    }
}

/// Computes, for each row in `rows`, the dot product of that row of `a` with the same row of `b`.
///
/// # Safety
/// The processor must have the instructions of `V`.
pub(super) unsafe fn dots<V: SimdVector, E: Element>(
    [a, b]: [HeadRows<'_, E>; 2],
    rows: Range<usize>,
    dst: &mut [f32; BLOCK],
) {
    // SAFETY: as the caller promises; only the rows' elements are read.
    unsafe {
        V::with(
            #[inline(always)]
            || {
                for (dst, t) in dst.iter_mut().zip(rows) {
                    let mut sums = [V::zero(); 2];
                    for (i, (a, b)) in a.row(t).chunks(V::LANES).zip(b.row(t).chunks(V::LANES)).enumerate() {
                        let (a, b) = (V::widen(a.as_ptr(), a.len()), V::widen(b.as_ptr(), b.len()));
                        sums[i % 2] = a.mul_add(b, sums[i % 2]);
                    }
                    let mut lanes = [0.0; MAX_LANES];
                    sums[0].add(sums[1]).store(lanes.as_mut_ptr());
                    let mut width = V::LANES / 2;
                    while width > 0 {
                        (0..width).for_each(|i| lanes[i] += lanes[i + width]);
                        width /= 2;
                    }
                    *dst = lanes[0];
                }
            },
        )
    }
}
