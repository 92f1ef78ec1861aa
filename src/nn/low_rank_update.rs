//! Sums of a weight and a product of two thin matrices, W + s B A, in f32, computed for a few lines of the weight (its
//! rows in memory) at a time.

use super::WeightLayout;
use crate::kernels::gemm::{Epilogue, Matrix, MatrixMut, gemm};
use crate::kernels::parallel::{self, ParallelChunks};
use crate::precision::{FlatRef, sum_of_squares};
use std::ops::Range;

/// The product s B A for a weight with `inputs` inputs and `outputs` outputs.
#[derive(Debug, Clone, Copy)]
#[doc(hidden)]
pub struct LowRankUpdate<'a> {
    pub layout: WeightLayout,
    pub inputs: usize,
    pub outputs: usize,
    /// The matrix A, `[rank, inputs]`.
    pub a: &'a [f32],
    /// The matrix B, `[outputs, rank]`.
    pub b: &'a [f32],
    pub scale: f32,
}

/// The number of elements of a weight that are processed together.
const CHUNK: usize = 1 << 18;
/// The number of columns whose squares one task sums.
const COLUMNS: usize = 256;

impl LowRankUpdate<'_> {
    /// Returns the number of lines of the weight, and the number of elements in each.
    pub fn lines(&self) -> (usize, usize) {
        match self.layout {
            WeightLayout::OutIn => (self.outputs, self.inputs),
            WeightLayout::InOut => (self.inputs, self.outputs),
        }
    }

    /// Returns ranges of lines that fit into the caches.
    pub fn pieces(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (lines, width) = self.lines();
        let step = (CHUNK / width.max(1)).max(1);
        (0..lines).step_by(step).map(move |first| first..lines.min(first + step))
    }

    /// Adds the product to the weight's lines in this range.
    pub fn add_to(&self, lines: Range<usize>, weight: &mut [f32]) {
        let (rank, width) = (self.a.len() / self.inputs.max(1), self.lines().1);
        let sum = MatrixMut::new(weight, lines.len(), width);
        let epilogue = Epilogue { accumulate: true, scale: self.scale, ..Epilogue::default() };
        match self.layout {
            WeightLayout::OutIn => {
                let b = Matrix::new(&self.b[lines.start * rank..lines.end * rank], lines.len(), rank);
                gemm(sum, b, Matrix::new(self.a, rank, self.inputs), epilogue);
            }
            WeightLayout::InOut => {
                let a = Matrix::strided(&self.a[lines.start..], rank, lines.len(), self.inputs).t();
                gemm(sum, a, Matrix::new(self.b, self.outputs, rank).t(), epilogue);
            }
        }
    }

    /// Adds the squares of a piece's elements, in f64, to the sums of their outputs.
    pub fn add_squares(&self, lines: Range<usize>, piece: &[f32], sums: &mut [f64]) {
        let width = self.lines().1;
        match self.layout {
            WeightLayout::OutIn => {
                parallel::for_each_part(lines.len(), ParallelChunks::new(&mut sums[lines], 1), |i, sum| {
                    sum[0] += sum_of_squares(FlatRef::F32(&piece[i * width..][..width]));
                })
            }
            WeightLayout::InOut => {
                parallel::for_each_part(width.div_ceil(COLUMNS), ParallelChunks::new(sums, COLUMNS), |i, sums| {
                    for line in piece.chunks_exact(width) {
                        let values = &line[i * COLUMNS..][..sums.len()];
                        sums.iter_mut().zip(values).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
                    }
                });
            }
        }
    }

    /// Multiplies a piece's elements by the factors of their outputs.
    pub fn scale(&self, lines: Range<usize>, piece: &mut [f32], factors: &[f32]) {
        for (i, line) in lines.zip(piece.chunks_exact_mut(self.lines().1)) {
            match self.layout {
                WeightLayout::OutIn => line.iter_mut().for_each(|x| *x *= factors[i]),
                WeightLayout::InOut => line.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor),
            }
        }
    }

    /// Returns the Euclidean norm of W + s B A for each output. `read` reads lines of the weight.
    ///
    /// # Errors
    /// The errors of `read`.
    pub fn norms<E>(&self, mut read: impl FnMut(Range<usize>, &mut [f32]) -> Result<(), E>) -> Result<Vec<f32>, E> {
        let width = self.lines().1;
        let (mut sums, mut piece) = (vec![0f64; self.outputs], Vec::new());
        for lines in self.pieces() {
            piece.resize(lines.len() * width, 0f32);
            read(lines.clone(), &mut piece)?;
            self.add_to(lines.clone(), &mut piece);
            self.add_squares(lines, &piece, &mut sums);
        }
        Ok(sums.into_iter().map(|sum| sum.sqrt() as f32).collect())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn both_orientations_have_the_sums_and_norms_of_the_definition() {
        let (inputs, outputs, rank, scale) = (700, 900, 3, 0.5);
        let value = |i: usize, k: usize| ((i * 37 + k * 11) % 23) as f32 / 16.0 - 0.6;
        let a: Vec<f32> = (0..rank * inputs).map(|i| value(i, 1)).collect();
        let b: Vec<f32> = (0..outputs * rank).map(|i| value(i, 2)).collect();
        let merged = |out: usize, inp: usize| {
            let product: f32 = (0..rank).map(|k| b[out * rank + k] * a[k * inputs + inp]).sum();
            value(out * inputs + inp, 0) + scale * product
        };
        for layout in [WeightLayout::OutIn, WeightLayout::InOut] {
            let update = LowRankUpdate { layout, inputs, outputs, a: &a, b: &b, scale };
            let (lines, width) = update.lines();
            let at = |line, col| if layout == WeightLayout::OutIn { (line, col) } else { (col, line) };
            let coordinates: Vec<_> = (0..lines).flat_map(|line| (0..width).map(move |col| at(line, col))).collect();
            let weight: Vec<f32> = coordinates.iter().map(|(out, inp)| value(out * inputs + inp, 0)).collect();
            let mut sum = weight.clone();
            assert!(update.pieces().count() > 1);
            update.pieces().for_each(|lines| {
                update.add_to(lines.clone(), &mut sum[lines.start * width..lines.end * width]);
            });
            for ((out, inp), sum) in coordinates.iter().zip(&sum) {
                assert!((sum - merged(*out, *inp)).abs() < 1e-5, "{layout:?} {out} {inp}");
            }
            let read = |lines: Range<usize>, piece: &mut [f32]| {
                piece.copy_from_slice(&weight[lines.start * width..lines.end * width]);
                Ok::<_, ()>(())
            };
            let norms = update.norms(read).unwrap();
            let factors: Vec<f32> = norms.iter().map(|norm| 1.0 / norm).collect();
            update.scale(0..lines, &mut sum, &factors);
            let mut lengths = vec![0.0; outputs];
            update.add_squares(0..lines, &sum, &mut lengths);
            assert!(lengths.iter().all(|length| (length - 1.0).abs() < 1e-4), "{layout:?}");
            for (out, norm) in norms.iter().enumerate() {
                let want = (0..inputs).map(|inp| f64::from(merged(out, inp)).powi(2)).sum::<f64>().sqrt();
                assert!((f64::from(*norm) - want).abs() < 1e-4 * want, "{layout:?} {out}: {norm} {want}");
            }
        }
    }
}
