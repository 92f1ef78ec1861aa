//! The configuration that the engine uses, with every default filled in and every rule checked.

use super::{ConfigNote, Monitoring, PipelineConfig};
use candle_core::DType;

mod optimizer;
mod scheduler;
mod zero;

pub use optimizer::*;
pub use scheduler::*;
pub use zero::*;

/// A DeepSpeed JSON configuration, resolved for one world size, with defaults filled in.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// The number of ranks that the batch keys were resolved for.
    pub world_size: usize,
    /// The batch triad.
    pub batch: BatchConfig,
    /// `fp16`, `bf16`, or neither.
    pub precision: Precision,
    /// `torch_autocast`, if enabled: the dtype of the products of linear layers in an f32 model.
    pub autocast: Option<DType>,
    /// The dtypes of master weights and optimizer moments.
    pub states: StatePrecision,
    /// `gradient_clipping`: the maximum global L2 norm; 0 switches clipping off. Default 1.0.
    pub gradient_clipping: f64,
    /// `prescale_gradients`: divide by the world size before the reduction.
    pub prescale_gradients: bool,
    /// `gradient_predivide_factor`: gradients are divided by this number before the reduction, and by world size / this
    /// number after the reduction. With 1, the default, they are divided by the world size before the reduction.
    pub gradient_predivide_factor: f64,
    /// `gradient_allreduce_op`: average or sum over ranks.
    pub gradient_allreduce_op: GradientOp,
    /// `communication_data_type`: the dtype in which gradients are sent; `None`: the model's dtype.
    pub communication_data_type: Option<DType>,
    /// `data_types.grad_accum_dtype`: the dtype in which gradients are accumulated; `None`: the model's dtype.
    pub grad_accum_dtype: Option<DType>,
    /// `data_types.buffer_dtype`: the dtype that a model's float buffers are cast to; `None`: the dtype that the model
    /// requests.
    pub buffer_dtype: Option<DType>,
    /// `data_types.keep_in_fp32_modules`: the names of modules whose parameters stay in f32; empty for an f32 model.
    pub keep_in_fp32_modules: Vec<String>,
    /// `zero_optimization`.
    pub zero: ZeroConfig,
    /// `optimizer`. An engine that trains needs one.
    pub optimizer: Option<OptimizerConfig>,
    /// `zero_allow_untested_optimizer`: allow SGD, Lamb, Adafactor and a custom optimizer at stages 1 to 3.
    pub allows_untested_optimizer: bool,
    /// `scheduler`. Without one, the optimizer's `lr` applies.
    pub scheduler: Option<SchedulerConfig>,
    /// `steps_per_print`: log every N optimizer steps; `None`: never.
    pub steps_per_print: Option<u64>,
    /// `wall_clock_breakdown`: log the duration of each phase every `steps_per_print` steps (without that key, every
    /// step).
    pub wall_clock_breakdown: bool,
    /// The monitors, loggers and profilers.
    pub monitoring: Monitoring,
    /// `gradient_check`: compare the gradient of the first step with finite differences of the loss. Default true.
    pub gradient_check: bool,
    /// `pipeline`: how many ranks form a pipeline, and how layers are divided among its stages.
    pub pipeline: PipelineConfig,
    /// `expert_parallel.autoep_size`: the number of ranks among which the experts of each layer are divided. Default 1:
    /// experts are sharded like other parameters.
    pub expert_parallel_size: usize,
    /// `local_steps`: islands of ranks exchange the changes in their weights only after many steps; `None`: all ranks
    /// form one island.
    pub local_steps: Option<super::LocalStepsConfig>,
    /// The `seed` of the initial weights. Default 42.
    pub seed: u64,
    /// `activation_checkpointing.every_unit`, or another key of that section with the same effect: every unit recomputes
    /// its forward pass during the backward pass.
    pub activation_checkpointing: bool,
    /// `activation_checkpointing.cpu_checkpointing`: the inputs that recomputing units keep are moved out of the
    /// model's memory: to the host if the model is on a GPU, or to a file if anything is offloaded to `nvme`.
    pub cpu_checkpointing: bool,
    /// `aio`: the settings of file access.
    pub aio: Aio,
    /// `checkpoint.tag_validation`.
    pub tag_validation: TagValidation,
    /// `checkpoint.upload_to`: the object store that receives each checkpoint once it is on disk.
    pub upload_checkpoints_to: Option<String>,
    /// `checkpoint.use_node_local_storage`: the ranks of each host save into a folder on that host.
    pub use_node_local_storage: bool,
    /// `checkpoint.writer.decoupled`: [`save_checkpoint`](crate::Engine::save_checkpoint) saves in the background.
    pub saves_in_background: bool,
    /// `checkpoint.writer.show_statistics`: rank 0 logs the size of a checkpoint and its write speed.
    pub shows_save_statistics: bool,
    /// The notes about this configuration: keys accepted without effect, translated, or not supported.
    pub notes: Vec<ConfigNote>,
    /// Every key of DeepSpeed with its resolved value, including keys that have no effect in candle-zero; see
    /// [`Config::to_deepspeed_json`]. The fields above take precedence.
    pub all_keys: serde_json::Map<String, serde_json::Value>,
}

/// `train_batch_size` = `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x world size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchConfig {
    /// The number of samples per optimizer step, over all ranks.
    pub train_batch_size: usize,
    /// The number of samples per rank and forward pass.
    pub train_micro_batch_size_per_gpu: usize,
    /// The number of micro batches per optimizer step.
    pub gradient_accumulation_steps: usize,
}

/// The number format of parameters and activations.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Precision {
    /// Everything in f32.
    F32,
    /// bfloat16 parameters, f32 master weights.
    Bf16 {
        /// `bf16.check_grad_overflow` (default true): skip a step with a non-finite gradient.
        check_grad_overflow: bool,
    },
    /// f16 parameters, f32 master weights, scaled loss.
    Fp16(Fp16),
}

impl Precision {
    /// Returns the dtype of parameters and activations.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 { .. } => DType::BF16,
            Self::Fp16(_) => DType::F16,
        }
    }

    /// Returns whether the loss scale adapts to the gradients.
    pub fn adapts_loss_scale(&self) -> bool {
        matches!(self, Self::Fp16(fp16) if fp16.loss_scale == 0.0)
    }
}

/// The dtypes of master weights and optimizer moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StatePrecision {
    /// Whether 16-bit parameters have f32 master weights (default true). False with `bf16_master_weights_and_grads` or
    /// `fp16_master_weights_and_grads`.
    pub master_weights: bool,
    /// `bf16_optimizer_states` (default false): store the optimizer's moments in bfloat16.
    pub bf16_moments: bool,
}

/// The `fp16` section.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Fp16 {
    /// `loss_scale`: 0 means dynamic; any other value is a static scale.
    pub loss_scale: f64,
    /// The base-2 exponent of the first dynamic scale. Default 16.
    pub initial_scale_power: u32,
    /// The number of steps without overflow before the scale doubles. Default 1000.
    pub loss_scale_window: u64,
    /// The number of overflows that it takes to halve the scale. Default 2.
    pub hysteresis: u32,
    /// Whether each step without overflow refills the hysteresis.
    pub consecutive_hysteresis: bool,
    /// The minimum of the dynamic scale. Default 1.
    pub min_loss_scale: f64,
}

/// `gradient_allreduce_op`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GradientOp {
    /// The average over ranks (default).
    Mean,
    /// The sum over ranks.
    Sum,
}

/// `checkpoint.tag_validation`: the action when ranks save under different tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TagValidation {
    /// All ranks use rank 0's tag.
    Ignore,
    /// All ranks use rank 0's tag, and rank 0 prints a message (default).
    Warn,
    /// All ranks return an error.
    Fail,
}

impl Config {
    /// Returns the number of ranks among which state is sharded: those of an island, if ranks take local steps.
    pub(crate) fn ranks_per_island(&self) -> usize {
        let islands = self.local_steps.as_ref().and_then(|config| config.islands).unwrap_or(1);
        self.world_size / islands.clamp(1, self.world_size.max(1))
    }

    /// Returns the number of ranks that one launcher starts: those of an island, if the islands have a server.
    pub(crate) fn launched_ranks(&self) -> usize {
        match &self.local_steps {
            Some(local_steps) if local_steps.server.is_some() => self.ranks_per_island(),
            _ => self.world_size,
        }
    }

    /// Returns two values for a job on `hosts` hosts: the configuration of one island, as if the job had only the ranks
    /// of that island, and the number of islands.
    pub(crate) fn of_island(&self, hosts: usize) -> (Self, usize) {
        let mut config = self.clone();
        let islands = self.local_steps.as_ref().map_or(1, |local_steps| local_steps.islands.unwrap_or(hosts.max(1)));
        config.local_steps = self.local_steps.clone().filter(|_| islands > 1);
        match &mut config.local_steps {
            Some(local_steps) => local_steps.islands = Some(1),
            None => return (config, 1),
        }
        config.world_size = (self.world_size / islands).max(1);
        (config, islands)
    }
}
