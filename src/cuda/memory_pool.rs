//! The pool from which the driver gives memory to tensors and buffers.
//!
//! Unasked, it gives all free memory back to the system wherever the host waits for the GPU, as each step and each copy beside the
//! model's work does; what computes next would have it mapped again.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{result, sys};
use candle_core::{CudaDevice, Result};
use std::ffi::c_void;

/// The pool of a device; nothing where its driver has none.
fn of(device: &CudaDevice) -> Result<Option<sys::CUmemoryPool>> {
    let stream = device.cuda_stream();
    let context = stream.context();
    if !context.has_async_alloc() {
        return Ok(None);
    }
    // SAFETY: a device of a living context.
    Ok(Some(unsafe { result::device::get_mem_pool(context.cu_device()) }.w()?))
}

/// From now on what is freed stays with this process, for what it allocates next.
///
/// # Errors
/// The driver's.
pub(crate) fn keep(device: &CudaDevice) -> Result<()> {
    let Some(pool) = of(device)? else { return Ok(()) };
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let mut bytes = u64::MAX;
    // SAFETY: the device's own pool, which is always there; the attribute is a number of 64 bits, which is copied.
    unsafe { result::mem_pool::set_attribute(pool, threshold, (&raw mut bytes).cast::<c_void>()) }.w()
}

/// Gives what is free back to the system, once the GPU has done all that was launched.
///
/// # Errors
/// The driver's.
pub(crate) fn trim(device: &CudaDevice) -> Result<()> {
    let Some(pool) = of(device)? else { return Ok(()) };
    device.cuda_stream().context().synchronize().w()?;
    // SAFETY: as above; memory in use is left alone.
    unsafe { result::mem_pool::trim_to(pool, 0) }.w()
}
