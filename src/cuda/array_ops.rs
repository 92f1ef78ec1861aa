//! Copies, sums and products of arrays.

use super::flat_view::{DeviceFlatMut, DeviceFlatRef};
use super::kernel_launch::arguments;
use super::kernel_module::{KernelModule, launch_over, module, suffix};
use crate::util::counted;
use candle_core::{CudaDevice, Result, bail};

const KERNELS: KernelModule = module!("array_ops");

/// Computes `to = from`, cast to the dtype of `to`.
pub(crate) fn copy(device: &CudaDevice, to: DeviceFlatMut<'_>, from: &DeviceFlatRef<'_>) -> Result<()> {
    copy_scaled(device, to, from, 1.0)
}

/// Computes `to = factor * from`. The product is computed in f32 and rounded once.
pub(super) fn copy_scaled(
    device: &CudaDevice,
    to: DeviceFlatMut<'_>,
    from: &DeviceFlatRef<'_>,
    factor: f32,
) -> Result<()> {
    run(device, "copy_scaled", to, from, factor)
}

/// Computes `to += from` in f32 and rounds once.
pub(crate) fn add(device: &CudaDevice, to: DeviceFlatMut<'_>, from: &DeviceFlatRef<'_>) -> Result<()> {
    run(device, "add_scaled", to, from, 1.0)
}

/// Computes `to += factor * from` in f32 and rounds once.
pub(super) fn add_scaled(
    device: &CudaDevice,
    to: DeviceFlatMut<'_>,
    from: &DeviceFlatRef<'_>,
    factor: f32,
) -> Result<()> {
    run(device, "add_scaled", to, from, factor)
}

/// Computes `values *= factor` in f32 and rounds once.
pub(super) fn scale(device: &CudaDevice, values: DeviceFlatMut<'_>, factor: f32) -> Result<()> {
    let count = values.len();
    if count == 0 {
        return Ok(());
    }
    let function = KERNELS.function(device, &format!("scale_{}", suffix(values.dtype())))?;
    // SAFETY: the kernel takes a count, that many elements of the dtype in its name, and a factor.
    unsafe { function.run(launch_over(count), arguments![count, values, factor]) }
}

fn run(device: &CudaDevice, kernel: &str, to: DeviceFlatMut<'_>, from: &DeviceFlatRef<'_>, factor: f32) -> Result<()> {
    let count = to.len();
    if from.len() != count {
        bail!("{kernel}: the source has {}, but the destination has {count}", counted(from.len(), "element"))
    }
    if count == 0 {
        return Ok(());
    }
    let function = KERNELS.function(device, &format!("{kernel}_{}_{}", suffix(to.dtype()), suffix(from.dtype())))?;
    // SAFETY: the kernel takes a count, that many elements of each array, of the dtypes in its name, and a factor.
    unsafe { function.run(launch_over(count), arguments![count, to, from, factor]) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cuda::DeviceFlat;
    use crate::precision::Flat;
    use candle_core::DType;
    use candle_core::backend::BackendDevice;

    #[test]
    fn scaled_sums_and_products_have_the_bits_of_the_host() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let special = [0.0, -0.0, 1e-40, 65520.0, f32::INFINITY, f32::MIN_POSITIVE, 1.003_906_3, 1.011_718_8];
        let numbers: Vec<f32> = (0..1000).map(|i| (i as f32 - 400.0) * 0.37).chain(special).collect();
        let n = numbers.len();
        let upload = |flat: &Flat| DeviceFlat::of(&device, flat.as_ref()).unwrap();
        let dtypes = [DType::F32, DType::BF16, DType::F16];
        for (d, s) in dtypes.into_iter().flat_map(|d| dtypes.map(|s| (d, s))) {
            let from = Flat::from_f32(numbers.clone(), s);
            let mut on_host = Flat::from_f32(numbers.iter().rev().copied().collect(), d);
            let (mut to, source) = (upload(&on_host), upload(&from));
            for factor in [0.7, 1.0, 1.0 / 3.0] {
                let source = source.slice(0..n - 1).unwrap();
                add_scaled(&device, to.slice_mut(1..n).unwrap(), &source, factor).unwrap();
                on_host.slice_mut(1..n).add_scaled(from.slice(0..n - 1), factor);
                assert_eq!(to.to_host(0..n).unwrap(), on_host, "{d:?} += {factor} {s:?}");
                scale(&device, to.slice_mut(3..n).unwrap(), factor).unwrap();
                on_host.slice_mut(3..n).scale(factor);
                assert_eq!(to.to_host(0..n).unwrap(), on_host, "{d:?} *= {factor}");
            }
        }
    }

    #[test]
    fn nothing_is_scaled_without_a_launch() {
        let Ok(device) = CudaDevice::new(0) else { return };
        let mut nothing = DeviceFlat::zeros(&device, DType::F16, 0).unwrap();
        scale(&device, nothing.slice_mut(0..0).unwrap(), 2.0).unwrap();
    }
}
