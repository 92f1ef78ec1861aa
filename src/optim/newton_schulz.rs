//! Newton-Schulz orthogonalization: approximates the nearest matrix with orthonormal rows (or columns).
//!
//! ```text
//! X = G / (|G| + 1e-7)                                           |G|: the Frobenius norm
//! 5 times:  A = X X^t,  X = a X + (b A + c A A) X                (transposed for a tall matrix)
//! ```
//!
//! This quintic polynomial moves all singular values except very small ones towards 1, into the range from 0.7 to 1.2.
//! If a matrix is far from square, the same iteration on the Gram matrix needs fewer products: the factors of `X` are
//! collected in a square matrix with the size of the shorter side, and `X` is multiplied twice instead of five times.

use crate::config::NsMethod;
use crate::kernels::element::Element;
use crate::kernels::gemm::{Epilogue, Matrix, MatrixMut, gemm};
use crate::kernels::parallel::{self, ParallelChunks};
use crate::precision::{FlatRef, sum_of_squares};
use half::bf16;

const STEPS: usize = 5;

/// The coefficients a, b, c.
const QUINTIC: [f32; 3] = [3.4445, -4.7750, 2.0315];

/// The step of the Gram iteration before which `X` is updated, so that rounding errors do not grow.
const RESTART_STEP: usize = 2;

/// The number added to the norm by which a matrix is divided.
const EPS: f32 = 1e-7;

/// The number of elements that one thread processes at a time.
const CHUNK: usize = 16 * BLOCK;
const BLOCK: usize = 1024;

/// Orthogonalizes the row-major matrix `x`: by the Gram iteration in f32, or by the standard iteration in bf16, as
/// DeepSpeed does on machines without f16. A square matrix does not benefit from the Gram iteration, and uses the
/// standard iteration in f32.
pub(super) fn orthogonalize(x: &mut [f32], rows: usize, cols: usize, method: NsMethod) {
    let shape = MatrixShape { rows, cols };
    match method {
        NsMethod::Gram => {
            let norm = sum_of_squares(FlatRef::F32(x)).sqrt() as f32 + EPS;
            map(x, |x| x / norm);
            let mut next = vec![0.0; x.len()];
            if rows == cols { standard(x, &mut next, shape) } else { gram(x, &mut next, shape) }
        }
        NsMethod::Standard => {
            let mut narrow = vec![bf16::ZERO; x.len()];
            bf16::narrow(x, &mut narrow);
            let norm = bf16::from_f64(sum_of_squares(FlatRef::BF16(&narrow)).sqrt());
            let norm = bf16::from_f32(norm.to_f32() + EPS).to_f32();
            map(&mut narrow, |x| x / norm);
            standard(&mut narrow, &mut vec![bf16::ZERO; x.len()], shape);
            bf16::widen(&narrow, x);
        }
    }
}

/// Returns the number of bytes that [`orthogonalize`] allocates.
pub(super) fn workspace(rows: usize, cols: usize, method: NsMethod) -> usize {
    let (all, square) = (rows * cols, rows.min(cols).pow(2));
    match method {
        NsMethod::Gram if rows == cols => 4 * (all + 3 * square),
        NsMethod::Gram => 4 * (all + 4 * square),
        NsMethod::Standard => 2 * (2 * all + 3 * square),
    }
}

#[derive(Debug, Clone, Copy)]
struct MatrixShape {
    rows: usize,
    cols: usize,
}

impl MatrixShape {
    fn short(self) -> usize {
        self.rows.min(self.cols)
    }

    fn of<E: Copy>(self, x: &[E]) -> Matrix<'_, E> {
        Matrix::new(x, self.rows, self.cols)
    }

    /// Computes `gram = X X^t`, or `X^t X` for a tall matrix.
    fn gram<E: Element>(self, gram: &mut [E], x: &[E]) {
        let (n, x) = (self.short(), self.of(x));
        let (a, b) = if self.rows > self.cols { (x.t(), x) } else { (x, x.t()) };
        gemm(MatrixMut::new(gram, n, n), a, b, Epilogue::default());
    }

    /// Computes `next = a X + B X`, or `a X + X B^t` for a tall matrix.
    fn advance<E: Element>(self, next: &mut [E], a: f32, b: &[E], x: &[E]) {
        let (n, x_matrix) = (self.short(), self.of(x));
        let b = Matrix::new(b, n, n);
        let (left, right) = if self.rows > self.cols { (x_matrix, b.t()) } else { (b, x_matrix) };
        add_product(next, (a, x), (1.0, left, right));
    }
}

/// Computes `sum = a base + c (left right)`. Both terms are rounded to the dtype of the elements, as in PyTorch.
fn add_product<E: Element>(
    sum: &mut [E],
    (a, base): (f32, &[E]),
    (c, left, right): (f32, Matrix<'_, E>, Matrix<'_, E>),
) {
    let (rows, cols) = (left.rows(), right.cols());
    gemm(MatrixMut::new(sum, rows, cols), left, right, Epilogue { scale: c, ..Epilogue::default() });
    if a == 0.0 {
        return;
    }
    parallel::for_each_part(sum.len().div_ceil(CHUNK), ParallelChunks::new(sum, CHUNK), |i, chunk: &mut [E]| {
        let (mut wide, mut term, mut rounded) = ([0.0; BLOCK], [0.0; BLOCK], [E::default(); BLOCK]);
        for (j, block) in chunk.chunks_mut(BLOCK).enumerate() {
            let (at, len) = (i * CHUNK + j * BLOCK, block.len());
            let (wide, term, rounded) = (&mut wide[..len], &mut term[..len], &mut rounded[..len]);
            E::widen(&base[at..at + len], term);
            term.iter_mut().for_each(|x| *x *= a);
            E::narrow(term, rounded);
            E::widen(rounded, term);
            E::widen(block, wide);
            wide.iter_mut().zip(term).for_each(|(x, term)| *x += *term);
            E::narrow(wide, block);
        }
    });
}

/// Replaces every element `x` by `f(x)`.
fn map<E: Element>(values: &mut [E], f: impl Fn(f32) -> f32 + Sync) {
    parallel::for_each_part(values.len().div_ceil(CHUNK), ParallelChunks::new(values, CHUNK), |_, chunk: &mut [E]| {
        let mut wide = [0.0; BLOCK];
        for block in chunk.chunks_mut(BLOCK) {
            let wide = &mut wide[..block.len()];
            E::widen(block, wide);
            wide.iter_mut().for_each(|x| *x = f(*x));
            E::narrow(wide, block);
        }
    });
}

/// Adds `a` to every element of the diagonal.
fn add_to_diagonal<E: Element>(square: &mut [E], n: usize, a: f32) {
    for at in (0..n).map(|i| i * n + i) {
        let mut wide = [0.0];
        E::widen(&square[at..=at], &mut wide);
        E::narrow(&[wide[0] + a], &mut square[at..=at]);
    }
}

/// Runs the standard iteration. The result is in `x`; `next` has the same length.
fn standard<E: Element>(x: &mut [E], next: &mut [E], shape: MatrixShape) {
    let [a, b, c] = QUINTIC;
    let n = shape.short();
    let [mut gram, mut scaled, mut polynomial] = [(); 3].map(|()| vec![E::default(); n * n]);
    let (mut current, mut updated) = (&mut *x, &mut *next);
    for _ in 0..STEPS {
        shape.gram(&mut gram, current);
        scaled.copy_from_slice(&gram);
        map(&mut scaled, |x| c * x);
        let (left, right) = (Matrix::new(&scaled, n, n), Matrix::new(&gram, n, n));
        add_product(&mut polynomial, (b, &gram), (1.0, left, right));
        shape.advance(updated, a, &polynomial, current);
        std::mem::swap(&mut current, &mut updated);
    }
    // After an odd number of steps, the result is in the other buffer.
    const { assert!(STEPS % 2 == 1) };
    x.copy_from_slice(next);
}

/// Runs the iteration on the Gram matrix. The result is in `x`; `next` has the same length.
fn gram(x: &mut [f32], next: &mut [f32], shape: MatrixShape) {
    let [a, b, c] = QUINTIC;
    let n = shape.short();
    // These are the Gram matrix R of the current X, b R + c R R, the pending factor of X, and a scratch matrix.
    let [mut r, mut z, mut q, mut scratch] = [(); 4].map(|()| vec![0.0; n * n]);
    shape.gram(&mut r, x);
    for step in 0..STEPS {
        if step == RESTART_STEP {
            shape.advance(next, 0.0, &q, x);
            shape.gram(&mut r, next);
        }
        let square = Matrix::new(&r, n, n);
        add_product(&mut z, (b, &r), (c, square, square));
        let polynomial = Matrix::new(&z, n, n);
        if step == 0 || step == RESTART_STEP {
            q.copy_from_slice(&z);
            add_to_diagonal(&mut q, n, a);
        } else {
            add_product(&mut scratch, (a, &q), (1.0, polynomial, Matrix::new(&q, n, n)));
            std::mem::swap(&mut q, &mut scratch);
        }
        if step + 1 < STEPS && step + 1 != RESTART_STEP {
            add_product(&mut scratch, (a, &r), (1.0, polynomial, Matrix::new(&r, n, n)));
            add_product(&mut r, (a, &scratch), (1.0, polynomial, Matrix::new(&scratch, n, n)));
        }
    }
    shape.advance(x, 0.0, &q, next);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a matrix of numbers without a pattern.
    fn matrix(rows: usize, cols: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 7919 + i * i * 31 + 17) % 1009) as f32 / 504.5 - 1.0;
        (0..rows * cols).map(value).collect()
    }

    /// Computes the standard iteration in f64.
    fn exact(g: &[f32], rows: usize, cols: usize) -> Vec<f64> {
        let [a, b, c] = [3.4445, -4.7750, 2.0315];
        let norm = g.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() + 1e-7;
        // The matrix is treated as a wide one.
        let (n, m) = (rows.min(cols), rows.max(cols));
        let at = |i: usize, j: usize| if rows > cols { j * cols + i } else { i * cols + j };
        let mut x: Vec<f64> = (0..n * m).map(|k| f64::from(g[at(k / m, k % m)]) / norm).collect();
        let product = |l: &[f64], r: &[f64], k: usize, cols: usize, transposed: bool| -> Vec<f64> {
            let element = |p: usize, j: usize| if transposed { r[j * k + p] } else { r[p * cols + j] };
            (0..n * cols).map(|ij| (0..k).map(|p| l[ij / cols * k + p] * element(p, ij % cols)).sum()).collect()
        };
        for _ in 0..STEPS {
            let gram = product(&x, &x, m, n, true);
            let square = product(&gram, &gram, n, n, false);
            let poly: Vec<f64> = gram.iter().zip(&square).map(|(g, s)| b * g + c * s).collect();
            let product_term = product(&poly, &x, n, m, false);
            x = x.iter().zip(&product_term).map(|(x, product_term)| a * x + product_term).collect();
        }
        (0..rows * cols).map(|k| if rows > cols { x[k % cols * m + k / cols] } else { x[k] }).collect()
    }

    #[test]
    fn both_methods_are_the_iteration() {
        for (rows, cols) in [(1, 1), (1, 7), (5, 3), (3, 5), (16, 16), (64, 33), (20, 150), (33, 32)] {
            let g = matrix(rows, cols);
            let exact = exact(&g, rows, cols);
            for (method, tolerance) in [(NsMethod::Gram, 3e-6), (NsMethod::Standard, 6e-2)] {
                let mut x = g.clone();
                orthogonalize(&mut x, rows, cols, method);
                let off = x.iter().zip(&exact).fold(0f64, |off, (x, e)| off.max((f64::from(*x) - e).abs()));
                assert!(off <= tolerance, "{method:?} of {rows} x {cols} is off by {off:e}");
            }
        }
    }

    #[test]
    fn no_direction_stays_none() {
        for method in [NsMethod::Gram, NsMethod::Standard] {
            let mut x = vec![0.0; 15];
            orthogonalize(&mut x, 5, 3, method);
            assert_eq!(x, [0.0; 15]);
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        for (rows, cols) in [(300, 190), (130, 400), (200, 200)] {
            for method in [NsMethod::Gram, NsMethod::Standard] {
                let run = |threads: usize| {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
                    let mut x = matrix(rows, cols);
                    pool.install(|| orthogonalize(&mut x, rows, cols, method));
                    x.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                assert!(run(1) == run(3), "{rows} x {cols} {method:?}");
            }
        }
    }
}
