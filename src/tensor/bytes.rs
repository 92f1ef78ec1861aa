//! The elements of tensors of any number type, as little-endian bytes like those in files.

use super::residency::{storage_on, swap};
use crate::util::counted;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, Result, Shape, Storage, Tensor, bail};
use half::{bf16, f16};
use safetensors::Dtype as FileDtype;

/// Runs `$body` with `$T` as the Rust type and `$variant` as the storage variant of `$dtype`; runs `$other` for types
/// that are not numbers or do not consist of whole bytes.
macro_rules! with_number {
    ($dtype:expr, $T:ident, $variant:ident => $body:expr, _ => $other:expr) => {
        with_number!(@ $dtype, $T, $variant, $body, $other,
            U8 u8, U32 u32, I16 i16, I32 i32, I64 i64, BF16 bf16, F16 f16, F32 f32, F64 f64)
    };
    (@ $dtype:expr, $T:ident, $v:ident, $body:expr, $other:expr, $($variant:ident $ty:ty),*) => {
        match $dtype {
            $(DType::$variant => {
                type $T = $ty;
                #[allow(unused_imports, reason = "not every use needs the variant")]
                use CpuStorage::$variant as $v;
                $body
            })*
            _ => $other,
        }
    };
}

/// A number type whose size is a whole number of bytes.
trait LittleEndianNumber: bytemuck::Pod {
    fn of(value: f64) -> Self;
    fn f64(self) -> f64;
    /// Returns the value if this is an integer type.
    fn i64(self) -> Option<i64>;
    /// Returns the integer if this type can represent it.
    fn of_i64(value: i64) -> Option<Self>;
}

macro_rules! integer {
    ($($ty:ty),*) => {$(
        impl LittleEndianNumber for $ty {
            fn of(value: f64) -> Self {
                value as Self
            }

            fn f64(self) -> f64 {
                self as f64
            }

            fn i64(self) -> Option<i64> {
                Some(i64::from(self))
            }

            fn of_i64(value: i64) -> Option<Self> {
                value.try_into().ok()
            }
        }
    )*};
}

macro_rules! float {
    ($($ty:ty: $from:expr, $into:expr;)*) => {$(
        impl LittleEndianNumber for $ty {
            fn of(value: f64) -> Self {
                $from(value)
            }

            fn f64(self) -> f64 {
                $into(self)
            }

            fn i64(self) -> Option<i64> {
                None
            }

            fn of_i64(_: i64) -> Option<Self> {
                None
            }
        }
    )*};
}

integer!(u8, u32, i16, i32, i64);
float! {
    bf16: bf16::from_f64, bf16::to_f64;
    f16: f16::from_f64, f16::to_f64;
    f32: |v| v as f32, f64::from;
    f64: |v| v, |v| v;
}

/// Returns whether this module can convert tensors of this type to bytes.
pub(crate) fn has_bytes(dtype: DType) -> bool {
    with_number!(dtype, T, V => size_of::<T>() > 0, _ => false)
}

/// Returns Candle's type for a tensor type of a safetensors file, if this module supports it.
pub(crate) fn dtype_in_file(dtype: FileDtype) -> Option<DType> {
    match dtype {
        // Such an element is a byte that is 0 or 1.
        FileDtype::BOOL => Some(DType::U8),
        dtype => FILE_DTYPES.iter().find(|(_, in_file)| *in_file == dtype).map(|(dtype, _)| *dtype),
    }
}

/// Returns the type in a safetensors file for a Candle type, if this module supports it.
pub(crate) fn dtype_for_file(dtype: DType) -> Option<FileDtype> {
    FILE_DTYPES.iter().find(|(candle_dtype, _)| *candle_dtype == dtype).map(|(_, in_file)| *in_file)
}

const FILE_DTYPES: [(DType, FileDtype); 9] = [
    (DType::U8, FileDtype::U8),
    (DType::U32, FileDtype::U32),
    (DType::I16, FileDtype::I16),
    (DType::I32, FileDtype::I32),
    (DType::I64, FileDtype::I64),
    (DType::BF16, FileDtype::BF16),
    (DType::F16, FileDtype::F16),
    (DType::F32, FileDtype::F32),
    (DType::F64, FileDtype::F64),
];

/// Returns the bytes of a tensor's elements, in row-major order.
pub(crate) fn to_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    let on_host;
    let values = match &*storage {
        Storage::Cpu(values) => values,
        Storage::Cuda(cuda) => {
            on_host = cuda.to_cpu_storage()?;
            &on_host
        }
        Storage::Metal(_) => bail!("training on Metal is not supported; use the CPU or CUDA"),
    };
    with_number!(tensor.dtype(), T, V => match values {
        V(values) => match values.get(range) {
            Some(values) => Ok(bytemuck::cast_slice::<T, u8>(values).to_vec()),
            None => bail!("a tensor of shape {:?} holds {}", tensor.shape(), counted(values.len(), "element")),
        },
        _ => bail!("the elements of a tensor do not match its dtype {:?}", tensor.dtype()),
    }, _ => bail!("the elements of a tensor of {:?} cannot be read", tensor.dtype()))
}

/// Returns the number and type of the elements in a tensor's storage, regardless of its shape. Returns `None` for a
/// tensor on a GPU, whose elements no operation replaces.
pub(crate) fn stored_elements(tensor: &Tensor) -> Option<(usize, DType)> {
    match &*tensor.storage_and_layout().0 {
        Storage::Cpu(values) => {
            let dtype = values.dtype();
            let count = with_number!(dtype, T, V => match values {
                V(values) => <[T]>::len(values),
                _ => 0,
            }, _ => 0);
            Some((count, dtype))
        }
        _ => None,
    }
}

/// Returns `bytes` as elements of `dtype`.
pub(crate) fn of_bytes(dtype: DType, bytes: &[u8]) -> Result<CpuStorage> {
    with_number!(dtype, T, V => Ok(V(bytemuck::pod_collect_to_vec::<u8, T>(bytes))),
        _ => bail!("a tensor of {dtype:?} cannot be created from bytes"))
}

/// Replaces the elements of `tensor`, which must occupy its entire storage, with `bytes`, for all holders of the
/// tensor.
pub(crate) fn set_bytes(tensor: &Tensor, bytes: &[u8]) -> Result<()> {
    if bytes.len() != tensor.elem_count() * tensor.dtype().size_in_bytes() {
        bail!(
            "{} {} given for a tensor of shape {:?} and dtype {:?}",
            counted(bytes.len(), "byte"),
            if bytes.len() == 1 { "was" } else { "were" },
            tensor.shape(),
            tensor.dtype()
        )
    }
    swap(tensor, of_bytes(tensor.dtype(), bytes)?).map(drop)
}

/// Returns a variable with the elements in `bytes`.
pub(crate) fn variable(device: &Device, dtype: DType, shape: Shape, bytes: &[u8]) -> Result<Tensor> {
    let storage = storage_on(device, of_bytes(dtype, bytes)?)?;
    Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), true))
}

/// Returns the bytes of `values` in `dtype`, rounded once.
pub(crate) fn encode(dtype: DType, values: impl Iterator<Item = f64>) -> Vec<u8> {
    with_number!(dtype, T, V => {
        let values: Vec<T> = values.map(<T as LittleEndianNumber>::of).collect();
        bytemuck::cast_slice(&values).to_vec()
    }, _ => Vec::new())
}

/// Returns the values of `bytes` of `dtype`.
pub(crate) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    with_number!(dtype, T, V => {
        bytemuck::pod_collect_to_vec::<u8, T>(bytes).into_iter().map(LittleEndianNumber::f64).collect()
    }, _ => Vec::new())
}

/// Converts `bytes` of one type to bytes of another: integers that fit, floats rounded once. Returns `None` if an
/// integer does not fit, or if only one of the types is an integer type.
pub(crate) fn converted(bytes: &[u8], from: DType, to: DType) -> Option<Vec<u8>> {
    if from == to {
        return Some(bytes.to_vec());
    }
    match (from.is_int(), to.is_int()) {
        (false, false) if has_bytes(from) && has_bytes(to) => Some(encode(to, decode(from, bytes).into_iter())),
        (true, true) => {
            let values: Vec<i64> = with_number!(from, T, V => {
                bytemuck::pod_collect_to_vec::<u8, T>(bytes).into_iter().filter_map(LittleEndianNumber::i64).collect()
            }, _ => Vec::new());
            with_number!(to, T, V => {
                let values: Option<Vec<T>> = values.into_iter().map(<T as LittleEndianNumber>::of_i64).collect();
                values.map(|values| bytemuck::cast_slice(&values).to_vec())
            }, _ => None)
        }
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Var;

    #[test]
    fn a_variable_has_the_elements_of_its_bytes_and_gives_them_back() {
        let bytes: Vec<u8> = [7i64, -1, 1 << 60].iter().flat_map(|v| v.to_le_bytes()).collect();
        let tensor = variable(&Device::Cpu, DType::I64, 3.into(), &bytes).unwrap();
        assert_eq!(tensor.to_vec1::<i64>().unwrap(), [7, -1, 1 << 60]);
        assert_eq!(to_bytes(&tensor).unwrap(), bytes);
        // A variable created from the tensor shares its memory.
        let var = Var::from_tensor(&tensor).unwrap();
        var.set(&Tensor::new(&[1i64, 2, 3], &Device::Cpu).unwrap()).unwrap();
        assert_eq!(tensor.to_vec1::<i64>().unwrap(), [1, 2, 3]);
        set_bytes(&tensor, &bytes).unwrap();
        assert_eq!(var.to_vec1::<i64>().unwrap(), [7, -1, 1 << 60]);
        assert!(set_bytes(&tensor, &bytes[8..]).is_err());
    }

    #[test]
    fn types_are_converted_where_no_value_changes_its_meaning() {
        let of = |values: &[i64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(converted(&of(&[3, 255]), DType::I64, DType::U8).unwrap(), [3, 255]);
        assert_eq!(converted(&of(&[256]), DType::I64, DType::U8), None);
        assert_eq!(converted(&of(&[-1]), DType::I64, DType::U32), None);
        assert_eq!(converted(&[1, 2], DType::U8, DType::I64).unwrap(), of(&[1, 2]));
        let third = encode(DType::F64, [1.0 / 3.0].into_iter());
        assert_eq!(converted(&third, DType::F64, DType::F32).unwrap(), (1.0f32 / 3.0).to_le_bytes());
        assert_eq!(converted(&third, DType::F64, DType::I64), None);
        assert_eq!(decode(DType::BF16, &encode(DType::BF16, [1.5].into_iter())), [1.5]);
    }
}
