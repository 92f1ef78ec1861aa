//! Removal and replacement of a tensor's storage, while the model and the autograd graph hold the tensor.
//!
//! Candle's in-place operations pass `&mut CpuStorage` (or `&mut CudaStorage`). A tensor keeps its dtype in a separate
//! field, so an absent parameter has an empty storage of a dtype that Candle refuses to compute with: using it is an
//! error. (An empty storage of the true dtype would be read out of bounds by Candle's matmul.)

use crate::error::{ParamError, without_backtrace};
use crate::precision::{Flat, FlatRef};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, DType, Device, Error, InplaceOp1, Layout, Result, Shape, Storage, Tensor,
    op::BackpropOp,
};
use std::sync::Mutex;

/// The dtype that marks a parameter as absent.
const ABSENT: DType = DType::F6E2M3;

fn absent() -> CpuStorage {
    CpuStorage::F6E2M3(Vec::new())
}

/// Returns an absent storage on a GPU. Candle creates no CUDA storage of this dtype from host values, so its slice is
/// built here.
#[cfg(feature = "cuda")]
fn absent_on_cuda(device: &CudaDevice) -> Result<CudaStorage> {
    // One byte is allocated, because not every driver can allocate zero bytes.
    let slice = candle_core::cuda_backend::CudaStorageSlice::F6E2M3(device.alloc_zeros::<u8>(1)?);
    Ok(CudaStorage { slice, device: device.clone() })
}

#[cfg(not(feature = "cuda"))]
fn absent_on_cuda(_: &CudaDevice) -> Result<CudaStorage> {
    Err(Error::NotCompiledWithCudaSupport)
}

fn on_cuda(device: &CudaDevice, values: CpuStorage) -> Result<CudaStorage> {
    if values.dtype() == ABSENT { absent_on_cuda(device) } else { device.storage_from_cpu_storage_owned(values) }
}

/// Returns whether `error` is, or may be, Candle's refusal to compute with an absent parameter.
pub(crate) fn is_refusal(error: &Error) -> bool {
    // The errors of some CUDA operations name no dtype.
    let texts = ["Map1 does not", "internal error 'dtype mismatch in", "internal error 'Dummy types"];
    let message = error.to_string();
    names_absent(error) || texts.iter().any(|text| message.contains(text))
}

/// Returns whether `error` explicitly concerns an absent parameter.
pub(crate) fn names_absent(error: &Error) -> bool {
    let text = error.to_string();
    // Candle checks dtypes before it computes and names both if they differ; the CPU operations name an unsupported
    // dtype.
    text.contains(&format!("{ABSENT:?}")) || text.contains(SHARDED)
}

impl From<Error> for crate::error::Error {
    fn from(error: Error) -> Self {
        match names_absent(&error) {
            true => ParamError::AbsentElsewhere { why: without_backtrace(&error.to_string()) }.into(),
            false => Self::Candle(error),
        }
    }
}

/// Returns whether `error` is the driver's error for a GPU without enough memory.
pub(crate) fn is_out_of_memory(error: &Error) -> bool {
    // Without feature `cuda`, cudarc's error can be identified only by its text.
    error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY")
}

const SHARDED: &str = "is sharded and is not currently gathered";

/// Returns the error of candle-zero's operation `op` about a storage of `dtype`, if that dtype marks a parameter of
/// `shape` as absent.
pub(crate) fn refusal(dtype: DType, shape: &Shape, op: &str) -> Option<Error> {
    (dtype == ABSENT).then(|| {
        let dims = shape.dims();
        Error::Msg(format!("{op}: the parameter of shape {dims:?} {SHARDED}; use it inside engine.forward or eval"))
    })
}

/// Returns a flat buffer as Candle's storage.
pub(crate) fn to_storage(flat: Flat) -> CpuStorage {
    match flat {
        Flat::F32(v) => CpuStorage::F32(v),
        Flat::BF16(v) => CpuStorage::BF16(v),
        Flat::F16(v) => CpuStorage::F16(v),
    }
}

fn from_storage(storage: CpuStorage) -> Result<Flat> {
    match storage {
        CpuStorage::F32(v) => Ok(Flat::F32(v)),
        CpuStorage::BF16(v) => Ok(Flat::BF16(v)),
        CpuStorage::F16(v) => Ok(Flat::F16(v)),
        other => candle_core::bail!("a parameter's storage holds {:?}", other.dtype()),
    }
}

/// The operation that swaps a tensor's storage, on any device, for one on the host.
struct SwapStorage(Mutex<CpuStorage>);

impl InplaceOp1 for SwapStorage {
    fn name(&self) -> &'static str {
        "swap-storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        std::mem::swap(storage, &mut crate::util::lock(&self.0));
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let mut slot = crate::util::lock(&self.0);
        let previous = if storage.dtype() == ABSENT { absent() } else { storage.to_cpu_storage()? };
        let new = std::mem::replace(&mut *slot, previous);
        *storage = on_cuda(storage.device(), new)?;
        Ok(())
    }
}

/// Runs an operation on a tensor's storage.
fn change(tensor: &Tensor, op: &impl InplaceOp1) -> Result<()> {
    if tensor.elem_count() == 0 {
        // Candle treats a shape such as [3, 0], whose rows share one address, as one with repeated elements.
        return tensor.detach().reshape(0)?.inplace_op1(op);
    }
    tensor.inplace_op1(op)
}

/// Puts `storage` into `tensor` and returns the previous one.
pub(super) fn swap(tensor: &Tensor, storage: CpuStorage) -> Result<CpuStorage> {
    let op = SwapStorage(Mutex::new(storage));
    change(tensor, &op)?;
    Ok(crate::util::unpoisoned(op.0.into_inner()))
}

/// Fills an absent parameter.
pub(crate) fn put(tensor: &Tensor, values: Flat) -> Result<()> {
    assert_eq!(values.len(), tensor.elem_count());
    assert_eq!(values.dtype(), tensor.dtype());
    swap(tensor, to_storage(values)).map(drop)
}

/// Empties a tensor: it keeps its shape and dtype, and computing with it becomes an error.
pub(crate) fn clear(tensor: &Tensor) -> Result<()> {
    struct ClearStorage;
    impl InplaceOp1 for ClearStorage {
        fn name(&self) -> &'static str {
            "clear-storage"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
            *storage = absent();
            Ok(())
        }

        fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
            *storage = absent_on_cuda(storage.device())?;
            Ok(())
        }
    }
    change(tensor, &ClearStorage)
}

/// Fills an absent tensor with `storage`, which is on the tensor's device.
pub(crate) fn fill(tensor: &Tensor, storage: Storage) -> Result<()> {
    struct FillStorage(Mutex<Option<Storage>>);
    impl FillStorage {
        fn take(&self) -> Result<Storage> {
            crate::util::lock(&self.0).take().ok_or_else(|| Error::Msg("a storage is inserted twice".into()))
        }
    }
    impl InplaceOp1 for FillStorage {
        fn name(&self) -> &'static str {
            "fill-storage"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
            match self.take()? {
                Storage::Cpu(values) => *storage = values,
                _ => candle_core::bail!("a storage for the CPU was created on another device"),
            }
            Ok(())
        }

        fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
            match self.take()? {
                Storage::Cuda(values) => *storage = values,
                _ => candle_core::bail!("a storage for the GPU was created on another device"),
            }
            Ok(())
        }
    }
    change(tensor, &FillStorage(Mutex::new(Some(storage))))
}

/// Lets `change` modify a parameter's values on the host; values on another device are copied to the host and back.
pub(crate) fn with_values<T>(tensor: &Tensor, change: impl FnOnce(&mut Flat) -> T) -> Result<T> {
    let mut flat = from_storage(swap(tensor, absent())?)?;
    let result = change(&mut flat);
    swap(tensor, to_storage(flat))?;
    Ok(result)
}

/// Passes a tensor's values to `read`, on the host, in row-major order.
pub(crate) fn with_view<T>(tensor: &Tensor, read: impl FnOnce(FlatRef<'_>) -> T) -> Result<T> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(v)) => Ok(read(FlatRef::F32(&v[range]))),
        Storage::Cpu(CpuStorage::BF16(v)) => Ok(read(FlatRef::BF16(&v[range]))),
        Storage::Cpu(CpuStorage::F16(v)) => Ok(read(FlatRef::F16(&v[range]))),
        Storage::Cpu(other) => Err(Error::Msg(format!(
            "a tensor has dtype {:?} and shape {:?}, but only f32, bf16 and f16 are supported; cast it with to_dtype \
             first",
            other.dtype(),
            tensor.dims()
        ))),
        Storage::Cuda(cuda) => Ok(read(from_storage(cuda.to_cpu_storage()?)?.slice(range))),
        Storage::Metal(_) => Err(Error::Msg("training on Metal is not supported; use the CPU or CUDA".into())),
    }
}

/// Returns a storage on `device` with these host values.
pub(crate) fn storage_on(device: &Device, values: CpuStorage) -> Result<Storage> {
    match device {
        Device::Cpu => Ok(Storage::Cpu(values)),
        Device::Cuda(cuda) => Ok(Storage::Cuda(on_cuda(cuda, values)?)),
        Device::Metal(_) => Err(Error::Msg("training on Metal is not supported; use the CPU or CUDA".into())),
    }
}

/// Returns a variable of `shape` without elements: the leaf under a parameter.
pub(crate) fn empty_leaf(device: &Device, shape: &Shape) -> Result<Tensor> {
    let storage = storage_on(device, absent())?;
    Ok(Tensor::from_storage(storage, shape.clone(), BackpropOp::none(), true))
}
