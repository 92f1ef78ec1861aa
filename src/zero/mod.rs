//! The ZeRO mechanism: gathers, reduces, updates and publishes model state.
//!
//! | folder | contents |
//! | --- | --- |
//! | `share/` | this rank's share: registration of parameters, layout of sub-groups, access to their states |
//! | `gather/` | units and their parameters: gathering, prefetching, releasing; recomputation |
//! | `reduce/` | gradients: bucketing, reduction, addition to the share |
//! | `step/` | the optimizer step: vote, update, publish |
//! | `transfer/` | pending collectives and copies between host and GPU |
//! | `gpu/` | work on the GPU: packing of gradients, updates of the shares on it, timing of the model's work |
//! | `check/` | checks of gradients, and detection of mistakes in a program and of differences between ranks |
//!
//! | file | contents |
//! | --- | --- |
//! | `rank_core.rs` | the state of one rank, shared by engine and graph |
//! | `step_executor.rs` | the interface through which decisions act on a rank, or on a rehearsal that only counts |
//! | `engine_step_executor.rs` | the core as a `StepExecutor` |
//! | `expert_ranks.rs` | the ranks among which experts are divided |
//! | `hooks.rs` | forward and backward passes: the methods that the engine, units and parameters call |
//! | `model_buffers.rs` | tensors that are not parameters, and their synchronization between ranks |
//!
//! The decisions of a step are written once, in terms of `step_executor::StepExecutor`. The core and a rehearsal carry
//! them out.

pub(crate) mod check;
mod engine_step_executor;
pub(crate) mod expert_ranks;
pub(crate) mod gather;
#[cfg(feature = "cuda")]
mod gpu;
mod hooks;
pub(crate) mod model_buffers;
pub(crate) mod rank_core;
pub(crate) mod reduce;
pub(crate) mod share;
pub(crate) mod step;
pub(crate) mod step_executor;
pub(crate) mod transfer;

#[doc(inline)]
pub use crate::param::BufferSync;
pub(crate) use gather::expert_all_to_all::{ExpertAllToAll, ExpertMessageKind};
pub(crate) use gather::routed_units::RoutedPass;
pub use gather::routed_units::{RoutedUnits, routed_units};
pub use gather::unit::{Unit, unit};
