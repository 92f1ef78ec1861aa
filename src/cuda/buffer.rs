//! A flat buffer in a GPU's memory: where a bucket of gradients is packed.

use super::array::room;
use super::flat::DeviceRef;
use super::sum::copy_scaled;
use crate::precision::Flat;
use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle_core::{CudaDevice, CudaStorage, DType, Result, bail};
use std::ops::Range;

/// An owned flat buffer of f32, bf16 or f16 in a GPU's memory.
#[derive(Debug)]
pub(crate) struct DeviceFlat {
    storage: CudaStorage,
    dtype: DType,
    len: usize,
}

impl DeviceFlat {
    /// `len` zeros.
    ///
    /// # Errors
    /// The device has no more memory; another dtype.
    pub fn zeros(device: &CudaDevice, dtype: DType, len: usize) -> Result<Self> {
        Ok(Self { storage: super::zeros(device, dtype, len)?, dtype, len })
    }

    /// Room for `len` elements, with whatever is in it.
    ///
    /// # Errors
    /// As [`zeros`](Self::zeros).
    pub fn room(device: &CudaDevice, dtype: DType, len: usize) -> Result<Self> {
        Ok(Self { storage: room(device, dtype, len)?, dtype, len })
    }

    /// All elements of a storage.
    ///
    /// # Errors
    /// They are not f32, bf16 or f16.
    #[allow(dead_code)] // TEMPORARY: until the engine uses it
    pub fn of_storage(storage: CudaStorage) -> Result<Self> {
        let (dtype, len) = match &storage.slice {
            CudaStorageSlice::F32(v) => (DType::F32, v.len()),
            CudaStorageSlice::BF16(v) => (DType::BF16, v.len()),
            CudaStorageSlice::F16(v) => (DType::F16, v.len()),
            _ => bail!("flat buffers hold f32, bf16 or f16"),
        };
        Ok(Self { storage, dtype, len })
    }

    /// The storage, of a tensor say. An empty buffer's has an element.
    #[allow(dead_code)] // TEMPORARY: until the engine uses it
    pub fn into_storage(self) -> CudaStorage {
        self.storage
    }

    /// `values` times `factor`, as `dtype`: the product is formed in f32 and rounded once.
    ///
    /// # Errors
    /// As [`zeros`](Self::zeros).
    pub fn scaled(device: &CudaDevice, dtype: DType, values: &DeviceRef<'_>, factor: f32) -> Result<Self> {
        let len = values.len();
        let mut flat = Self::room(device, dtype, len)?;
        flat.copy_scaled(0..len, values, factor)?;
        Ok(flat)
    }

    /// Sets elements `range` to `values` times `factor`: the product is formed in f32 and rounded once.
    ///
    /// # Errors
    /// The driver's.
    pub fn copy_scaled(&mut self, range: Range<usize>, values: &DeviceRef<'_>, factor: f32) -> Result<()> {
        let device = self.storage.device.clone();
        match super::elements_mut(&mut self.storage, range) {
            Some(to) => copy_scaled(&device, to, values, factor),
            None => bail!("elements beyond the {} of a flat buffer", self.len),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
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

    /// The address, for `stream` to read: it waits for what cudarc knows to write there, and cudarc is told of the read when the
    /// second value is dropped, where it keeps events at all.
    ///
    /// # Errors
    /// None: a buffer holds f32, bf16 or f16.
    pub fn address<'a>(&'a self, stream: &'a CudaStream) -> Result<(CUdeviceptr, SyncOnDrop<'a>)> {
        Ok(match &self.storage.slice {
            CudaStorageSlice::F32(v) => v.device_ptr(stream),
            CudaStorageSlice::BF16(v) => v.device_ptr(stream),
            CudaStorageSlice::F16(v) => v.device_ptr(stream),
            _ => bail!("flat buffers hold f32, bf16 or f16"),
        })
    }

    /// The same for `stream` to read and to write.
    ///
    /// # Errors
    /// As [`address`](Self::address).
    pub fn address_mut<'a>(&'a mut self, stream: &'a CudaStream) -> Result<(CUdeviceptr, SyncOnDrop<'a>)> {
        Ok(match &mut self.storage.slice {
            CudaStorageSlice::F32(v) => v.device_ptr_mut(stream),
            CudaStorageSlice::BF16(v) => v.device_ptr_mut(stream),
            CudaStorageSlice::F16(v) => v.device_ptr_mut(stream),
            _ => bail!("flat buffers hold f32, bf16 or f16"),
        })
    }

    /// Its elements on the host, and zeros behind them up to `padded` of them.
    ///
    /// # Errors
    /// The driver's.
    pub fn to_host(&self, padded: usize) -> Result<Flat> {
        let mut flat = Flat::zeros(self.dtype, padded);
        match super::elements(&self.storage, 0..self.len) {
            Some(elements) => elements.read(&self.storage.device, flat.slice_mut(0..self.len))?,
            None => bail!("a flat buffer holds f32, bf16 or f16"),
        }
        Ok(flat)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cuda::{add, elements};
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
            let mut on_device = DeviceFlat::scaled(&device, d, &source, 0.7).unwrap();
            let mut on_host = Flat::zeros(d, n);
            on_host.as_mut().copy_scaled(from.as_ref(), 0.7);
            assert_eq!(on_device.to_host(n).unwrap(), on_host, "{d:?} = 0.7 {s:?}");
            on_device.copy_scaled(3..n, &source.part(0..n - 3).unwrap(), 1.0).unwrap();
            on_host.slice_mut(3..n).copy_cast(from.slice(0..n - 3));
            assert_eq!(on_device.to_host(n).unwrap(), on_host, "{d:?} = {s:?}");
            add(
                &device,
                crate::cuda::elements_mut(&mut on_device.storage, 1..n).unwrap(),
                &source.part(0..n - 1).unwrap(),
            )
            .unwrap();
            on_host.slice_mut(1..n).add_scaled(from.slice(0..n - 1), 1.0);
            assert_eq!(on_device.to_host(n).unwrap(), on_host, "{d:?} += {s:?}");
        }
    }

    #[test]
    fn a_buffer_comes_to_the_host_with_its_padding() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let flat = DeviceFlat::zeros(&device, DType::BF16, 3).unwrap();
        assert_eq!(flat.to_host(5).unwrap(), Flat::zeros(DType::BF16, 5));
    }
}
