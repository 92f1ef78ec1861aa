//! The optimizer step.
//!
//! | file | contents |
//! | --- | --- |
//! | `sharded_step.rs` | the vote and the update |
//! | `outer_step.rs` | the outer step of local steps, between islands |
//! | `pipeline_vote.rs` | the vote of the stages of a pipeline |
//! | `rank_zero_requests.rs` | requests from rank 0 to all ranks in a vote |
//! | `hyperparameters.rs` | the optimizer's settings for each parameter |
//! | `state_sweep.rs` | a sweep through the share, in memory and in files |
//! | `stored_states.rs` | states in formats other than f32, and their conversion to f32 and back |
//! | `whole_param_step.rs` | norms of whole parameters, and directions computed from whole parameters |
//! | `factored_step.rs` | factored states, and steps that depend on them |
//! | `active_weights.rs` | the trained weights or their average in the model |
//! | `weight_publisher.rs` | the transfer of updated shards to all ranks |
//! | `delayed_update.rs` | an update that runs during the next step |

pub(crate) mod active_weights;
#[cfg(feature = "cuda")]
mod delayed_update;
mod factored_step;
pub(in crate::zero) mod hyperparameters;
pub(crate) mod outer_step;
pub(crate) mod pipeline_vote;
pub(crate) mod rank_zero_requests;
pub(crate) mod sharded_step;
pub(crate) mod state_sweep;
mod stored_states;
pub(crate) mod weight_publisher;
mod whole_param_step;
