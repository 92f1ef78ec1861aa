//! A flat buffer in a GPU's memory: [`Flat`] there.

use super::array::room;
use super::array_ops::{add_scaled, copy_scaled, scale};
use super::flat_view::{DeviceFlatMut, DeviceFlatRef};
use crate::precision::{Flat, FlatMut, FlatRef};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtrMut, SyncOnDrop};
use candle_core::{CudaDevice, CudaStorage, DType, Result, bail};
use std::ops::Range;

/// An owned flat buffer of f32, bf16 or f16 in a GPU's memory. Its first `len` elements count; the others are room.
#[derive(Debug)]
pub(crate) struct DeviceFlat {
    storage: CudaStorage,
    len: usize,
}

impl DeviceFlat {
    /// An empty buffer with room for `capacity` elements.
    ///
    /// # Errors
    /// The device has no more memory; another dtype.
    pub fn with_capacity(device: &CudaDevice, dtype: DType, capacity: usize) -> Result<Self> {
        Ok(Self { storage: room(device, dtype, capacity)?, len: 0 })
    }

    /// `len` zeros.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity).
    pub fn zeros(device: &CudaDevice, dtype: DType, len: usize) -> Result<Self> {
        Ok(Self { storage: super::zeros(device, dtype, len)?, len })
    }

    /// A copy of what lies on the host.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity).
    pub fn of(device: &CudaDevice, values: FlatRef<'_>) -> Result<Self> {
        let mut flat = Self::with_capacity(device, values.dtype(), values.len())?;
        flat.extend_from_host(values)?;
        Ok(flat)
    }

    /// `values` times `factor`, as `dtype` and with zeros behind them up to `padded` of them: the product is formed in f32 and
    /// rounded once.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity).
    pub fn scaled(
        device: &CudaDevice,
        dtype: DType,
        values: &DeviceFlatRef<'_>,
        factor: f32,
        padded: usize,
    ) -> Result<Self> {
        let mut flat = Self::with_capacity(device, dtype, padded)?;
        let own = flat.grown_by(values.len())?;
        flat.copy_scaled(own, values, factor)?;
        flat.extend_zeros(padded - values.len())?;
        Ok(flat)
    }

    /// The memory of a tensor, with all its room.
    pub fn into_storage(self) -> CudaStorage {
        self.storage
    }

    /// Where it lies.
    pub fn device(&self) -> &CudaDevice {
        &self.storage.device
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.storage.dtype()
    }

    /// Bytes allocated, spare room included.
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

    /// Whether it lies in the memory of this device of Candle's, and was allocated on its stream: where it is freed, too.
    pub fn is_of(&self, device: &CudaDevice) -> bool {
        let stream = match &self.storage.slice {
            CudaStorageSlice::F32(v) => v.stream(),
            CudaStorageSlice::BF16(v) => v.stream(),
            CudaStorageSlice::F16(v) => v.stream(),
            _ => return false,
        };
        self.storage.device.same_device(device) && *stream == device.cuda_stream()
    }

    /// The address of all its room, for `stream` to read and to write: it waits for what cudarc knows to write there, and cudarc is
    /// told of the use when the second value is dropped, where it keeps events at all.
    ///
    /// # Errors
    /// None: a buffer holds f32, bf16 or f16.
    pub fn address_mut<'a>(&'a mut self, stream: &'a CudaStream) -> Result<(CUdeviceptr, SyncOnDrop<'a>)> {
        Ok(match &mut self.storage.slice {
            CudaStorageSlice::F32(v) => v.device_ptr_mut(stream),
            CudaStorageSlice::BF16(v) => v.device_ptr_mut(stream),
            CudaStorageSlice::F16(v) => v.device_ptr_mut(stream),
            _ => bail!("flat buffers hold f32, bf16 or f16"),
        })
    }

    /// Becomes `len` elements, which whoever calls this has something write.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity), where there is too little room.
    pub fn resize(&mut self, len: usize) -> Result<()> {
        self.reserve_exact(len.saturating_sub(self.len))?;
        self.len = len;
        Ok(())
    }

    /// Makes room for exactly `more` elements, if there is less.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity): both lie in memory for a moment.
    pub fn reserve_exact(&mut self, more: usize) -> Result<()> {
        if self.capacity() < self.len + more { self.move_into(self.len + more) } else { Ok(()) }
    }

    /// Gives spare room back.
    ///
    /// # Errors
    /// As [`reserve_exact`](Self::reserve_exact).
    pub fn shrink_to_fit(&mut self) -> Result<()> {
        if self.capacity() > self.len.max(1) { self.move_into(self.len) } else { Ok(()) }
    }

    fn move_into(&mut self, capacity: usize) -> Result<()> {
        let mut moved = Self::with_capacity(self.device(), self.dtype(), capacity)?;
        moved.extend_from(self, 0..self.len)?;
        *self = moved;
        Ok(())
    }

    /// Keeps the first `len` elements.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Appends `count` zeros.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity).
    pub fn extend_zeros(&mut self, count: usize) -> Result<()> {
        let range = self.grown_by(count)?;
        let device = self.device().clone();
        self.part_mut(range)?.fill_zero(&device)
    }

    /// Appends elements `range` of another buffer of this device, cast to this one's dtype.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity).
    pub fn extend_from(&mut self, from: &Self, range: Range<usize>) -> Result<()> {
        self.extend(&from.part(range)?)
    }

    /// Appends elements of this device, cast to this buffer's dtype.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity).
    pub fn extend(&mut self, values: &DeviceFlatRef<'_>) -> Result<()> {
        let to = self.grown_by(values.len())?;
        self.copy_scaled(to, values, 1.0)
    }

    /// Appends what lies on the host, cast to this buffer's dtype.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity).
    pub fn extend_from_host(&mut self, values: FlatRef<'_>) -> Result<()> {
        let to = self.grown_by(values.len())?;
        self.write(to, values)
    }

    /// Makes `count` elements more, with whatever is in them.
    fn grown_by(&mut self, count: usize) -> Result<Range<usize>> {
        let start = self.len;
        self.resize(start + count)?;
        Ok(start..self.len)
    }

    /// Elements `range`, for kernels to read.
    ///
    /// # Errors
    /// There are fewer.
    pub fn part(&self, range: Range<usize>) -> Result<DeviceFlatRef<'_>> {
        match super::elements(&self.storage, range.clone()) {
            Some(elements) if range.end <= self.len => Ok(elements),
            _ => bail!("elements {range:?} of the {} of a flat buffer", self.len),
        }
    }

    /// Elements `range`, for kernels to write.
    ///
    /// # Errors
    /// There are fewer.
    pub fn part_mut(&mut self, range: Range<usize>) -> Result<DeviceFlatMut<'_>> {
        let len = self.len;
        match super::elements_mut(&mut self.storage, range.clone()) {
            Some(elements) if range.end <= len => Ok(elements),
            _ => bail!("elements {range:?} of the {len} of a flat buffer"),
        }
    }

    /// Sets elements `range` to `values` times `factor`: the product is formed in f32 and rounded once.
    ///
    /// # Errors
    /// The driver's.
    pub fn copy_scaled(&mut self, range: Range<usize>, values: &DeviceFlatRef<'_>, factor: f32) -> Result<()> {
        let device = self.device().clone();
        copy_scaled(&device, self.part_mut(range)?, values, factor)
    }

    /// Adds `values` times `factor` to as many elements from `to` on: in f32, rounded once.
    ///
    /// # Errors
    /// The driver's.
    pub fn add_scaled(&mut self, to: usize, values: &DeviceFlatRef<'_>, factor: f32) -> Result<()> {
        let device = self.device().clone();
        add_scaled(&device, self.part_mut(to..to + values.len())?, values, factor)
    }

    /// Multiplies all elements, in f32, rounded once.
    ///
    /// # Errors
    /// The driver's.
    pub fn scale(&mut self, factor: f32) -> Result<()> {
        let (device, all) = (self.device().clone(), 0..self.len);
        scale(&device, self.part_mut(all)?, factor)
    }

    /// Sets elements `range` to what lies on the host, cast to this buffer's dtype there.
    ///
    /// # Errors
    /// The driver's.
    pub fn write(&mut self, range: Range<usize>, values: FlatRef<'_>) -> Result<()> {
        let device = self.device().clone();
        if values.dtype() == self.dtype() {
            return self.part_mut(range)?.write(&device, values);
        }
        let mut cast = Flat::with_capacity(self.dtype(), values.len());
        cast.extend_cast(values);
        self.part_mut(range)?.write(&device, cast.as_ref())
    }

    /// Becomes what lies on the host, of the same dtype.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity), where there is too little room.
    pub fn replace(&mut self, values: FlatRef<'_>) -> Result<()> {
        self.len = 0;
        self.extend_from_host(values)
    }

    /// Copies elements `range` to the host, to as many of the same dtype, and waits for them.
    ///
    /// # Errors
    /// The driver's.
    pub fn read(&self, range: Range<usize>, values: FlatMut<'_>) -> Result<()> {
        self.part(range)?.read(self.device(), values)
    }

    /// Elements `range`, on the host.
    ///
    /// # Errors
    /// The driver's.
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
        let odd = [0.0, -0.0, 1e-40, 65520.0, f32::INFINITY, f32::MIN_POSITIVE, 1.003_906_3, 1.011_718_8];
        (0..1000).map(|i| (i as f32 - 400.0) * 0.37).chain(odd).collect()
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
            on_device.copy_scaled(3..n, &source.part(0..n - 3).unwrap(), 1.0).unwrap();
            on_host.slice_mut(3..n).copy_cast(from.slice(0..n - 3));
            assert_eq!(on_device.to_host(0..n).unwrap(), on_host, "{d:?} = {s:?}");
            on_device.add_scaled(1, &source.part(0..n - 1).unwrap(), 0.3).unwrap();
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
        assert!(flat.part(2..4).is_err(), "what lies behind the elements is not to be read");
        assert_eq!(flat.to_host(0..2).unwrap(), Flat::F32(vec![6.0, 9.0]));
        assert_eq!(flat.into_storage().to_cpu_storage().unwrap().as_slice::<f32>().unwrap().len(), 3);
    }
}
