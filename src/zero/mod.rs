//! The ZeRO mechanism: what is gathered, reduced, updated and published, and when.
//!
//! | folder | what |
//! | --- | --- |
//! | `share/` | this rank's share of the model: parameters registered, sub-groups laid out, their states read and written |
//! | `gather/` | units and their parameters: gathered, prefetched, released; recomputation |
//! | `reduce/` | gradients: bucketed, reduced, added to the share |
//! | `step/` | the optimizer step: vote, update, publish |
//! | `transfer/` | collectives and copies between host and GPU that are under way |
//! | `gpu/` | what runs on the GPU: packing of gradients, the step of a share there, the times of the model's work |
//! | `check/` | whether gradients are right, and what a program or the ranks do wrong |
//!
//! | file | what |
//! | --- | --- |
//! | `rank_core.rs` | the state of one rank, shared by engine and graph |
//! | `rank_backend.rs` | what decisions see of a rank: the core, or a rehearsal that only counts |
//! | `core_backend.rs` | the core as such a rank |
//! | `hooks.rs` | forward and backward, as engine, units and parameters call them |
//! | `model_buffers.rs` | tensors that are not parameters: the same on all ranks |
//!
//! The decisions of a step are written once, over `rank_backend::RankBackend`; the core and a rehearsal carry them out.

pub(crate) mod check;
mod core_backend;
pub(crate) mod gather;
#[cfg(feature = "cuda")]
mod gpu;
mod hooks;
pub(crate) mod model_buffers;
pub(crate) mod rank_backend;
pub(crate) mod rank_core;
pub(crate) mod reduce;
pub(crate) mod share;
pub(crate) mod step;
pub(crate) mod transfer;

#[doc(inline)]
pub use crate::param::BufferSync;
pub use gather::unit::{Unit, unit};
