//! Writes elements at indexes along one axis, or adds them to the elements there.

use super::composed;
use super::in_f32::{deliver, has_kernels, narrowed, with_f32, with_grad};
use crate::graph::OpInputs;
use crate::kernels::scatter::{NO_TARGET, ScatterIndices};
use crate::tensor::element::{TensorElement, with_element};
use crate::util::counted;
use candle_core::shape::Dim;
use candle_core::{DType, Layout, Result, Tensor, bail};

/// Returns `init` with some elements replaced by those of `source`. Element (.., i, ..) of the source, where i is its
/// index along `dim`, replaces element (.., j, ..) of `init`, where j is element (.., i, ..) of `indexes`; the indexes
/// along the other axes are the same. If several elements have the same target, the last one wins.
///
/// `indexes` (u8, u32 or i64) and `source` have the same shape, which may exceed that of `init` only along `dim`. An
/// index equal to its type's largest value is ignored, as in Candle.
///
/// This is [`Tensor::scatter`] with correct gradients: overwritten elements of `init`, and elements of the source that
/// a later one overwrites, have a gradient of 0.
///
/// # Errors
/// Shapes or dtypes that do not match, or an index out of range.
pub fn scatter<D: Dim>(init: &Tensor, indexes: &Tensor, source: &Tensor, dim: D) -> Result<Tensor> {
    const NAME: &str = "scatter";
    let targets = targets(NAME, [init, indexes, source], dim)?;
    if !has_kernels(init) {
        return composed::scatter(init, source, &targets);
    }
    apply(NAME, init, source, targets, false)
}

/// Returns `init` with the elements of `source` added. Element (.., i, ..) of the source, where i is its index along
/// `dim`, is added to element (.., j, ..) of `init`, where j is element (.., i, ..) of `indexes`; the indexes along the
/// other axes are the same. Elements are added in the source's order. Sums are in f32 and rounded once.
///
/// `indexes` (u8, u32 or i64) and `source` have the same shape, which may exceed that of `init` only along `dim`. An
/// index equal to its type's largest value is ignored, as in Candle.
///
/// This is [`Tensor::scatter_add`] with correct gradients.
///
/// # Errors
/// The errors of [`scatter`].
pub fn scatter_add<D: Dim>(init: &Tensor, indexes: &Tensor, source: &Tensor, dim: D) -> Result<Tensor> {
    const NAME: &str = "scatter_add";
    let targets = targets(NAME, [init, indexes, source], dim)?;
    if !has_kernels(init) {
        return composed::scatter_add(init, source, &targets);
    }
    apply(NAME, init, source, targets, true)
}

/// Returns the target of each element of the source.
fn targets<D: Dim>(op: &'static str, [init, indexes, source]: [&Tensor; 3], dim: D) -> Result<ScatterIndices> {
    let dim = dim.to_index(init.shape(), op)?;
    let (to, from) = (init.dims(), source.dims());
    let fits = to.len() == from.len() && (0..to.len()).all(|axis| axis == dim || from[axis] <= to[axis]);
    if !fits || indexes.dims() != from {
        bail!(
            "{op}: the source has shape {from:?}, the indexes {:?} and the target {to:?}; source and indexes must \
             have the same shape, and be no longer than the target except along dimension {dim}",
            indexes.dims()
        )
    }
    if init.dtype() != source.dtype() {
        bail!("{op}: a source of {:?} cannot go into a tensor of {:?}; cast one of them", source.dtype(), init.dtype())
    }
    let largest = match indexes.dtype() {
        DType::U8 => i64::from(u8::MAX),
        DType::U32 => i64::from(u32::MAX),
        DType::I64 => i64::MAX,
        other => bail!("{op}: the indexes are {other:?}; they must be u8, u32 or i64"),
    };
    let indexes = indexes.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
    // Along each axis, the source's elements are placed with the stride of the result.
    let layout = Layout::contiguous(init.shape());
    let strides = layout.stride();
    let mut coordinates = vec![0; from.len()];
    let mut flat_indices = Vec::with_capacity(indexes.len());
    for index in indexes {
        let offset: usize =
            coordinates.iter().zip(strides).enumerate().filter(|(axis, _)| *axis != dim).map(|(_, (a, s))| a * s).sum();
        flat_indices.push(match usize::try_from(index) {
            _ if index == largest => NO_TARGET,
            Ok(index) if index < to[dim] => offset + index * strides[dim],
            _ => bail!(
                "{op}: index {index} along dimension {dim} is out of range; a tensor of shape {to:?} has {} there",
                counted(to[dim], "element")
            ),
        });
        for axis in (0..coordinates.len()).rev() {
            coordinates[axis] += 1;
            if coordinates[axis] < from[axis] {
                break;
            }
            coordinates[axis] = 0;
        }
    }
    Ok(ScatterIndices { flat_indices })
}

fn apply(op: &'static str, init: &Tensor, source: &Tensor, targets: ScatterIndices, adds: bool) -> Result<Tensor> {
    let (init, source) = (init.contiguous()?, source.contiguous()?);
    let inputs = OpInputs::of([Some(&init), Some(&source)])?;
    let (shape, dtype) = (init.shape().clone(), init.dtype());
    with_element!(dtype, op, E => {
        let y = with_f32([Some(&init), Some(&source)], op, |[init, source]| {
            let (mut y, source) = (init.unwrap_or_default().to_vec(), source.unwrap_or_default());
            if adds { targets.add(source, &mut y) } else { targets.set(source, &mut y) }
            Ok(y)
        })?;
        inputs.result(op, E::storage(narrowed(y)), shape, move |grad, [to_init, to_source]| {
            with_grad::<E, _>(&grad, op, |dy| {
                deliver(to_source, dtype, op, || {
                    let mut gradient = targets.gather(dy);
                    if !adds {
                        let alive = targets.surviving(dy.len());
                        gradient.iter_mut().zip(alive).filter(|(_, alive)| !alive).for_each(|(value, _)| *value = 0.0);
                    }
                    gradient
                })?;
                deliver(to_init, dtype, op, || {
                    let mut gradient = dy.to_vec();
                    if !adds {
                        targets.set(&vec![0.0; targets.flat_indices.len()], &mut gradient);
                    }
                    gradient
                })
            })
        })
    })
}
