//! Selects columns of a tensor, such as the parts of a fused projection's result, and joins columns.

use crate::graph::OpInputs;
use crate::kernels::add::add_into;
use crate::kernels::buffer;
use crate::kernels::parallel::{ParallelChunks, for_each_part};
use crate::tensor::element::{TensorElement, with_all, with_element, with_elements};
use crate::util::counted;
use candle_core::{D, Result, Tensor, bail};
use std::ops::Range;

/// The number of rows that one task copies.
const ROWS_PER_TASK: usize = 64;

/// Returns columns `range` of the last dimension of `x` `[.., width]` as a tensor `[.., range.len()]` with its own
/// memory.
///
/// The backward pass adds to these columns of the gradient in place. Unlike that of Candle's `narrow`, it does not
/// create a tensor of the input's size for each part.
///
/// # Errors
/// A range that is empty or ends after the last column.
pub fn columns(x: &Tensor, range: Range<usize>) -> Result<Tensor> {
    const NAME: &str = "columns";
    let width = x.dims().last().copied().unwrap_or(0);
    if range.is_empty() || range.end > width {
        bail!(
            "columns: {range:?} of an input of shape {:?}; the range must not be empty and must end within the input's {}",
            x.dims(),
            counted(width, "column")
        )
    }
    if !x.device().is_cpu() {
        return x.narrow(D::Minus1, range.start, range.len())?.contiguous();
    }
    let x = x.contiguous()?;
    let inputs = OpInputs::of([Some(&x)])?;
    let mut shape = x.dims().to_vec();
    shape[x.rank() - 1] = range.len();
    let (rows, part) = (x.elem_count() / width, range.len());
    with_element!(x.dtype(), NAME, E => {
        let mut y = buffer::<E>(rows * part);
        with_elements::<E, _>(&x, NAME, |x| {
            for_each_part(rows.div_ceil(ROWS_PER_TASK), ParallelChunks::new(&mut y, ROWS_PER_TASK * part), |task, y| {
                let x = &x[task * ROWS_PER_TASK * width..];
                let pairs = y.chunks_exact_mut(part).zip(x.chunks_exact(width));
                pairs.for_each(|(y, x)| y.copy_from_slice(&x[range.clone()]));
            });
            Ok(())
        })?;
        inputs.result(NAME, E::storage(y), shape, move |grad, [to_x]| {
            grad.read::<E, _>(NAME, |dy| {
                to_x.accumulate_zeroed::<E>(rows * width, |dx| {
                    for_each_part(rows.div_ceil(ROWS_PER_TASK), ParallelChunks::new(dx, ROWS_PER_TASK * width), |task, dx| {
                        let dy = &dy[task * ROWS_PER_TASK * part..];
                        let pairs = dx.chunks_exact_mut(width).zip(dy.chunks_exact(part));
                        pairs.for_each(|(dx, dy)| add_into(&mut dx[range.clone()], dy));
                    });
                    Ok(())
                })
            })
        })
    })
}

/// Returns the columns of `a` `[.., m]` followed by those of `b` `[.., n]` as a tensor `[.., m + n]`, which [`columns`]
/// can divide again.
///
/// # Errors
/// Tensors whose other dimensions or dtypes differ.
pub(crate) fn join_columns(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const NAME: &str = "joined_columns";
    let widths = [a, b].map(|x| x.dims().last().copied().unwrap_or(0));
    let outer = |x: &Tensor| x.dims().split_last().map(|(_, outer)| outer.to_vec());
    if outer(a) != outer(b) || a.dtype() != b.dtype() || widths.contains(&0) {
        bail!(
            "{NAME}: the operands have shapes {:?} and {:?} and dtypes {:?} and {:?}; only the last dimension may differ",
            a.dims(),
            b.dims(),
            a.dtype(),
            b.dtype()
        )
    }
    if !a.device().is_cpu() {
        return Tensor::cat(&[a, b], D::Minus1);
    }
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    let inputs = OpInputs::of([Some(&a), Some(&b)])?;
    let [m, n] = widths;
    let (mut shape, rows) = (a.dims().to_vec(), a.elem_count() / m);
    shape[a.rank() - 1] = m + n;
    with_element!(a.dtype(), NAME, E => {
        let mut y = buffer::<E>(rows * (m + n));
        with_all([Some(&a), Some(&b)], NAME, |[a, b]| {
            let (a, b) = (a.unwrap_or_default(), b.unwrap_or_default());
            let chunk = ROWS_PER_TASK * (m + n);
            for_each_part(rows.div_ceil(ROWS_PER_TASK), ParallelChunks::new(&mut y, chunk), |task, y| {
                let first = task * ROWS_PER_TASK;
                let parts = a[first * m..].chunks_exact(m).zip(b[first * n..].chunks_exact(n));
                for (y, (a, b)) in y.chunks_exact_mut(m + n).zip(parts) {
                    y[..m].copy_from_slice(a);
                    y[m..].copy_from_slice(b);
                }
            });
            Ok(())
        })?;
        inputs.result(NAME, E::storage(y), shape, move |grad, sinks| {
            for (sink, range) in sinks.iter().zip([0..m, m..m + n]) {
                let part = range.len();
                sink.make::<E>(rows * part, |dx| {
                    grad.read::<E, _>(NAME, |dy| {
                        let chunks = ParallelChunks::new(dx, ROWS_PER_TASK * part);
                        for_each_part(rows.div_ceil(ROWS_PER_TASK), chunks, |task, dx| {
                            let dy = dy[task * ROWS_PER_TASK * (m + n)..].chunks_exact(m + n);
                            dx.chunks_exact_mut(part).zip(dy).for_each(|(dx, dy)| dx.copy_from_slice(&dy[range.clone()]));
                        });
                        Ok(())
                    })
                })?;
            }
            Ok(())
        })
    })
}
