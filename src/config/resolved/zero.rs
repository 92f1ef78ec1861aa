//! `zero_optimization` and `aio`: the stage, its buckets, and the location of offloaded state.

use crate::layout::{ShardMesh, ZeroStage};
use candle_core::DType;
use std::path::{Path, PathBuf};

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
    /// `log_trace_cache_warnings`: rank 0 logs each step that uses units in a different order than before. Default
    /// false.
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
    /// `stage3_param_persistence_threshold`: parameters with at most this many elements stay gathered, unless they are
    /// quantized. Default 1e5.
    pub param_persistence_threshold: usize,
    /// `stage3_model_persistence_threshold`, in elements: the maximum total size of the parameters that stay gathered.
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
    /// `zero_quantized_weights`: stage 3 gathers int8 with a scale per block. Lower stages gather updated weights
    /// exactly.
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
        self.offload_optimizer.as_ref().filter(|section| section.device.nvme_path().is_some())
    }

    /// Returns `offload_param` if parameter shards are offloaded to files.
    #[doc(hidden)]
    pub fn param_files(&self) -> Option<&OffloadParam> {
        self.offload_param.as_ref().filter(|section| section.device.nvme_path().is_some())
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
    pub device: OffloadTo,
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
    /// on the host during the next step, which still uses the weights from before the update. `None`, the default: no
    /// delay.
    pub delayed_update_after: Option<u64>,
    /// `pin_memory`: copy gradients and updated weights between a GPU and the host through page-locked memory. Default
    /// true.
    pub pin_memory: bool,
}

/// `zero_optimization.offload_param`: the location of parameter shards.
#[derive(Debug, Clone, PartialEq)]
pub struct OffloadParam {
    /// `device`.
    pub device: OffloadTo,
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
    pub fn read_ahead_elements(&self) -> usize {
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
