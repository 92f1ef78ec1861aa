//! Moves gradients from the backward pass that computes them to this rank's share.
//!
//! | file | contents |
//! | --- | --- |
//! | `gradient_reducer.rs` | buckets gradients, reduces them, and adds them to the share |
//! | `engine_gradient_backend.rs` | the operations that need values: summing gradients and packing them into buckets |
//! | `bucket_queue.rs` | the parameters that share a bucket, and the pending buckets |
//! | `unreduced_gradients.rs`, `no_sync.rs` | gradients that stay on their rank until they are reduced |
//! | `divided_backward.rs` | gradients that wait for the second part of a divided backward pass |
//! | `diverted_gradient.rs` | a gradient that goes to the caller of the backward pass |
//! | `unused_params.rs` | parameters that no backward pass reaches |

pub(in crate::zero) mod bucket_queue;
pub(in crate::zero) mod diverted_gradient;
pub(crate) mod divided_backward;
mod engine_gradient_backend;
pub(crate) mod gradient_reducer;
mod no_sync;
pub(in crate::zero) mod unreduced_gradients;
mod unused_params;
