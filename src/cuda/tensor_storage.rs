//! The memory of a tensor on a GPU: allocation of results, and the elements that a kernel reads or writes.

use super::flat_view::{DeviceFlatMut, DeviceFlatRef};
use crate::util::is_or_are;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Result, bail};
use std::ops::Range;

/// Allocates `len` elements of f32, bf16 or f16 with arbitrary contents.
///
/// # Errors
/// Returns an error if the device is out of memory or the dtype is none of these.
pub(crate) fn alloc_uninit(device: &CudaDevice, dtype: DType, len: usize) -> Result<CudaStorage> {
    // Some drivers do not allocate zero bytes.
    let len = len.max(1);
    // SAFETY: every caller has a kernel write the complete memory before anything reads it.
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

/// Allocates `len` zeros of f32, bf16 or f16.
///
/// # Errors
/// Same as for [`alloc_uninit`].
pub(crate) fn zeros(device: &CudaDevice, dtype: DType, len: usize) -> Result<CudaStorage> {
    let mut storage = alloc_uninit(device, dtype, len)?;
    let stream = device.cuda_stream();
    match &mut storage.slice {
        CudaStorageSlice::F32(v) => stream.memset_zeros(v).w()?,
        CudaStorageSlice::BF16(v) => stream.memset_zeros(v).w()?,
        CudaStorageSlice::F16(v) => stream.memset_zeros(v).w()?,
        _ => bail!("kernels write f32, bf16 or f16"),
    }
    Ok(storage)
}

/// Returns the storage of a tensor that contains `numbers`.
pub(crate) fn storage_of(device: &CudaDevice, numbers: CudaSlice<f32>) -> CudaStorage {
    CudaStorage { slice: CudaStorageSlice::F32(numbers), device: device.clone() }
}

/// Returns elements `range` of a storage for kernels to read, or `None` if the dtype is none of f32, bf16 and f16 or
/// `range` ends after the last element.
pub(crate) fn elements(storage: &CudaStorage, range: Range<usize>) -> Option<DeviceFlatRef<'_>> {
    match &storage.slice {
        CudaStorageSlice::F32(v) => Some(DeviceFlatRef::F32(v.try_slice(range)?)),
        CudaStorageSlice::BF16(v) => Some(DeviceFlatRef::BF16(v.try_slice(range)?)),
        CudaStorageSlice::F16(v) => Some(DeviceFlatRef::F16(v.try_slice(range)?)),
        _ => None,
    }
}

/// Returns elements `range` of a storage for kernels to write, or `None` if the dtype is none of f32, bf16 and f16 or
/// `range` ends after the last element.
pub(crate) fn elements_mut(storage: &mut CudaStorage, range: Range<usize>) -> Option<DeviceFlatMut<'_>> {
    match &mut storage.slice {
        CudaStorageSlice::F32(v) => Some(DeviceFlatMut::F32(v.try_slice_mut(range)?)),
        CudaStorageSlice::BF16(v) => Some(DeviceFlatMut::BF16(v.try_slice_mut(range)?)),
        CudaStorageSlice::F16(v) => Some(DeviceFlatMut::F16(v.try_slice_mut(range)?)),
        _ => None,
    }
}

/// Allocates a result of `len` elements and has `write` fill it.
///
/// # Errors
/// Same as for [`alloc_uninit`], and the errors of `write`.
pub(crate) fn alloc_and_write(
    device: &CudaDevice,
    dtype: DType,
    len: usize,
    write: impl FnOnce(DeviceFlatMut<'_>) -> Result<()>,
) -> Result<CudaStorage> {
    let mut storage = alloc_uninit(device, dtype, len)?;
    match elements_mut(&mut storage, 0..len) {
        Some(elements) => write(elements)?,
        None => bail!("kernels write f32, bf16 or f16, not {dtype:?}"),
    }
    Ok(storage)
}

impl DeviceFlatRef<'_> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        super::flat_view::each!(Self, self, v => v.len())
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::BF16(_) => DType::BF16,
            Self::F16(_) => DType::F16,
        }
    }

    /// Returns elements `range`.
    ///
    /// # Errors
    /// Returns an error if `range` ends before it starts or after the last element.
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceFlatRef<'_>> {
        if range.start > range.end || range.end > self.len() {
            let be = is_or_are(self.len());
            bail!("elements {range:?} are out of range: there {be} {}", self.len())
        }
        Ok(match self {
            Self::F32(v) => DeviceFlatRef::F32(v.slice(range)),
            Self::BF16(v) => DeviceFlatRef::BF16(v.slice(range)),
            Self::F16(v) => DeviceFlatRef::F16(v.slice(range)),
        })
    }
}

impl DeviceFlatMut<'_> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        super::flat_view::each!(Self, self, v => v.len())
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::BF16(_) => DType::BF16,
            Self::F16(_) => DType::F16,
        }
    }
}
