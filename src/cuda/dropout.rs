//! Dropout: `kernels/dropout.cu`.

use super::flat_view::DeviceFlatRef;
use super::kernel_launch::arguments;
use super::kernel_module::{KernelModule, launch_over, module, suffix};
use super::tensor_storage::alloc_and_write;
use candle_core::{CudaDevice, CudaStorage, Result};

const KERNELS: KernelModule = module!("dropout");

/// The number of positions in a group of counters in src/kernels/dropout.rs.
const GROUP: u64 = 64;
const COUNTERS: u64 = 16;

/// Computes x / (1 - p) for kept elements, and 0 for each element i that the random word at position `offset + i`
/// drops. The bits are those of the host.
pub(crate) fn dropout(
    device: &CudaDevice,
    x: &DeviceFlatRef<'_>,
    p: f32,
    seed: u64,
    offset: u64,
) -> Result<CudaStorage> {
    assert!((0.0..1.0).contains(&p), "the dropout probability {p} is not in [0, 1)");
    let count = x.len();
    let (bound, scale) = ((f64::from(p) * 4_294_967_296.0) as u32, 1.0 / (1.0 - p));
    alloc_and_write(device, x.dtype(), count, |y| {
        if count == 0 {
            return Ok(());
        }
        let counters = ((offset % GROUP + count as u64).div_ceil(GROUP) * COUNTERS) as usize;
        let function = KERNELS.function(device, &format!("dropout_{}", suffix(x.dtype())))?;
        let arguments = arguments![counters, count, x, y, scale, bound, seed, offset];
        // SAFETY: the kernel takes the number of counters, the number of elements, that many elements of two arrays, a
        // scale, a bound of 32 bits, and two words of 64 bits.
        unsafe { function.run(launch_over(counters), arguments) }
    })
}
