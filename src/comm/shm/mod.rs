//! Collectives of the ranks of one host, through memory that they share.
//!
//! | file | content |
//! | --- | --- |
//! | `region.rs` | the shared memory and its layout |
//! | `pieces.rs` | pieces of data in it: which rank writes and reads what, and in which order |
//! | `rank_state.rs` | the state of each rank in the job, and the first failure |
//! | `exchange.rs` | one exchange of a piece between all ranks, with its fingerprint and its limits |
//! | `partition.rs` | the division of buffers into pieces and chunks |
//! | `collectives.rs`, `quantized.rs` | the collectives as sequences of exchanges: of exact elements, or of integers |
//! | `streaming_copy.rs` | copies that bypass the cache |

pub(in crate::comm) mod collectives;
pub(in crate::comm) mod exchange;
pub(in crate::comm) mod partition;
pub(in crate::comm) mod pieces;
pub(in crate::comm) mod quantized;
pub(in crate::comm) mod rank_state;
#[doc(hidden)]
pub mod region;
mod streaming_copy;
