//! Errors of collectives between GPUs.

use std::sync::Arc;
use std::time::Duration;

/// Why a wait is over before its time, as the caller's own detection of failures has found it.
pub(crate) type CallerFailure = Arc<dyn std::error::Error + Send + Sync>;

/// Errors of collectives between GPUs. Cloned, because every later collective fails as the first one did.
///
/// None but [`Told`](Self::Told) can know which rank is to blame: a caller that does names it.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum NcclError {
    /// No library.
    #[error(
        "NCCL is not found: {library} cannot be loaded ({why}); install it (package libnccl2) where the system looks for \
         libraries, or let CANDLE_ZERO_NCCL_LIBRARY name its file"
    )]
    NotFound { library: String, why: String },
    /// A library that lacks what is needed.
    #[error("{library} has no function {symbol}: it is not NCCL, or older than 2.14")]
    Lacks { library: String, symbol: String },
    /// A call that the library refuses.
    #[error("NCCL's {call} fails: {why}; NCCL_DEBUG=INFO in the environment lets NCCL say more")]
    Refused { call: &'static str, why: String },
    /// The library has lost a peer.
    #[error("NCCL fails while rank {rank} waits in {op}: {why}; look at the other ranks' output")]
    Lost { rank: usize, op: &'static str, why: String },
    /// A peer does not come, or is in another collective.
    #[error(
        "rank {rank} waited in {op} between GPUs for {}: a peer does not take part in it, or is in another collective",
        seconds(*waited)
    )]
    Silent { rank: usize, op: &'static str, waited: Duration },
    /// What the caller's own detection says.
    #[error(transparent)]
    Told(CallerFailure),
    /// This rank has given up.
    #[error("rank {rank} has given up before: it takes part in no collective between GPUs any more")]
    GaveUp { rank: usize },
    /// CUDA's error or Candle's.
    #[error(transparent)]
    Device(Arc<candle_core::Error>),
}

impl From<candle_core::Error> for NcclError {
    fn from(error: candle_core::Error) -> Self {
        Self::Device(Arc::new(error))
    }
}

fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64())
}
