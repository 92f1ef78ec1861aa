//! The sums of the columns of a matrix, which are the gradient of a bias.

use super::matrix::Matrix;
use super::scratch::with_words;
use crate::kernels::element::Element;
use crate::kernels::f32_access::{get, vectorized};
use crate::kernels::parallel;

/// The number of rows of a partial sum.
const ROWS: usize = 64;

/// Writes the sum of every column of a row-major matrix to `out`, in f32: first partial sums of [`ROWS`] rows, then the
/// sum of these, each in row order.
///
/// # Panics
/// Panics if the matrix is not row-major, or if the length of `out` differs from the length of the rows.
pub fn column_sums<E: Element>(data: Matrix<'_, E>, out: &mut [f32]) {
    let (rows, cols) = (data.rows(), data.cols());
    assert_eq!(out.len(), cols, "there must be one sum per column");
    assert!(data.is_row_major(), "the matrix is not row-major");
    out.fill(0.0);
    let parts = rows.div_ceil(ROWS);
    with_words(parts * cols, |sums| {
        let sums = PartialSums(sums.cast());
        parallel::for_each(parts, |part| {
            // SAFETY: the words are initialized, and any bit pattern is a valid number; every task writes its own
            // `cols` words.
            let sums = unsafe { std::slice::from_raw_parts_mut(sums.at(part * cols), cols) };
            sums.fill(0.0);
            vectorized!(for i in part * ROWS..rows.min((part + 1) * ROWS) {
                add(data.row(i), sums);
            });
        });
        for part in 0..parts {
            // SAFETY: as above, and no task is still writing.
            let part = unsafe { std::slice::from_raw_parts(sums.at(part * cols), cols) };
            out.iter_mut().zip(part).for_each(|(out, part)| *out += part);
        }
    });
}

/// Adds a row to the sums. It is inlined, so that it is compiled for the SIMD level of the surrounding dispatch.
#[inline(always)]
fn add<E: Element>(row: &[E], sums: &mut [f32]) {
    for (sum, x) in sums.iter_mut().zip(row) {
        *sum += get(*x);
    }
}

/// The partial sums. Tasks share them, and each writes only its part.
struct PartialSums(*mut f32);

// SAFETY: it is only an address; see the uses of [`PartialSums::at`].
unsafe impl Sync for PartialSums {}

impl PartialSums {
    fn at(&self, i: usize) -> *mut f32 {
        self.0.wrapping_add(i)
    }
}
