//! Memory of a tensor on a GPU: room for a result, and the elements that a kernel reads or writes.

use super::flat_view::{DeviceFlatMut, DeviceFlatRef};
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Result, bail};
use std::ops::Range;

/// Room for `len` elements of f32, bf16 or f16, with whatever is in it.
///
/// # Errors
/// The device has no more memory; another dtype.
pub(crate) fn room(device: &CudaDevice, dtype: DType, len: usize) -> Result<CudaStorage> {
    // Not every driver allocates nothing.
    let len = len.max(1);
    // SAFETY: whoever asks for room has a kernel write all of it before anything reads it.
    let slice = unsafe {
        match dtype {
            DType::F32 => CudaStorageSlice::F32(device.alloc(len)?),
            DType::BF16 => CudaStorageSlice::BF16(device.alloc(len)?),
            DType::F16 => CudaStorageSlice::F16(device.alloc(len)?),
            other => bail!("kernels write f32, bf16 or f16, not {other:?}"),
        }
    };
    Ok(CudaStorage { slice, device: device.clone() })
}

/// `len` zeros of f32, bf16 or f16.
///
/// # Errors
/// As [`room`].
pub(crate) fn zeros(device: &CudaDevice, dtype: DType, len: usize) -> Result<CudaStorage> {
    let mut storage = room(device, dtype, len)?;
    let stream = device.cuda_stream();
    match &mut storage.slice {
        CudaStorageSlice::F32(v) => stream.memset_zeros(v).w()?,
        CudaStorageSlice::BF16(v) => stream.memset_zeros(v).w()?,
        CudaStorageSlice::F16(v) => stream.memset_zeros(v).w()?,
        _ => bail!("kernels write f32, bf16 or f16"),
    }
    Ok(storage)
}

/// The storage of a tensor of these numbers.
pub(crate) fn storage_of(device: &CudaDevice, numbers: CudaSlice<f32>) -> CudaStorage {
    CudaStorage { slice: CudaStorageSlice::F32(numbers), device: device.clone() }
}

/// Elements of a storage, for kernels to read; nothing where they have another dtype or are fewer.
pub(crate) fn elements(storage: &CudaStorage, range: Range<usize>) -> Option<DeviceFlatRef<'_>> {
    match &storage.slice {
        CudaStorageSlice::F32(v) => Some(DeviceFlatRef::F32(v.try_slice(range)?)),
        CudaStorageSlice::BF16(v) => Some(DeviceFlatRef::BF16(v.try_slice(range)?)),
        CudaStorageSlice::F16(v) => Some(DeviceFlatRef::F16(v.try_slice(range)?)),
        _ => None,
    }
}

/// Elements of a storage, for kernels to write; nothing where they have another dtype or are fewer.
pub(crate) fn elements_mut(storage: &mut CudaStorage, range: Range<usize>) -> Option<DeviceFlatMut<'_>> {
    match &mut storage.slice {
        CudaStorageSlice::F32(v) => Some(DeviceFlatMut::F32(v.try_slice_mut(range)?)),
        CudaStorageSlice::BF16(v) => Some(DeviceFlatMut::BF16(v.try_slice_mut(range)?)),
        CudaStorageSlice::F16(v) => Some(DeviceFlatMut::F16(v.try_slice_mut(range)?)),
        _ => None,
    }
}

/// A result of `len` elements that `write` makes.
///
/// # Errors
/// As [`room`], and those of `write`.
pub(crate) fn written(
    device: &CudaDevice,
    dtype: DType,
    len: usize,
    write: impl FnOnce(DeviceFlatMut<'_>) -> Result<()>,
) -> Result<CudaStorage> {
    let mut storage = room(device, dtype, len)?;
    match elements_mut(&mut storage, 0..len) {
        Some(elements) => write(elements)?,
        None => bail!("kernels write f32, bf16 or f16, not {dtype:?}"),
    }
    Ok(storage)
}

impl DeviceFlatRef<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        super::flat_view::each!(Self, self, v => v.len())
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::BF16(_) => DType::BF16,
            Self::F16(_) => DType::F16,
        }
    }

    /// Some of the elements.
    ///
    /// # Errors
    /// There are fewer.
    pub fn part(&self, range: Range<usize>) -> Result<DeviceFlatRef<'_>> {
        if range.start > range.end || range.end > self.len() {
            bail!("elements {range:?} of {}", self.len())
        }
        Ok(match self {
            Self::F32(v) => DeviceFlatRef::F32(v.slice(range)),
            Self::BF16(v) => DeviceFlatRef::BF16(v.slice(range)),
            Self::F16(v) => DeviceFlatRef::F16(v.slice(range)),
        })
    }
}

impl DeviceFlatMut<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        super::flat_view::each!(Self, self, v => v.len())
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::BF16(_) => DType::BF16,
            Self::F16(_) => DType::F16,
        }
    }
}
