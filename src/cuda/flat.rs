//! A flat buffer in a GPU's memory: [`Flat`](crate::precision::Flat) there.

use super::load::{Module, module, over, suffix};
use crate::precision::{Flat, FlatMut, FlatRef};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, CudaViewMut, PushKernelArg};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{CudaDevice, DType, Result, bail};
use half::{bf16, f16};
use std::ops::Range;

const KERNELS: Module = module!("flat");

/// An owned flat buffer of one dtype in a GPU's memory. Its first `len` elements count; the others are room.
#[derive(Debug)]
pub(crate) struct DeviceFlat {
    room: Room,
    len: usize,
    device: CudaDevice,
}

#[derive(Debug)]
enum Room {
    F32(CudaSlice<f32>),
    BF16(CudaSlice<bf16>),
    F16(CudaSlice<f16>),
}

/// Elements of a buffer on a device, for kernels to read.
#[derive(Debug)]
pub(crate) enum DeviceRef<'a> {
    F32(CudaView<'a, f32>),
    BF16(CudaView<'a, bf16>),
    F16(CudaView<'a, f16>),
}

/// Elements of a buffer on a device, for kernels to write.
#[derive(Debug)]
pub(crate) enum DeviceMut<'a> {
    F32(CudaViewMut<'a, f32>),
    BF16(CudaViewMut<'a, bf16>),
    F16(CudaViewMut<'a, f16>),
}

/// Runs one generic expression for whichever dtype it is.
macro_rules! each {
    ($type:ident, $value:expr, $v:ident => $body:expr) => {
        match $value {
            $type::F32($v) => $body,
            $type::BF16($v) => $body,
            $type::F16($v) => $body,
        }
    };
}
pub(crate) use each;

/// The same for two of the same dtype; `$other` where they differ.
macro_rules! each_pair {
    ($left:ident, $a:expr, $right:ident, $b:expr, ($x:ident, $y:ident) => $body:expr, _ => $other:expr) => {
        match ($a, $b) {
            ($left::F32($x), $right::F32($y)) => $body,
            ($left::BF16($x), $right::BF16($y)) => $body,
            ($left::F16($x), $right::F16($y)) => $body,
            _ => $other,
        }
    };
}

impl Room {
    /// Memory with whatever is in it.
    fn new(device: &CudaDevice, dtype: DType, capacity: usize) -> Result<Self> {
        // Not every driver allocates nothing.
        let capacity = capacity.max(1);
        // SAFETY: elements are read only below a length up to which they have been written.
        unsafe {
            Ok(match dtype {
                DType::F32 => Self::F32(device.alloc(capacity)?),
                DType::BF16 => Self::BF16(device.alloc(capacity)?),
                DType::F16 => Self::F16(device.alloc(capacity)?),
                other => panic!("flat buffers hold f32, bf16 or f16, not {other:?}"),
            })
        }
    }

    fn capacity(&self) -> usize {
        each!(Self, self, v => v.len())
    }
}

impl DeviceFlat {
    /// An empty buffer with room for `capacity` elements of `dtype`, which must be f32, bf16 or f16.
    ///
    /// # Errors
    /// The device has no more memory.
    pub fn with_capacity(device: &CudaDevice, dtype: DType, capacity: usize) -> Result<Self> {
        Ok(Self { room: Room::new(device, dtype, capacity)?, len: 0, device: device.clone() })
    }

    /// `len` zeros.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity).
    pub fn zeros(device: &CudaDevice, dtype: DType, len: usize) -> Result<Self> {
        let mut flat = Self::with_capacity(device, dtype, len)?;
        flat.extend_zeros(len)?;
        Ok(flat)
    }

    /// A copy of what lies on the host.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity).
    pub fn from_host(device: &CudaDevice, values: FlatRef<'_>) -> Result<Self> {
        let mut flat = Self::with_capacity(device, values.dtype(), values.len())?;
        flat.len = values.len();
        flat.set(0..values.len(), values)?;
        Ok(flat)
    }

    /// All of a tensor's storage.
    ///
    /// # Errors
    /// It holds another dtype than a flat buffer can have.
    pub fn from_storage(device: &CudaDevice, storage: CudaStorageSlice) -> Result<Self> {
        let room = match storage {
            CudaStorageSlice::F32(v) => Room::F32(v),
            CudaStorageSlice::BF16(v) => Room::BF16(v),
            CudaStorageSlice::F16(v) => Room::F16(v),
            _ => bail!("a parameter's storage on the GPU holds neither f32 nor bf16 nor f16"),
        };
        Ok(Self { len: room.capacity(), room, device: device.clone() })
    }

    /// The storage of a tensor: exactly the elements.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity), where there is room beside them.
    pub fn into_storage(mut self) -> Result<CudaStorageSlice> {
        self.shrink_to_fit()?;
        Ok(match self.room {
            Room::F32(v) => CudaStorageSlice::F32(v),
            Room::BF16(v) => CudaStorageSlice::BF16(v),
            Room::F16(v) => CudaStorageSlice::F16(v),
        })
    }

    /// Where it lies.
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match &self.room {
            Room::F32(_) => DType::F32,
            Room::BF16(_) => DType::BF16,
            Room::F16(_) => DType::F16,
        }
    }

    /// Bytes allocated, spare room included.
    pub fn capacity_in_bytes(&self) -> usize {
        self.room.capacity() * self.dtype().size_in_bytes()
    }

    /// Makes room for exactly `more` elements, if there is less.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity).
    pub fn reserve_exact(&mut self, more: usize) -> Result<()> {
        if self.room.capacity() < self.len + more { self.move_into(self.len + more) } else { Ok(()) }
    }

    /// Gives spare room back.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity): both lie in memory for a moment.
    pub fn shrink_to_fit(&mut self) -> Result<()> {
        if self.room.capacity() > self.len.max(1) { self.move_into(self.len) } else { Ok(()) }
    }

    fn move_into(&mut self, capacity: usize) -> Result<()> {
        let mut moved = Self::with_capacity(&self.device, self.dtype(), capacity)?;
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
        self.fill_zero(range)
    }

    /// Appends elements `range` of another buffer of this device, cast to this one's dtype.
    ///
    /// # Errors
    /// As [`with_capacity`](Self::with_capacity).
    pub fn extend_from(&mut self, from: &Self, range: Range<usize>) -> Result<()> {
        let to = self.grown_by(range.len())?;
        self.copy_scaled(to, from, range, 1.0)
    }

    /// Makes `count` elements more, with whatever is in them.
    fn grown_by(&mut self, count: usize) -> Result<Range<usize>> {
        self.reserve_exact(count)?;
        let start = self.len;
        self.len += count;
        Ok(start..self.len)
    }

    /// Elements `range`, for kernels to read.
    pub fn slice(&self, range: Range<usize>) -> DeviceRef<'_> {
        assert!(range.end <= self.len, "elements {range:?} of {}", self.len);
        match &self.room {
            Room::F32(v) => DeviceRef::F32(v.slice(range)),
            Room::BF16(v) => DeviceRef::BF16(v.slice(range)),
            Room::F16(v) => DeviceRef::F16(v.slice(range)),
        }
    }

    /// Elements `range`, for kernels to write.
    pub fn slice_mut(&mut self, range: Range<usize>) -> DeviceMut<'_> {
        assert!(range.end <= self.len, "elements {range:?} of {}", self.len);
        match &mut self.room {
            Room::F32(v) => DeviceMut::F32(v.slice_mut(range)),
            Room::BF16(v) => DeviceMut::BF16(v.slice_mut(range)),
            Room::F16(v) => DeviceMut::F16(v.slice_mut(range)),
        }
    }

    /// Sets elements to zero.
    ///
    /// # Errors
    /// The driver's.
    pub fn fill_zero(&mut self, range: Range<usize>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let stream = self.device.cuda_stream();
        each!(DeviceMut, self.slice_mut(range), v => stream.memset_zeros(&mut { v }).w())
    }

    /// Sets elements to what lies on the host, in this buffer's dtype.
    ///
    /// # Errors
    /// The driver's.
    pub fn set(&mut self, range: Range<usize>, values: FlatRef<'_>) -> Result<()> {
        assert_eq!(range.len(), values.len(), "as many values as elements");
        if range.is_empty() {
            return Ok(());
        }
        let device = self.device.clone();
        each_pair!(DeviceMut, self.slice_mut(range), FlatRef, values,
            (to, from) => device.memcpy_htod(from, &mut { to }), _ => bail!("values of another dtype"))
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

    /// Copies elements `range` to the host, in this buffer's dtype, and waits for them.
    ///
    /// # Errors
    /// The driver's.
    pub fn read(&self, range: Range<usize>, values: FlatMut<'_>) -> Result<()> {
        assert_eq!(range.len(), values.len(), "as many values as elements");
        if range.is_empty() {
            return Ok(());
        }
        let stream = self.device.cuda_stream();
        each_pair!(DeviceRef, self.slice(range), FlatMut, values,
            (from, to) => stream.memcpy_dtoh(&from, to).w()?, _ => bail!("values of another dtype"));
        stream.synchronize().w()
    }

    /// Sets elements `range` to elements of another buffer of this device times `factor`, rounded once.
    ///
    /// # Errors
    /// The driver's.
    pub fn copy_scaled(&mut self, range: Range<usize>, from: &Self, part: Range<usize>, factor: f32) -> Result<()> {
        if factor != 1.0 || self.dtype() != from.dtype() {
            return self.launch("copy_scaled", range, from, part, factor);
        }
        assert_eq!(range.len(), part.len(), "two flat buffers of different length");
        if range.is_empty() {
            return Ok(());
        }
        let device = self.device.clone();
        each_pair!(DeviceMut, self.slice_mut(range), DeviceRef, from.slice(part),
            (to, from) => device.memcpy_dtod(&from, &mut { to }), _ => unreachable!("one dtype"))
    }

    /// Adds elements of another buffer of this device times `factor` to elements `range`, in f32, rounded once.
    ///
    /// # Errors
    /// The driver's.
    pub fn add_scaled(&mut self, range: Range<usize>, from: &Self, part: Range<usize>, factor: f32) -> Result<()> {
        self.launch("add_scaled", range, from, part, factor)
    }

    /// Multiplies elements, in f32, rounded once.
    ///
    /// # Errors
    /// The driver's.
    pub fn scale(&mut self, range: Range<usize>, factor: f32) -> Result<()> {
        let count = range.len();
        if count == 0 {
            return Ok(());
        }
        let function = KERNELS.function(&self.device, &format!("scale_{}", suffix(self.dtype())))?;
        each!(DeviceMut, self.slice_mut(range), values => {
            let (mut values, mut launch) = (values, function.builder());
            launch.arg(&count).arg(&mut values).arg(&factor);
            // SAFETY: the kernel takes a count, that many elements and a factor.
            unsafe { launch.launch(over(count)) }.w().map(drop)
        })
    }

    /// Runs a kernel over elements of this buffer and as many of another.
    fn launch(
        &mut self,
        kernel: &str,
        range: Range<usize>,
        from: &Self,
        part: Range<usize>,
        factor: f32,
    ) -> Result<()> {
        assert_eq!(range.len(), part.len(), "two flat buffers of different length");
        let count = range.len();
        if count == 0 {
            return Ok(());
        }
        let name = format!("{kernel}_{}_{}", suffix(self.dtype()), suffix(from.dtype()));
        let function = KERNELS.function(&self.device, &name)?;
        each!(DeviceMut, self.slice_mut(range), to => each!(DeviceRef, from.slice(part), from => {
            let (mut to, mut launch) = (to, function.builder());
            launch.arg(&count).arg(&mut to).arg(&from).arg(&factor);
            // SAFETY: the kernel takes a count, that many elements of each buffer, of the dtypes in its name, and a factor.
            unsafe { launch.launch(over(count)) }.w().map(drop)
        }))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::backend::BackendDevice;

    /// A GPU, if one answers.
    pub(crate) fn gpu() -> Option<CudaDevice> {
        CudaDevice::new(0).ok()
    }

    fn numbers() -> Vec<f32> {
        let odd = [0.0, -0.0, 1e-40, 65520.0, f32::INFINITY, f32::MIN_POSITIVE, 1.003_906_3, 1.011_718_8];
        (0..1000).map(|i| (i as f32 - 400.0) * 0.37).chain(odd).collect()
    }

    #[test]
    fn casts_and_sums_have_the_bits_of_the_host() {
        let Some(device) = gpu() else { return };
        let dtypes = [DType::F32, DType::BF16, DType::F16];
        for (d, s) in dtypes.into_iter().flat_map(|d| dtypes.map(|s| (d, s))) {
            let (mut to, from) = (Flat::from_f32(numbers(), d), Flat::from_f32(numbers(), s));
            let n = to.len();
            let mut on_device = DeviceFlat::from_host(&device, to.as_ref()).unwrap();
            let source = DeviceFlat::from_host(&device, from.as_ref()).unwrap();
            on_device.add_scaled(3..n, &source, 0..n - 3, 0.3).unwrap();
            to.slice_mut(3..n).add_scaled(from.slice(0..n - 3), 0.3);
            assert_eq!(on_device.to_host(0..n).unwrap(), to, "{d:?} += {s:?}");
            on_device.scale(1..n, 1.7).unwrap();
            to.slice_mut(1..n).scale(1.7);
            assert_eq!(on_device.to_host(0..n).unwrap(), to, "{d:?} *= 1.7");
            on_device.copy_scaled(0..n, &source, 0..n, 0.7).unwrap();
            to.as_mut().copy_scaled(from.as_ref(), 0.7);
            assert_eq!(on_device.to_host(0..n).unwrap(), to, "{d:?} = 0.7 {s:?}");
            on_device.copy_scaled(0..n, &source, 0..n, 1.0).unwrap();
            to.as_mut().copy_cast(from.as_ref());
            assert_eq!(on_device.to_host(0..n).unwrap(), to, "{d:?} = {s:?}");
        }
    }

    #[test]
    fn a_buffer_grows_shrinks_and_becomes_a_storage() {
        let Some(device) = gpu() else { return };
        let mut flat = DeviceFlat::with_capacity(&device, DType::F32, 4).unwrap();
        let other = DeviceFlat::from_host(&device, FlatRef::F32(&[1.0, 2.0, 3.0])).unwrap();
        flat.extend_from(&other, 1..3).unwrap();
        flat.extend_zeros(5).unwrap();
        assert_eq!(flat.to_host(0..7).unwrap(), Flat::F32(vec![2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0]));
        flat.truncate(3);
        flat.shrink_to_fit().unwrap();
        assert_eq!((flat.len(), flat.capacity_in_bytes()), (3, 12));
        let storage = flat.into_storage().unwrap();
        let back = DeviceFlat::from_storage(&device, storage).unwrap();
        assert_eq!(back.to_host(0..3).unwrap(), Flat::F32(vec![2.0, 3.0, 0.0]));
    }
}
