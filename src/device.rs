//! The device on which a rank computes if the program does not choose one.

use crate::error::Result;
use candle_core::Device;

/// Returns the GPU whose index is the local rank. If there are more ranks than GPUs, ranks are assigned to the
/// GPUs round-robin.
///
/// # Errors
/// No GPU is available, or the rank's environment cannot be parsed.
#[cfg(feature = "cuda")]
pub(crate) fn default() -> Result<Device> {
    use crate::comm::RankEnv;
    use candle_core::cuda_backend::{WrapErr, cudarc::driver::CudaContext};

    let RankEnv { local_rank, local_world_size: ranks, .. } = RankEnv::from_env()?;
    let gpus = usize::try_from(CudaContext::device_count().w()?).unwrap_or(0);
    if local_rank == 0 && (1..ranks).contains(&gpus) {
        crate::notice::emit(&format!("{ranks} ranks share {}", crate::util::counted(gpus, "GPU")));
    }
    // Without any GPU, index 0 produces the driver's own error.
    Ok(Device::new_cuda(local_rank % gpus.max(1))?)
}

/// Returns the CPU.
#[cfg(not(feature = "cuda"))]
pub(crate) fn default() -> Result<Device> {
    Ok(Device::Cpu)
}
