//! Gradients: from the backward that makes them to this rank's share.
//!
//! | file | what |
//! | --- | --- |
//! | `gradient_reducer.rs` | gradients bucketed, reduced, added to the share |
//! | `core_gradients.rs` | the same with values: gradients summed, and packed into buckets |
//! | `bucket_queue.rs` | which parameters share a bucket, and how many buckets are under way |
//! | `unreduced_gradients.rs`, `no_sync.rs` | gradients that a rank keeps for itself until they are reduced |
//! | `unused_params.rs` | parameters that no backward reaches |

pub(in crate::zero) mod bucket_queue;
mod core_gradients;
pub(crate) mod gradient_reducer;
mod no_sync;
pub(in crate::zero) mod unreduced_gradients;
mod unused_params;
