//! Checks that gradients are correct, and finds mistakes in a program and differences between ranks.
//!
//! | file | contents |
//! | --- | --- |
//! | `finite_difference_check.rs` | perturbs parameters, and measures a backward pass's gradients along the direction |
//! | `gradient_check_state.rs` | the state of a check |
//! | `perturbation_direction.rs` | the direction in which parameters are perturbed |
//! | `forward_outputs.rs`, `output_hooks.rs` | outputs of forward passes: whether a loss belongs to this step |
//! | `weight_samples.rs`, `inplace_writes.rs` | writes to parameters by anything other than the engine |
//! | `collective_mismatch.rs` | the parts of the model that ranks ran when their calls differed |

mod collective_mismatch;
mod finite_difference_check;
pub(crate) mod forward_outputs;
pub(crate) mod gradient_check_state;
mod inplace_writes;
mod output_hooks;
pub(in crate::zero) mod perturbation_direction;
pub(in crate::zero) mod weight_samples;
