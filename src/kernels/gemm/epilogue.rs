//! The operations that are applied to the sums of a matrix product before the sums are rounded and stored.

use super::matrix::{Matrix, MatrixMut};
use crate::kernels::element::Element;
use crate::kernels::math;
use crate::kernels::simd::{prefetch_at, prefetch_to_write};

/// The operations on the sums before they are rounded and stored:
/// `c = activation(scale * sum + bias) + residual (+ c)`. Everything is computed in f32 and rounded once, except that
/// the inputs of an activation are rounded, too.
#[derive(Debug)]
pub struct Epilogue<'a, E> {
    /// Whether the previous contents of the result are added to it.
    pub accumulate: bool,
    /// The factor by which the sums are multiplied.
    pub scale: f32,
    /// The bias that is added to every row, one number per column.
    pub bias: Option<&'a [E]>,
    /// The matrix that is added after the activation, row-major and of the result's shape.
    pub residual: Option<Matrix<'a, E>>,
    /// The activation, and the matrix that receives its inputs, if requested. These values are rounded to the dtype of
    /// the result. The activation is computed from the rounded values, whether they are stored or not.
    pub activation: Option<(Activation, Option<MatrixMut<'a, E>>)>,
}

impl<E> Default for Epilogue<'_, E> {
    fn default() -> Self {
        Self { accumulate: false, scale: 1.0, bias: None, residual: None, activation: None }
    }
}

/// An elementwise function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// The tanh approximation of GELU.
    GeluTanh,
    /// Exact GELU, computed with the error function.
    Gelu,
    /// x / (1 + exp(-x)).
    Silu,
    /// max(x, 0)^2.
    ReluSquared,
}

impl Activation {
    #[inline(always)]
    pub(super) fn apply(self, values: &mut [f32]) {
        match self {
            Self::GeluTanh => values.iter_mut().for_each(|x| *x = math::gelu_tanh(*x)),
            Self::Gelu => values.iter_mut().for_each(|x| *x = math::gelu(*x)),
            Self::Silu => values.iter_mut().for_each(|x| *x = math::silu(*x)),
            Self::ReluSquared => values.iter_mut().for_each(|x| *x = math::relu_squared(*x)),
        }
    }
}

/// The size of a cache line in bytes.
const LINE: usize = 64;

/// The result of a product and its [`Epilogue`], shared by threads that each write different elements.
pub(super) struct EpilogueOutput<'a, C> {
    pub(super) result: ParallelMatrix<C>,
    pub(super) accumulate: bool,
    pub(super) scale: f32,
    pub(super) bias: Option<&'a [C]>,
    pub(super) residual: Option<Matrix<'a, C>>,
    pub(super) activation: Option<Activation>,
    pub(super) activation_inputs: Option<ParallelMatrix<C>>,
}

/// A row-major matrix in memory that is written in parallel.
pub(super) struct ParallelMatrix<C> {
    data: *mut C,
    row_stride: usize,
}

// SAFETY: this is only an address; callers that write through [`ParallelMatrix::at`] must write disjoint elements.
unsafe impl<C: Send> Sync for ParallelMatrix<C> {}

impl<C> ParallelMatrix<C> {
    fn new(mut matrix: MatrixMut<'_, C>) -> Self {
        Self { data: matrix.as_mut_ptr(), row_stride: matrix.row_stride() }
    }

    pub(super) fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// Returns the address of an element.
    ///
    /// # Safety
    /// The element must exist in the matrix.
    #[inline(always)]
    pub(super) unsafe fn at(&self, row: usize, col: usize) -> *mut C {
        // SAFETY: the caller names an element of the matrix, which is within its slice.
        unsafe { self.data.add(row * self.row_stride + col) }
    }
}

impl<'a, C: Element> EpilogueOutput<'a, C> {
    /// Checks that the shapes of all operands match the result.
    pub(super) fn new(result: MatrixMut<'a, C>, epilogue: Epilogue<'a, C>) -> Self {
        let (rows, cols) = (result.rows(), result.cols());
        let Epilogue { accumulate, scale, bias, residual, activation } = epilogue;
        assert!(bias.is_none_or(|bias| bias.len() == cols), "the length of the bias differs from that of a row");
        if let Some(residual) = &residual {
            assert_eq!((residual.rows(), residual.cols()), (rows, cols), "the shapes of residual and result differ");
            assert!(residual.is_row_major(), "the residual is not row-major");
        }
        let (activation, before) = activation.map_or((None, None), |(activation, before)| (Some(activation), before));
        if let Some(before) = &before {
            assert_eq!(
                (before.rows(), before.cols()),
                (rows, cols),
                "the shapes of activation inputs and result differ"
            );
        }
        Self {
            result: ParallelMatrix::new(result),
            accumulate,
            scale,
            bias,
            residual,
            activation,
            activation_inputs: before.map(ParallelMatrix::new),
        }
    }

    /// Prefetches elements of the result and of the activation's inputs, which will be written, and elements of the
    /// residual, which will be added. The columns to the left have already been prefetched.
    #[inline(always)]
    pub(super) fn prefetch(&self, (row, rows): (usize, usize), (col, cols): (usize, usize)) {
        let last = col + cols - 1;
        for i in row..row + rows {
            // SAFETY: this is an element of the result.
            let result = unsafe { self.result.at(i, last) };
            lines_up_to(result, cols).for_each(prefetch_to_write);
            if let Some(before) = &self.activation_inputs {
                // SAFETY: as above.
                let before = unsafe { before.at(i, last) };
                lines_up_to(before, cols).for_each(prefetch_to_write);
            }
            if let Some(residual) = &self.residual {
                let residual = residual.as_ptr().wrapping_add(i * residual.row_stride() + last);
                lines_up_to(residual, cols).for_each(prefetch_at);
            }
        }
    }
}

/// Returns addresses in the cache lines that contain `count` adjacent elements up to `last`. The line of the first
/// elements may be left out if it begins before them.
#[inline(always)]
fn lines_up_to<C>(last: *const C, count: usize) -> impl Iterator<Item = *const u8> {
    (0..(count * size_of::<C>()).div_ceil(LINE)).map(move |line| last.cast::<u8>().wrapping_sub(line * LINE))
}
