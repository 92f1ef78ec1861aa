//! Storage dtypes of the layer kernels (f32, bf16, f16), their widening, and access to a tensor's elements.
//!
//! Every kernel reads elements of one storage dtype, computes in f32 and rounds a result once when it is stored.

use crate::nn::matrix::Matrix;
use candle_core::{CpuStorage, DType, Error, Layout, Result, Storage, Tensor, WithDType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// A storage dtype of the layer kernels.
pub(crate) trait Element: WithDType + Default {
    /// Widens `src` into `dst` of the same length.
    fn widen(src: &[Self], dst: &mut [f32]);

    /// Rounds `src` into `dst` of the same length, to nearest even.
    fn narrow(src: &[f32], dst: &mut [Self]);

    /// The matrix in f32: itself when it is f32, else a widened copy in `buffer`.
    fn matrix_f32<'a>(m: Matrix<'a, Self>, buffer: &'a mut Vec<f32>) -> Matrix<'a, f32>;

    /// `data` as what Candle keeps.
    fn storage(data: Vec<Self>) -> CpuStorage {
        Self::to_cpu_storage_owned(data)
    }

    /// `src` as a new vector of f32.
    fn widened(src: &[Self]) -> Vec<f32> {
        let mut out = vec![0.0; src.len()];
        Self::widen(src, &mut out);
        out
    }

    /// `src` as a new vector of this dtype.
    fn narrowed(src: &[f32]) -> Vec<Self> {
        let mut out = vec![Self::default(); src.len()];
        Self::narrow(src, &mut out);
        out
    }
}

impl Element for f32 {
    fn widen(src: &[Self], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }

    fn narrow(src: &[f32], dst: &mut [Self]) {
        dst.copy_from_slice(src);
    }

    fn matrix_f32<'a>(m: Matrix<'a, Self>, _buffer: &'a mut Vec<f32>) -> Matrix<'a, f32> {
        m
    }
}

macro_rules! half_element {
    ($ty:ty) => {
        impl Element for $ty {
            fn widen(src: &[Self], dst: &mut [f32]) {
                src.convert_to_f32_slice(dst);
            }

            fn narrow(src: &[f32], dst: &mut [Self]) {
                dst.convert_from_f32_slice(src);
            }

            fn matrix_f32<'a>(m: Matrix<'a, Self>, buffer: &'a mut Vec<f32>) -> Matrix<'a, f32> {
                m.widened_into(buffer)
            }
        }
    };
}

half_element!(bf16);
half_element!(f16);

/// Runs `$body` with `$E` standing for the Rust type of `$dtype`; any other dtype is Candle's "unsupported" error of
/// the op named `$op`.
macro_rules! with_element {
    ($dtype:expr, $op:expr, $E:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $E = f32;
                $body
            }
            candle_core::DType::BF16 => {
                type $E = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $E = half::f16;
                $body
            }
            other => Err(candle_core::Error::UnsupportedDTypeForOp(other, $op).bt()),
        }
    };
}
pub(crate) use with_element;

/// The elements of a contiguous CPU storage.
///
/// A storage of another dtype is an error, and so is one with fewer elements than its shape says: that is how the
/// engine leaves a parameter that is not resident, and computing with it must not be possible.
pub(crate) fn elements<'a, E: WithDType>(s: &'a CpuStorage, l: &Layout, op: &'static str) -> Result<&'a [E]> {
    use candle_core::backend::BackendStorage;
    let found = s.dtype();
    if found != E::DTYPE {
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
        Error::Msg(format!("{op}: the tensor of shape {:?} holds {} elements", l.shape(), all.len())).bt()
    })
}

/// Runs `run` on the elements of a contiguous CPU tensor, as they are now.
pub(crate) fn with_elements<E: WithDType, R>(
    t: &Tensor,
    op: &'static str,
    run: impl FnOnce(&[E]) -> Result<R>,
) -> Result<R> {
    let (storage, layout) = t.storage_and_layout();
    match &*storage {
        Storage::Cpu(s) => run(elements::<E>(s, layout, op)?),
        _ => Err(Error::Msg(format!("{op}: the CPU kernel met a tensor of {:?}", t.device())).bt()),
    }
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
        assert!(elements::<f32>(&absent, &layout, "linear").is_err());
    }

    #[test]
    fn narrowing_rounds_to_nearest_even() {
        assert_eq!(bf16::narrowed(&[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0]), [bf16::ONE, bf16::from_f32(1.015625)]);
        assert_eq!(f16::widened(&[f16::from_f32(0.5)]), [0.5]);
    }
}
