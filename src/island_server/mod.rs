//! Islands that are separate jobs: the server at which they meet, and each rank's connection to it.
//!
//! ```text
//!   island in slot 0: ranks 0, 1   ----\
//!   island in slot 1: ranks 0, 1   -----+---- island server: one exchange after the other, membership, record
//!   (slot 2 is empty)                  /
//!   island in slot 3: ranks 0, 1   ---/
//! ```
//!
//! Each rank of each island has a connection. In an exchange, a rank sends its change in a fragment and receives the
//! mean of the changes of the ranks at its position. An island that joins receives the state of another island, its
//! donor, through the server as well. `frame.rs`, `messages.rs` and `pseudo_gradient_codec.rs` define the protocol,
//! `membership.rs` decides which islands take part, `membership_log.rs` records these decisions, and `server.rs` and
//! `link.rs` are the two ends of a connection.
//!
//! Connections are neither encrypted nor authenticated; use the server only on a trusted network, or through a tunnel.
//!
//! # Memory of the server
//! While an exchange is open, the server holds the encoded changes of the islands that have sent theirs: at most
//! `islands x trained elements of a fragment`, 4 bytes each in `fp32`, for each fragment in flight. When the exchange
//! is closed, the server decodes one change at a time for each position. While a donation passes through, the server
//! holds at most 48 MiB of it for each rank that receives it.

pub(crate) mod error;
mod frame;
mod link;
mod membership;
mod membership_log;
mod messages;
mod outbox;
mod pseudo_gradient_codec;
mod server;

pub(crate) use link::{EntryMode, IslandLink, JoinMessage};
pub(crate) use messages::{DonationHead, Hello, RoundKey, RunShape};
pub(crate) use pseudo_gradient_codec::PseudoGradientFormat;
pub use server::{IslandServer, IslandServerOptions, IslandServerStatus};

use std::time::Duration;

/// The environment variable with the address of the island server. It replaces `local_steps.server`.
#[doc(hidden)]
pub const SERVER: &str = crate::config::ISLAND_SERVER;
/// The environment variable with the slot that an island requests.
#[doc(hidden)]
pub const SLOT: &str = "CANDLE_ZERO_ISLAND_SLOT";
/// The environment variable with the number of the launcher that starts and restarts an island.
#[doc(hidden)]
pub const LAUNCHER: &str = "CANDLE_ZERO_LAUNCHER_ID";

/// The time without a sign of life after which the other side of a connection counts as dead.
const DEFAULT_SILENCE_TIMEOUT: Duration = Duration::from_secs(60);

/// The time after which a side that has nothing to send sends a sign of life.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
