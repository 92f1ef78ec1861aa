//! Views of matrices inside slices.

use crate::util::{counted, is_or_are};
use std::marker::PhantomData;

/// A matrix inside a slice. Element (i, j) is at `i * row_stride + j * col_stride`, and one of the strides is 1.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a, E> {
    data: &'a [E],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, E: Copy> Matrix<'a, E> {
    /// Creates a dense row-major matrix.
    pub fn new(data: &'a [E], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Creates a row-major matrix whose rows start `row_stride` elements apart.
    ///
    /// # Panics
    /// Panics if rows overlap or exceed the slice.
    pub fn strided(data: &'a [E], rows: usize, cols: usize, row_stride: usize) -> Self {
        check_extent(data.len(), rows, cols, row_stride);
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// Returns a transposed view.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub(super) fn row_stride(&self) -> usize {
        self.row_stride
    }

    pub(super) fn col_stride(&self) -> usize {
        self.col_stride
    }

    pub(super) fn as_ptr(&self) -> *const E {
        self.data.as_ptr()
    }

    /// Returns whether the elements of a row are adjacent.
    pub(super) fn is_row_major(&self) -> bool {
        self.col_stride == 1
    }

    /// Returns the elements of a row of a row-major matrix.
    pub(super) fn row(&self, row: usize) -> &'a [E] {
        assert!(self.is_row_major() && row < self.rows, "no such row");
        &self.data[row * self.row_stride..][..self.cols]
    }

    /// Returns the element at (i, j).
    #[cfg(test)]
    pub(super) fn at(&self, i: usize, j: usize) -> E {
        self.data[i * self.row_stride + j * self.col_stride]
    }
}

/// A row-major matrix for writing.
#[derive(Debug)]
pub struct MatrixMut<'a, E> {
    data: *mut E,
    rows: usize,
    cols: usize,
    row_stride: usize,
    slice: PhantomData<&'a mut [E]>,
}

// SAFETY: same as for the `&mut [E]` whose elements it exclusively holds.
unsafe impl<E: Send> Send for MatrixMut<'_, E> {}

impl<'a, E> MatrixMut<'a, E> {
    /// Creates a dense matrix.
    pub fn new(data: &'a mut [E], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Creates a matrix whose rows start `row_stride` elements apart.
    ///
    /// # Panics
    /// Panics if rows overlap or exceed the slice.
    pub fn strided(data: &'a mut [E], rows: usize, cols: usize, row_stride: usize) -> Self {
        check_extent(data.len(), rows, cols, row_stride);
        Self { data: data.as_mut_ptr(), rows, cols, row_stride, slice: PhantomData }
    }

    /// Divides the matrix into its first `col` columns and the others. Both lie in the same slice, but have no element
    /// in common.
    ///
    /// # Panics
    /// Panics if the matrix has fewer than `col` columns.
    pub fn split_columns(self, col: usize) -> (Self, Self) {
        assert!(col <= self.cols, "there {} only {}", is_or_are(self.cols), counted(self.cols, "column"));
        let second = Self { data: self.data.wrapping_add(col), cols: self.cols - col, ..self };
        (Self { cols: col, ..self }, second)
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub(super) fn row_stride(&self) -> usize {
        self.row_stride
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut E {
        self.data
    }
}

fn check_extent(len: usize, rows: usize, cols: usize, row_stride: usize) {
    assert!(cols <= row_stride || rows <= 1, "rows overlap");
    assert!(rows == 0 || cols == 0 || (rows - 1) * row_stride + cols <= len, "the matrix reaches past its slice");
}
