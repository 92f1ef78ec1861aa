//! Collectives of the ranks of one host, through memory that they share.
//!
//! | file | content |
//! | --- | --- |
//! | `region.rs` | the shared memory and its layout |
//! | `piece_slots.rs` | pieces of data in the shared memory: which rank writes and reads what, and in which order |
//! | `published_count.rs` | a count that one rank increments, and on which others sleep |
//! | `mailbox.rs`, `mailbox_memory.rs`, `point_to_point.rs` | packets from one rank to another; messages, with their fingerprints and limits |
//! | `rank_state.rs` | the state of each rank in the job, and the first failure |
//! | `exchange.rs` | one exchange of a piece between all ranks, with its fingerprint and its limits |
//! | `partition.rs` | the division of buffers into pieces and chunks |
//! | `collectives.rs`, `quantized.rs` | the collectives as sequences of exchanges: of exact elements, or of integers |
//! | `streaming_copy.rs` | copies that bypass the cache |

pub(in crate::comm) mod collectives;
pub(in crate::comm) mod exchange;
pub(in crate::comm) mod mailbox;
mod mailbox_memory;
pub(in crate::comm) mod partition;
pub(in crate::comm) mod piece_slots;
pub(in crate::comm) mod point_to_point;
mod published_count;
pub(in crate::comm) mod quantized;
pub(in crate::comm) mod rank_state;
#[doc(hidden)]
pub mod region;
mod streaming_copy;
