//! Views of elements in a GPU's memory.

use crate::precision::{FlatMut, FlatRef};
use crate::util::is_or_are;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut};
use candle_core::{CudaDevice, Result, bail};
use half::{bf16, f16};
use std::ops::Range;

/// Elements in a GPU's memory, for kernels to read.
#[derive(Debug)]
pub(crate) enum DeviceFlatRef<'a> {
    F32(CudaView<'a, f32>),
    BF16(CudaView<'a, bf16>),
    F16(CudaView<'a, f16>),
}

/// Elements in a GPU's memory, for kernels to write.
#[derive(Debug)]
pub(crate) enum DeviceFlatMut<'a> {
    F32(CudaViewMut<'a, f32>),
    BF16(CudaViewMut<'a, bf16>),
    F16(CudaViewMut<'a, f16>),
}

/// Evaluates one generic expression for the dtype.
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

impl DeviceFlatRef<'_> {
    /// Returns the address of the elements for `stream` to read. `stream` waits for the writes that cudarc has
    /// recorded. Other streams are notified only of reads before this call.
    pub fn address(&self, stream: &CudaStream) -> CUdeviceptr {
        each!(Self, self, v => v.device_ptr(stream).0)
    }

    /// Copies the elements to `values` on the host, which must have the same length and dtype, and waits for the copy.
    ///
    /// # Errors
    /// Returns an error if the dtypes differ or the driver reports one.
    pub fn read(&self, device: &CudaDevice, values: FlatMut<'_>) -> Result<()> {
        assert_eq!(self.len(), values.len(), "there must be as many values as elements");
        if values.is_empty() {
            return Ok(());
        }
        let stream = device.cuda_stream();
        match (self, values) {
            (Self::F32(from), FlatMut::F32(to)) => stream.memcpy_dtoh(from, to).w()?,
            (Self::BF16(from), FlatMut::BF16(to)) => stream.memcpy_dtoh(from, to).w()?,
            (Self::F16(from), FlatMut::F16(to)) => stream.memcpy_dtoh(from, to).w()?,
            _ => bail!("elements of {:?} are read as a different dtype", self.dtype()),
        }
        stream.synchronize().w()
    }
}

impl DeviceFlatMut<'_> {
    /// Returns the address of the elements for `stream` to read and to write. `stream` waits for the uses that cudarc
    /// has recorded. Other streams are notified only of uses before this call.
    pub fn address(&mut self, stream: &CudaStream) -> CUdeviceptr {
        each!(Self, self, v => v.device_ptr_mut(stream).0)
    }

    /// Returns elements `range`.
    ///
    /// # Errors
    /// Returns an error if `range` ends before it starts or after the last element.
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<DeviceFlatMut<'_>> {
        if range.start > range.end || range.end > self.len() {
            let be = is_or_are(self.len());
            bail!("elements {range:?} are out of range: there {be} {}", self.len())
        }
        Ok(match self {
            Self::F32(v) => DeviceFlatMut::F32(v.slice_mut(range)),
            Self::BF16(v) => DeviceFlatMut::BF16(v.slice_mut(range)),
            Self::F16(v) => DeviceFlatMut::F16(v.slice_mut(range)),
        })
    }

    /// Sets the elements to values of the same dtype from the host.
    ///
    /// # Errors
    /// Returns an error if the dtypes differ or the driver reports one.
    pub fn write(self, device: &CudaDevice, values: FlatRef<'_>) -> Result<()> {
        assert_eq!(self.len(), values.len(), "there must be as many values as elements");
        if values.is_empty() {
            return Ok(());
        }
        match (self, values) {
            (Self::F32(mut to), FlatRef::F32(from)) => device.memcpy_htod(from, &mut to),
            (Self::BF16(mut to), FlatRef::BF16(from)) => device.memcpy_htod(from, &mut to),
            (Self::F16(mut to), FlatRef::F16(from)) => device.memcpy_htod(from, &mut to),
            (to, _) => bail!("elements of {:?} are set from a different dtype", to.dtype()),
        }
    }

    /// Sets the elements to zero.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub fn fill_zero(self, device: &CudaDevice) -> Result<()> {
        if self.len() == 0 {
            return Ok(());
        }
        each!(Self, self, v => device.cuda_stream().memset_zeros(&mut { v }).w())
    }
}
