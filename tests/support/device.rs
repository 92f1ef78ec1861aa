//! The devices on which the ranks of a test compute.

use candle_core::{Device, Result};

/// Returns the CPU or, with feature `cuda` and the variable `CANDLE_ZERO_TEST_DEVICE=cuda`, the GPU of a rank. Ranks
/// share GPUs if there are too few.
pub fn of_rank(rank: usize) -> Result<Device> {
    #[cfg(feature = "cuda")]
    if std::env::var_os("CANDLE_ZERO_TEST_DEVICE").is_some_and(|d| d == "cuda") {
        return gpu(rank);
    }
    let _ = rank;
    Ok(Device::Cpu)
}

/// Returns the GPU of a rank.
///
/// # Errors
/// Fails if no GPU responds.
#[cfg(feature = "cuda")]
pub fn gpu(rank: usize) -> Result<Device> {
    use candle_core::cuda_backend::{WrapErr, cudarc::driver::CudaContext};
    let gpus = usize::try_from(CudaContext::device_count().w()?).unwrap();
    // If there are no GPUs, requesting GPU 0 returns the driver's error.
    Device::new_cuda(rank % gpus.max(1))
}

/// Returns the number of bytes in use on a GPU, as counted by the CUDA mock (tools/mock_cuda), or `None` on real
/// hardware.
#[cfg(feature = "cuda")]
pub fn counted_bytes(gpu: i32) -> Option<usize> {
    count(c"mock_cuda_live_bytes", gpu)
}

/// Returns the peak number of bytes in use on a GPU since the process began, counted in the same way.
#[cfg(feature = "cuda")]
pub fn peak_bytes(gpu: i32) -> Option<usize> {
    count(c"mock_cuda_peak_bytes", gpu)
}

#[cfg(feature = "cuda")]
fn count(function: &std::ffi::CStr, gpu: i32) -> Option<usize> {
    type Count = unsafe extern "C" fn(i32) -> usize;
    let program = libloading::os::unix::Library::this();
    // SAFETY: the mock's functions with these names have this type.
    unsafe { program.get::<Count>(function).ok().map(|count| count(gpu)) }
}
