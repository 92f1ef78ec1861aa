//! Where the ranks of a test compute.

use candle_core::{Device, Result};

/// The CPU; with feature `cuda` and the variable `CANDLE_ZERO_TEST_DEVICE=cuda` a GPU for each rank, as far as there are
/// so many.
pub fn of_rank(rank: usize) -> Result<Device> {
    #[cfg(feature = "cuda")]
    if std::env::var_os("CANDLE_ZERO_TEST_DEVICE").is_some_and(|d| d == "cuda") {
        return gpu(rank);
    }
    let _ = rank;
    Ok(Device::Cpu)
}

/// The GPU of a rank.
///
/// # Errors
/// None answers.
#[cfg(feature = "cuda")]
pub fn gpu(rank: usize) -> Result<Device> {
    use candle_core::cuda_backend::{WrapErr, cudarc::driver::CudaContext};
    let gpus = usize::try_from(CudaContext::device_count().w()?).unwrap();
    // Without any, number 0 leads to the driver's own error.
    Device::new_cuda(rank % gpus.max(1))
}

/// Live bytes of a rank's GPU as the stand-in for CUDA counts them (tools/mock_cuda); nothing on hardware.
#[cfg(feature = "cuda")]
pub fn counted_bytes(gpu: i32) -> Option<usize> {
    count(c"mock_cuda_live_bytes", gpu)
}

/// The most of them since the process began.
#[cfg(feature = "cuda")]
pub fn peak_bytes(gpu: i32) -> Option<usize> {
    count(c"mock_cuda_peak_bytes", gpu)
}

#[cfg(feature = "cuda")]
fn count(function: &std::ffi::CStr, gpu: i32) -> Option<usize> {
    type Count = unsafe extern "C" fn(i32) -> usize;
    let program = libloading::os::unix::Library::this();
    // SAFETY: the stand-in's functions of these names have this type.
    unsafe { program.get::<Count>(function).ok().map(|count| count(gpu)) }
}
