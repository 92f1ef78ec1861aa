//! Activation functions and their gated forms: `kernels/activation.cu`.

use super::flat_view::{DeviceFlatMut, DeviceFlatRef};
use super::kernel_launch::arguments;
use super::kernel_module::{KernelFunction, KernelModule, launch_over, module, suffix};
use super::tensor_storage::alloc_and_write;
use crate::kernels::gemm::Activation;
use crate::util::counted;
use candle_core::{CudaDevice, CudaStorage, DType, Result, bail};

const KERNELS: KernelModule = module!("activation");

fn kernel(device: &CudaDevice, function: Activation, part: &str, dtype: DType) -> Result<KernelFunction> {
    let name = match function {
        Activation::GeluTanh => "gelu_tanh",
        Activation::Gelu => "gelu",
        Activation::Silu => "silu",
        Activation::ReluSquared => "relu_squared",
    };
    KERNELS.function(device, &format!("{name}{part}_{}", suffix(dtype)))
}

/// Returns an error unless all arrays have the same dtype and number of elements as the first.
fn check(first: &DeviceFlatRef<'_>, others: &[&DeviceFlatRef<'_>]) -> Result<()> {
    match others.iter().find(|other| (other.dtype(), other.len()) != (first.dtype(), first.len())) {
        Some(other) => bail!(
            "activation: {} of {:?} {} given, but the first array has {} of {:?}",
            counted(other.len(), "element"),
            other.dtype(),
            if other.len() == 1 { "was" } else { "were" },
            first.len(),
            first.dtype()
        ),
        None => Ok(()),
    }
}

/// Computes f(x).
pub(crate) fn forward(device: &CudaDevice, function: Activation, x: &DeviceFlatRef<'_>) -> Result<CudaStorage> {
    let count = x.len();
    alloc_and_write(device, x.dtype(), count, |y| {
        if count == 0 {
            return Ok(());
        }
        let kernel = kernel(device, function, "", x.dtype())?;
        // SAFETY: the kernel takes a count and that many elements of two arrays of x's dtype.
        unsafe { kernel.run(launch_over(count), arguments![count, x, y]) }
    })
}

/// Computes dx = dy * f'(x).
pub(crate) fn backward(
    device: &CudaDevice,
    function: Activation,
    [x, dy]: [&DeviceFlatRef<'_>; 2],
    dx: DeviceFlatMut<'_>,
) -> Result<()> {
    let count = x.len();
    check(x, &[dy])?;
    if (dx.dtype(), dx.len()) != (x.dtype(), count) {
        bail!(
            "activation: the gradient has {}, but must have {}",
            counted(dx.len(), &format!("{:?} element", dx.dtype())),
            counted(count, &format!("{:?} element", x.dtype()))
        )
    }
    if count == 0 {
        return Ok(());
    }
    let kernel = kernel(device, function, "_backward", x.dtype())?;
    // SAFETY: the kernel takes a count and that many elements of three arrays of x's dtype.
    unsafe { kernel.run(launch_over(count), arguments![count, x, dy, dx]) }
}

/// Computes f(gate) * up.
pub(crate) fn gated(
    device: &CudaDevice,
    function: Activation,
    [gate, up]: [&DeviceFlatRef<'_>; 2],
) -> Result<CudaStorage> {
    let count = gate.len();
    check(gate, &[up])?;
    alloc_and_write(device, gate.dtype(), count, |y| {
        if count == 0 {
            return Ok(());
        }
        let kernel = kernel(device, function, "_gated", gate.dtype())?;
        // SAFETY: the kernel takes a count and that many elements of three arrays of the gate's dtype.
        unsafe { kernel.run(launch_over(count), arguments![count, gate, up, y]) }
    })
}

/// Computes dy * up * f'(gate) and dy * f(gate).
pub(crate) fn gated_backward(
    device: &CudaDevice,
    function: Activation,
    [gate, up]: [&DeviceFlatRef<'_>; 2],
    dy: &DeviceFlatRef<'_>,
) -> Result<[CudaStorage; 2]> {
    let (count, dtype) = (gate.len(), gate.dtype());
    check(gate, &[up, dy])?;
    let mut dup = None;
    let dgate = alloc_and_write(device, dtype, count, |dgate| {
        dup = Some(alloc_and_write(device, dtype, count, |dup| {
            if count == 0 {
                return Ok(());
            }
            let kernel = kernel(device, function, "_gated_backward", dtype)?;
            // SAFETY: the kernel takes a count and that many elements of five arrays of the gate's dtype.
            unsafe { kernel.run(launch_over(count), arguments![count, gate, up, dy, dgate, dup]) }
        })?);
        Ok(())
    })?;
    match dup {
        Some(dup) => Ok([dgate, dup]),
        None => bail!("activation: one of the two gradients was not computed"),
    }
}
