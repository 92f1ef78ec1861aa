//! Mixtures of experts: each row of a batch passes through a few of many MLPs.
//!
//! ```text
//!   x [rows, width] --> linear --> logits [rows, experts] --> route --> experts and weights of each row
//!       |                                                                   |
//!       +--> expert_rows --> gate and up --> gated_activation --> down --> combine_experts --> [rows, width]
//!             one row per choice, sorted by expert: one grouped product for each projection
//! ```
//!
//! [`ExpertMlp`] combines the steps in the lower line. No choice is dropped, and no row is padded. Memory and time are
//! proportional to the number of choices. Results have the same bits for any number of threads and in either form of
//! the weights ([`ExpertTensors`]).
//!
//! With expert parallelism, rows travel to the ranks that hold their experts (`traveling_rows.rs`).
//!
//! An expert whose tensors are separate can be a unit ([`crate::zero::routed_units`], [`ExpertMlp::with_units`]), which
//! is gathered at stage 3 only if a row on any rank chose it.

mod adapter;
mod assignment;
mod balance_loss;
mod gated_activation;
mod gradient_checked_router;
mod grouped_gemm;
mod mlp;
mod options;
mod permute_and_combine;
mod projection;
mod recorded_projection;
mod routing;
mod tensors;
mod traveling_rows;
mod unused;

pub use adapter::ExpertAdapter;
pub use assignment::ExpertAssignment;
pub use balance_loss::{SyncBalanceLoss, load_balancing_loss};
pub use gated_activation::gated_activation;
pub(crate) use gradient_checked_router::GradientCheckedRouter;
pub use mlp::ExpertMlp;
pub use options::{ExpertActivation, GateUpOrder, RouterOptions, RouterOrder};
pub use permute_and_combine::{add_gated, combine_experts, expert_rows};
pub use projection::ExpertProjection;
pub use routing::{Routing, route};
pub use tensors::ExpertTensors;

#[cfg(test)]
mod tests;
