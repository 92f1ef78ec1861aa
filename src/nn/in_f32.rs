//! Helpers for layers whose kernels compute only in f32: 16-bit inputs are widened, and results and gradients are
//! rounded once.

use crate::graph::{Grad, InputGradSink};
use crate::kernels::buffer;
use crate::kernels::element::ElementDtype;
use crate::nn::norm;
use crate::tensor::element::{TensorElement, with_all, with_element};
use candle_core::{DType, Result, Tensor};

/// Returns whether this library has kernels for the tensor: f32, bf16 or f16 on the CPU.
pub(super) fn has_kernels(x: &Tensor) -> bool {
    x.device().is_cpu() && matches!(x.dtype(), DType::F32 | DType::BF16 | DType::F16)
}

/// Calls `look` with the current values of contiguous CPU tensors, in f32.
pub(super) fn with_f32<R, const N: usize>(
    tensors: [Option<&Tensor>; N],
    op: &'static str,
    look: impl FnOnce([Option<&[f32]>; N]) -> Result<R>,
) -> Result<R> {
    let is_f32 = |tensor: &&Tensor| tensor.dtype() == DType::F32;
    let mut buffers: [Option<Vec<f32>>; N] = [const { None }; N];
    for (widened, tensor) in buffers.iter_mut().zip(tensors) {
        *widened = tensor.filter(|tensor| !is_f32(tensor)).map(|tensor| norm::widened(tensor, op)).transpose()?;
    }
    with_all::<f32, _, N>(tensors.map(|tensor| tensor.filter(is_f32)), op, |slices| {
        look(std::array::from_fn(|i| buffers[i].as_deref().or(slices[i])))
    })
}

/// Converts values to another format, rounding each once.
pub(super) fn narrowed<E: TensorElement>(values: Vec<f32>) -> Vec<E> {
    bytemuck::allocation::try_cast_vec(values).unwrap_or_else(|(_, values)| {
        let mut low = buffer::<E>(values.len());
        E::narrow(&values, &mut low);
        low
    })
}

/// Calls `look` with the gradient of a result of type `E`, in f32.
pub(super) fn with_grad<E: TensorElement, R>(
    grad: &Grad,
    op: &'static str,
    look: impl FnOnce(&[f32]) -> Result<R>,
) -> Result<R> {
    grad.read::<E, _>(op, |dy| match E::KIND {
        ElementDtype::F32 => look(bytemuck::cast_slice(dy)),
        _ => {
            let mut wide = buffer::<f32>(dy.len());
            E::widen(dy, &mut wide);
            look(&wide)
        }
    })
}

/// Delivers the gradient of an input of `dtype`, if it is wanted.
pub(super) fn deliver(
    sink: &InputGradSink,
    dtype: DType,
    op: &'static str,
    gradient: impl FnOnce() -> Vec<f32>,
) -> Result<()> {
    if !sink.is_wanted() {
        return Ok(());
    }
    with_element!(dtype, op, E => sink.deliver(Grad::own(narrowed::<E>(gradient()))))
}
