//! The sums of the columns of a matrix: the gradient of a bias.

use super::matrix::Matrix;
use crate::kernels::element::Element;
use crate::kernels::par;

/// Columns of one task.
const COLS: usize = 128;
/// Rows of one partial sum.
const ROWS: usize = 128;

/// Writes the sum of every column of a row-major matrix to `out`, in f32: partial sums of [`ROWS`] rows, then the sum
/// of those, each in row order.
///
/// # Panics
/// If the matrix is not row-major or `out` has another length than its rows.
pub fn column_sums<E: Element>(data: Matrix<'_, E>, out: &mut [f32]) {
    assert_eq!(out.len(), data.cols(), "one sum per column");
    assert!(data.is_row_major(), "matrix is not row-major");
    let out = Columns(out.as_mut_ptr());
    par::for_each(data.cols().div_ceil(COLS), |task| {
        let col = task * COLS;
        let width = COLS.min(data.cols() - col);
        let (mut total, mut part, mut row) = ([0f32; COLS], [0f32; COLS], [0f32; COLS]);
        for start in (0..data.rows()).step_by(ROWS) {
            part.fill(0.0);
            for i in start..data.rows().min(start + ROWS) {
                E::widen(&data.row(i)[col..][..width], &mut row[..width]);
                part.iter_mut().zip(&row).for_each(|(p, x)| *p += x);
            }
            total.iter_mut().zip(&part).for_each(|(t, p)| *t += p);
        }
        // SAFETY: `col + width` is at most the length of `out`, and every task has its own columns.
        let out = unsafe { std::slice::from_raw_parts_mut(out.at(col), width) };
        out.copy_from_slice(&total[..width]);
    });
}

/// The sums, shared by tasks that each write their own columns.
struct Columns(*mut f32);

// SAFETY: it is only a place; see the use of [`Columns::at`].
unsafe impl Sync for Columns {}

impl Columns {
    fn at(&self, col: usize) -> *mut f32 {
        self.0.wrapping_add(col)
    }
}
