//! The configuration as the engine uses it: every default filled in, every rule checked.

use super::{ConfigNote, Monitoring};
use crate::layout::{ShardMesh, ZeroStage};
use candle_core::DType;
use std::path::{Path, PathBuf};

/// A resolved configuration: what a DeepSpeed JSON says, defaults filled in, for one world size.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Ranks that the batch keys were resolved for.
    pub world_size: usize,
    /// The batch triad.
    pub batch: BatchConfig,
    /// `fp16`, `bf16`, or neither.
    pub precision: Precision,
    /// `torch_autocast`, where it is enabled: the format of the products of linear layers in an f32 model.
    pub autocast: Option<DType>,
    /// Master weights and moments.
    pub states: StatePrecision,
    /// `gradient_clipping`: the largest global L2 norm; 0 switches clipping off. Default 1.0.
    pub gradient_clipping: f64,
    /// `prescale_gradients`: divide by the world size before the reduction.
    pub prescale_gradients: bool,
    /// `gradient_predivide_factor`: the part of the division that comes before the reduction.
    pub gradient_predivide_factor: f64,
    /// `gradient_allreduce_op`: average or sum over ranks.
    pub gradient_allreduce_op: GradientOp,
    /// `communication_data_type`: what gradients travel in; `None`: the model's dtype.
    pub communication_data_type: Option<DType>,
    /// `data_types.grad_accum_dtype`: what gradients are accumulated in; `None`: the model's dtype.
    pub grad_accum_dtype: Option<DType>,
    /// `data_types.buffer_dtype`: what a model's buffers of floats are cast to; `None`: they are what the model asks for.
    pub buffer_dtype: Option<DType>,
    /// `data_types.keep_in_fp32_modules`: names of modules whose parameters stay in f32; none in a model of f32.
    pub keep_in_fp32_modules: Vec<String>,
    /// `zero_optimization`.
    pub zero: ZeroConfig,
    /// `optimizer`; an engine that trains needs one.
    pub optimizer: Option<OptimizerConfig>,
    /// `zero_allow_untested_optimizer`: SGD, Lamb and an optimizer of one's own may train at stage 1 to 3.
    pub allows_untested_optimizer: bool,
    /// `scheduler`; without one the optimizer's `lr` holds.
    pub scheduler: Option<SchedulerConfig>,
    /// `steps_per_print`: log every N optimizer steps; `None`: never.
    pub steps_per_print: Option<u64>,
    /// `wall_clock_breakdown`: log how long each phase took, with `steps_per_print`'s rhythm (each step without it).
    pub wall_clock_breakdown: bool,
    /// Monitors, loggers and profilers.
    pub monitoring: Monitoring,
    /// `gradient_check`: the gradient of the first step is compared with differences of the loss. Default true.
    pub gradient_check: bool,
    /// `seed` of the initial weights. Default 42.
    pub seed: u64,
    /// `activation_checkpointing.every_unit`, or another key of that section that asks for it: every unit recomputes its
    /// forward in backward.
    pub activation_checkpointing: bool,
    /// `activation_checkpointing.cpu_checkpointing`: what recomputing units keep, their inputs, leaves the model's
    /// memory: to the host where the model is on a GPU, and to a file where something is offloaded to `nvme`.
    pub cpu_checkpointing: bool,
    /// `aio`: how files are accessed.
    pub aio: Aio,
    /// `checkpoint.tag_validation`.
    pub tag_validation: TagValidation,
    /// `checkpoint.upload_to`: the object store that gets each checkpoint once it is on disk.
    pub upload_checkpoints_to: Option<String>,
    /// `checkpoint.use_node_local_storage`: the ranks of each host save into a folder that only they see.
    pub use_node_local_storage: bool,
    /// `checkpoint.writer.decoupled`: [`save_checkpoint`](crate::Engine::save_checkpoint) saves in the background.
    pub saves_in_background: bool,
    /// `checkpoint.writer.show_statistics`: rank 0 says how many bytes a checkpoint has and how fast they were written.
    pub shows_save_statistics: bool,
    /// The notes about this file: keys accepted without effect, translated, or not supported.
    pub notes: Vec<ConfigNote>,
    /// Every key of DeepSpeed's with its resolved value, also those without effect here; see
    /// [`Config::to_deepspeed_json`]. The fields above take precedence.
    pub recorded: serde_json::Map<String, serde_json::Value>,
}

/// `train_batch_size` = `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x world size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchConfig {
    /// Samples per optimizer step over all ranks.
    pub train_batch_size: usize,
    /// Samples per rank and forward.
    pub train_micro_batch_size_per_gpu: usize,
    /// Micro batches per optimizer step.
    pub gradient_accumulation_steps: usize,
}

/// Number format of parameters and activations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Precision {
    /// All in f32.
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
    /// The dtype of parameters and activations.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 { .. } => DType::BF16,
            Self::Fp16(_) => DType::F16,
        }
    }

    /// Whether the loss scale follows the gradients.
    pub fn adapts_loss_scale(&self) -> bool {
        matches!(self, Self::Fp16(fp16) if fp16.loss_scale == 0.0)
    }
}

/// How master weights and moments are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatePrecision {
    /// 16-bit parameters have f32 master weights (default true): false with `bf16_master_weights_and_grads` or
    /// `fp16_master_weights_and_grads`.
    pub master_weights: bool,
    /// `bf16_optimizer_states` (default false): moments are kept in bfloat16.
    pub bf16_moments: bool,
}

/// The `fp16` section.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fp16 {
    /// `loss_scale`: 0 is dynamic, more is that static scale.
    pub loss_scale: f64,
    /// First dynamic scale is 2 to this power. Default 16.
    pub initial_scale_power: u32,
    /// Clean steps before the scale doubles. Default 1000.
    pub loss_scale_window: u64,
    /// Overflows tolerated before the scale halves. Default 2.
    pub hysteresis: u32,
    /// Refill the hysteresis after each clean step.
    pub consecutive_hysteresis: bool,
    /// Floor of the dynamic scale. Default 1.
    pub min_loss_scale: f64,
}

/// `gradient_allreduce_op`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientOp {
    /// Average over ranks (default).
    Mean,
    /// Sum over ranks.
    Sum,
}

/// `checkpoint.tag_validation`: what happens when ranks save under different tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TagValidation {
    /// All ranks take rank 0's.
    Ignore,
    /// The same, with a message from rank 0 (default).
    Warn,
    /// An error on all ranks.
    Fail,
}

/// `zero_optimization`.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroConfig {
    /// `stage` 0 to 3.
    pub stage: ZeroStage,
    /// `reduce_bucket_size`, elements. Default 5e8.
    pub reduce_bucket_size: usize,
    /// `allgather_bucket_size`, elements. Default 5e8.
    pub allgather_bucket_size: usize,
    /// `overlap_comm`: reductions and gathers run while the model computes. Default: true at stage 3 only.
    pub overlap_comm: bool,
    /// `load_from_fp32_weights` (default true): a load takes master weights as they were saved; false: rounded to the
    /// model's dtype.
    pub load_from_fp32_weights: bool,
    /// `log_trace_cache_warnings`: rank 0 says when units are used in another order than before. Default false.
    pub log_trace_cache_warnings: bool,
    /// `contiguous_gradients`. Buckets here are always contiguous; kept for the record.
    pub contiguous_gradients: bool,
    /// `reduce_scatter`: reduce to owners; false: all-reduce and keep the owned part.
    pub reduce_scatter: bool,
    /// `sub_group_size`, elements of this rank's share per optimizer sub-step. Default 1e9.
    pub sub_group_size: usize,
    /// `stage3_prefetch_bucket_size`, elements gathered ahead; 0 switches prefetching off. Default 5e7.
    pub prefetch_bucket_size: usize,
    /// `stage3_param_persistence_threshold`, elements: smaller parameters stay gathered. Default 1e5.
    pub param_persistence_threshold: usize,
    /// `stage3_model_persistence_threshold`, elements: cap on the sum of such parameters.
    pub model_persistence_threshold: usize,
    /// `stage3_max_live_parameters`, elements gathered at once before prefetching stops. Default 1e9.
    pub max_live_parameters: usize,
    /// `stage3_max_reuse_distance`, elements: a parameter used again within it is not released. Default 1e9.
    pub max_reuse_distance: usize,
    /// `zero_hpz_partition_size`: at stage 3 and on several hosts, groups of so many ranks of one host keep a second copy of
    /// what was gathered, and gather from it again. Default 1: none.
    pub hpz_partition_size: usize,
    /// `mics_shard_size`: at stage 3, everything is sharded among each group of so many ranks. Default `None`: among all, as at
    /// stages below.
    pub mics_shard_size: Option<usize>,
    /// `zero_quantized_weights`: gathers of stage 3 carry int8 with a scale per block. Stages below gather no weights.
    pub quantized_weights: bool,
    /// `zero_quantized_nontrainable_weights`: frozen matrices are held and gathered in eight bits at stage 3.
    pub quantized_nontrainable_weights: bool,
    /// `zero_quantized_gradients`: what a rank sends of its gradients is int4 with a scale per block.
    pub quantized_gradients: bool,
    /// `compress_between_hosts_only`: the two above, and a `communication_data_type` of 16 bits, apply between hosts alone: to the
    /// sums of each host's gradients, and to gathers that cross. Default false.
    pub compress_between_hosts_only: bool,
    /// `ignore_unused_parameters`: a parameter that no backward reaches has a gradient of zeros in place of an error.
    /// Where the file does not say it: false (DeepSpeed: true).
    pub ignore_unused_parameters: bool,
    /// `leaf_module`: units that are gathered as one with all units inside.
    pub leaf_module: LeafModule,
    /// `offload_optimizer`; `None` where nothing is offloaded (`device` none, stage 0).
    pub offload_optimizer: Option<OffloadOptimizer>,
    /// `offload_param`; `None` where nothing is offloaded (`device` none, stages below 3).
    pub offload_param: Option<OffloadParam>,
}

/// `zero_optimization.leaf_module`: units that are gathered as one with all units inside, for modules of which ranks run
/// different parts. A unit's name is the prefix of the `VarBuilder` that it was built from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeafModule {
    /// `names`: whole names.
    pub names: Vec<String>,
    /// `name_suffixes`: endings of names.
    pub name_suffixes: Vec<String>,
}

/// `device` and `nvme_path` of an offload section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OffloadTo {
    /// Host memory.
    Cpu,
    /// Files in a folder of the host.
    Nvme {
        /// `nvme_path`.
        path: PathBuf,
    },
}

impl ZeroConfig {
    /// Whether gradients, in `communication`, or weights are to travel in fewer bytes.
    pub(crate) fn compresses(&self, communication: Option<DType>) -> bool {
        let in_16_bits = communication.is_some_and(|dtype| dtype != DType::F32);
        self.quantized_gradients || self.quantized_weights && self.stage == ZeroStage::Three || in_16_bits
    }

    /// How `world_size` ranks divide what is sharded: among all where groups do not fit that number, as an estimate for other
    /// numbers of ranks may have it.
    pub(crate) fn mesh(&self, world_size: usize) -> ShardMesh {
        let ranks = self.mics_shard_size.filter(|ranks| world_size.is_multiple_of(*ranks));
        ranks.map_or(ShardMesh::among_all(world_size), |ranks| ShardMesh::in_groups(world_size, ranks))
    }

    /// `offload_optimizer`, where optimizer state goes to files.
    #[doc(hidden)]
    pub fn optimizer_files(&self) -> Option<&OffloadOptimizer> {
        self.offload_optimizer.as_ref().filter(|section| section.to.nvme_path().is_some())
    }

    /// `offload_param`, where parameter shards go to files.
    #[doc(hidden)]
    pub fn param_files(&self) -> Option<&OffloadParam> {
        self.offload_param.as_ref().filter(|section| section.to.nvme_path().is_some())
    }
}

impl OffloadTo {
    /// The folder of files.
    pub fn nvme_path(&self) -> Option<&Path> {
        match self {
            Self::Cpu => None,
            Self::Nvme { path } => Some(path),
        }
    }
}

/// `zero_optimization.offload_optimizer`: where master weights, moments and gradient shares live.
#[derive(Debug, Clone, PartialEq)]
pub struct OffloadOptimizer {
    /// `device`.
    pub to: OffloadTo,
    /// `buffer_count`: the buffers of the step together have at most the elements of this many of the largest
    /// sub-group. Default 4.
    pub buffer_count: usize,
    /// `pipeline_read`: read what comes next while the step computes. Default false.
    pub pipeline_read: bool,
    /// `pipeline_write`: write what is done while the step computes. Default false.
    pub pipeline_write: bool,
    /// `ratio`: share of the sub-groups that is offloaded; the first ones stay. Default 1.
    pub ratio: f64,
    /// `delayed_update`, after as many updates as `delayed_update_after` says (default 40): where a GPU computes the model, an
    /// update runs on the host beside the next step, which computes with the weights before it. `None`, the default: at once.
    pub delayed_update_after: Option<u64>,
    /// `pin_memory`: gradients and updated weights pass between a GPU and the host through page-locked memory. Default true.
    pub pin_memory: bool,
}

/// `zero_optimization.offload_param`: where parameter shards live.
#[derive(Debug, Clone, PartialEq)]
pub struct OffloadParam {
    /// `device`.
    pub to: OffloadTo,
    /// `buffer_count`: with `buffer_size`, bounds what is read ahead. Default 5.
    pub buffer_count: usize,
    /// `buffer_size`, elements. Default 1e8.
    pub buffer_size: usize,
    /// `max_in_cpu`: elements of this rank's shards that stay in memory with `nvme`. Default 1e9.
    pub max_in_cpu: usize,
    /// `pin_memory`: shards pass from the host to a GPU through page-locked memory. Default true.
    pub pin_memory: bool,
}

impl OffloadParam {
    /// Elements that may be read ahead.
    pub fn ahead(&self) -> usize {
        self.buffer_count.saturating_mul(self.buffer_size)
    }
}

/// `aio`: requests to the files of `nvme`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aio {
    /// `block_size`, bytes of a request, in whole pages of 4 KiB and at most 16 MiB. Default 1 MiB.
    pub block_size: usize,
    /// `queue_depth`: requests under way for each of `intra_op_parallelism`. Default 8.
    pub queue_depth: usize,
    /// `intra_op_parallelism`. Default 1.
    pub intra_op_parallelism: usize,
}

/// `optimizer` with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
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
    /// `Adam8bit`, `AdamW8bit` and `Lion8bit`.
    EightBit(EightBitConfig),
}

impl OptimizerConfig {
    /// Whether the optimizer has betas, which a schedule may change, rather than one factor.
    pub(crate) fn has_betas(&self) -> bool {
        match self {
            Self::Adam(_) | Self::Lion(_) | Self::Lamb(_) => true,
            Self::EightBit(_) => true,
            Self::Sgd(_) | Self::Adagrad(_) | Self::Muon(_) => false,
        }
    }
}

/// Parameters of Adam and AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamConfig {
    /// Learning rate. Default 1e-3.
    pub lr: f64,
    /// Decay of the two moments. Default 0.9, 0.999.
    pub betas: (f64, f64),
    /// Default 1e-8.
    pub eps: f64,
    /// Default 0.
    pub weight_decay: f64,
    /// Divide the moments by 1 - beta^t. Default true.
    pub bias_correction: bool,
    /// Decoupled decay (AdamW, and Adam unless `adam_w_mode` is false); else L2 added to the gradient.
    pub decoupled: bool,
}

/// Parameters of SGD.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdConfig {
    /// Learning rate. Default 1e-3.
    pub lr: f64,
    /// Default 0: no momentum buffer.
    pub momentum: f64,
    /// Default 0.
    pub dampening: f64,
    /// Default 0, added to the gradient.
    pub weight_decay: f64,
    /// Default false.
    pub nesterov: bool,
}

/// Parameters of Lion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionConfig {
    /// Learning rate. Default 1e-3.
    pub lr: f64,
    /// Share of the momentum in the direction, and its decay. Default 0.9, 0.999.
    pub betas: (f64, f64),
    /// Default 0, decoupled.
    pub weight_decay: f64,
}

/// Parameters of Adagrad.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradConfig {
    /// Learning rate. Default 1e-2.
    pub lr: f64,
    /// Default 1e-10.
    pub eps: f64,
    /// Default 0, added to the gradient.
    pub weight_decay: f64,
}

/// Parameters of LAMB.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LambConfig {
    /// Learning rate. Default 1e-3.
    pub lr: f64,
    /// Decay of the two moments. Default 0.9, 0.999.
    pub betas: (f64, f64),
    /// Default 1e-8.
    pub eps: f64,
    /// Default 0, decoupled.
    pub weight_decay: f64,
    /// Divide the moments by 1 - beta^t. Default true.
    pub bias_correction: bool,
    /// Add `eps` to the second moment rather than to its root. Default false.
    pub eps_inside_sqrt: bool,
    /// Largest trust ratio. Default 10.
    pub max_coeff: f64,
    /// Smallest trust ratio. Default 0.01.
    pub min_coeff: f64,
}

/// Parameters of Muon.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonConfig {
    /// `muon_lr`, the learning rate of matrices. Default `lr`, else 0.02.
    pub lr: f64,
    /// Default 0.95.
    pub momentum: f64,
    /// Default 0, decoupled.
    pub weight_decay: f64,
    /// Default gram.
    pub ns_method: NsMethod,
    /// The optimizer of the parameters that are no matrices. Its `lr` is `adam_lr`: default `lr`, else 3e-4.
    pub adam: AdamConfig,
}

/// An optimizer whose moments are kept in eight bits, and its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum EightBit {
    /// `Adam8bit`, whose decay is decoupled too, as in bitsandbytes.
    Adam(AdamConfig),
    /// `AdamW8bit`.
    AdamW(AdamConfig),
    /// `Lion8bit`.
    Lion(LionConfig),
}

impl EightBit {
    /// bitsandbytes' name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Adam(_) => "Adam8bit",
            Self::AdamW(_) => "AdamW8bit",
            Self::Lion(_) => "Lion8bit",
        }
    }
}

/// Parameters of Adam8bit, AdamW8bit and Lion8bit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EightBitConfig {
    /// The optimizer.
    pub kind: EightBit,
    /// Parameters of fewer elements keep f32 moments. Default 4096.
    pub min_8bit_size: usize,
}

/// How Muon orthogonalizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NsMethod {
    /// Newton-Schulz on the Gram matrix, in f32.
    Gram,
    /// Newton-Schulz as it stands, in bf16.
    Standard,
}

/// Shape of a warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarmupType {
    /// ln(it + 1) / ln(steps) (default).
    Log,
    /// it / steps.
    Linear,
}

/// A number for all parameter groups, or one for each.
#[derive(Debug, Clone, PartialEq)]
pub enum PerGroup {
    /// The same for all of them.
    All(f64),
    /// As many as there are groups.
    Each(Vec<f64>),
}

impl PerGroup {
    /// The number of one group. A list that is too short gives its last one; a schedule refuses such a list.
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
pub enum SchedulerConfig {
    /// `WarmupLR`.
    WarmupLr {
        /// Default 0.
        warmup_min_lr: PerGroup,
        /// `None`: the optimizer's own lr.
        warmup_max_lr: Option<PerGroup>,
        /// Default 1000.
        warmup_num_steps: u64,
        /// Default log.
        warmup_type: WarmupType,
    },
    /// `WarmupDecayLR`.
    WarmupDecayLr {
        /// Required.
        total_num_steps: u64,
        /// Default 0.
        warmup_min_lr: PerGroup,
        /// Default 0.001.
        warmup_max_lr: PerGroup,
        /// Default 1000.
        warmup_num_steps: u64,
        /// Default log.
        warmup_type: WarmupType,
    },
    /// `WarmupCosineLR`.
    WarmupCosineLr {
        /// Required.
        total_num_steps: u64,
        /// Default 0.
        warmup_min_ratio: f64,
        /// Default 1000.
        warmup_num_steps: u64,
        /// Default 0.0001.
        cos_min_ratio: f64,
        /// Default log.
        warmup_type: WarmupType,
    },
    /// `OneCycle`.
    OneCycle(OneCycleConfig),
    /// `LRRangeTest`.
    LrRangeTest {
        /// Default 0.001.
        lr_range_test_min_lr: PerGroup,
        /// Default 2000.
        lr_range_test_step_size: u64,
        /// Default 1.
        lr_range_test_step_rate: f64,
        /// Default false.
        lr_range_test_staircase: bool,
    },
}

/// Parameters of OneCycle. Its sizes are numbers of steps.
#[derive(Debug, Clone, PartialEq)]
pub struct OneCycleConfig {
    /// Required. Learning rate at both ends of the cycle.
    pub cycle_min_lr: PerGroup,
    /// Required. Learning rate at its top.
    pub cycle_max_lr: PerGroup,
    /// Default 0. After the cycle the rate is divided by 1 + this, per `decay_step_size`.
    pub decay_lr_rate: f64,
    /// Default 2000. Way up.
    pub cycle_first_step_size: f64,
    /// Default: as the first. Way down.
    pub cycle_second_step_size: f64,
    /// Default 0: no stairs on the way up.
    pub cycle_first_stair_count: u64,
    /// Default: as the first. Stairs on the way down.
    pub cycle_second_stair_count: u64,
    /// Default 0: no decay after the cycle.
    pub decay_step_size: f64,
    /// Default true: beta1 goes the other way round, and beta2 is 0.99.
    pub cycle_momentum: bool,
    /// Default 0.8. beta1 at the top of the cycle, and at the first step.
    pub cycle_min_mom: f64,
    /// Default 0.9. beta1 at the ends of the cycle.
    pub cycle_max_mom: f64,
    /// Default 0. After the cycle beta1 is multiplied by 1 + this, per `decay_step_size`.
    pub decay_mom_rate: f64,
}

impl OneCycleConfig {
    /// A cycle between two rates with DeepSpeed's defaults.
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
