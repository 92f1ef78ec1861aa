//! The one error type. Every message names what was found, where, what is allowed, and the mend.

use std::path::PathBuf;
use std::sync::Arc;

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything a user can meet, in groups. Broken invariants are assertions, not values of this type.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- files -------------------------------------------------------------------------------
    /// A file or folder could not be read, written or created.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb ("read", "create", ...).
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    // ---- configuration -----------------------------------------------------------------------

    // ---- data --------------------------------------------------------------------------------

    // ---- parameters and weights --------------------------------------------------------------

    // ---- training ----------------------------------------------------------------------------

    // ---- optimizer and schedule --------------------------------------------------------------

    // ---- communication -----------------------------------------------------------------------
    /// A collective failed, or the memory that carries it.
    #[error(transparent)]
    Comm(#[from] CommError),

    // ---- launcher ----------------------------------------------------------------------------

    // ---- below us ----------------------------------------------------------------------------
    /// Candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// What can happen between ranks. Cloned, because every later collective fails as the first one did.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// The shared memory or a thread could not be had.
    #[error(
        "cannot {action} the memory that ranks share: {source}; check the limits of memory and processes (ulimit -a)"
    )]
    Region {
        /// What was attempted.
        action: &'static str,
        /// The system's reason.
        #[source]
        source: Arc<std::io::Error>,
    },
    /// The inherited descriptor is not the launcher's.
    #[error(
        "file descriptor {fd} (CANDLE_ZERO_SHM_FD) is not the shared memory of this job: found {found}; start the program with zerorun, and unset CANDLE_ZERO_SHM_FD where it is left over from another job"
    )]
    ForeignRegion {
        /// The descriptor.
        fd: i32,
        /// What it is.
        found: String,
    },
    /// Two processes claim one rank.
    #[error("rank {rank} is taken already ({state}); an engine may be initialized once per rank and job")]
    RankTaken {
        /// The rank.
        rank: usize,
        /// What became of its first holder.
        state: String,
    },
    /// A peer's process ended.
    #[error(
        "rank {peer} died ({why}) while rank {rank} waited in {op}; look at rank {peer}'s output, or the kernel log for an out-of-memory kill"
    )]
    RankDied {
        /// This rank.
        rank: usize,
        /// The dead one.
        peer: usize,
        /// How the launcher saw it end.
        why: String,
        /// The collective.
        op: String,
    },
    /// A peer gave up.
    #[error("rank {peer} stopped ({why}) while rank {rank} waited in {op}")]
    RankAborted {
        /// This rank.
        rank: usize,
        /// The one that gave up.
        peer: usize,
        /// Its last words.
        why: String,
        /// The collective.
        op: String,
    },
    /// A peer left in good order while others still need it.
    #[error(
        "rank {peer} has left the job while rank {rank} waits for it in {op}; every rank must make the same number of steps and collective calls"
    )]
    RankLeft {
        /// This rank.
        rank: usize,
        /// The one that left.
        peer: usize,
        /// The collective.
        op: String,
    },
    /// A peer's process shows no life.
    #[error(
        "rank {peer} has shown no sign of life for {seconds} s while rank {rank} waited in {op}; it was stopped or its machine is overloaded"
    )]
    HeartbeatLost {
        /// This rank.
        rank: usize,
        /// The silent one.
        peer: usize,
        /// The collective.
        op: String,
        /// Length of the silence.
        seconds: u64,
    },
    /// A peer lives but does not come.
    #[error(
        "rank {rank} waited {limit:?} for rank {peer} in {op}; if a step may take longer, raise the limit (zerorun --timeout)"
    )]
    Timeout {
        /// This rank.
        rank: usize,
        /// The awaited one.
        peer: usize,
        /// The collective.
        op: String,
        /// The limit.
        limit: std::time::Duration,
    },
    /// Ranks issued different collectives.
    #[error(
        "ranks have diverged: rank {rank} is in {here}, rank {peer} in {there}; every rank must run the same model with the same configuration, in the same order"
    )]
    Diverged {
        /// This rank.
        rank: usize,
        /// What it issued.
        here: String,
        /// The other rank.
        peer: usize,
        /// What that one issued.
        there: String,
    },
    /// The communication thread is gone.
    #[error("the communication thread of this rank has ended after an earlier failure; the first error tells why")]
    ThreadEnded,
}
