//! The needs of a configuration, before anything runs: bytes of each rank by kind and tier, bytes on the wire and of
//! files in each step.
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
//! The estimate reads names and shapes of the parameters, never a weight. The engine's own code lays them out and
//! decides what travels when, on a ledger like the engine's (`rehearsal.rs`). So held bytes and traffic are those of
//! the engine, to the byte, and so are the peaks of a model whose units run in the order in which they were built.
//!
//! | file | what |
//! | --- | --- |
//! | `shapes.rs` | the parameters of a model, of a preset or of safetensors files |
//! | `rehearsal.rs` | a training step that only counts |
//! | `meta_buffer.rs`, `rehearsed_files.rs` | its buffers and its files |
//! | `traffic.rs` | what is moved |
//! | `step_trace.rs` | what happens in a step: computing, collectives, waits |
//! | `network.rs` | a cable, and how long messages take on it |
//! | `measured_step.rs` | how long a step of one host takes |
//! | `forecast.rs` | how long a step of several hosts takes |
//! | `options.rs` | what an estimate depends on besides model and configuration |
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
mod rehearsal;
mod rehearsed_files;
mod shapes;
mod step_trace;
mod traffic;

pub use forecast::{Forecast, InterHostTraffic, ScalingRow};
pub use measured_step::MeasuredStep;
pub use network::Network;
pub use options::EstimateOptions;
pub use shapes::{Shapes, UnitRule};
pub use traffic::{CollectiveCounts, Traffic};

use crate::config::Config;
use crate::error::{ModelError, Result};
use crate::memory::MemoryReport;
use rehearsal::Rehearsal;
use serde::Serialize;
use step_trace::StepTrace;

/// Parameters at most: their state is counted in bytes.
const MOST_PARAMETERS: usize = 1 << 57;

/// The needs of each rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// Model state of a rank, as [`Engine::memory_report`](crate::Engine::memory_report) will count it.
    ///
    /// Held bytes are exact. So are peaks, but for what depends on how fast a disk is: gradients on their way to files,
    /// and copies for direct access (a part of staging), are counted at their most.
    pub memory: MemoryReport,
    /// The traffic of a rank in one optimizer step.
    pub step: Traffic,
    /// How such a step goes.
    #[serde(skip)]
    step_trace: StepTrace,
}

impl Estimate {
    /// The estimate for a model on the CPU; `config` knows the number of ranks.
    ///
    /// # Errors
    /// As [`Estimate::with`].
    pub fn new(shapes: &Shapes, config: &Config) -> Result<Self> {
        Self::with(shapes, config, EstimateOptions::default())
    }

    /// The estimate with [`EstimateOptions`].
    ///
    /// # Errors
    /// More parameters than bytes of them can be counted; a module of `data_types.keep_in_fp32_modules` that is not there.
    pub fn with(shapes: &Shapes, config: &Config, options: EstimateOptions) -> Result<Self> {
        let parameters = shapes.num_parameters();
        if parameters > MOST_PARAMETERS {
            let allowed = format!("at most {MOST_PARAMETERS}");
            let found = parameters.to_string();
            return Err(ModelError::Config { key: "number of parameters", found, allowed }.into());
        }
        let (params, leaves) = shapes.registered(config)?;
        let rehearsal = Rehearsal::new(&params, leaves, config, options)?.with_buffers(shapes.buffer_bytes());
        let (step, step_trace) = rehearsal.train()?;
        Ok(Self { memory: rehearsal.report(), step, step_trace })
    }

    /// Bytes of a rank in the host's memory, page-locked or not, at most: peaks of different kinds need not be at the same time.
    pub fn host_bytes(&self) -> usize {
        self.memory.rows.iter().map(|row| row.host.peak + row.pinned.peak).sum()
    }

    /// The same in the memory of the GPU.
    pub fn device_bytes(&self) -> usize {
        self.memory.rows.iter().map(|row| row.device.peak).sum()
    }

    /// Bytes that a rank reserves in files.
    pub fn file_bytes(&self) -> usize {
        self.memory.rows.iter().map(|row| row.file.peak).sum()
    }
}
