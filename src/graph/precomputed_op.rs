//! An operation whose result was computed beforehand and whose backward pass is a closure. The engine uses such an
//! operation to enter the graph.
//!
//! In Candle, the forward pass of a custom operation returns a new storage. The forward pass of this operation computes
//! nothing: its result only has to depend on the argument, so that the backward pass runs.

use crate::precision::Flat;
use crate::tensor::residency::{storage_on, to_storage, with_view};
use crate::util::lock;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cpu_backend::CpuDevice;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Storage, Tensor};
use std::sync::Mutex;

struct PrecomputedOp<B> {
    name: &'static str,
    /// The result, which the forward pass returns. The forward pass runs once.
    result: Mutex<Option<(Storage, Shape)>>,
    backward: B,
}

/// Returns `result` as the result of an operation on `arg`, whose backward pass calls `backward(arg, gradient)` to get
/// the gradient of `arg`.
pub(crate) fn apply_precomputed<B>(
    name: &'static str,
    arg: &Tensor,
    result: (Storage, Shape),
    backward: B,
) -> Result<Tensor>
where
    B: Fn(&Tensor, &Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
{
    arg.apply_op1(PrecomputedOp { name, result: Mutex::new(Some(result)), backward })
}

/// Returns a scalar whose derivative with respect to `output` is `grad`, so that its backward pass seeds the graph with
/// `grad`.
pub(crate) fn seed_backward(output: &Tensor, grad: Tensor) -> Result<Tensor> {
    let zero = storage_on(output.device(), to_storage(Flat::zeros(output.dtype(), 1)))?;
    apply_precomputed("seed", output, (zero, Shape::from(())), move |_, _| Ok(Some(grad.clone())))
}

/// Creates a token's result: one element on `device`.
pub(crate) fn token_value(device: &Device) -> Result<(Storage, Shape)> {
    Ok((storage_on(device, CpuStorage::F32(vec![0.0]))?, Shape::from(1)))
}

/// Returns whether parameters may have this type. A loss or an output may have other types, such as f64.
fn is_trainable_dtype(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// Returns a copy of a tensor's values, on the tensor's device, and the tensor's shape.
pub(crate) fn copy_storage(tensor: &Tensor) -> Result<(Storage, Shape)> {
    let (storage, layout) = tensor.storage_and_layout();
    let copy = match &*storage {
        Storage::Cuda(cuda) => {
            let mut copy = cuda.device().zeros_impl(layout.shape(), cuda.dtype())?;
            cuda.copy_strided_src(&mut copy, 0, layout)?;
            Storage::Cuda(copy)
        }
        Storage::Cpu(cpu) if !is_trainable_dtype(cpu.dtype()) => {
            let mut copy = CpuDevice.zeros_impl(layout.shape(), cpu.dtype())?;
            cpu.copy_strided_src(&mut copy, 0, layout)?;
            Storage::Cpu(copy)
        }
        _ => {
            drop(storage);
            Storage::Cpu(with_view(tensor, |values| to_storage(values.to_flat()))?)
        }
    };
    Ok((copy, tensor.shape().clone()))
}

impl<B> PrecomputedOp<B> {
    fn take(&self) -> Result<(Storage, Shape)> {
        match lock(&self.result).take() {
            Some(result) => Ok(result),
            None => candle_core::bail!("{}: an operation with a prepared result ran forward twice", self.name),
        }
    }

    fn wrong_device<T>(&self) -> Result<T> {
        candle_core::bail!("{}: the prepared result is on a different device from the operation's argument", self.name)
    }
}

impl<B> CustomOp1 for PrecomputedOp<B>
where
    B: Fn(&Tensor, &Tensor) -> Result<Option<Tensor>> + Send + Sync,
{
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match self.take()? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            _ => self.wrong_device(),
        }
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.take()? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            _ => self.wrong_device(),
        }
    }

    fn bwd(&self, arg: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        (self.backward)(arg, grad)
    }
}
