//! The pool from which the driver allocates memory for tensors and buffers.
//!
//! By default, the pool returns all free memory to the system whenever the host waits for the GPU, which happens in
//! each step and in each concurrent copy. The memory of the next computation would then have to be mapped again.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{result, sys};
use candle_core::{CudaDevice, Result};
use std::ffi::c_void;

/// Returns the pool of a device, or `None` if its driver does not support pools.
fn pool_of(device: &CudaDevice) -> Result<Option<sys::CUmemoryPool>> {
    let stream = device.cuda_stream();
    let context = stream.context();
    if !context.has_async_alloc() {
        return Ok(None);
    }
    // SAFETY: the device belongs to an existing context.
    Ok(Some(unsafe { result::device::get_mem_pool(context.cu_device()) }.w()?))
}

/// Makes the pool keep freed memory for later allocations instead of returning it to the system.
///
/// # Errors
/// Returns an error if the driver reports one.
pub(crate) fn retain_freed_memory(device: &CudaDevice) -> Result<()> {
    let Some(pool) = pool_of(device)? else { return Ok(()) };
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let mut bytes = u64::MAX;
    // SAFETY: the pool is the device's current pool, which always exists; the attribute is a 64-bit number, which is
    // copied.
    unsafe { result::mem_pool::set_attribute(pool, threshold, (&raw mut bytes).cast::<c_void>()) }.w()
}

/// Returns free memory to the system, once the GPU has finished all launched work.
///
/// # Errors
/// Returns an error if the driver reports one.
pub(crate) fn trim(device: &CudaDevice) -> Result<()> {
    let Some(pool) = pool_of(device)? else { return Ok(()) };
    device.cuda_stream().context().synchronize().w()?;
    // SAFETY: same as above; memory in use is not affected.
    unsafe { result::mem_pool::trim_to(pool, 0) }.w()
}
