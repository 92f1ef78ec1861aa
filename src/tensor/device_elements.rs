//! Access to the elements of tensors in GPU memory for candle-zero's GPU kernels; the counterpart of `element.rs`.

use super::residency::refusal;
use crate::cuda::{DeviceFlatMut, DeviceFlatRef, elements, elements_mut, zeros};
use crate::util::lock;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, DType, Device, Error, InplaceOp1, Layout, Result, Shape, Storage, Tensor,
};
use std::sync::Mutex;

/// Returns the GPU that holds a tensor.
pub(crate) fn gpu_of(tensor: &Tensor) -> Option<&CudaDevice> {
    match tensor.device() {
        Device::Cuda(device) => Some(device),
        _ => None,
    }
}

/// Returns whether kernels read and write elements of `dtype`.
pub(crate) fn is_supported(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// Returns a tensor with this memory, without a graph.
pub(crate) fn tensor_of(storage: CudaStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}

/// Runs `run` on the current elements of contiguous tensors on a GPU.
pub(crate) fn with_arrays<R, const N: usize>(
    tensors: [Option<&Tensor>; N],
    op: &'static str,
    run: impl FnOnce([Option<&DeviceFlatRef<'_>>; N]) -> Result<R>,
) -> Result<R> {
    let storages = tensors.map(|t| t.map(|t| (t.storage_and_layout(), t)));
    let mut arrays = [const { None }; N];
    for (array, storage) in arrays.iter_mut().zip(&storages) {
        let Some(((storage, layout), tensor)) = storage else { continue };
        *array = Some(match &**storage {
            Storage::Cuda(cuda) => array_of(cuda, layout, op)?,
            _ => {
                return Err(Error::Msg(format!("{op}: the GPU kernel received a tensor on {:?}", tensor.device())).bt());
            }
        });
    }
    run(arrays.each_ref().map(Option::as_ref))
}

/// Does the same as [`with_arrays`], for tensors that are all present.
pub(crate) fn with_each<R, const N: usize>(
    tensors: [&Tensor; N],
    op: &'static str,
    run: impl FnOnce([&DeviceFlatRef<'_>; N]) -> Result<R>,
) -> Result<R> {
    with_arrays(tensors.map(Some), op, |arrays| {
        let mut all = arrays.into_iter().flatten();
        let missing = || Error::Msg(format!("{op}: an operand is missing"));
        let mut each = [None; N];
        each.iter_mut().for_each(|slot| *slot = all.next());
        if each.iter().any(Option::is_none) {
            return Err(missing());
        }
        run(each.map(|array| array.unwrap_or_else(|| unreachable!("checked above"))))
    })
}

fn array_of<'a>(cuda: &'a CudaStorage, layout: &Layout, op: &'static str) -> Result<DeviceFlatRef<'a>> {
    use candle_core::backend::BackendStorage;
    let Some((start, end)) = layout.contiguous_offsets() else {
        return Err(Error::RequiresContiguous { op }.bt());
    };
    if let Some(array) = elements(cuda, start..end) {
        return Ok(array);
    }
    let dtype = cuda.dtype();
    if let Some(refusal) = refusal(dtype, layout.shape(), op) {
        return Err(refusal);
    }
    if is_supported(dtype) {
        let shape = layout.shape();
        let text = format!("{op}: the tensor of shape {shape:?} holds fewer elements than its shape requires");
        return Err(Error::Msg(text).bt());
    }
    Err(Error::UnsupportedDTypeForOp(dtype, op).bt())
}

/// Lets `change` write the elements of a contiguous tensor on a GPU. All holders of the tensor see the change.
pub(crate) fn change(tensor: &Tensor, change: impl FnOnce(DeviceFlatMut<'_>) -> Result<()>) -> Result<()> {
    struct ChangeStorage<F>(Mutex<Option<F>>);
    impl<F: FnOnce(DeviceFlatMut<'_>) -> Result<()>> InplaceOp1 for ChangeStorage<F> {
        fn name(&self) -> &'static str {
            "change-elements"
        }

        fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
            candle_core::bail!("the GPU kernel received a tensor on the CPU")
        }

        fn cuda_fwd(&self, cuda: &mut CudaStorage, layout: &Layout) -> Result<()> {
            let Some((start, end)) = layout.contiguous_offsets() else {
                return Err(Error::RequiresContiguous { op: self.name() }.bt());
            };
            match (lock(&self.0).take(), elements_mut(cuda, start..end)) {
                (Some(change), Some(elements)) => change(elements),
                _ => {
                    candle_core::bail!("a tensor of shape {:?} has elements that kernels cannot write", layout.shape())
                }
            }
        }
    }
    tensor.inplace_op1(&ChangeStorage(Mutex::new(Some(change))))
}

/// Computes `sum + other`, rounded once. On a GPU, the result is in the memory of `sum`, which must have no other
/// holder.
pub(crate) fn add_in_place(sum: Tensor, other: &Tensor) -> Result<Tensor> {
    let Some(device) = gpu_of(&sum).cloned() else { return sum + other };
    if other.dtype() != sum.dtype() {
        candle_core::bail!("cannot add tensors of different dtypes, {:?} and {:?}", sum.dtype(), other.dtype())
    }
    let other = other.contiguous()?;
    change(&sum, |sum| with_each([&other], "add", |[other]| crate::cuda::add(&device, sum, other)))?;
    Ok(sum)
}

/// Takes the memory out of a tensor on a GPU; the tensor must have no other holder.
pub(crate) fn take(tensor: &Tensor) -> Result<CudaStorage> {
    struct TakeStorage(Mutex<Option<CudaStorage>>);
    impl InplaceOp1 for TakeStorage {
        fn name(&self) -> &'static str {
            "take-elements"
        }

        fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
            candle_core::bail!("the GPU kernel received a tensor on the CPU")
        }

        fn cuda_fwd(&self, cuda: &mut CudaStorage, _: &Layout) -> Result<()> {
            let placeholder = zeros(&cuda.device, DType::F32, 1)?;
            *lock(&self.0) = Some(std::mem::replace(cuda, placeholder));
            Ok(())
        }
    }
    let taken = TakeStorage(Mutex::new(None));
    tensor.inplace_op1(&taken)?;
    let taken = lock(&taken.0).take();
    taken.ok_or_else(|| Error::Msg("the memory of a tensor could not be taken".into()))
}
