//! A flat buffer in host memory or in the memory of the GPU on which the model computes.
//!
//! In either memory, operations on buffers go through [`ElementBuffer`] and give the same bits. Values on a GPU are
//! read and set through the host.

use crate::error::Result;
use crate::precision::{ElementBuffer, Flat, FlatMut, FlatRef};
use candle_core::{DType, Device};
use std::ops::Range;
#[cfg(feature = "cuda")]
use {crate::cuda::DeviceFlat, crate::precision::sum_of_squares, candle_core::CudaDevice};

/// The memory that holds buffers.
#[derive(Debug, Clone)]
pub(crate) enum BufferDevice {
    Host,
    #[cfg(feature = "cuda")]
    Device(CudaDevice),
}

impl BufferDevice {
    /// Returns the memory of tensors on `device`.
    pub fn of(device: &Device) -> Self {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Self::Device(device.clone()),
            _ => Self::Host,
        }
    }

    /// Returns the GPU, if this is a GPU's memory.
    #[cfg(feature = "cuda")]
    pub fn gpu(&self) -> Option<&CudaDevice> {
        match self {
            Self::Device(device) => Some(device),
            Self::Host => None,
        }
    }
}

/// A flat buffer of f32, bf16 or f16.
#[derive(Debug)]
pub(crate) enum FlatBuffer {
    Host(Flat),
    #[cfg(feature = "cuda")]
    Device(DeviceFlat),
}

#[cfg(feature = "cuda")]
const NEEDS_HOST_BUFFERS: &str = "work on the host requires buffers on the host";
#[cfg(feature = "cuda")]
const NEEDS_GPU_BUFFERS: &str = "work on a GPU requires buffers on the GPU";
#[cfg(feature = "cuda")]
const NEEDS_SAME_MEMORY: &str = "an operation on two buffers requires both in the same memory";

/// Evaluates one expression for a buffer in either memory.
macro_rules! each {
    ($value:expr, $v:ident => $body:expr) => {
        match $value {
            FlatBuffer::Host($v) => $body,
            #[cfg(feature = "cuda")]
            FlatBuffer::Device($v) => $body,
        }
    };
}

impl FlatBuffer {
    /// Returns elements `range` of a buffer on the host.
    ///
    /// # Panics
    /// Panics if the buffer is not on the host.
    pub fn slice(&self, range: Range<usize>) -> FlatRef<'_> {
        self.on_host().slice(range)
    }

    /// Returns elements `range` of a buffer on the host, mutably.
    ///
    /// # Panics
    /// Panics if the buffer is not on the host.
    pub fn slice_mut(&mut self, range: Range<usize>) -> FlatMut<'_> {
        self.on_host_mut().slice_mut(range)
    }

    /// Returns the raw bytes of a buffer on the host, mutably.
    ///
    /// # Panics
    /// Panics if the buffer is not on the host.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.on_host_mut().as_bytes_mut()
    }

    fn on_host(&self) -> &Flat {
        match self {
            Self::Host(flat) => flat,
            #[cfg(feature = "cuda")]
            Self::Device(_) => unreachable!("{NEEDS_HOST_BUFFERS}"),
        }
    }

    fn on_host_mut(&mut self) -> &mut Flat {
        match self {
            Self::Host(flat) => flat,
            #[cfg(feature = "cuda")]
            Self::Device(_) => unreachable!("{NEEDS_HOST_BUFFERS}"),
        }
    }

    /// Returns the buffer on a GPU.
    ///
    /// # Panics
    /// Panics if the buffer is on the host.
    #[cfg(feature = "cuda")]
    pub fn on_device(&self) -> &DeviceFlat {
        match self {
            Self::Device(flat) => flat,
            Self::Host(_) => unreachable!("{NEEDS_GPU_BUFFERS}"),
        }
    }

    /// Returns the buffer on a GPU, mutably.
    ///
    /// # Panics
    /// Panics if the buffer is on the host.
    #[cfg(feature = "cuda")]
    pub fn on_device_mut(&mut self) -> &mut DeviceFlat {
        match self {
            Self::Device(flat) => flat,
            Self::Host(_) => unreachable!("{NEEDS_GPU_BUFFERS}"),
        }
    }

    /// Returns the buffer on the host.
    ///
    /// # Panics
    /// Panics if the buffer is not on the host.
    pub fn into_host(self) -> Flat {
        match self {
            Self::Host(flat) => flat,
            #[cfg(feature = "cuda")]
            Self::Device(_) => unreachable!("{NEEDS_HOST_BUFFERS}"),
        }
    }

    /// Passes elements `range`, in either memory, to `take`.
    ///
    /// # Errors
    /// An error of the GPU driver.
    pub fn read<T>(&self, range: Range<usize>, take: impl FnOnce(FlatRef<'_>) -> T) -> Result<T> {
        match self {
            Self::Host(flat) => Ok(take(flat.slice(range))),
            #[cfg(feature = "cuda")]
            Self::Device(flat) => Ok(take(flat.to_host(range)?.as_ref())),
        }
    }

    /// Sets elements `range`, in either memory, to `values`, cast to this buffer's dtype.
    ///
    /// # Errors
    /// An error of the GPU driver.
    pub fn write(&mut self, range: Range<usize>, values: FlatRef<'_>) -> Result<()> {
        match self {
            Self::Host(flat) => flat.slice_mut(range).copy_cast(values),
            #[cfg(feature = "cuda")]
            Self::Device(flat) => flat.write(range, values)?,
        }
        Ok(())
    }
}

impl ElementBuffer for FlatBuffer {
    type Location = BufferDevice;

    fn host() -> BufferDevice {
        BufferDevice::Host
    }

    fn is_device(location: &BufferDevice) -> bool {
        !matches!(location, BufferDevice::Host)
    }

    fn with_capacity(location: &BufferDevice, dtype: DType, capacity: usize) -> Result<Self> {
        Ok(match location {
            BufferDevice::Host => Self::Host(Flat::with_capacity(dtype, capacity)),
            #[cfg(feature = "cuda")]
            BufferDevice::Device(device) => Self::Device(DeviceFlat::with_capacity(device, dtype, capacity)?),
        })
    }

    fn zeros(location: &BufferDevice, dtype: DType, len: usize) -> Result<Self> {
        Ok(match location {
            BufferDevice::Host => Self::Host(Flat::zeros(dtype, len)),
            #[cfg(feature = "cuda")]
            BufferDevice::Device(device) => Self::Device(DeviceFlat::zeros(device, dtype, len)?),
        })
    }

    fn location(&self) -> BufferDevice {
        match self {
            Self::Host(_) => BufferDevice::Host,
            #[cfg(feature = "cuda")]
            Self::Device(flat) => BufferDevice::Device(flat.device().clone()),
        }
    }

    fn dtype(&self) -> DType {
        each!(self, flat => flat.dtype())
    }

    fn len(&self) -> usize {
        each!(self, flat => flat.len())
    }

    fn capacity_in_bytes(&self) -> usize {
        each!(self, flat => flat.capacity_in_bytes())
    }

    fn reserve_exact(&mut self, more: usize) -> Result<()> {
        match self {
            Self::Host(flat) => flat.reserve_exact(more),
            #[cfg(feature = "cuda")]
            Self::Device(flat) => flat.reserve_exact(more)?,
        }
        Ok(())
    }

    fn extend_zeros(&mut self, count: usize) -> Result<()> {
        match self {
            Self::Host(flat) => flat.extend_zeros(count),
            #[cfg(feature = "cuda")]
            Self::Device(flat) => flat.extend_zeros(count)?,
        }
        Ok(())
    }

    fn truncate(&mut self, len: usize) {
        each!(self, flat => flat.truncate(len));
    }

    fn shrink_to_fit(&mut self) -> Result<()> {
        match self {
            Self::Host(flat) => flat.shrink_to_fit(),
            #[cfg(feature = "cuda")]
            Self::Device(flat) => flat.shrink_to_fit()?,
        }
        Ok(())
    }

    fn move_to(self, location: &BufferDevice) -> Result<Self> {
        Ok(match (self, location) {
            (buffer @ Self::Host(_), BufferDevice::Host) => buffer,
            #[cfg(feature = "cuda")]
            (Self::Host(flat), BufferDevice::Device(device)) => Self::Device(DeviceFlat::of(device, flat.as_ref())?),
            #[cfg(feature = "cuda")]
            (Self::Device(flat), BufferDevice::Host) => Self::Host(flat.to_host(0..flat.len())?),
            #[cfg(feature = "cuda")]
            (buffer @ Self::Device(_), BufferDevice::Device(_)) => buffer,
        })
    }

    fn values(&self) -> Option<FlatRef<'_>> {
        match self {
            Self::Host(flat) => Some(flat.as_ref()),
            #[cfg(feature = "cuda")]
            Self::Device(_) => None,
        }
    }

    fn values_mut(&mut self) -> Option<FlatMut<'_>> {
        match self {
            Self::Host(flat) => Some(flat.as_mut()),
            #[cfg(feature = "cuda")]
            Self::Device(_) => None,
        }
    }

    fn extend_cast(&mut self, values: FlatRef<'_>) -> Result<()> {
        match self {
            Self::Host(flat) => flat.extend_cast(values),
            #[cfg(feature = "cuda")]
            Self::Device(flat) => flat.extend_from_host(values)?,
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn extend_from(&mut self, from: &Self, range: Range<usize>) -> Result<()> {
        match (self, from) {
            (Self::Host(to), Self::Host(from)) => to.extend_cast(from.slice(range)),
            (Self::Device(to), Self::Device(from)) => to.extend_from(from, range)?,
            _ => unreachable!("{NEEDS_SAME_MEMORY}"),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn scale(&mut self, factor: f32) -> Result<()> {
        match self {
            Self::Host(flat) => flat.as_mut().scale(factor),
            Self::Device(flat) => flat.scale(factor)?,
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn add_scaled(&mut self, to: usize, other: &Self, from: Range<usize>, factor: f32) -> Result<()> {
        match (self, other) {
            (Self::Host(sum), Self::Host(other)) => {
                sum.slice_mut(to..to + from.len()).add_scaled(other.slice(from), factor);
            }
            (Self::Device(sum), Self::Device(other)) => sum.add_scaled(to, &other.slice(from)?, factor)?,
            _ => unreachable!("{NEEDS_SAME_MEMORY}"),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn sums_of_squares(parts: &[(&Self, Range<usize>)]) -> Result<Vec<f64>> {
        let Some((Self::Device(first), _)) = parts.first() else {
            let sum = |(buffer, range): &(&Self, Range<usize>)| sum_of_squares(buffer.slice(range.clone()));
            return Ok(parts.iter().map(sum).collect());
        };
        let arrays = parts.iter().map(|(buffer, range)| buffer.on_device().slice(range.clone()));
        Ok(crate::cuda::sums_of_squares(first.device(), &arrays.collect::<candle_core::Result<Vec<_>>>()?)?)
    }
}

impl From<Flat> for FlatBuffer {
    fn from(flat: Flat) -> Self {
        Self::Host(flat)
    }
}
