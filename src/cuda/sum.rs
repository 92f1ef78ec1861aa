//! Copies and sums of whole arrays.

use super::flat::{DeviceMut, DeviceRef};
use super::launch::arguments;
use super::load::{Module, module, over, suffix};
use candle_core::{CudaDevice, Result, bail};

const KERNELS: Module = module!("flat");

/// to = from, cast.
pub(crate) fn copy(device: &CudaDevice, to: DeviceMut<'_>, from: &DeviceRef<'_>) -> Result<()> {
    run(device, "copy_scaled", to, from, 1.0)
}

/// to += from, computed in f32 and rounded once.
pub(crate) fn add(device: &CudaDevice, to: DeviceMut<'_>, from: &DeviceRef<'_>) -> Result<()> {
    run(device, "add_scaled", to, from, 1.0)
}

fn run(device: &CudaDevice, kernel: &str, to: DeviceMut<'_>, from: &DeviceRef<'_>, factor: f32) -> Result<()> {
    let count = to.len();
    if from.len() != count {
        bail!("{kernel}: {} elements for {count}", from.len())
    }
    if count == 0 {
        return Ok(());
    }
    let function = KERNELS.function(device, &format!("{kernel}_{}_{}", suffix(to.dtype()), suffix(from.dtype())))?;
    // SAFETY: the kernel takes a count, that many elements of each array, of the dtypes in its name, and a factor.
    unsafe { function.run(over(count), arguments![count, to, from, factor]) }
}
