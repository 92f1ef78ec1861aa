//! How parameters are shared among ranks, and where a rank keeps its share.

use crate::config::{Config, StatePrecision};
use crate::layout::{Placement, ShardMesh};
use crate::offload::{ALIGN, STEP};
use crate::optim::{OptimizerRole, ParameterGrouping, StateFormat, WeightFormat};
use crate::tensor::flat_buffer::BufferDevice;
#[cfg(feature = "cuda")]
use crate::zero::transfer::device_copy::CopyKind;
use candle_core::{DType, Device};
use std::sync::Arc;

/// Where a rank keeps its share, as far as it is not in files.
#[derive(Debug, Clone)]
pub(crate) struct ShareDevices<P> {
    /// Master weights, moments and gradients.
    pub states: P,
    /// Shards of weights in the model's dtype.
    pub weights: P,
}

/// How parameters are shared among ranks, and where a rank keeps its share.
#[derive(Clone)]
pub(crate) struct SharePlan {
    pub rank: usize,
    pub mesh: ShardMesh,
    pub placement: Placement,
    pub dtype: DType,
    pub sub_group_size: usize,
    /// The dtype that gradients are accumulated in.
    pub grad_dtype: DType,
    /// Decides which states a parameter has.
    pub grouping: Arc<ParameterGrouping>,
    /// What buffers of floats are cast to (`data_types.buffer_dtype`); `None`: nothing.
    pub buffer_dtype: Option<DType>,
    /// Elements of weights that stay in memory (`max_in_cpu`), where the others lie in files.
    pub weights_in_memory: Option<usize>,
    /// States are to be on the host (`offload_optimizer`), whatever device computes the model.
    pub offloads_states: bool,
    /// Shards of weights are (`offload_param`).
    pub offloads_weights: bool,
    /// How master weights and moments are kept.
    pub states: StatePrecision,
    /// The part of the sub-groups whose optimizer state lies in files (`ratio`), where any does.
    pub states_in_files: Option<f64>,
    /// Frozen parameters are packed.
    pub packs: bool,
}

impl SharePlan {
    /// As `config` says, for gradients that are accumulated in `grad_dtype`.
    pub fn new(config: &Config, grad_dtype: DType, rank: usize, grouping: Arc<ParameterGrouping>) -> Self {
        let zero = &config.zero;
        Self {
            rank,
            mesh: zero.mesh(config.world_size),
            placement: zero.stage.placement(),
            dtype: config.precision.dtype(),
            buffer_dtype: config.buffer_dtype,
            sub_group_size: zero.sub_group_size,
            grad_dtype,
            packs: grouping.packs(),
            offloads_states: zero.offload_optimizer.is_some(),
            offloads_weights: zero.offload_param.is_some(),
            states: config.states,
            weights_in_memory: zero.param_files().map(|files| files.max_in_cpu),
            states_in_files: zero.optimizer_files().map(|files| files.ratio),
            grouping,
        }
    }

    /// Whether a rank holds its shard of a parameter whose weights are held so, and gathers the whole when it is needed; else
    /// the parameter is whole in its tensor all the time. At stage 3 that is so for what is packed and for what others have
    /// a part of: a rank with a packed model and nobody to share it with would hold the rest of it twice.
    pub fn shards(&self, weights: WeightFormat) -> bool {
        let shares = self.mesh.shards() > 1 || self.offloads_weights || !self.packs;
        self.placement.params.is_sharded() && (shares || weights.packing().is_some())
    }

    /// Whether packed shares are unpacked from where they are, for a rank that is alone and has no files: a copy of them, made
    /// early, speeds nothing up.
    pub fn unpacks_in_place(&self) -> bool {
        self.mesh.shards() == 1 && !self.has_files()
    }

    /// Where the share lies of a model on `device`.
    pub fn devices(&self, device: &Device) -> ShareDevices<BufferDevice> {
        self.devices_of(BufferDevice::of(device), BufferDevice::Host)
    }

    /// Where the share lies of a model in the memory `model`: there too, its states if kernels of a GPU can update them there, and
    /// either if it is not to be on the `host`.
    pub fn devices_of<P>(&self, model: P, host: P) -> ShareDevices<P>
    where
        P: Clone,
    {
        ShareDevices {
            states: if self.stays_on_device() { model.clone() } else { host.clone() },
            weights: if self.offloads_weights { host } else { model },
        }
    }

    /// What passes between the host and a GPU that computes the model, which has parameters that are trained or none.
    #[cfg(feature = "cuda")]
    pub fn copy_kinds(&self, trains: bool) -> impl Iterator<Item = CopyKind> + use<> {
        let on_host = self.devices_of(false, true);
        let shards = self.placement.params.is_sharded() && on_host.weights;
        let updates = trains && on_host.states;
        let all = [(CopyKind::Gradients, updates), (CopyKind::Updates, updates && !shards), (CopyKind::Shards, shards)];
        all.into_iter().filter_map(|(kind, passes)| passes.then_some(kind))
    }

    /// Whether a GPU keeps and updates the share of a model that it computes.
    fn stays_on_device(&self) -> bool {
        let wide = self.dtype == DType::F32 || self.has_master();
        let in_f32 = |role: &OptimizerRole| self.formats(*role).iter().all(|format| *format == StateFormat::F32);
        let by_kernels = |role: &OptimizerRole| self.grouping.optimizer(*role).is_none_or(|o| o.has_kernel());
        !self.offloads_states
            && !self.offloads_weights
            && wide
            && OptimizerRole::ALL.iter().all(|role| in_f32(role) && by_kernels(role))
    }

    /// Whether trained parameters have master weights.
    pub fn has_master(&self) -> bool {
        self.dtype != DType::F32 && self.states.master_weights
    }

    /// How the moments of a role's parameters are kept.
    pub fn formats(&self, role: OptimizerRole) -> Vec<StateFormat> {
        let optimizer = self.grouping.optimizer(role);
        let format = |state| match optimizer.map_or(StateFormat::F32, |optimizer| optimizer.state_format(state)) {
            StateFormat::F32 if self.states.bf16_moments => StateFormat::Bf16,
            format => format,
        };
        (0..self.grouping.state_names(role).len()).map(format).collect()
    }

    /// Elements of a role's parameters that lie on one rank together.
    pub fn block(&self, role: OptimizerRole) -> usize {
        self.formats(role).into_iter().map(StateFormat::block).max().unwrap_or(1)
    }

    /// Elements of which a share in files has a multiple: the codes of as many fill whole pages, or the 16-bit numbers.
    pub fn step(&self) -> usize {
        if OptimizerRole::ALL.into_iter().any(|role| self.block(role) > 1) { ALIGN } else { STEP }
    }

    /// Some states lie in files.
    pub fn has_files(&self) -> bool {
        self.weights_in_memory.is_some() || self.states_in_files.is_some()
    }
}
