//! ZeRO (Zero Redundancy Optimizer, arXiv 1910.02054) for Candle: training with optimizer states, gradients and
//! parameters partitioned over ranks, driven by a DeepSpeed JSON configuration.
//!
//! # Vocabulary
//!
//! | word | meaning |
//! |---|---|
//! | rank, world size | one of the processes (or threads) that train together; their number |
//! | stage | what is sharded: nothing (0), optimizer states (1), gradients too (2), parameters too (3) |
//! | shard | the part of one parameter that one rank owns, padded to equal length |
//! | share | all that one rank owns: its shards, in sub-groups |
//! | sub-group | a run of shards that the optimizer works through as one piece |
//! | unit | parameters that are gathered and released together; one transformer block |
//! | whole, absent | a parameter's tensor holds all of it, or nothing |
//! | gather, release | make a parameter whole; make it absent again |
//! | bucket | gradients that are reduced together |
//! | publish | bring updated shards to all ranks (stages 1 and 2) |
//! | master weights | f32 weights behind 16-bit parameters |
//! | micro step | one forward and backward; `gradient_accumulation_steps` of them make an optimizer step |
//! | Psi, N | number of parameters, number of ranks |
//!
//! # The way of the data
//!
//! ```text
//! parameter   init -> share -> [gather -> unit forward -> release] -> [gather -> unit backward -> release]
//! gradient    capture -> bucket -> reduce on the comm thread -> this rank's share
//! step        vote (overflow, norm) -> clip -> update, sub-group by sub-group -> publish
//! ```
//!
//! [`Engine`] tells this story; the modules below are its words. Begin with the README and `engine.rs`.
#![deny(missing_docs)]

#[cfg(not(target_os = "linux"))]
compile_error!(
    "candle-zero runs on Linux alone: ranks share memory through memfd_create and wait in futexes, and offloaded state \
     needs O_TMPFILE, O_DIRECT and fallocate; on another system build it in a Linux container or virtual machine"
);

pub mod checkpoint;
pub mod cli;
pub mod comm;
pub mod config;
#[cfg(feature = "cuda")]
mod cuda;
pub mod data;
#[doc(hidden)]
pub mod device;
pub mod engine;
pub mod error;
pub mod estimate;
#[doc(hidden)]
pub mod files;
mod graph;
#[doc(hidden)]
pub mod kernels;
pub mod layout;
pub mod memory;
pub mod models;
pub mod monitor;
pub mod nn;
#[doc(hidden)]
pub mod notice;
pub mod offload;
pub mod optim;
#[doc(hidden)]
pub mod param;
pub mod precision;
pub mod profiler;
#[doc(hidden)]
pub mod sandbox;
#[doc(hidden)]
pub mod stop_signal;
mod tensor;
#[doc(hidden)]
pub mod timeline;
#[doc(hidden)]
pub mod util;
pub mod zero;

pub use config::Config;
pub use engine::{Engine, EngineBuilder, GradientReport, GradientRow, GradientVerdict};
pub use error::{Error, Result};
pub use profiler::StepTimings;
/// The crate whose `Value` and `json!` stand in calls of this one: for programs that do not name it themselves.
pub use serde_json;

/// The folder that this library was built from: `zerorun` builds scripts against it.
#[doc(hidden)]
pub const CHECKOUT: &str = env!("CARGO_MANIFEST_DIR");

/// README's code, compiled and run as a doc test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The code of docs/frozen.md, likewise.
#[cfg(doctest)]
#[doc = include_str!("../docs/frozen.md")]
struct FrozenPage;
