//! The ZeRO mechanism: what is gathered, reduced, updated and published, and when.
//!
//! | file | what |
//! | --- | --- |
//! | `buffers.rs` | tensors that are no parameters: the same on all ranks |
//! | `unit.rs` | what is gathered and released together; recomputation |
//! | `kept_input.rs`, `replay.rs` | what recomputation keeps, and where; whether it gives the same again |
//! | `core.rs` | the state of one rank, shared by engine and graph |
//! | `rank.rs` | what decisions see of a rank: the core, or a rehearsal that only counts |
//! | `run.rs` | forward and backward, as engine, units and parameters call them |
//! | `registry.rs`, `share_plan.rs` | the `VarBuilder` backend: parameters registered, and shared among ranks |
//! | `sub_group.rs`, `lay_out.rs` | this rank's share of the model, and how it is laid out |
//! | `packed.rs` | packed weights, as words |
//! | `parcel.rs`, `batch.rs`, `travel.rs` | what travels together, what is under way, and how |
//! | `gather.rs`, `bundle.rs`, `trace.rs` | parameters at stage 3: gathered, prefetched, released |
//! | `gradients.rs` | gradients: bucketed, reduced, added to the share |
//! | `on_device.rs`, `device_step.rs` | gradients packed, and a share updated, on a GPU |
//! | `gpu_work.rs` | when the model's work ran on a GPU |
//! | `step.rs`, `delayed.rs` | vote, update; an update beside the next step |
//! | `unreduced.rs`, `no_sync.rs` | gradients that a rank keeps for itself until they are reduced |
//! | `walk.rs` | a pass through the share, in memory and in files |
//! | `moving.rs`, `away.rs` | what goes to and fro between the host and the GPU; weights there that a step on the host changes |
//! | `moment.rs`, `kept.rs` | optimizer states in formats other than f32, and their way to f32 and back |
//! | `whole.rs` | norms of whole parameters, and directions made of whole ones |
//! | `publish.rs` | updated shards, brought to all ranks |
//! | `leaf.rs` | units that are gathered as one with all units inside |
//! | `diverged.rs` | the parts that ranks were in when their calls differed |
//! | `unused.rs` | parameters that no backward reaches |
//! | `freeze.rs` | parameters frozen and thawed between steps |
//! | `access.rs` | one parameter, its gradient and states, read and set |
//! | `for_eval.rs` | a second instance of the model, for evaluation |
//! | `export.rs` | whole parameters in a file |
//!
//! The decisions of a step are written once, over `rank::Rank`; the core and a rehearsal carry them out.

mod access;
#[cfg(feature = "cuda")]
mod away;
mod batch;
pub(crate) mod buffers;
mod bundle;
pub(crate) mod core;
#[cfg(feature = "cuda")]
mod delayed;
#[cfg(feature = "cuda")]
mod device_step;
mod direction;
mod diverged;
mod export;
pub(crate) mod for_eval;
mod freeze;
pub(crate) mod gather;
#[cfg(feature = "cuda")]
mod gpu_work;
pub(crate) mod gradient_check;
pub(crate) mod gradients;
mod kept;
mod kept_input;
pub(crate) mod lay_out;
pub(crate) mod leaf;
pub(crate) mod moment;
pub(crate) mod moving;
mod no_sync;
#[cfg(feature = "cuda")]
mod on_device;
mod outputs;
mod packed;
pub(crate) mod parcel;
mod publish;
pub(crate) mod rank;
mod recipe;
pub(crate) mod registry;
mod replay;
mod run;
pub(crate) mod share;
pub(crate) mod share_plan;
pub(crate) mod step;
pub(crate) mod sub_group;
pub(crate) mod trace;
pub(crate) mod travel;
pub(crate) mod unit;
mod unreduced;
mod unused;
pub(crate) mod walk;
mod whole;
mod written;

pub use crate::param::BufferSync;
pub use unit::{Unit, unit};
