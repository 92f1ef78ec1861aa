//! The configuration that the engine uses, with every default filled in and every rule checked.

use super::{ConfigNote, Monitoring, PipelineConfig};
use crate::layout::{ShardMesh, ZeroStage};
use candle_core::DType;
use std::path::{Path, PathBuf};

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
    /// `activation_checkpointing.every_unit`, or another key of that section that requests it: every unit recomputes
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
    /// `checkpoint.use_node_local_storage`: the ranks of each host save into a folder that only this host can access.
    pub use_node_local_storage: bool,
    /// `checkpoint.writer.decoupled`: [`save_checkpoint`](crate::Engine::save_checkpoint) saves in the background.
    pub saves_in_background: bool,
    /// `checkpoint.writer.show_statistics`: rank 0 logs the size of a checkpoint and its write speed.
    pub shows_save_statistics: bool,
    /// The notes about this configuration: keys accepted without effect, translated, or not supported.
    pub notes: Vec<ConfigNote>,
    /// Every key of DeepSpeed with its resolved value, including keys that have no effect in candle-zero; see
    /// [`Config::to_deepspeed_json`]. The fields above take precedence.
    pub recorded: serde_json::Map<String, serde_json::Value>,
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

/// `zero_optimization`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ZeroConfig {
    /// `stage`, from 0 to 3.
    pub stage: ZeroStage,
    /// `reduce_bucket_size`, in elements. Default 5e8.
    pub reduce_bucket_size: usize,
    /// `allgather_bucket_size`, in elements. Default 5e8.
    pub allgather_bucket_size: usize,
    /// `overlap_comm`: run reductions and gathers while the model computes. Default: true at stage 3 only.
    pub overlap_comm: bool,
    /// `load_from_fp32_weights` (default true): load master weights as they were saved; false: rounded to the model's
    /// dtype.
    pub load_from_fp32_weights: bool,
    /// `log_trace_cache_warnings`: rank 0 logs when the order in which units are used changes. Default false.
    pub log_trace_cache_warnings: bool,
    /// `contiguous_gradients`. Buckets are always contiguous in candle-zero; the key is only recorded.
    pub contiguous_gradients: bool,
    /// `reduce_scatter`: reduce to owners; false: all-reduce and keep the owned part.
    pub reduce_scatter: bool,
    /// `sub_group_size`: the number of elements of this rank's share that one part of an optimizer step updates.
    /// Default 1e9.
    pub sub_group_size: usize,
    /// `stage3_prefetch_bucket_size`: the number of elements gathered ahead; 0 switches prefetching off. Default 5e7.
    pub prefetch_bucket_size: usize,
    /// `stage3_param_persistence_threshold`: parameters with at most this many elements stay gathered. Default 1e5.
    pub param_persistence_threshold: usize,
    /// `stage3_model_persistence_threshold`, in elements: the maximum total of all such parameters.
    pub model_persistence_threshold: usize,
    /// `stage3_max_live_parameters`: the number of elements gathered at a time before prefetching stops. Default 1e9.
    pub max_live_parameters: usize,
    /// `stage3_max_reuse_distance`, in elements: a parameter used again within this many elements is not released.
    /// Default 1e9.
    pub max_reuse_distance: usize,
    /// `zero_hpz_partition_size`: at stage 3 on several hosts, groups of this many ranks on one host keep a second copy
    /// of gathered parameters, and gather again from it. Default 1: none.
    pub hpz_partition_size: usize,
    /// `mics_shard_size`: at stage 3, everything is sharded within groups of this many ranks. Default `None`: among all
    /// ranks, as at lower stages.
    pub mics_shard_size: Option<usize>,
    /// `zero_quantized_weights`: stage 3 gathers int8 with a scale per block. Lower stages do not gather weights.
    pub quantized_weights: bool,
    /// `zero_quantized_nontrainable_weights`: frozen matrices are stored and gathered in 8 bits at stage 3.
    pub quantized_nontrainable_weights: bool,
    /// `zero_quantized_gradients`: gradients are sent as int4 with a scale per block.
    pub quantized_gradients: bool,
    /// `compress_between_hosts_only`: `zero_quantized_weights`, `zero_quantized_gradients` and a 16-bit
    /// `communication_data_type` apply only between hosts: to the sums of each host's gradients, and to gathers between
    /// hosts. Default false.
    pub compress_between_hosts_only: bool,
    /// `ignore_unused_parameters`: a parameter that no backward pass reaches gets a gradient of zeros instead of an
    /// error. Default: false (DeepSpeed: true).
    pub ignore_unused_parameters: bool,
    /// `leaf_module`: units that are gathered together with all units inside them.
    pub leaf_module: LeafModule,
    /// `offload_optimizer`; `None` if nothing is offloaded (`device` none, or stage 0).
    pub offload_optimizer: Option<OffloadOptimizer>,
    /// `offload_param`; `None` if nothing is offloaded (`device` none, or a stage below 3).
    pub offload_param: Option<OffloadParam>,
}

/// `zero_optimization.leaf_module`: units that are gathered together with all units inside them, for modules in which
/// ranks run different parts. A unit's name is the prefix of the `VarBuilder` that it was built from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeafModule {
    /// `names`: full names.
    pub names: Vec<String>,
    /// `name_suffixes`: suffixes of names.
    pub name_suffixes: Vec<String>,
}

/// `device` and `nvme_path` of an offload section.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OffloadTo {
    /// Host memory.
    Cpu,
    /// Files in a folder on the host.
    Nvme {
        /// `nvme_path`.
        path: PathBuf,
    },
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

impl ZeroConfig {
    /// Returns whether weights, or gradients sent as `communication`, are sent in a compressed form: as integers or in
    /// 16 bits.
    pub(crate) fn compresses(&self, communication: Option<DType>) -> bool {
        let in_16_bits = communication.is_some_and(|dtype| dtype != DType::F32);
        self.quantized_gradients || self.quantized_weights && self.stage == ZeroStage::Three || in_16_bits
    }

    /// Returns how `world_size` ranks divide the sharded state. If the groups do not fit that number, as can happen in
    /// an estimate for a different number of ranks, the state is divided among all ranks.
    pub(crate) fn mesh(&self, world_size: usize) -> ShardMesh {
        let ranks = self.mics_shard_size.filter(|ranks| world_size.is_multiple_of(*ranks));
        ranks.map_or(ShardMesh::among_all(world_size), |ranks| ShardMesh::in_groups(world_size, ranks))
    }

    /// Returns `offload_optimizer` if optimizer state is offloaded to files.
    #[doc(hidden)]
    pub fn optimizer_files(&self) -> Option<&OffloadOptimizer> {
        self.offload_optimizer.as_ref().filter(|section| section.to.nvme_path().is_some())
    }

    /// Returns `offload_param` if parameter shards are offloaded to files.
    #[doc(hidden)]
    pub fn param_files(&self) -> Option<&OffloadParam> {
        self.offload_param.as_ref().filter(|section| section.to.nvme_path().is_some())
    }
}

impl OffloadTo {
    /// Returns the folder of the files.
    pub fn nvme_path(&self) -> Option<&Path> {
        match self {
            Self::Cpu => None,
            Self::Nvme { path } => Some(path),
        }
    }
}

/// `zero_optimization.offload_optimizer`: the location of master weights, moments and gradient shards.
#[derive(Debug, Clone, PartialEq)]
pub struct OffloadOptimizer {
    /// `device`.
    pub to: OffloadTo,
    /// `buffer_count`: the step's buffers together hold at most this many times the elements of the largest
    /// sub-group. Default 4.
    pub buffer_count: usize,
    /// `pipeline_read`: read the next data while the step computes. Default false.
    pub pipeline_read: bool,
    /// `pipeline_write`: write finished data while the step computes. Default false.
    pub pipeline_write: bool,
    /// `ratio`: the fraction of the sub-groups that is offloaded; the first ones stay in memory. Default 1.
    pub ratio: f64,
    /// `delayed_update`, after `delayed_update_after` updates (default 40): if a GPU runs the model, an update runs
    /// on the host during the next step, which still uses the weights before the update. `None`, the default: no delay.
    pub delayed_update_after: Option<u64>,
    /// `pin_memory`: copy gradients and updated weights between a GPU and the host through page-locked memory. Default
    /// true.
    pub pin_memory: bool,
}

/// `zero_optimization.offload_param`: the location of parameter shards.
#[derive(Debug, Clone, PartialEq)]
pub struct OffloadParam {
    /// `device`.
    pub to: OffloadTo,
    /// `buffer_count`: together with `buffer_size`, bounds the read-ahead. Default 5.
    pub buffer_count: usize,
    /// `buffer_size`, in elements. Default 1e8.
    pub buffer_size: usize,
    /// `max_in_cpu`: the number of elements of this rank's shards that stay in memory with `nvme`. Default 1e9.
    pub max_in_cpu: usize,
    /// `pin_memory`: copy shards from the host to a GPU through page-locked memory. Default true.
    pub pin_memory: bool,
}

impl OffloadParam {
    /// Returns the number of elements that may be read ahead.
    pub fn ahead(&self) -> usize {
        self.buffer_count.saturating_mul(self.buffer_size)
    }
}

/// `aio`: the settings of requests to the files of `nvme`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aio {
    /// `block_size`: the size of a request in bytes, rounded down to a multiple of 4 KiB, and limited to the range from
    /// 4 KiB to 16 MiB. Default 1 MiB.
    pub block_size: usize,
    /// `queue_depth`: the number of requests in flight per unit of `intra_op_parallelism`. Default 8.
    pub queue_depth: usize,
    /// `intra_op_parallelism`. Default 1.
    pub intra_op_parallelism: usize,
}

/// `optimizer` with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum OptimizerConfig {
    /// `Adam` and `AdamW`.
    Adam(AdamConfig),
    /// `SGD`.
    Sgd(SgdConfig),
    /// `Lion`.
    Lion(LionConfig),
    /// `Adagrad`.
    Adagrad(AdagradConfig),
    /// `Lamb`.
    Lamb(LambConfig),
    /// `Muon`.
    Muon(MuonConfig),
    /// `LARS`.
    Lars(LarsConfig),
    /// `Adafactor`.
    Adafactor(AdafactorConfig),
    /// `AdamWScheduleFree`.
    ScheduleFree(ScheduleFreeConfig),
    /// `Adam8bit`, `AdamW8bit` and `Lion8bit`.
    EightBit(EightBitConfig),
}

impl OptimizerConfig {
    /// Returns whether the optimizer has betas that a schedule can change.
    pub(crate) fn has_betas(&self) -> bool {
        match self {
            Self::Adam(_) | Self::Lion(_) | Self::Lamb(_) | Self::ScheduleFree(_) => true,
            Self::EightBit(_) => true,
            Self::Sgd(_) | Self::Adagrad(_) | Self::Muon(_) | Self::Lars(_) | Self::Adafactor(_) => false,
        }
    }
}

/// The parameters of Adam and AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamConfig {
    /// The learning rate. Default 1e-3.
    pub lr: f64,
    /// The decay rates of the two moments. Default 0.9, 0.999.
    pub betas: (f64, f64),
    /// The term added to the denominator. Default 1e-8.
    pub eps: f64,
    /// The weight decay. Default 0; with `torch_adam`, 0.01 if the decay is decoupled.
    pub weight_decay: f64,
    /// Whether to divide the moments by 1 - beta^t. Default true.
    pub bias_correction: bool,
    /// Whether the decay is decoupled (AdamW, and Adam unless `adam_w_mode` is false) instead of L2 added to the
    /// gradient.
    pub decoupled: bool,
}

/// The parameters of SGD.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdConfig {
    /// The learning rate. Default 1e-3.
    pub lr: f64,
    /// The momentum. Default 0: no momentum buffer.
    pub momentum: f64,
    /// The dampening of the momentum. Default 0.
    pub dampening: f64,
    /// The weight decay, added to the gradient. Default 0.
    pub weight_decay: f64,
    /// Whether to use Nesterov momentum. Default false.
    pub nesterov: bool,
}

/// The parameters of Lion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionConfig {
    /// The learning rate. Default 1e-3.
    pub lr: f64,
    /// The momentum's share in the update direction, and its decay rate. Default 0.9, 0.999.
    pub betas: (f64, f64),
    /// The decoupled weight decay. Default 0.
    pub weight_decay: f64,
}

/// The parameters of Adagrad.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradConfig {
    /// The learning rate. Default 1e-2.
    pub lr: f64,
    /// The term added to the denominator. Default 1e-10.
    pub eps: f64,
    /// The weight decay, added to the gradient. Default 0.
    pub weight_decay: f64,
}

/// The parameters of LAMB.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LambConfig {
    /// The learning rate. Default 1e-3.
    pub lr: f64,
    /// The decay rates of the two moments. Default 0.9, 0.999.
    pub betas: (f64, f64),
    /// The term added to the denominator. Default 1e-8.
    pub eps: f64,
    /// The decoupled weight decay. Default 0.
    pub weight_decay: f64,
    /// Whether to divide the moments by 1 - beta^t. Default true.
    pub bias_correction: bool,
    /// Whether to add `eps` to the second moment rather than to its square root. Default false.
    pub eps_inside_sqrt: bool,
    /// The maximum trust ratio. Default 10.
    pub max_coeff: f64,
    /// The minimum trust ratio. Default 0.01.
    pub min_coeff: f64,
}

/// The parameters of Muon.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonConfig {
    /// `muon_lr`, the learning rate of matrices. Default `lr`, else 0.02.
    pub lr: f64,
    /// The momentum. Default 0.95.
    pub momentum: f64,
    /// The decoupled weight decay. Default 0.
    pub weight_decay: f64,
    /// The orthogonalization method. Default gram.
    pub ns_method: NsMethod,
    /// The optimizer of the parameters that are not matrices. Its `lr` is `adam_lr`: default `lr`, else 3e-4. Its
    /// default `betas` are 0.9, 0.95, and its default `eps` is 1e-10.
    pub adam: AdamConfig,
}

/// The parameters of LARS.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LarsConfig {
    /// The learning rate. Default 0.1.
    pub lr: f64,
    /// The momentum. Default 0.9.
    pub momentum: f64,
    /// The weight decay, added to the gradient. Default 0.
    pub weight_decay: f64,
    /// The factor of every trust ratio. Default 0.001.
    pub trust_coefficient: f64,
    /// The term added to the denominator of the trust ratio. Default 1e-8.
    pub eps: f64,
}

/// The parameters of Adafactor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdafactorConfig {
    /// The learning rate. `None`: relative steps (`relative_step`).
    pub lr: Option<f64>,
    /// Whether the relative learning rate grows from 0 during the first 10,000 steps. Default false.
    pub warmup_init: bool,
    /// The term added to the squared gradient, and the minimum scale of a parameter. Default 1e-30, 1e-3.
    pub eps: (f64, f64),
    /// The root mean square above which an update is scaled down. Default 1.
    pub clip_threshold: f64,
    /// The exponent of the decay rate of the second moment, 1 - step^`decay_rate`. Default -0.8.
    pub decay_rate: f64,
    /// The decay rate of the first moment. Default `None`: no first moment.
    pub beta1: Option<f64>,
    /// The decoupled weight decay. Default 0.
    pub weight_decay: f64,
    /// Whether the learning rate is multiplied by the root mean square of the parameter. Default true.
    pub scale_parameter: bool,
}

/// The parameters of AdamWScheduleFree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScheduleFreeConfig {
    /// The learning rate. Default 0.0025.
    pub lr: f64,
    /// The weight of the average in the weights that are trained, and the decay rate of the second moment. Default 0.9,
    /// 0.999.
    pub betas: (f64, f64),
    /// The term added to the denominator. Default 1e-8.
    pub eps: f64,
    /// The decoupled weight decay. Default 0.
    pub weight_decay: f64,
    /// The number of steps during which the learning rate grows. Default 0.
    pub warmup_steps: u64,
    /// The exponent of the step's number in the step's weight in the average. Default 0.
    pub r: f64,
    /// The exponent of the learning rate in the step's weight in the average. Default 2.
    pub weight_lr_power: f64,
}

/// An optimizer with 8-bit states, and its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum EightBit {
    /// `Adam8bit`. Its decay is also decoupled, as in bitsandbytes.
    Adam(AdamConfig),
    /// `AdamW8bit`. Its default `weight_decay` is 0.01.
    AdamW(AdamConfig),
    /// `Lion8bit`. Its default `lr` is 1e-4, and its default `betas` are 0.9, 0.99.
    Lion(LionConfig),
}

impl EightBit {
    /// Returns bitsandbytes' name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Adam(_) => "Adam8bit",
            Self::AdamW(_) => "AdamW8bit",
            Self::Lion(_) => "Lion8bit",
        }
    }
}

/// The parameters of Adam8bit, AdamW8bit and Lion8bit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EightBitConfig {
    /// The optimizer.
    pub kind: EightBit,
    /// Parameters with fewer elements keep f32 states. Default 4096.
    pub min_8bit_size: usize,
}

/// The orthogonalization method of Muon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NsMethod {
    /// Newton-Schulz on the Gram matrix, in f32.
    Gram,
    /// Plain Newton-Schulz, in bf16.
    Standard,
}

/// The shape of a warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WarmupType {
    /// ln(it + 1) / ln(steps) (default).
    Log,
    /// it / steps.
    Linear,
}

/// One number for all parameter groups, or one for each.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum PerGroup {
    /// The same number for all groups.
    All(f64),
    /// One number per group.
    Each(Vec<f64>),
}

impl PerGroup {
    /// Returns the number for a group. If the list is too short, returns its last number; schedules refuse a list that
    /// is too short.
    pub fn of(&self, group: usize) -> f64 {
        match self {
            Self::All(number) => *number,
            Self::Each(numbers) => numbers.get(group).or(numbers.last()).copied().unwrap_or_default(),
        }
    }
}

impl From<f64> for PerGroup {
    fn from(number: f64) -> Self {
        Self::All(number)
    }
}

/// `scheduler` with its parameters.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum SchedulerConfig {
    /// `WarmupLR`.
    WarmupLr {
        /// The initial learning rate. Default 0.
        warmup_min_lr: PerGroup,
        /// The final learning rate. `None`: the optimizer's own lr.
        warmup_max_lr: Option<PerGroup>,
        /// The number of warm-up steps. Default 1000.
        warmup_num_steps: u64,
        /// The shape of the warm-up. Default log.
        warmup_type: WarmupType,
    },
    /// `WarmupDecayLR`.
    WarmupDecayLr {
        /// The total number of steps. Required.
        total_num_steps: u64,
        /// The learning rate at the start and at the end. Default 0.
        warmup_min_lr: PerGroup,
        /// The learning rate after the warm-up. Default 0.001.
        warmup_max_lr: PerGroup,
        /// The number of warm-up steps. Default 1000.
        warmup_num_steps: u64,
        /// The shape of the warm-up. Default log.
        warmup_type: WarmupType,
        /// After the warm-up, the difference between the rate and `warmup_min_lr` is proportional to the share of steps
        /// that are left, raised to this power. Default 1: linear decay.
        decay_power: f64,
    },
    /// `WarmupCosineLR`.
    WarmupCosineLr {
        /// The total number of steps. Required.
        total_num_steps: u64,
        /// The learning rate at the start of the warm-up as a fraction of the optimizer's. Default 0. In the first
        /// step, the rate is always 0, as in DeepSpeed.
        warmup_min_ratio: f64,
        /// The number of warm-up steps. Default 1000.
        warmup_num_steps: u64,
        /// The final learning rate as a fraction of the optimizer's. Default 0.0001.
        cos_min_ratio: f64,
        /// The shape of the warm-up. Default log.
        warmup_type: WarmupType,
    },
    /// `OneCycle`.
    OneCycle(OneCycleConfig),
    /// `LRRangeTest`.
    LrRangeTest {
        /// The initial learning rate. Default 0.001.
        lr_range_test_min_lr: PerGroup,
        /// The number of steps per increase. Default 2000.
        lr_range_test_step_size: u64,
        /// The increase, as a multiple of the initial rate. Default 1.
        lr_range_test_step_rate: f64,
        /// Whether the rate rises in a staircase instead of continuously. Default false.
        lr_range_test_staircase: bool,
    },
}

/// The parameters of OneCycle. Step sizes are given as numbers of steps.
#[derive(Debug, Clone, PartialEq)]
pub struct OneCycleConfig {
    /// The learning rate at both ends of the cycle. Required.
    pub cycle_min_lr: PerGroup,
    /// The learning rate at the top of the cycle. Required.
    pub cycle_max_lr: PerGroup,
    /// After the cycle, the rate is divided by 1 + `decay_lr_rate` * k, where k is the number of steps since the end of
    /// the cycle divided by `decay_step_size`. Default 0.
    pub decay_lr_rate: f64,
    /// The length of the rise. Default 2000.
    pub cycle_first_step_size: f64,
    /// The length of the fall. Default: the same as the rise.
    pub cycle_second_step_size: f64,
    /// The number of stairs in the rise. Default 0: none.
    pub cycle_first_stair_count: u64,
    /// The number of stairs in the fall. Default: the same as the rise.
    pub cycle_second_stair_count: u64,
    /// The number of steps per decay after the cycle. Default 0: no decay.
    pub decay_step_size: f64,
    /// Whether beta1 falls while the rate rises and rises while the rate falls, and beta2 is 0.99. Default true.
    pub cycle_momentum: bool,
    /// beta1 at the top of the cycle, and in the first step. Default 0.8.
    pub cycle_min_mom: f64,
    /// beta1 at both ends of the cycle, except in the first step. Default 0.9.
    pub cycle_max_mom: f64,
    /// After the cycle, beta1 is multiplied by 1 + `decay_mom_rate` * k, with the same k as for the rate. Default 0.
    pub decay_mom_rate: f64,
}

impl OneCycleConfig {
    /// Creates a cycle between two rates with DeepSpeed's defaults.
    pub fn new(cycle_min_lr: impl Into<PerGroup>, cycle_max_lr: impl Into<PerGroup>) -> Self {
        Self {
            cycle_min_lr: cycle_min_lr.into(),
            cycle_max_lr: cycle_max_lr.into(),
            decay_lr_rate: 0.0,
            cycle_first_step_size: 2000.0,
            cycle_second_step_size: 2000.0,
            cycle_first_stair_count: 0,
            cycle_second_stair_count: 0,
            decay_step_size: 0.0,
            cycle_momentum: true,
            cycle_min_mom: 0.8,
            cycle_max_mom: 0.9,
            decay_mom_rate: 0.0,
        }
    }
}
