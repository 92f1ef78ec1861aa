//! The cross entropy of rows of logits and its gradient: `kernels/cross_entropy.cu`.

use super::flat_view::{DeviceFlatMut, DeviceFlatRef};
use super::kernel_launch::arguments;
use super::kernel_module::{KernelFunction, KernelModule, launch_over, module, suffix};
use super::tensor_storage::alloc_and_write;
use crate::util::{counted, is_or_are};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, LaunchConfig};
use candle_core::{CudaDevice, CudaStorage, DType, Result, bail};

const KERNELS: KernelModule = module!("cross_entropy");

/// The number of threads of a block that sums losses. It determines the order of that sum.
const THREADS: u32 = 256;
/// The number of classes per thread above which a row gets more threads.
const CLASSES_PER_THREAD: usize = 8;

/// The arguments of the kernels apart from the logits: the targets, and the rows to which the logits belong.
pub(crate) struct CrossEntropyArguments<'a> {
    pub classes: usize,
    /// The targets of all rows: a class, or `u32::MAX` for an ignored row.
    pub targets: &'a DeviceTargets,
    /// The index of the first row among the targets.
    pub first: usize,
    pub rows: usize,
    /// The soft cap: logits are replaced with cap * tanh(logit / cap).
    pub cap: Option<f32>,
}

/// Targets on a device.
pub(crate) struct DeviceTargets(CudaSlice<u32>, usize);

impl DeviceTargets {
    /// Copies targets, each a class below `classes` or `u32::MAX`, to the device.
    pub fn new(device: &CudaDevice, targets: &[u32], classes: usize) -> Result<Self> {
        if let Some(target) = targets.iter().find(|target| **target as usize >= classes && **target != u32::MAX) {
            bail!("cross_entropy: target {target} is not below {classes}, the number of classes")
        }
        let words = if targets.is_empty() { device.alloc_zeros(1)? } else { device.clone_htod(targets)? };
        Ok(Self(words, targets.len()))
    }
}

impl CrossEntropyArguments<'_> {
    /// Returns a launch with a block for each row. Its number of threads depends on the number of classes.
    fn launch(&self) -> LaunchConfig {
        let threads = self.classes.div_ceil(CLASSES_PER_THREAD).next_multiple_of(32).clamp(32, 1024);
        LaunchConfig { grid_dim: (self.rows as u32, 1, 1), block_dim: (threads as u32, 1, 1), shared_mem_bytes: 0 }
    }

    fn check(&self, logits: usize) -> Result<()> {
        let Self { classes, first, rows, .. } = *self;
        if logits != rows * classes || first + rows > self.targets.1 {
            let (end, targets) = (first + rows, self.targets.1);
            bail!(
                "cross_entropy: {} or {} {} not match rows {first} to {end} of {classes} {}",
                counted(logits, "logit"),
                counted(targets, "target"),
                if targets == 1 { "does" } else { "do" },
                if classes == 1 { "class" } else { "classes" }
            )
        }
        Ok(())
    }

    fn cap(&self) -> f32 {
        self.cap.unwrap_or(0.0)
    }
}

fn kernel(device: &CudaDevice, name: &str, dtype: DType) -> Result<KernelFunction> {
    KERNELS.function(device, &format!("{name}_{}", suffix(dtype)))
}

/// Writes the rows' losses times `sign` to `losses`, starting at the first row's position.
pub(crate) fn losses(
    device: &CudaDevice,
    args: &CrossEntropyArguments<'_>,
    logits: &DeviceFlatRef<'_>,
    sign: f32,
    losses: &mut CudaSlice<f32>,
) -> Result<()> {
    args.check(logits.len())?;
    if args.rows == 0 {
        return Ok(());
    }
    let range = args.first..args.first + args.rows;
    let (Some(targets), Some(losses)) = (args.targets.0.try_slice(range.clone()), losses.try_slice_mut(range)) else {
        bail!("cross_entropy: the buffer for losses is shorter than the number of rows")
    };
    let arguments = arguments![args.classes, logits, targets, args.cap(), sign, DeviceFlatMut::F32(losses)];
    // SAFETY: the kernel takes a block, a target and a loss for each row of logits.
    unsafe { kernel(device, "losses", logits.dtype())?.run(args.launch(), arguments) }
}

/// The factor of the rows' gradients: scales / divisor.
pub(crate) enum LossGradientScale<'a> {
    One,
    /// One number in memory for all rows.
    All(&'a DeviceFlatRef<'a>, f32),
    /// A number for each target.
    Each(&'a DeviceFlatRef<'a>, f32),
}

/// Writes the gradients of the losses with respect to the logits to `d`, and the losses to `losses`, if given. Without
/// `logits`, `d` must contain the logits, which the gradients replace.
pub(crate) fn gradients(
    device: &CudaDevice,
    args: &CrossEntropyArguments<'_>,
    logits: Option<&DeviceFlatRef<'_>>,
    scale: &LossGradientScale<'_>,
    d: DeviceFlatMut<'_>,
    losses: Option<&mut CudaSlice<f32>>,
) -> Result<()> {
    args.check(d.len())?;
    let fits = |logits: &DeviceFlatRef<'_>| (logits.len(), logits.dtype()) == (d.len(), d.dtype());
    if !logits.is_none_or(fits) {
        let elements = counted(d.len(), "element");
        bail!("cross_entropy: the gradient has {elements} of {:?}, unlike the logits", d.dtype())
    }
    if args.rows == 0 {
        return Ok(());
    }
    let range = args.first..args.first + args.rows;
    let (scales, stride, divisor) = match scale {
        LossGradientScale::One => (None, 0usize, 1.0),
        LossGradientScale::All(scale, divisor) => (Some(scale.slice(0..1)?), 0, *divisor),
        LossGradientScale::Each(scales, divisor) => (Some(scales.slice(range.clone())?), 1, *divisor),
    };
    if scales.as_ref().is_some_and(|scales| scales.dtype() != DType::F32) {
        bail!("cross_entropy: the gradient of a loss must be f32")
    }
    let Some(targets) = args.targets.0.try_slice(range.clone()) else { bail!("cross_entropy: targets are missing") };
    let losses = match losses {
        None => None,
        Some(losses) => match losses.try_slice_mut(range) {
            Some(losses) => Some(DeviceFlatMut::F32(losses)),
            None => bail!("cross_entropy: losses are missing"),
        },
    };
    let (kernel, launch) = (kernel(device, "gradient", d.dtype())?, args.launch());
    let arguments = arguments![args.classes, logits, targets, args.cap(), scales.as_ref(), stride, divisor, d, losses];
    // SAFETY: the kernel takes a block, a target, a loss and a scale for each row of logits.
    unsafe { kernel.run(launch, arguments) }
}

/// Computes the sum of `count` losses divided by `divisor`, as a number in device memory.
pub(crate) fn mean(device: &CudaDevice, losses: &CudaSlice<f32>, count: usize, divisor: f64) -> Result<CudaStorage> {
    if losses.len() < count {
        let be = is_or_are(losses.len());
        bail!("cross_entropy: the number of losses must be at least {count}, but there {be} only {}", losses.len())
    }
    alloc_and_write(device, DType::F32, 1, |mean| {
        let launch = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        let function = KERNELS.function(device, "mean_of_losses")?;
        // SAFETY: the kernel takes a count, that many losses and a divisor, and writes one number.
        unsafe { function.run(launch, arguments![count, losses, divisor, mean]) }
    })
}

/// Computes values * scale / divisor in `dtype`, rounded once. The scale is one f32 number in memory.
pub(crate) fn scaled_by(
    device: &CudaDevice,
    values: &DeviceFlatRef<'_>,
    scale: &DeviceFlatRef<'_>,
    divisor: f32,
    dtype: DType,
) -> Result<CudaStorage> {
    let count = values.len();
    if (scale.len(), scale.dtype()) != (1, DType::F32) {
        let elements = counted(scale.len(), &format!("{:?} element", scale.dtype()));
        bail!("cross_entropy: the scale has {elements}, but must be one f32")
    }
    alloc_and_write(device, dtype, count, |scaled| {
        if count == 0 {
            return Ok(());
        }
        let name = format!("scaled_by_{}_{}", suffix(dtype), suffix(values.dtype()));
        let function = KERNELS.function(device, &name)?;
        // SAFETY: the kernel takes a count, that many elements of two arrays of the dtypes in its name, one number, and
        // a divisor.
        unsafe { function.run(launch_over(count), arguments![count, scaled, values, scale, divisor]) }
    })
}
