//! The division of parameters among ranks, and the memory or files in which a rank keeps its share.

use crate::config::{Config, LocalStepsConfig, StatePrecision};
use crate::layout::{Placement, ShardMesh};
use crate::offload::{ALIGN, STEP};
use crate::optim::{OptimizerRole, ParameterGrouping, StateFormat, SubGroupKey, WeightFormat};
use crate::tensor::flat_buffer::BufferDevice;
#[cfg(feature = "cuda")]
use crate::zero::transfer::device_copy::CopyPayloadKind;
use candle_core::{DType, Device};
use std::sync::Arc;

/// The places where a rank keeps the parts of its share that are not in files.
#[derive(Debug, Clone)]
pub(crate) struct ShardDevices<P> {
    /// The location of master weights, optimizer states and gradients.
    pub states: P,
    /// The location of shards of weights, except packed ones, which stay on the host.
    pub weights: P,
}

/// The division of parameters among ranks, and the memory or files in which a rank keeps its share.
#[derive(Clone)]
pub(crate) struct SharePlan {
    pub rank: usize,
    pub mesh: ShardMesh,
    /// The number of ranks among which the experts of a layer are divided. If it is 1, experts are like other
    /// parameters.
    pub expert_ranks: usize,
    pub placement: Placement,
    pub dtype: DType,
    pub sub_group_size: usize,
    /// The dtype in which gradients are accumulated.
    pub grad_dtype: DType,
    /// The rules that decide which states a parameter has.
    pub grouping: Arc<ParameterGrouping>,
    /// The dtype to which float buffers are cast (`data_types.buffer_dtype`). `None` means no cast.
    pub buffer_dtype: Option<DType>,
    /// The number of elements of weights that stay in memory (`max_in_cpu`) if the others are in files.
    pub weights_in_memory: Option<usize>,
    /// Whether states are kept on the host (`offload_optimizer`), whatever device runs the model.
    pub offloads_states: bool,
    /// Whether shards of weights are kept on the host (`offload_param`).
    pub offloads_weights: bool,
    /// The precision of master weights and optimizer states.
    pub states: StatePrecision,
    /// The fraction of the sub-groups whose optimizer states are in files (`ratio`), if any are.
    pub states_in_files: Option<f64>,
    /// Whether frozen parameters are packed.
    pub packs: bool,
    /// The names of the states of the outer optimizer, if ranks take local steps.
    pub outer_states: &'static [&'static str],
}

/// The name of the weights after the last exchange between islands.
pub(crate) const OUTER_WEIGHTS: &str = "outer_weights";

/// The name of the momentum of the outer optimizer.
pub(crate) const OUTER_MOMENTUM: &str = "outer_momentum";

/// The name of the mean change of fragments whose exchange has ended but has not taken effect when a checkpoint is
/// saved.
pub(crate) const OUTER_CHANGE: &str = "outer_change";

/// Returns the names of the states of the outer optimizer.
fn outer_states(config: Option<&LocalStepsConfig>) -> &'static [&'static str] {
    let Some(config) = config else { return &[] };
    match (config.outer_momentum > 0.0, config.fragment_delay > 0) {
        (false, false) => &[OUTER_WEIGHTS],
        (true, false) => &[OUTER_WEIGHTS, OUTER_MOMENTUM],
        (false, true) => &[OUTER_WEIGHTS, OUTER_CHANGE],
        (true, true) => &[OUTER_WEIGHTS, OUTER_MOMENTUM, OUTER_CHANGE],
    }
}

impl SharePlan {
    /// Creates the plan that `config` requests, for gradients that are accumulated in `grad_dtype`.
    pub fn new(config: &Config, grad_dtype: DType, rank: usize, grouping: Arc<ParameterGrouping>) -> Self {
        let zero = &config.zero;
        Self {
            rank,
            mesh: zero.mesh(config.ranks_per_island()),
            expert_ranks: config.expert_parallel_size,
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
            outer_states: outer_states(config.local_steps.as_ref()),
            grouping,
        }
    }

    /// Returns whether a rank holds only its shard of a parameter with weights in this format, and gathers the whole
    /// parameter when it is needed. Otherwise the parameter's tensor always holds all of it. Stage 3 always shards
    /// packed parameters. It shards other parameters too, unless frozen parameters are packed, a shard is a whole
    /// parameter and weights are kept where the model computes, because the rank would then hold the unpacked
    /// parameters twice.
    pub fn shards(&self, weights: WeightFormat) -> bool {
        let shards_unpacked = self.mesh.shards() > 1 || self.offloads_weights || !self.packs;
        self.placement.params.is_sharded() && (shards_unpacked || weights.packing().is_some())
    }

    /// Returns whether packed shards are unpacked directly from their storage. This is the case without files if a
    /// shard is a whole parameter, because copying the shards early would not speed anything up.
    pub fn unpacks_in_place(&self) -> bool {
        self.mesh.shards() == 1 && !self.has_files()
    }

    /// Returns the locations of the share of a model on `device`.
    pub fn devices(&self, device: &Device) -> ShardDevices<BufferDevice> {
        self.devices_of(BufferDevice::of(device), BufferDevice::Host)
    }

    /// Returns the locations of the share of a model in the memory `model`. States are there too if nothing is
    /// offloaded and kernels of a GPU can update them there; otherwise, they are on the `host`. Weights are on the
    /// `host` if they are offloaded.
    pub fn devices_of<P>(&self, model: P, host: P) -> ShardDevices<P>
    where
        P: Clone,
    {
        ShardDevices {
            states: if self.stays_on_device() { model.clone() } else { host.clone() },
            weights: if self.offloads_weights { host } else { model },
        }
    }

    /// Returns the kinds of copies that are made between the host and a GPU that runs the model. `trains` states
    /// whether any parameters are trained.
    #[cfg(feature = "cuda")]
    pub fn copy_kinds(&self, trains: bool) -> impl Iterator<Item = CopyPayloadKind> + use<> {
        let on_host = self.devices_of(false, true);
        let shards = self.placement.params.is_sharded() && on_host.weights;
        let updates = trains && on_host.states;
        let all = [
            (CopyPayloadKind::Gradients, updates),
            (CopyPayloadKind::Updates, updates && !shards),
            (CopyPayloadKind::Shards, shards),
        ];
        all.into_iter().filter_map(|(kind, is_used)| is_used.then_some(kind))
    }

    /// Returns whether the GPU on which the model computes also keeps and updates the share.
    fn stays_on_device(&self) -> bool {
        let has_f32_weights = self.dtype == DType::F32 || self.has_master();
        let in_f32 = |role: &OptimizerRole| self.formats(*role).iter().all(|format| *format == StateFormat::F32);
        let by_kernels = |role: &OptimizerRole| self.grouping.optimizer(*role).is_none_or(|o| o.has_kernel());
        !self.offloads_states
            && !self.offloads_weights
            && has_f32_weights
            && OptimizerRole::ALL.iter().all(|role| in_f32(role) && by_kernels(role))
    }

    /// Returns whether trained parameters have master weights.
    pub fn has_master(&self) -> bool {
        self.dtype != DType::F32 && self.states.master_weights
    }

    /// Returns whether the optimizer of a class of parameters averages weights.
    pub fn averages_class(&self, class: SubGroupKey) -> bool {
        class.role().is_some_and(|role| self.grouping.averaging(role).is_some())
    }

    /// Returns whether an optimizer averages weights.
    pub fn averages(&self) -> bool {
        OptimizerRole::ALL.into_iter().any(|role| self.grouping.averaging(role).is_some())
    }

    /// Returns the formats of the optimizer states of a role's parameters.
    pub fn formats(&self, role: OptimizerRole) -> Vec<StateFormat> {
        let optimizer = self.grouping.optimizer(role);
        let format = |state| match optimizer.map_or(StateFormat::F32, |optimizer| optimizer.state_format(state)) {
            StateFormat::F32 if self.states.bf16_moments => StateFormat::Bf16,
            format => format,
        };
        (0..self.grouping.state_names(role).len()).map(format).collect()
    }

    /// Returns the number of consecutive elements of a role's parameters that must be on the same rank.
    pub fn block(&self, role: OptimizerRole) -> usize {
        self.formats(role).into_iter().map(StateFormat::block).max().unwrap_or(1)
    }

    /// Returns the number of elements by which the length of a share in files must be divisible, so that its codes,
    /// or 16-bit numbers, fill complete pages.
    pub fn step(&self) -> usize {
        if OptimizerRole::ALL.into_iter().any(|role| self.block(role) > 1) { ALIGN } else { STEP }
    }

    /// Returns whether some states are in files.
    pub fn has_files(&self) -> bool {
        self.weights_in_memory.is_some() || self.states_in_files.is_some()
    }
}
