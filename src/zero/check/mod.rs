//! Whether gradients are right, and what a program or the ranks do wrong.
//!
//! | file | what |
//! | --- | --- |
//! | `gradient_check.rs` | parameters perturbed for a forward, and what a backward brings along the way |
//! | `perturbation.rs` | the direction in which parameters are perturbed |
//! | `forward_outputs.rs` | outputs of forwards: whether a loss is one of this step |
//! | `inplace_writes.rs` | writes into parameters that the engine does not make |
//! | `divergence.rs` | the parts that ranks were in when their calls differed |

mod divergence;
pub(in crate::zero) mod forward_outputs;
pub(crate) mod gradient_check;
pub(in crate::zero) mod inplace_writes;
pub(in crate::zero) mod perturbation;
