//! Products of one, two or four rows with `b` read from its original memory: each word is loaded, or transposed in
//! registers, and multiplied immediately. The sums have the same bits as those of the microkernels.

use super::arithmetic::ElementArithmetic;
use super::microkernel::{AccumulatorInit, StridedWords, load_sums, store_sums};
use super::pack::GemmOperand;
use crate::kernels::element::Element;
use crate::kernels::vector::SimdVector;

/// The maximum number of rows.
pub(super) const ROWS: usize = 4;

/// Computes the sums for `rows` rows (a power of two, at most [`ROWS`]) and `vectors` vectors of columns of `b`
/// (starting at column `outer`) over `steps` steps (starting at step `step` of `b`). `a` begins with the words of the
/// first of these steps, and rows of sums are `stride` apart. `start` is [`AccumulatorInit::Zero`] or
/// [`AccumulatorInit::Continue`].
///
/// # Safety
/// The processor must have the instructions of `W`; `a`, `b` and `sums` must contain the rows, columns and steps that
/// this function reads and writes.
#[expect(clippy::too_many_arguments, reason = "the arguments of a microkernel, and the position in `b`")]
pub(super) unsafe fn multiply<W: ElementArithmetic<E>, E: Element>(
    rows: usize,
    a: StridedWords,
    b: &GemmOperand<E>,
    (outer, vectors): (usize, usize),
    (step, steps): (usize, usize),
    sums: *mut f32,
    stride: usize,
    start: AccumulatorInit,
) {
    assert!(start != AccumulatorInit::Add && steps > 0);
    let keep = start == AccumulatorInit::Continue;
    let position = (outer, step, steps);
    // SAFETY: as the caller promises.
    unsafe {
        W::V::with(
            #[inline(always)]
            move || match (rows, b.inner_stride == 1, vectors) {
                (1, true, _) => multiply_adjacent_elements::<W, E, 1>(a, b, position, vectors, sums, stride, keep),
                (2, true, _) => multiply_adjacent_elements::<W, E, 2>(a, b, position, vectors, sums, stride, keep),
                (4, true, _) => multiply_adjacent_elements::<W, E, 4>(a, b, position, vectors, sums, stride, keep),
                (1, false, 1) => multiply_adjacent_columns::<W, E, 1, 1>(a, b, position, sums, stride, keep),
                (1, false, 2) => multiply_adjacent_columns::<W, E, 1, 2>(a, b, position, sums, stride, keep),
                (1, false, 3) => multiply_adjacent_columns::<W, E, 1, 3>(a, b, position, sums, stride, keep),
                (2, false, 1) => multiply_adjacent_columns::<W, E, 2, 1>(a, b, position, sums, stride, keep),
                (2, false, 2) => multiply_adjacent_columns::<W, E, 2, 2>(a, b, position, sums, stride, keep),
                (2, false, 3) => multiply_adjacent_columns::<W, E, 2, 3>(a, b, position, sums, stride, keep),
                (4, false, 1) => multiply_adjacent_columns::<W, E, 4, 1>(a, b, position, sums, stride, keep),
                (4, false, 2) => multiply_adjacent_columns::<W, E, 4, 2>(a, b, position, sums, stride, keep),
                (4, false, 3) => multiply_adjacent_columns::<W, E, 4, 3>(a, b, position, sums, stride, keep),
                _ => unreachable!("{rows} rows of {vectors} vectors"),
            },
        )
    }
}

/// Does the work of [`multiply`] for columns of `b` whose elements are adjacent.
///
/// # Safety
/// Same as for [`multiply`]. The call must also be inside `W::V::with`.
#[inline(always)]
unsafe fn multiply_adjacent_elements<W: ElementArithmetic<E>, E: Element, const R: usize>(
    a: StridedWords,
    b: &GemmOperand<E>,
    (outer, step, steps): (usize, usize, usize),
    vectors: usize,
    sums: *mut f32,
    stride: usize,
    keep: bool,
) {
    for v in 0..vectors {
        // SAFETY: as the caller promises.
        unsafe {
            let sums = sums.add(v * W::LANES);
            let mut acc = load_sums::<W::V, R, 1>(sums, stride, keep);
            b.for_each_transposed_step::<W>(
                outer + v * W::LANES,
                step,
                steps,
                #[inline(always)]
                |s, words| {
                    for (i, acc) in acc.iter_mut().enumerate() {
                        W::add_products(acc, a.first.add(i * a.row + s * a.step), &[words]);
                    }
                },
            );
            store_sums(acc, sums, stride);
        }
    }
}

/// Does the work of [`multiply`] for adjacent columns of `b`.
///
/// # Safety
/// Same as for [`multiply`]. The call must also be inside `W::V::with`.
#[inline(always)]
unsafe fn multiply_adjacent_columns<W: ElementArithmetic<E>, E: Element, const R: usize, const N: usize>(
    a: StridedWords,
    b: &GemmOperand<E>,
    (outer, step, steps): (usize, usize, usize),
    sums: *mut f32,
    stride: usize,
    keep: bool,
) {
    // SAFETY: as the caller promises.
    unsafe {
        let mut acc = load_sums::<W::V, R, N>(sums, stride, keep);
        for s in 0..steps {
            b.prefetch_columns::<W>(outer, N, step + s);
            let mut columns = [W::V::zero(); N];
            for (v, column) in columns.iter_mut().enumerate() {
                *column = b.words::<W>(outer + v * W::LANES, step + s);
            }
            for (i, acc) in acc.iter_mut().enumerate() {
                W::add_products(acc, a.first.add(i * a.row + s * a.step), &columns);
            }
        }
        store_sums(acc, sums, stride);
    }
}
