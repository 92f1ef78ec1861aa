//! Estimates what a configuration needs before anything runs: the bytes of each rank by kind and memory tier, and the
//! bytes on the wire and in files in each step.
//!
//! ```
//! use candle_zero::config::Config;
//! use candle_zero::estimate::{Estimate, Shapes};
//!
//! let shapes = Shapes::of("two layers", |vb| {
//!     Ok((candle_nn::linear(64, 64, vb.pp("a"))?, candle_nn::linear(64, 1, vb.pp("b"))?))
//! })?;
//! let config = r#"{ "train_batch_size": 8, "optimizer": { "type": "AdamW" }, "zero_optimization": { "stage": 2 } }"#;
//! let estimate = Estimate::new(&shapes, &Config::load(config, 4)?)?;
//! println!("{}", estimate.memory);
//! # Ok::<(), candle_zero::Error>(())
//! ```
//!
//! The estimate reads the names and shapes of the parameters, but never a weight. The engine's own code lays the
//! parameters out and decides when to transfer what, using a ledger like the engine's (`rehearsal.rs`). Therefore, held
//! bytes and traffic equal those of the engine, to the byte. The peaks are equal too if the model's units run in the
//! order in which they were built.
//!
//! | file | content |
//! | --- | --- |
//! | `shapes.rs` | the parameters of a model, of a preset or of safetensors files |
//! | `rehearsal.rs` | a training step that only counts |
//! | `meta_buffer.rs`, `rehearsed_files.rs` | the buffers and files of a rehearsal |
//! | `traffic.rs` | the bytes that are moved |
//! | `step_trace.rs` | the events of a step: computation, collectives, waits |
//! | `network.rs` | a network link, and the time that messages take on it |
//! | `measured_step.rs` | the time of a step on one host |
//! | `forecast.rs` | the time of a step on several hosts |
//! | `pipeline.rs` | the ranks of a pipeline |
//! | `options.rs` | the inputs of an estimate besides the model and the configuration |
//! | `paper.rs` | table 1 of the ZeRO paper |
//! | `deepspeed.rs` | the formulas of DeepSpeed's estimators |

pub mod deepspeed;
pub(crate) mod error;
mod forecast;
mod measured_step;
mod meta_buffer;
mod network;
mod options;
pub mod paper;
mod pipeline;
mod rehearsal;
mod rehearsed_files;
mod shapes;
mod step_trace;
mod traffic;

pub use forecast::{Forecast, InterHostTraffic, ScalingRow};
pub use measured_step::MeasuredStep;
pub use network::Network;
pub use options::EstimateOptions;
pub use pipeline::{PipelineEstimate, PipelineRankEstimate};
pub use shapes::{Shapes, UnitRule};
pub use traffic::{CollectiveCounts, Traffic};

use crate::config::Config;
use crate::error::{EngineError, ModelError, Result};
use crate::memory::MemoryReport;
use rehearsal::Rehearsal;
use serde::Serialize;
use step_trace::StepTrace;

/// The maximum number of parameters, chosen so that their state can be counted in bytes.
const MAX_PARAMETERS: usize = 1 << 57;

/// The estimated needs of each rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Estimate {
    /// The model state of a rank, as [`Engine::memory_report`](crate::Engine::memory_report) will count it.
    ///
    /// Held bytes are exact. Peaks are exact too, except those that depend on the speed of a disk: gradients being
    /// written to files, and copies for direct access (a part of staging), are counted at their maximum.
    pub memory: MemoryReport,
    /// The traffic of a rank in one optimizer step.
    pub step: Traffic,
    /// The events of this step.
    #[serde(skip)]
    step_trace: StepTrace,
}

impl Estimate {
    /// Estimates a model on the CPU. `config` determines the number of ranks.
    ///
    /// # Errors
    /// The errors of [`Estimate::with`].
    pub fn new(shapes: &Shapes, config: &Config) -> Result<Self> {
        Self::with(shapes, config, EstimateOptions::default())
    }

    /// Estimates a model with [`EstimateOptions`].
    ///
    /// # Errors
    /// More parameters than can be counted in bytes; a module in `data_types.keep_in_fp32_modules` that does not exist;
    /// experts that cannot be divided as `expert_parallel` requests; a pipeline of several stages; ranks that cannot be
    /// divided among the islands.
    pub fn with(shapes: &Shapes, config: &Config, options: EstimateOptions) -> Result<Self> {
        let parameters = shapes.num_parameters();
        if parameters > MAX_PARAMETERS {
            let allowed = format!("at most {MAX_PARAMETERS}");
            let found = parameters.to_string();
            return Err(ModelError::Config { key: "number of parameters", found, allowed }.into());
        }
        if let Some(stages @ 2..) = config.pipeline.stages {
            let why = format!(
                "pipeline.stages is {stages}, but this estimate covers only data-parallel ranks; use PipelineEstimate \
                 (zerorun estimate --pipeline), or remove the key"
            );
            return Err(EngineError::Pipeline { why }.into());
        }
        let world_size = config.world_size;
        let (config, islands) = &config.of_island(options.hosts);
        if !world_size.is_multiple_of(*islands) {
            return Err(EngineError::indivisible_islands(*islands, world_size).into());
        }
        let options = EstimateOptions { hosts: (options.hosts / islands).max(1), ..options };
        let (params, leaves) = shapes.registered(config)?;
        let rehearsal = Rehearsal::new(&params, leaves, config, options)?.with_buffers(shapes.buffer_bytes());
        let _in_flight = rehearsal.exchange(*islands)?;
        let (step, step_trace) = rehearsal.train()?;
        Ok(Self { memory: rehearsal.report(), step, step_trace })
    }

    /// Returns the maximum number of bytes of a rank in host memory, page-locked or not. The peaks of different kinds,
    /// which are summed here, need not occur at the same time.
    pub fn host_bytes(&self) -> usize {
        self.memory.rows.iter().map(|row| row.host.peak + row.pinned.peak).sum()
    }

    /// Returns the maximum number of bytes of a rank in GPU memory; see [`Estimate::host_bytes`].
    pub fn device_bytes(&self) -> usize {
        self.memory.rows.iter().map(|row| row.device.peak).sum()
    }

    /// Returns the number of bytes that a rank reserves in files.
    pub fn file_bytes(&self) -> usize {
        self.memory.rows.iter().map(|row| row.file.peak).sum()
    }
}
