//! Layer normalization and root-mean-square normalization of rows: `kernels/norm.cu`.

use super::column_sums::{PartialColumnSums, RowChunking};
use super::flat_view::{DeviceFlatMut, DeviceFlatRef};
use super::kernel_launch::{arguments, by_row};
use super::kernel_module::{KernelModule, module, suffix};
use super::tensor_storage::alloc_and_write;
use crate::util::counted;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{CudaDevice, CudaStorage, DType, Result, bail};

const KERNELS: KernelModule = module!("norm");

/// The statistics of each row that the forward pass computes for the backward pass.
#[derive(Debug)]
pub(crate) struct NormStatistics {
    rows: usize,
    width: usize,
    /// The means that were subtracted from the rows, in layer normalization.
    means: Option<CudaSlice<f32>>,
    /// The factors by which the rows were then multiplied.
    factors: CudaSlice<f32>,
}

impl NormStatistics {
    /// Allocates the statistics of rows of `width` elements.
    fn new(device: &CudaDevice, x: &DeviceFlatRef<'_>, width: usize, centered: bool) -> Result<Self> {
        if width == 0 || !x.len().is_multiple_of(width) {
            bail!(
                "norm: {} {} not form rows of {width}",
                counted(x.len(), "element"),
                if x.len() == 1 { "does" } else { "do" }
            )
        }
        let rows = x.len() / width;
        // SAFETY: the forward pass writes a number for each row, and the backward pass reads only these numbers.
        let numbers = || unsafe { device.alloc::<f32>(rows.max(1)) };
        let means = if centered { Some(numbers()?) } else { None };
        Ok(Self { rows, width, means, factors: numbers()? })
    }

    fn check(&self, x: &DeviceFlatRef<'_>, weight: &DeviceFlatRef<'_>, dy: &DeviceFlatRef<'_>) -> Result<()> {
        let expected = self.rows * self.width;
        if [x.len(), dy.len()] != [expected; 2] || dy.dtype() != x.dtype() {
            let elements = |array: &DeviceFlatRef<'_>| counted(array.len(), &format!("{:?} element", array.dtype()));
            let (x, dy) = (elements(x), elements(dy));
            let expected = counted(expected, "element");
            bail!("norm: x has {x} and dy has {dy}, but both must have {expected} of the same dtype")
        }
        check_parameter(x, weight, self.width)
    }
}

/// Checks that a parameter has the width of the rows, and is either in their format or in f32.
fn check_parameter(x: &DeviceFlatRef<'_>, parameter: &DeviceFlatRef<'_>, width: usize) -> Result<()> {
    if parameter.len() != width || ![x.dtype(), DType::F32].contains(&parameter.dtype()) {
        bail!(
            "norm: the parameter has {}, but must have {}",
            counted(parameter.len(), &format!("{:?} element", parameter.dtype())),
            counted(
                width,
                &if x.dtype() == DType::F32 { "F32 element".into() } else { format!("{:?} or F32 element", x.dtype()) }
            )
        )
    }
    Ok(())
}

fn is_f32(parameter: &DeviceFlatRef<'_>) -> bool {
    parameter.dtype() == DType::F32
}

/// Computes (x - mean) / sqrt(variance + eps) * weight + bias for rows as wide as the weight.
pub(crate) fn layer_norm(
    device: &CudaDevice,
    x: &DeviceFlatRef<'_>,
    [weight, bias]: [&DeviceFlatRef<'_>; 2],
    eps: f32,
) -> Result<(CudaStorage, NormStatistics)> {
    let width = weight.len();
    check_parameter(x, weight, width)?;
    check_parameter(x, bias, width)?;
    let mut statistics = NormStatistics::new(device, x, width, true)?;
    let rows = statistics.rows;
    let y = alloc_and_write(device, x.dtype(), x.len(), |y| {
        if rows == 0 {
            return Ok(());
        }
        let function = KERNELS.function(device, &format!("layer_norm_{}", suffix(x.dtype())))?;
        let NormStatistics { means, factors, .. } = &mut statistics;
        let arguments =
            arguments![width, x, weight, is_f32(weight), bias, is_f32(bias), eps, y, means.as_mut(), factors];
        // SAFETY: the kernel takes rows of this width, a block each, parameters of that width with flags that name
        // their format, and two numbers for each row.
        unsafe { function.run(by_row(rows, width), arguments) }
    })?;
    Ok((y, statistics))
}

/// Computes x / sqrt(mean(x^2) + eps) * (weight + one) for rows as wide as the weight.
pub(crate) fn rms_norm(
    device: &CudaDevice,
    [x, weight]: [&DeviceFlatRef<'_>; 2],
    one: f32,
    eps: f32,
) -> Result<(CudaStorage, NormStatistics)> {
    let width = weight.len();
    check_parameter(x, weight, width)?;
    let mut statistics = NormStatistics::new(device, x, width, false)?;
    let rows = statistics.rows;
    let y = alloc_and_write(device, x.dtype(), x.len(), |y| {
        if rows == 0 {
            return Ok(());
        }
        let function = KERNELS.function(device, &format!("rms_norm_{}", suffix(x.dtype())))?;
        let arguments = arguments![width, x, weight, is_f32(weight), one, eps, y, &mut statistics.factors];
        // SAFETY: the kernel takes rows of this width, a block each, a weight of that width with a flag that names its
        // format, and a number for each row.
        unsafe { function.run(by_row(rows, width), arguments) }
    })?;
    Ok((y, statistics))
}

/// Computes the input's gradient, and writes it to `dx` or, if `add` is set, adds it to `dx`.
pub(crate) fn input_gradient(
    device: &CudaDevice,
    statistics: &NormStatistics,
    [x, weight, dy]: [&DeviceFlatRef<'_>; 3],
    one: f32,
    dx: DeviceFlatMut<'_>,
    add: bool,
) -> Result<()> {
    statistics.check(x, weight, dy)?;
    if (dx.len(), dx.dtype()) != (x.len(), x.dtype()) {
        bail!(
            "norm: the gradient has {}, but must have {}",
            counted(dx.len(), &format!("{:?} element", dx.dtype())),
            counted(x.len(), &format!("{:?} element", x.dtype()))
        )
    }
    let NormStatistics { rows, width, means, factors } = statistics;
    if *rows == 0 {
        return Ok(());
    }
    let function = KERNELS.function(device, &format!("norm_input_gradient_{}", suffix(x.dtype())))?;
    let arguments = arguments![*width, x, weight, is_f32(weight), one, means.as_ref(), factors, dy, dx, add];
    // SAFETY: the kernel takes rows of this width, a block each, a weight of that width with a flag that names its
    // format, and one or two numbers for each row.
    unsafe { function.run(by_row(*rows, *width), arguments) }
}

/// Computes the gradients of the weight and of layer normalization's bias.
pub(crate) fn parameter_gradients(
    device: &CudaDevice,
    statistics: &NormStatistics,
    [x, weight, dy]: [&DeviceFlatRef<'_>; 3],
) -> Result<(PartialColumnSums, Option<PartialColumnSums>)> {
    statistics.check(x, weight, dy)?;
    let NormStatistics { rows, width, means, factors } = statistics;
    let chunking = RowChunking::of(*rows, *width);
    let mut weight_sums = chunking.alloc_sums(device)?;
    let mut bias_sums = means.as_ref().map(|_| chunking.alloc_sums(device)).transpose()?;
    if *rows > 0 {
        let function = KERNELS.function(device, &format!("norm_parameter_gradients_{}", suffix(x.dtype())))?;
        let (per_chunk, means) = (chunking.per_chunk, means.as_ref());
        let arguments =
            arguments![*rows, *width, per_chunk, x, means, factors, dy, &mut weight_sums, bias_sums.as_mut()];
        // SAFETY: the kernel takes rows of this width, split this way, one or two numbers for each row, and sums for
        // each column and chunk.
        unsafe { function.run(chunking.launch(), arguments)? };
    }
    let parts = |sums| PartialColumnSums { chunking, sums };
    Ok((parts(weight_sums), bias_sums.map(parts)))
}
