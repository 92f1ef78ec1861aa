//! Where a rank computes when its program does not say.

use crate::error::Result;
use candle_core::Device;

/// The CPU; with feature `cuda` the GPU of the local rank's number. More ranks than GPUs share them in turn.
///
/// # Errors
/// No GPU answers; a rank's environment that cannot be read.
#[cfg(feature = "cuda")]
pub(crate) fn default() -> Result<Device> {
    use crate::comm::RankEnv;
    use candle_core::cuda_backend::{WrapErr, cudarc::driver::CudaContext};

    let RankEnv { local_rank, local_world_size: ranks, .. } = RankEnv::from_env()?;
    let gpus = usize::try_from(CudaContext::device_count().w()?).unwrap_or(0);
    if local_rank == 0 && (1..ranks).contains(&gpus) {
        crate::notice::say(&format!("{ranks} ranks share {}", crate::util::counted(gpus, "GPU")));
    }
    // Without any, number 0 leads to the driver's own error.
    Ok(Device::new_cuda(local_rank % gpus.max(1))?)
}

/// The CPU; with feature `cuda` the GPU of the local rank's number.
#[cfg(not(feature = "cuda"))]
pub(crate) fn default() -> Result<Device> {
    Ok(Device::Cpu)
}
