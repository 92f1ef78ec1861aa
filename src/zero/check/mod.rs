//! Whether gradients are right, and what a program or the ranks do wrong.
//!
//! | file | what |
//! | --- | --- |
//! | `gradient_check.rs`, `gradient_check_state.rs` | parameters perturbed for a forward, and what a backward brings along the way; its state |
//! | `perturbation.rs` | the direction in which parameters are perturbed |
//! | `forward_outputs.rs`, `output_hooks.rs` | outputs of forwards: whether a loss is one of this step |
//! | `weight_samples.rs`, `inplace_writes.rs` | writes into parameters that the engine does not make |
//! | `rank_divergence.rs` | the parts that ranks were in when their calls differed |

pub(crate) mod forward_outputs;
mod gradient_check;
pub(crate) mod gradient_check_state;
mod inplace_writes;
mod output_hooks;
pub(in crate::zero) mod perturbation;
mod rank_divergence;
pub(in crate::zero) mod weight_samples;
