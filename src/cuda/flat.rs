//! Views of elements in a GPU's memory.

use crate::precision::FlatMut;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut};
use candle_core::{CudaDevice, Result, bail};
use half::{bf16, f16};

/// Elements in a GPU's memory, for kernels to read.
#[derive(Debug)]
pub(crate) enum DeviceRef<'a> {
    F32(CudaView<'a, f32>),
    BF16(CudaView<'a, bf16>),
    F16(CudaView<'a, f16>),
}

/// Elements in a GPU's memory, for kernels to write.
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

impl DeviceRef<'_> {
    /// Copies them to the host, to as many of the same dtype, and waits for them.
    ///
    /// # Errors
    /// Another dtype; the driver's.
    pub fn read(&self, device: &CudaDevice, values: FlatMut<'_>) -> Result<()> {
        assert_eq!(self.len(), values.len(), "as many values as elements");
        if values.is_empty() {
            return Ok(());
        }
        let stream = device.cuda_stream();
        match (self, values) {
            (Self::F32(from), FlatMut::F32(to)) => stream.memcpy_dtoh(from, to).w()?,
            (Self::BF16(from), FlatMut::BF16(to)) => stream.memcpy_dtoh(from, to).w()?,
            (Self::F16(from), FlatMut::F16(to)) => stream.memcpy_dtoh(from, to).w()?,
            _ => bail!("elements of {:?} are read as another dtype", self.dtype()),
        }
        stream.synchronize().w()
    }
}
