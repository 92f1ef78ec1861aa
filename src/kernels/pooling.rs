//! Pooling and resampling of planes `[planes, height, width]` in f32: maxima, means, and nearest-neighbour and bilinear
//! interpolation.
//!
//! Each result depends on a few elements of its plane, and its gradient flows back to the same elements.

use super::parallel::{ParallelChunks, for_each_part};
use std::ops::Range;

/// Pooling windows over planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolingWindows {
    /// The height and width of a plane.
    pub size: [usize; 2],
    /// The height and width of the result.
    pub result: [usize; 2],
    pub kernel: [usize; 2],
    pub stride: [usize; 2],
    pub padding: [usize; 2],
}

impl PoolingWindows {
    fn results(self) -> usize {
        self.result[0] * self.result[1]
    }

    fn elements(self) -> usize {
        self.size[0] * self.size[1]
    }

    /// Returns the elements of a plane that result `index` covers along an axis, without padding.
    pub fn range(self, axis: usize, index: usize) -> Range<usize> {
        let start = index * self.stride[axis];
        let end = (start + self.kernel[axis]).saturating_sub(self.padding[axis]).min(self.size[axis]);
        start.saturating_sub(self.padding[axis]).min(end)..end
    }

    /// Calls `visit` with the position of each result and the rows and columns that it covers.
    #[inline(always)]
    fn for_each_window(self, mut visit: impl FnMut(usize, Range<usize>, Range<usize>)) {
        for row in 0..self.result[0] {
            let rows = self.range(0, row);
            for column in 0..self.result[1] {
                visit(row * self.result[1] + column, rows.clone(), self.range(1, column));
            }
        }
    }

    /// Writes the largest element of each window and its position in the plane. Of equal elements, the first counts as
    /// the largest; a NaN is larger than any number.
    pub fn maxima(self, x: &[f32], y: &mut [f32], positions: &mut [u32]) {
        let parts = (ParallelChunks::new(y, self.results()), ParallelChunks::new(positions, self.results()));
        for_each_part(x.len() / self.elements().max(1), parts, |plane, (y, positions)| {
            let x = &x[plane * self.elements()..][..self.elements()];
            self.for_each_window(|result, rows, columns| {
                let mut position = rows.start * self.size[1] + columns.start;
                let mut largest = f32::NEG_INFINITY;
                for row in rows {
                    let start = row * self.size[1] + columns.start;
                    for (i, value) in (start..).zip(&x[start..start + columns.len()]) {
                        // No number is larger than a NaN.
                        if *value > largest || (value.is_nan() && !largest.is_nan()) {
                            (position, largest) = (i, *value);
                        }
                    }
                }
                y[result] = largest;
                positions[result] = position as u32;
            });
        });
    }

    /// Computes the gradient of [`PoolingWindows::maxima`]: each gradient goes to the position of its maximum.
    pub fn maxima_backward(self, dy: &[f32], positions: &[u32], dx: &mut [f32]) {
        for_each_part(dx.len() / self.elements().max(1), ParallelChunks::new(dx, self.elements()), |plane, dx| {
            dx.fill(0.0);
            let results = plane * self.results()..(plane + 1) * self.results();
            dy[results.clone()].iter().zip(&positions[results]).for_each(|(dy, position)| dx[*position as usize] += dy);
        });
    }

    /// Returns the weight of an element in the mean of its window. The zeros of the padding also count.
    fn element_weight(self) -> f32 {
        1.0 / (self.kernel[0] * self.kernel[1]) as f32
    }

    /// Computes the mean of each window.
    pub fn means(self, x: &[f32], y: &mut [f32]) {
        let weight = self.element_weight();
        for_each_part(x.len() / self.elements().max(1), ParallelChunks::new(y, self.results()), |plane, y| {
            let x = &x[plane * self.elements()..][..self.elements()];
            self.for_each_window(|result, rows, columns| {
                let row = |row: usize| &x[row * self.size[1]..][columns.clone()];
                y[result] = rows.map(|i| row(i).iter().sum::<f32>()).sum::<f32>() * weight;
            });
        });
    }

    /// Computes the gradient of [`PoolingWindows::means`].
    pub fn means_backward(self, dy: &[f32], dx: &mut [f32]) {
        let weight = self.element_weight();
        for_each_part(dx.len() / self.elements().max(1), ParallelChunks::new(dx, self.elements()), |plane, dx| {
            dx.fill(0.0);
            let dy = &dy[plane * self.results()..][..self.results()];
            self.for_each_window(|result, rows, columns| {
                let part = dy[result] * weight;
                for row in rows {
                    dx[row * self.size[1]..][columns.clone()].iter_mut().for_each(|sum| *sum += part);
                }
            });
        });
    }
}

/// The two elements that a result depends on along an axis, and the weight of the second, from 0 to 1.
pub type InterpolationPair = (usize, usize, f32);

/// Interpolation of planes of `size[0]` x `size[1]` to as many rows and columns as there are pairs.
#[derive(Debug, Clone, PartialEq)]
pub struct InterpolationGrid {
    pub size: [usize; 2],
    pub rows: Vec<InterpolationPair>,
    pub columns: Vec<InterpolationPair>,
}

impl InterpolationGrid {
    fn results(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    fn elements(&self) -> usize {
        self.size[0] * self.size[1]
    }

    pub fn forward(&self, x: &[f32], y: &mut [f32]) {
        for_each_part(x.len() / self.elements().max(1), ParallelChunks::new(y, self.results()), |plane, y| {
            let x = &x[plane * self.elements()..][..self.elements()];
            for ((top, bottom, row_weight), y) in self.rows.iter().zip(y.chunks_exact_mut(self.columns.len())) {
                let [top, bottom] = [top, bottom].map(|row| &x[row * self.size[1]..][..self.size[1]]);
                for ((left, right, column_weight), y) in self.columns.iter().zip(y) {
                    // A neighbour with weight 0 is not read: it may be infinite.
                    let interpolate = |row: &[f32]| {
                        if *column_weight == 0.0 {
                            row[*left]
                        } else {
                            row[*left] * (1.0 - column_weight) + row[*right] * column_weight
                        }
                    };
                    *y = if *row_weight == 0.0 {
                        interpolate(top)
                    } else {
                        interpolate(top) * (1.0 - row_weight) + interpolate(bottom) * row_weight
                    };
                }
            }
        });
    }

    pub fn backward(&self, dy: &[f32], dx: &mut [f32]) {
        for_each_part(dx.len() / self.elements().max(1), ParallelChunks::new(dx, self.elements()), |plane, dx| {
            dx.fill(0.0);
            let dy = &dy[plane * self.results()..][..self.results()];
            for ((top, bottom, row_weight), dy) in self.rows.iter().zip(dy.chunks_exact(self.columns.len())) {
                for ((left, right, column_weight), dy) in self.columns.iter().zip(dy) {
                    for (row, a) in [(top, 1.0 - row_weight), (bottom, *row_weight)] {
                        for (column, b) in [(left, 1.0 - column_weight), (right, *column_weight)] {
                            if a * b != 0.0 {
                                dx[row * self.size[1] + column] += dy * a * b;
                            }
                        }
                    }
                }
            }
        });
    }
}
