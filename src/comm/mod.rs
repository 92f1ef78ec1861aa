//! Collectives between ranks.
//!
//! ```text
//!   engine ---- launch(job) ----> queue (comm thread or waiting thread, in issue order) ----> exchange (shared memory)
//!          <--- Pending::wait ---
//! ```
//!
//! [`Communicator`] is what the engine sees: rank, size, and collectives on flat buffers in two halves, launch and
//! wait. [`Solo`] is a world of one. [`Shared`] carries every other world of one machine: ranks as threads of one
//! process ([`threads`]) over anonymous memory, or ranks as processes over the memfd that `zerorun` made (`shm`). A
//! program can bring its own.
//!
//! Sums run in rank order in f32, whatever the stage, the bucket size or the number of pieces that a buffer travels
//! in. That is what makes stages 0 to 3 give the same bits.
//!
//! Elements travel as they are, or as small integers with a scale per block: [`Wire`].

pub(crate) mod agree;
mod bandwidth;
mod coded;
mod collectives;
mod communicator;
mod counters;
mod defaults;
mod encoding;
pub(crate) mod env;
mod exchange;
mod fingerprint;
mod from_env;
mod kind;
mod log;
mod pending;
mod pieces;
mod queue;
pub(crate) mod shm;
mod solo;
mod split;
mod state;
mod stream;
pub mod threads;

pub use bandwidth::Bandwidth;
pub(crate) use bandwidth::{size_text, trimmed_mean};
pub use communicator::Communicator;
pub use counters::{CommReport, KindReport};
pub use encoding::Wire;
pub use env::RankEnv;
pub use from_env::from_env;
pub use kind::Kind;
pub use log::{CommLog, CommLogRow, CommSummary};
pub use pending::Pending;
pub use queue::Shared;
pub use solo::Solo;
pub(crate) use state::Fault;
