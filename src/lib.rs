//! ZeRO (Zero Redundancy Optimizer, arXiv 1910.02054) for Candle: trains models whose optimizer states, gradients and
//! parameters are sharded over ranks, configured by a DeepSpeed JSON file.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use candle_nn::Module;
//! use candle_zero::Engine;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let config = r#"{ "train_batch_size": 8,
//!                       "optimizer": { "type": "AdamW", "params": { "lr": 1e-2 } },
//!                       "zero_optimization": { "stage": 3 } }"#; // or the path of a file
//!     let mut engine = Engine::initialize(|vb| candle_nn::linear(4, 1, vb), config)?;
//!     let x = Tensor::arange(0f32, 32f32, &Device::Cpu)?.reshape((8, 4))?;
//!     for _ in 0..10 {
//!         let loss = engine.forward(|model| model.forward(&x)?.sqr()?.mean_all())?;
//!         engine.backward(&loss)?;
//!         engine.step()?;
//!     }
//!     engine.export_safetensors(std::env::temp_dir().join("candle-zero-linear.safetensors"))?;
//!     Ok(())
//! }
//! ```
//!
//! A model is any type that is built from a `candle_nn::VarBuilder`. Started directly, this program is rank 0 of 1.
//! `zerorun`, `mpirun` or `srun` start it on several ranks. [`Engine`] is the entry point of the library.
//!
//! # Features
//!
//! All features are off by default.
//!
//! - `cli`: `cli::DsArgs`, the DeepSpeed arguments of a training script as a clap struct, and progress bars.
//! - `cuda`: training on NVIDIA GPUs through Candle's CUDA backend. The engine's own operations have CUDA kernels;
//!   collectives go through NCCL or host memory. It has been tested on one H200; collectives between several GPUs
//!   have run only on a mock.
//! - `s3`: checkpoints in an object store: S3, and services that speak its protocol.
//!
//! # Vocabulary
//!
//! | term | meaning | elsewhere |
//! | --- | --- | --- |
//! | rank, world size | one of the processes (or threads) that train together; the number of ranks | the same |
//! | Psi, N | the number of parameters; the number of ranks | the ZeRO paper |
//! | stage | the sharded part: nothing (0), optimizer states (1), also gradients (2), also parameters (3) | the same |
//! | unit | parameters that are gathered and released together, such as a transformer block | FSDP unit |
//! | routed unit | a unit, such as an expert, that is gathered only if a row on any rank chose it | no common term |
//! | shard | the part of one parameter that one rank owns; shards are padded to equal length | the same |
//! | share | everything that one rank owns: its shards of all parameters | partition (DeepSpeed) |
//! | sub-group | consecutive shards of a share that the optimizer updates in one piece | the same (DeepSpeed) |
//! | whole, absent | a parameter's residency: its tensor holds all elements, or none | unsharded, sharded (FSDP2) |
//! | gather, release | make a parameter whole; make it absent again | unshard, reshard (FSDP2) |
//! | bucket | gradients that are reduced together | the same |
//! | master weights | the f32 weights behind 16-bit parameters | the same |
//! | micro step | forward and backward pass; `gradient_accumulation_steps` of them form an optimizer step | the same |
//! | vote | the collective before an update: gradient norm, overflow and mean loss over all ranks | no common term |
//! | publish | distribute updated shards to all ranks (stages 1 and 2) | all-gather of updated parameters |
//! | ledger | the record of allocated model-state memory by kind: see [`Engine::memory_report`] | no common term |
//! | pipeline stage, chunk | consecutive layers that one rank holds; one of several such stages of a rank | the same |
//! | island, local steps | ranks that train by themselves for many steps; these steps | DiLoCo worker, inner steps |
//! | slot, donor | the place of an island in a run; the island that gives its state to a joining one | no common term |
//! | holders | with expert parallelism, the ranks that hold the same experts | expert data-parallel group (DeepSpeed) |
//! | outer step | the update with the mean change of all islands | the same (DiLoCo) |
//! | rehearsal | a step that allocates and transfers nothing and only counts, for [`estimate`] | dry run |
//!
//! # Data flow
//!
//! ```text
//! parameter   init -> share -> [gather -> unit forward -> release] -> [gather -> unit backward -> release]
//! gradient    capture -> bucket -> reduce on the communication thread -> this rank's share
//! step        vote (overflow, norm) -> clip -> update, sub-group by sub-group -> publish
//! islands     change since the last exchange -> mean over islands -> outer step -> publish
//! ```
//!
//! To read the sources, begin with `src/engine.rs`. `docs/architecture.md` follows these lines through the files.
#![deny(missing_docs)]

#[cfg(not(target_os = "linux"))]
compile_error!(
    "candle-zero runs only on Linux: ranks share memory through memfd_create and wait in futexes, and offloaded state \
     needs O_TMPFILE, O_DIRECT and fallocate; on another system, build it in a Linux container or virtual machine"
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
pub mod island_server;
#[doc(hidden)]
pub mod json_leaves;
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
pub mod pipeline;
pub mod precision;
pub mod profiler;
pub mod runs;
#[doc(hidden)]
pub mod stop_signal;
pub mod sweep;
mod tensor;
#[doc(hidden)]
pub mod timeline;
#[doc(hidden)]
pub mod untrusted_work;
#[doc(hidden)]
pub mod util;
mod wall_clock;
pub mod zero;

/// The version of Candle that the signatures of this crate use.
pub use candle_core;
/// The version of candle-nn that the signatures of this crate use.
pub use candle_nn;
pub use config::Config;
pub use engine::{Engine, EngineBuilder, GradientCheckVerdict, GradientReport, GradientRow};
pub use error::{Error, Result};
pub use profiler::StepTimings;
/// The crate of the `Value` type in this library's API, re-exported for programs that do not depend on it themselves.
pub use serde_json;

/// The folder that this library was built from. `zerorun` builds scripts against it.
#[doc(hidden)]
pub const CHECKOUT: &str = env!("CARGO_MANIFEST_DIR");

/// Compiles and runs the code in README.md as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Compiles and runs the code in docs/pipeline.md as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/pipeline.md")]
struct PipelinePage;

/// Compiles and runs the code in docs/local_steps.md as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/local_steps.md")]
struct LocalStepsPage;

/// Compiles and runs the code in docs/frozen.md as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/frozen.md")]
struct FrozenPage;
