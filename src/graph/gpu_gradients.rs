//! Gradients computed and summed in a GPU's memory: [`GradSlot`]s and [`InputGradSink`]s of layers that compute there.

use super::grad_slot::{Grad, GradSlot};
use super::recorded_op::InputGradSink;
use crate::cuda::{self, DeviceFlatMut};
use crate::tensor::device_elements::{change, gpu_of, tensor_of, with_each};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Result, Shape, Tensor};

impl Grad {
    /// Creates a gradient of `len` elements in memory that is not shared.
    pub fn of_storage(storage: CudaStorage, len: usize) -> Self {
        Self::OnDevice(tensor_of(storage, len))
    }

    /// Returns the values as a contiguous tensor on `device`.
    pub fn on_device(self, device: &CudaDevice) -> Result<Tensor> {
        let shape = Shape::from(self.len());
        self.into_tensor(&shape, &Device::Cuda(device.clone()))?.contiguous()
    }

    /// Returns the same gradient in a GPU's memory, in a form that may be changed in place. A gradient that may be
    /// shared is copied.
    fn into_own_on(self, device: &CudaDevice) -> Result<Tensor> {
        match self {
            Self::OnDevice(tensor) if gpu_of(&tensor).is_some_and(|gpu| gpu.id() == device.id()) => Ok(tensor),
            Self::Own(flat) => Self::Own(flat).on_device(device),
            other => {
                let tensor = other.on_device(device)?;
                let len = tensor.elem_count();
                let copy = cuda::alloc_and_write(device, tensor.dtype(), len, |to| {
                    with_each([&tensor], "copy", |[from]| cuda::copy(device, to, from))
                })?;
                Ok(tensor_of(copy, len))
            }
        }
    }
}

impl GradSlot {
    /// Does the same as [`GradSlot::accumulate`] in a GPU's memory.
    pub fn accumulate_on(
        &self,
        device: &CudaDevice,
        dtype: DType,
        len: usize,
        write: impl FnOnce(DeviceFlatMut<'_>, bool) -> Result<()>,
    ) -> Result<()> {
        if !self.is_open() {
            return Ok(());
        }
        self.compute_deferred()?;
        let Some(grad) = self.take() else {
            let storage = cuda::alloc_and_write(device, dtype, len, |grad| write(grad, false))?;
            return self.add(Grad::of_storage(storage, len));
        };
        if grad.dtype() != dtype {
            candle_core::bail!("gradients of one tensor have the dtypes {:?} and {dtype:?}", grad.dtype())
        }
        let grad = grad.into_own_on(device)?;
        change(&grad, |grad| write(grad, true))?;
        self.add(Grad::OnDevice(grad))
    }
}

impl InputGradSink {
    /// Calls [`GradSlot::accumulate_on`], or does nothing if the gradient is not wanted.
    pub fn accumulate_on(
        &self,
        device: &CudaDevice,
        dtype: DType,
        len: usize,
        write: impl FnOnce(DeviceFlatMut<'_>, bool) -> Result<()>,
    ) -> Result<()> {
        self.open().map_or(Ok(()), |slot| slot.accumulate_on(device, dtype, len, write))
    }

    /// Does the same as [`InputGradSink::accumulate_zeroed`] in a GPU's memory.
    pub fn accumulate_zeroed_on(
        &self,
        device: &CudaDevice,
        dtype: DType,
        len: usize,
        add: impl FnOnce(DeviceFlatMut<'_>) -> Result<()>,
    ) -> Result<()> {
        let Some(slot) = self.open() else { return Ok(()) };
        if slot.is_empty() {
            slot.add(Grad::of_storage(cuda::zeros(device, dtype, len)?, len))?;
        }
        slot.accumulate_on(device, dtype, len, |grad, _| add(grad))
    }

    /// Delivers a gradient of `len` elements that `write` computes in a GPU's memory.
    pub fn make_on(
        &self,
        device: &CudaDevice,
        dtype: DType,
        len: usize,
        write: impl FnOnce(DeviceFlatMut<'_>) -> Result<()>,
    ) -> Result<()> {
        let Some(slot) = self.open() else { return Ok(()) };
        slot.add(Grad::of_storage(cuda::alloc_and_write(device, dtype, len, write)?, len))
    }
}
