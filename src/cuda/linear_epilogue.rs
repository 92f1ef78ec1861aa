//! The epilogue of a linear layer's product: `kernels/linear_epilogue.cu`.

use super::flat_view::{DeviceFlatMut, DeviceFlatRef};
use super::kernel_launch::{KernelArgument, arguments};
use super::kernel_module::{KernelModule, launch_over, module, suffix};
use super::tensor_storage::alloc_and_write;
use crate::kernels::gemm::Activation;
use crate::util::counted;
use candle_core::{CudaDevice, CudaStorage, Result, bail};

const KERNELS: KernelModule = module!("linear_epilogue");

/// Computes `residual + f(product + bias)` for products in rows of `width`. With a function, replaces the products with
/// the function's arguments, and returns the result. Without one, replaces the products with the result, and returns
/// `None`.
pub(crate) fn apply(
    device: &CudaDevice,
    products: DeviceFlatMut<'_>,
    width: usize,
    bias: Option<&DeviceFlatRef<'_>>,
    function: Option<Activation>,
    residual: Option<&DeviceFlatRef<'_>>,
) -> Result<Option<CudaStorage>> {
    let (count, dtype) = (products.len(), products.dtype());
    let fits = |operand: Option<&DeviceFlatRef<'_>>, len: usize| {
        operand.is_none_or(|operand| (operand.len(), operand.dtype()) == (len, dtype))
    };
    if width == 0 || !count.is_multiple_of(width) || !fits(bias, width) || !fits(residual, count) {
        bail!(
            "linear: the sizes or dtypes of the operands do not fit {} of {dtype:?} in rows of {width}",
            counted(count, "product")
        )
    }
    let number = match function {
        None => 0u32,
        Some(Activation::GeluTanh) => 1,
        Some(Activation::Gelu) => 2,
        Some(Activation::Silu) => 3,
        Some(Activation::ReluSquared) => 4,
    };
    let kernel = KERNELS.function(device, &format!("follow_{}", suffix(dtype)))?;
    let run = |products: DeviceFlatMut<'_>, y: Option<DeviceFlatMut<'_>>| {
        if count == 0 {
            return Ok(());
        }
        let arguments: [KernelArgument<'_>; 7] = arguments![count, width, products, bias, number, residual, y];
        // SAFETY: the kernel takes a count and that many elements of three arrays, a bias of the width, and a
        // function's number; without a function, it does not access the last array.
        unsafe { kernel.run(launch_over(count), arguments) }
    };
    match function {
        None => run(products, None).map(|()| None),
        Some(_) => alloc_and_write(device, dtype, count, |y| run(products, Some(y))).map(Some),
    }
}
