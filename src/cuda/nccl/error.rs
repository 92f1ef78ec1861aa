//! Errors of collectives between GPUs.

use std::sync::Arc;
use std::time::Duration;

/// The reason to end a wait early, found by the caller's own failure detection.
pub(crate) type CallerFailure = Arc<dyn std::error::Error + Send + Sync>;

/// Errors of collectives between GPUs. They can be cloned, because every later collective fails with the first error.
///
/// Only [`CallerFailure`](Self::CallerFailure) can identify the rank that failed, if the caller's failure detection
/// does.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum NcclError {
    /// The library was not found.
    #[error(
        "NCCL was not found: {library} cannot be loaded ({why}); install it (package libnccl2) where the system looks \
         for libraries, or set CANDLE_ZERO_NCCL_LIBRARY to its file"
    )]
    NotFound { library: String, why: String },
    /// The library lacks a required function.
    #[error("{library} has no function {symbol}: it is not NCCL, or is older than 2.14")]
    MissingFunction { library: String, symbol: String },
    /// The library refused a call.
    #[error("NCCL's {call} failed: {why}; set NCCL_DEBUG=INFO for more details")]
    CallFailed { call: &'static str, why: String },
    /// The library reported an asynchronous error, for example because it lost a peer.
    #[error("NCCL failed while rank {rank} waited in {op}: {why}; check the other ranks' output")]
    AsyncError { rank: usize, op: &'static str, why: String },
    /// A peer does not take part, or is in another collective.
    #[error(
        "rank {rank} waited in {op} between GPUs for {}: a peer does not take part in it, or is in another collective",
        seconds(*waited)
    )]
    PeerTimeout { rank: usize, op: &'static str, waited: Duration },
    /// The error of the caller's own failure detection.
    #[error(transparent)]
    CallerFailure(CallerFailure),
    /// This rank has given up.
    #[error("rank {rank} gave up earlier and takes part in no further collectives between GPUs")]
    GaveUp { rank: usize },
    /// An error of CUDA or Candle.
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
