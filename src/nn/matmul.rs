//! The product of batches of matrices, for any views.

use super::composed;
use super::in_f32::has_kernels;
use crate::graph::{OpInputs, SavedTensor};
use crate::kernels::gemm::{Epilogue, Matrix, MatrixMut, gemm};
use crate::kernels::parallel::{ParallelChunks, for_each_part};
use crate::kernels::{buffer, mac_count};
use crate::tensor::element::{TensorElement, with_all, with_element, with_elements};
use candle_core::{Layout, Result, Shape, Tensor, bail};

const NAME: &str = "matmul";

/// Returns the product `[.., m, n]` of `a` `[.., m, k]` and `b` `[.., k, n]`. The axes before the last two are
/// broadcast, as in PyTorch's `matmul`.
///
/// [`Tensor::matmul`] returns wrong numbers if the left operand is a transposed view and the right one a broadcast
/// view, and its gradients may be wrong too. This function supports any views. On the CPU, sums of f32, bf16 and f16
/// are in f32 and rounded once; for f64 and on a GPU, Candle's product is used.
///
/// # Errors
/// Fewer than two dimensions, shapes that do not match, or operands with different dtypes.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (s, shape) = MatmulSizes::of(a, b)?;
    if a.dtype() != b.dtype() {
        bail!("{NAME}: the operands are {:?} and {:?}; cast one of them", a.dtype(), b.dtype())
    }
    if !has_kernels(a) {
        return composed::matmul(a, b);
    }
    let (a, b) = (MatmulOperand::of(a)?, MatmulOperand::of(b)?);
    let inputs = OpInputs::of([Some(&a.tensor), Some(&b.tensor)])?;
    with_element!(a.tensor.dtype(), NAME, E => {
        let mut y = buffer::<E>(shape.elem_count());
        with_all::<E, _, 2>([Some(&a.tensor), Some(&b.tensor)], NAME, |[left, right]| {
            let (left, right) = (left.unwrap_or_default(), right.unwrap_or_default());
            let products = || {
                for_each_part(s.left.len(), ParallelChunks::new(&mut y, s.m * s.n), |i, y| {
                    let (left, right) = (a.matrix(left, s.left[i], [s.m, s.k]), b.matrix(right, s.right[i], [s.k, s.n]));
                    gemm(MatrixMut::new(y, s.m, s.n), left, right, Epilogue::default());
                })
            };
            mac_count::on_this_thread([s.left.len(), s.m, s.k, s.n], products);
            Ok(())
        })?;
        let saved = [SavedTensor::of(&a.tensor), SavedTensor::of(&b.tensor)];
        let (a, b) = (a.layout(), b.layout());
        inputs.result(NAME, E::storage(y), shape, move |grad, [to_a, to_b]| {
            grad.read::<E, _>(NAME, |dy| {
                let dy = |i: usize| Matrix::new(&dy[i * s.m * s.n..][..s.m * s.n], s.m, s.n);
                if to_a.is_wanted() {
                    let sums = with_elements::<E, _>(&saved[1].get()?, NAME, |right| {
                        Ok(a.gradient(&s.left, [s.m, s.k, s.n], |i| (dy(i), b.matrix(right, s.right[i], [s.k, s.n]).t())))
                    })?;
                    to_a.deliver_sums::<E>(&sums)?;
                }
                if to_b.is_wanted() {
                    let sums = with_elements::<E, _>(&saved[0].get()?, NAME, |left| {
                        Ok(b.gradient(&s.right, [s.k, s.n, s.m], |i| (a.matrix(left, s.left[i], [s.m, s.k]).t(), dy(i))))
                    })?;
                    to_b.deliver_sums::<E>(&sums)?;
                }
                Ok(())
            })
        })
    })
}

/// The sizes `m`, `k` and `n`, and, for each matrix of the result, the index of its factor in each operand.
struct MatmulSizes {
    m: usize,
    k: usize,
    n: usize,
    left: Vec<usize>,
    right: Vec<usize>,
}

impl MatmulSizes {
    /// Returns the sizes, and the shape of the result.
    fn of(a: &Tensor, b: &Tensor) -> Result<(Self, Shape)> {
        let ([left @ .., m, k], [right @ .., inner, n]) = (a.dims(), b.dims()) else {
            bail!(
                "{NAME}: the operands have shapes {:?} and {:?}; they must have at least two dimensions",
                a.dims(),
                b.dims()
            )
        };
        let batch =
            (k == inner).then(|| Shape::from(left).broadcast_shape_binary_op(&Shape::from(right), NAME).ok()).flatten();
        let Some(batch) = batch else {
            bail!(
                "{NAME}: the operands have shapes {:?} and {:?}; they must be [.., m, k] and [.., k, n], with leading \
                 axes of equal length or of length 1",
                a.dims(),
                b.dims()
            )
        };
        let (left, right) = (matrices(&batch, left), matrices(&batch, right));
        let shape = [batch.dims(), &[*m, *n]].concat();
        Ok((Self { m: *m, k: *k, n: *n, left, right }, shape.into()))
    }
}

/// Returns the index of the operand's matrix at each position of the result's batch.
fn matrices(batch: &Shape, operand_dims: &[usize]) -> Vec<usize> {
    let missing_axes = batch.rank() - operand_dims.len();
    let strides = Layout::contiguous(operand_dims);
    let matrix_at = |mut position: usize| {
        let mut matrix = 0;
        for axis in (missing_axes..batch.rank()).rev() {
            let length = batch.dims()[axis];
            if operand_dims[axis - missing_axes] > 1 {
                matrix += position % length * strides.stride()[axis - missing_axes];
            }
            position /= length;
        }
        matrix
    };
    (0..batch.elem_count()).map(matrix_at).collect()
}

/// A contiguous tensor of matrices, or of transposed matrices.
struct MatmulOperand {
    tensor: Tensor,
    transposed: bool,
}

impl MatmulOperand {
    /// Creates the operand. `x` is copied unless it is contiguous or the transposed view of a contiguous tensor.
    fn of(x: &Tensor) -> Result<Self> {
        let transpose = x.t()?;
        Ok(match transpose.is_contiguous() && !x.is_contiguous() {
            true => Self { tensor: transpose, transposed: true },
            false => Self { tensor: x.contiguous()?, transposed: false },
        })
    }

    fn layout(&self) -> MatmulOperandLayout {
        MatmulOperandLayout { transposed: self.transposed, elements: self.tensor.elem_count() }
    }

    fn matrix<'a, E: TensorElement>(&self, data: &'a [E], index: usize, size: [usize; 2]) -> Matrix<'a, E> {
        self.layout().matrix(data, index, size)
    }
}

/// The memory layout of an operand's matrices.
#[derive(Clone, Copy)]
struct MatmulOperandLayout {
    transposed: bool,
    elements: usize,
}

impl MatmulOperandLayout {
    /// Returns the matrix at this index; it has `rows` rows and `columns` columns.
    fn matrix<'a, E: TensorElement>(self, data: &'a [E], index: usize, [rows, columns]: [usize; 2]) -> Matrix<'a, E> {
        let values = &data[index * rows * columns..][..rows * columns];
        if self.transposed { Matrix::new(values, columns, rows).t() } else { Matrix::new(values, rows, columns) }
    }

    /// Returns the operand's gradient, whose matrices are `[rows, columns]`. Each of these matrices is a sum over
    /// the positions in the result's batch at which the operand's matrix is used. The terms are products, with inner
    /// dimension `inner`, of the two matrices that `factors` returns for a position.
    fn gradient<'a, E: TensorElement>(
        self,
        matrix_of_position: &[usize],
        [rows, columns, inner]: [usize; 3],
        factors: impl Fn(usize) -> (Matrix<'a, E>, Matrix<'a, E>) + Sync,
    ) -> Vec<f32> {
        let matrix_len = rows * columns;
        let matrices = self.elements.checked_div(matrix_len).unwrap_or(0);
        let mut positions = vec![Vec::new(); matrices];
        matrix_of_position.iter().enumerate().for_each(|(position, index)| positions[*index].push(position));
        let mut sums = vec![0f32; self.elements];
        let products = || {
            for_each_part(matrices, ParallelChunks::new(&mut sums, matrix_len), |index, sum| {
                for position in &positions[index] {
                    let (left, right) = factors(*position);
                    let epilogue = Epilogue { accumulate: true, ..Epilogue::default() };
                    match self.transposed {
                        true => gemm(MatrixMut::new(sum, columns, rows), right.t(), left.t(), epilogue),
                        false => gemm(MatrixMut::new(sum, rows, columns), left, right, epilogue),
                    }
                }
            })
        };
        mac_count::on_this_thread([matrix_of_position.len(), rows, columns, inner], products);
        sums
    }
}
