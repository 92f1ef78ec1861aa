//! Access to a tensor's elements for the kernels, and conversion between Rust's types and Candle's storages.

use super::residency::refusal;
use crate::kernels;
use crate::precision::Flat;
use crate::util::counted;
use candle_core::{CpuStorage, DType, Error, Layout, Result, Storage, Tensor, WithDType};
use half::{bf16, f16};
use std::ops::Deref;

/// A storage dtype of the layers: f32, bf16 or f16.
pub(crate) trait TensorElement: WithDType + kernels::Element {
    /// Returns `data` as a flat buffer.
    fn flat(data: Vec<Self>) -> Flat;

    /// Returns the elements of a flat buffer, if it has this dtype.
    fn of_flat(flat: &Flat) -> Option<&[Self]>;

    /// Returns the elements of a flat buffer mutably, if it has this dtype.
    fn of_flat_mut(flat: &mut Flat) -> Option<&mut Vec<Self>>;

    /// Returns `data` as Candle's storage.
    fn storage(data: Vec<Self>) -> CpuStorage {
        Self::to_cpu_storage_owned(data)
    }
}

macro_rules! element {
    ($ty:ty, $variant:ident) => {
        impl TensorElement for $ty {
            fn flat(data: Vec<Self>) -> Flat {
                Flat::$variant(data)
            }

            fn of_flat(flat: &Flat) -> Option<&[Self]> {
                if let Flat::$variant(data) = flat { Some(data) } else { None }
            }

            fn of_flat_mut(flat: &mut Flat) -> Option<&mut Vec<Self>> {
                if let Flat::$variant(data) = flat { Some(data) } else { None }
            }
        }
    };
}

element!(f32, F32);
element!(bf16, BF16);
element!(f16, F16);
/// Runs `$body` with `$E` as the Rust type of `$dtype`. A dtype other than f32, bf16 and f16 gives Candle's
/// "unsupported" error for the op named `$op`; a SIMD level at which kernels cannot run is an error too.
macro_rules! with_element {
    ($dtype:expr, $op:expr, $E:ident => $body:expr) => {
        match ($crate::kernels::checked_level(), $dtype) {
            (Err(error), _) => Err(candle_core::Error::wrap(error)),
            (Ok(_), candle_core::DType::F32) => {
                type $E = f32;
                $body
            }
            (Ok(_), candle_core::DType::BF16) => {
                type $E = half::bf16;
                $body
            }
            (Ok(_), candle_core::DType::F16) => {
                type $E = half::f16;
                $body
            }
            (Ok(_), other) => Err(candle_core::Error::UnsupportedDTypeForOp(other, $op).bt()),
        }
    };
}
pub(crate) use with_element;

/// Returns the elements of a contiguous CPU storage.
///
/// A storage of a different dtype is an error; the engine gives an absent parameter such a storage
/// (`residency.rs`), so that computing with the parameter is impossible. A storage with fewer elements than its shape
/// requires is also an error.
pub(crate) fn elements<'a, E: WithDType>(s: &'a CpuStorage, l: &Layout, op: &'static str) -> Result<&'a [E]> {
    use candle_core::backend::BackendStorage;
    let found = s.dtype();
    if found != E::DTYPE {
        if let Some(refusal) = refusal(found, l.shape(), op) {
            return Err(refusal);
        }
        return Err(match found {
            DType::F32 | DType::BF16 | DType::F16 => {
                Error::DTypeMismatchBinaryOp { lhs: E::DTYPE, rhs: found, op }.bt()
            }
            other => Error::UnsupportedDTypeForOp(other, op).bt(),
        });
    }
    let Some((start, end)) = l.contiguous_offsets() else {
        return Err(Error::RequiresContiguous { op }.bt());
    };
    let all = s.as_slice::<E>()?;
    all.get(start..end).ok_or_else(|| {
        Error::Msg(format!("{op}: the tensor of shape {:?} holds {}", l.shape(), counted(all.len(), "element"))).bt()
    })
}

/// Runs `run` on the current elements of contiguous CPU tensors.
pub(crate) fn with_all<E: WithDType, R, const N: usize>(
    tensors: [Option<&Tensor>; N],
    op: &'static str,
    run: impl FnOnce([Option<&[E]>; N]) -> Result<R>,
) -> Result<R> {
    let tensors = locked_tensors(tensors);
    run(elements_of_all(&tensors, op)?)
}

// The compiler repeats `with_all` for each `run`. The code that does not depend on `run` is in separate functions,
// which are compiled only once for each dtype and number of tensors.

fn locked_tensors<'a, const N: usize>(
    tensors: [Option<&'a Tensor>; N],
) -> [Option<LockedTensor<'a, impl Deref<Target = Storage> + 'a>>; N] {
    tensors.map(|tensor| tensor.map(locked))
}

fn elements_of_all<'a, E: WithDType, const N: usize>(
    tensors: &'a [Option<LockedTensor<'_, impl Deref<Target = Storage>>>; N],
    op: &'static str,
) -> Result<[Option<&'a [E]>; N]> {
    let mut all = [None; N];
    for (elements, tensor) in all.iter_mut().zip(tensors) {
        *elements = tensor.as_ref().map(|tensor| tensor.elements(op)).transpose()?;
    }
    Ok(all)
}

/// A tensor and its storage, which `guard` keeps locked for reading.
pub(crate) struct LockedTensor<'a, G> {
    tensor: &'a Tensor,
    guard: G,
    layout: &'a Layout,
}

/// Locks a tensor's storage for reading, after waiting until no thread writes to it.
pub(crate) fn locked(tensor: &Tensor) -> LockedTensor<'_, impl Deref<Target = Storage>> {
    let (guard, layout) = tensor.storage_and_layout();
    LockedTensor { tensor, guard, layout }
}

impl<G: Deref<Target = Storage>> LockedTensor<'_, G> {
    /// Returns the elements of the tensor, which must be contiguous and on the CPU.
    pub fn elements<E: WithDType>(&self, op: &'static str) -> Result<&[E]> {
        match &*self.guard {
            Storage::Cpu(s) => elements(s, self.layout, op),
            _ => Err(Error::Msg(format!("{op}: the CPU kernel received a tensor on {:?}", self.tensor.device())).bt()),
        }
    }
}

/// Does the same as [`with_all`], for any number of tensors.
pub(crate) fn with_each<'a, E: WithDType, R>(
    tensors: impl IntoIterator<Item = &'a Tensor>,
    op: &'static str,
    run: impl FnOnce(&[&[E]]) -> Result<R>,
) -> Result<R> {
    let tensors: Vec<_> = tensors.into_iter().map(locked).collect();
    run(&tensors.iter().map(|tensor| tensor.elements(op)).collect::<Result<Vec<_>>>()?)
}

/// Does the same as [`with_all`], for one tensor.
pub(crate) fn with_elements<E: WithDType, R>(
    tensor: &Tensor,
    op: &'static str,
    run: impl FnOnce(&[E]) -> Result<R>,
) -> Result<R> {
    run(locked(tensor).elements(op)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::{Device, Shape};

    #[test]
    fn a_storage_shorter_than_its_shape_is_refused() {
        let empty = CpuStorage::F32(Vec::new());
        let layout = Layout::contiguous(Shape::from((2, 3)));
        let text = elements::<f32>(&empty, &layout, "linear").unwrap_err().to_string();
        assert!(text.contains("linear") && text.contains("holds 0 elements"), "{text}");
    }

    #[test]
    fn another_dtype_is_refused_by_name() {
        let t = Tensor::zeros(4, DType::F64, &Device::Cpu).unwrap();
        let text = with_elements::<f32, _>(&t, "gelu_tanh", |_| Ok(())).unwrap_err().to_string();
        assert!(text.contains("gelu_tanh") && text.contains("F64"), "{text}");
        let absent = CpuStorage::F6E2M3(Vec::new());
        let layout = Layout::contiguous(Shape::from(4));
        let text = elements::<f32>(&absent, &layout, "linear").unwrap_err().to_string();
        assert!(text.contains("linear: the parameter of shape [4] is sharded"), "{text}");
    }
}
