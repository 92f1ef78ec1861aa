//! A flat buffer in a GPU's memory, the counterpart of [`Flat`].

use super::array_ops::{add_scaled, copy_scaled, scale};
use super::flat_view::{DeviceFlatMut, DeviceFlatRef};
use super::tensor_storage::alloc_uninit;
use crate::precision::{Flat, FlatMut, FlatRef};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtrMut, SyncOnDrop};
use candle_core::{CudaDevice, CudaStorage, DType, Result, bail};
use std::ops::Range;

/// An owned flat buffer of f32, bf16 or f16 in a GPU's memory. Its first `len` elements are in use; the others are
/// spare capacity.
#[derive(Debug)]
pub(crate) struct DeviceFlat {
    storage: CudaStorage,
    len: usize,
}

impl DeviceFlat {
    /// Creates an empty buffer with room for `capacity` elements.
    ///
    /// # Errors
    /// Returns an error if the device is out of memory or the dtype is none of f32, bf16 and f16.
    pub fn with_capacity(device: &CudaDevice, dtype: DType, capacity: usize) -> Result<Self> {
        Ok(Self { storage: alloc_uninit(device, dtype, capacity)?, len: 0 })
    }

    /// Creates a buffer of `len` zeros.
    ///
    /// # Errors
    /// Same as for [`with_capacity`](Self::with_capacity).
    pub fn zeros(device: &CudaDevice, dtype: DType, len: usize) -> Result<Self> {
        Ok(Self { storage: super::zeros(device, dtype, len)?, len })
    }

    /// Copies values from the host.
    ///
    /// # Errors
    /// Same as for [`with_capacity`](Self::with_capacity).
    pub fn of(device: &CudaDevice, values: FlatRef<'_>) -> Result<Self> {
        let mut flat = Self::with_capacity(device, values.dtype(), values.len())?;
        flat.extend_from_host(values)?;
        Ok(flat)
    }

    /// Creates a buffer of `values` times `factor` as `dtype`, padded with zeros to `padded_len` elements. The product
    /// is computed in f32 and rounded once.
    ///
    /// # Errors
    /// Same as for [`with_capacity`](Self::with_capacity).
    pub fn scaled(
        device: &CudaDevice,
        dtype: DType,
        values: &DeviceFlatRef<'_>,
        factor: f32,
        padded_len: usize,
    ) -> Result<Self> {
        let mut flat = Self::with_capacity(device, dtype, padded_len)?;
        let range = flat.grow_by(values.len())?;
        flat.copy_scaled(range, values, factor)?;
        flat.extend_zeros(padded_len - values.len())?;
        Ok(flat)
    }

    /// Returns the memory as a tensor's storage, including spare capacity.
    pub fn into_storage(self) -> CudaStorage {
        self.storage
    }

    /// Returns the device of the memory.
    pub fn device(&self) -> &CudaDevice {
        &self.storage.device
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.storage.dtype()
    }

    /// Returns the number of allocated bytes, including spare capacity.
    pub fn capacity_in_bytes(&self) -> usize {
        self.capacity() * self.dtype().size_in_bytes()
    }

    fn capacity(&self) -> usize {
        match &self.storage.slice {
            CudaStorageSlice::F32(v) => v.len(),
            CudaStorageSlice::BF16(v) => v.len(),
            CudaStorageSlice::F16(v) => v.len(),
            _ => 0,
        }
    }

    /// Returns whether the buffer is in the memory of this Candle device and was allocated on its stream, where it is
    /// also freed.
    pub fn is_of(&self, device: &CudaDevice) -> bool {
        let stream = match &self.storage.slice {
            CudaStorageSlice::F32(v) => v.stream(),
            CudaStorageSlice::BF16(v) => v.stream(),
            CudaStorageSlice::F16(v) => v.stream(),
            _ => return false,
        };
        self.storage.device.same_device(device) && *stream == device.cuda_stream()
    }

    /// Returns the address of the complete memory, for `stream` to read and to write. `stream` waits for the writes
    /// that cudarc has recorded. When the second value is dropped, cudarc records this use, if it keeps events at all.
    ///
    /// # Errors
    /// Never fails, because a buffer has f32, bf16 or f16 elements.
    pub fn address_mut<'a>(&'a mut self, stream: &'a CudaStream) -> Result<(CUdeviceptr, SyncOnDrop<'a>)> {
        Ok(match &mut self.storage.slice {
            CudaStorageSlice::F32(v) => v.device_ptr_mut(stream),
            CudaStorageSlice::BF16(v) => v.device_ptr_mut(stream),
            CudaStorageSlice::F16(v) => v.device_ptr_mut(stream),
            _ => bail!("flat buffers hold f32, bf16 or f16"),
        })
    }

    /// Sets the length to `len` elements. The caller must make sure that all of them are then written.
    ///
    /// # Errors
    /// Same as for [`with_capacity`](Self::with_capacity), if there is too little room.
    pub fn resize(&mut self, len: usize) -> Result<()> {
        self.reserve_exact(len.saturating_sub(self.len))?;
        self.len = len;
        Ok(())
    }

    /// Makes room for exactly `more` further elements if there is not enough room.
    ///
    /// # Errors
    /// Same as for [`with_capacity`](Self::with_capacity): the old and the new buffer exist at the same time for a
    /// moment.
    pub fn reserve_exact(&mut self, more: usize) -> Result<()> {
        if self.capacity() < self.len + more { self.move_into(self.len + more) } else { Ok(()) }
    }

    /// Releases spare capacity.
    ///
    /// # Errors
    /// Same as for [`reserve_exact`](Self::reserve_exact).
    pub fn shrink_to_fit(&mut self) -> Result<()> {
        if self.capacity() > self.len.max(1) { self.move_into(self.len) } else { Ok(()) }
    }

    fn move_into(&mut self, capacity: usize) -> Result<()> {
        let mut resized = Self::with_capacity(self.device(), self.dtype(), capacity)?;
        resized.extend_from(self, 0..self.len)?;
        *self = resized;
        Ok(())
    }

    /// Keeps only the first `len` elements.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Appends `count` zeros.
    ///
    /// # Errors
    /// Same as for [`with_capacity`](Self::with_capacity).
    pub fn extend_zeros(&mut self, count: usize) -> Result<()> {
        let range = self.grow_by(count)?;
        let device = self.device().clone();
        self.slice_mut(range)?.fill_zero(&device)
    }

    /// Appends elements `range` of another buffer on this device, cast to this buffer's dtype.
    ///
    /// # Errors
    /// Same as for [`with_capacity`](Self::with_capacity).
    pub fn extend_from(&mut self, from: &Self, range: Range<usize>) -> Result<()> {
        self.extend(&from.slice(range)?)
    }

    /// Appends elements that are on this device, cast to this buffer's dtype.
    ///
    /// # Errors
    /// Same as for [`with_capacity`](Self::with_capacity).
    pub fn extend(&mut self, values: &DeviceFlatRef<'_>) -> Result<()> {
        let to = self.grow_by(values.len())?;
        self.copy_scaled(to, values, 1.0)
    }

    /// Appends values from the host, cast to this buffer's dtype.
    ///
    /// # Errors
    /// Same as for [`with_capacity`](Self::with_capacity).
    pub fn extend_from_host(&mut self, values: FlatRef<'_>) -> Result<()> {
        let to = self.grow_by(values.len())?;
        self.write(to, values)
    }

    /// Adds `count` elements with arbitrary contents.
    fn grow_by(&mut self, count: usize) -> Result<Range<usize>> {
        let start = self.len;
        self.resize(start + count)?;
        Ok(start..self.len)
    }

    /// Returns elements `range` for kernels to read.
    ///
    /// # Errors
    /// Returns an error if `range` ends after the last element.
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceFlatRef<'_>> {
        match super::elements(&self.storage, range.clone()) {
            Some(elements) if range.end <= self.len => Ok(elements),
            _ => bail!("elements {range:?} are out of range: the flat buffer has {}", self.len),
        }
    }

    /// Returns elements `range` for kernels to write.
    ///
    /// # Errors
    /// Returns an error if `range` ends after the last element.
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<DeviceFlatMut<'_>> {
        let len = self.len;
        match super::elements_mut(&mut self.storage, range.clone()) {
            Some(elements) if range.end <= len => Ok(elements),
            _ => bail!("elements {range:?} are out of range: the flat buffer has {len}"),
        }
    }

    /// Sets elements `range` to `values` times `factor`. The product is computed in f32 and rounded once.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn copy_scaled(&mut self, range: Range<usize>, values: &DeviceFlatRef<'_>, factor: f32) -> Result<()> {
        let device = self.device().clone();
        copy_scaled(&device, self.slice_mut(range)?, values, factor)
    }

    /// Adds `values` times `factor` to the same number of elements, starting at element `to`, in f32, and rounds
    /// once.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn add_scaled(&mut self, to: usize, values: &DeviceFlatRef<'_>, factor: f32) -> Result<()> {
        let device = self.device().clone();
        add_scaled(&device, self.slice_mut(to..to + values.len())?, values, factor)
    }

    /// Multiplies all elements by `factor` in f32, and rounds once.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn scale(&mut self, factor: f32) -> Result<()> {
        let (device, all) = (self.device().clone(), 0..self.len);
        scale(&device, self.slice_mut(all)?, factor)
    }

    /// Sets elements `range` to values from the host, which are cast to this buffer's dtype on the host.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn write(&mut self, range: Range<usize>, values: FlatRef<'_>) -> Result<()> {
        let device = self.device().clone();
        if values.dtype() == self.dtype() {
            return self.slice_mut(range)?.write(&device, values);
        }
        let mut cast = Flat::with_capacity(self.dtype(), values.len());
        cast.extend_cast(values);
        self.slice_mut(range)?.write(&device, cast.as_ref())
    }

    /// Replaces all elements with values from the host, cast to this buffer's dtype.
    ///
    /// # Errors
    /// Same as for [`with_capacity`](Self::with_capacity), if there is too little room.
    pub fn replace(&mut self, values: FlatRef<'_>) -> Result<()> {
        self.len = 0;
        self.extend_from_host(values)
    }

    /// Copies elements `range` to the host, to the same number of elements of the same dtype, and waits for the copy.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn read(&self, range: Range<usize>, values: FlatMut<'_>) -> Result<()> {
        self.slice(range)?.read(self.device(), values)
    }

    /// Returns elements `range` on the host.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn to_host(&self, range: Range<usize>) -> Result<Flat> {
        let mut values = Flat::zeros(self.dtype(), range.len());
        self.read(range, values.as_mut())?;
        Ok(values)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cuda::elements;
    use candle_core::backend::BackendDevice;
    use candle_core::{Device, Storage, Tensor};

    fn numbers() -> Vec<f32> {
        let special = [0.0, -0.0, 1e-40, 65520.0, f32::INFINITY, f32::MIN_POSITIVE, 1.003_906_3, 1.011_718_8];
        (0..1000).map(|i| (i as f32 - 400.0) * 0.37).chain(special).collect()
    }

    #[test]
    fn casts_and_sums_have_the_bits_of_the_host() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let dtypes = [DType::F32, DType::BF16, DType::F16];
        for (d, s) in dtypes.into_iter().flat_map(|d| dtypes.map(|s| (d, s))) {
            let from = Flat::from_f32(numbers(), s);
            let n = from.len();
            let tensor = Tensor::new(numbers(), &Device::Cuda(device.clone())).unwrap().to_dtype(s).unwrap();
            let (storage, _) = tensor.storage_and_layout();
            let Storage::Cuda(cuda) = &*storage else { unreachable!("a tensor of the GPU") };
            let source = elements(cuda, 0..n).unwrap();
            let mut on_device = DeviceFlat::scaled(&device, d, &source, 0.7, n).unwrap();
            let mut on_host = Flat::zeros(d, n);
            on_host.as_mut().copy_scaled(from.as_ref(), 0.7);
            assert_eq!(on_device.to_host(0..n).unwrap(), on_host, "{d:?} = 0.7 {s:?}");
            on_device.copy_scaled(3..n, &source.slice(0..n - 3).unwrap(), 1.0).unwrap();
            on_host.slice_mut(3..n).copy_cast(from.slice(0..n - 3));
            assert_eq!(on_device.to_host(0..n).unwrap(), on_host, "{d:?} = {s:?}");
            on_device.add_scaled(1, &source.slice(0..n - 1).unwrap(), 0.3).unwrap();
            on_host.slice_mut(1..n).add_scaled(from.slice(0..n - 1), 0.3);
            assert_eq!(on_device.to_host(0..n).unwrap(), on_host, "{d:?} += {s:?}");
        }
    }

    #[test]
    fn a_buffer_grows_shrinks_and_becomes_a_storage() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let mut flat = DeviceFlat::with_capacity(&device, DType::F32, 4).unwrap();
        let other = DeviceFlat::of(&device, FlatRef::F32(&[1.0, 2.0, 3.0])).unwrap();
        flat.extend_from(&other, 1..3).unwrap();
        flat.extend_zeros(5).unwrap();
        assert_eq!(flat.to_host(0..7).unwrap(), Flat::F32(vec![2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0]));
        flat.truncate(3);
        flat.shrink_to_fit().unwrap();
        flat.scale(3.0).unwrap();
        assert_eq!((flat.len(), flat.capacity_in_bytes()), (3, 12));
        assert!(flat.slice(2..4).is_err(), "the bytes after the elements must not be read");
        assert_eq!(flat.to_host(0..2).unwrap(), Flat::F32(vec![6.0, 9.0]));
        assert_eq!(flat.into_storage().to_cpu_storage().unwrap().as_slice::<f32>().unwrap().len(), 3);
    }
}
