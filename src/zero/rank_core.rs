//! The partitioned state of one rank, which the engine and the operations inside the autograd graph share.
//!
//! Operations hold an [`EngineLink`]: it leads to the [`RankCore`] while the engine lives, and to nothing before and
//! after, so that a model outside an engine is a plain Candle model. Modules above this one use the core's methods,
//! because the core's fields are visible only inside `zero/`.

use super::check::forward_outputs::ForwardOutputs;
use super::check::gradient_check_state::RankCheckState;
use super::check::weight_samples::WeightSamples;
use super::expert_ranks::ExpertRanks;
use super::gather::leaf_units::{LeafPosition, LeafUnits};
use super::gather::param_gatherer::ParamGatherer;
use super::model_buffers::ModelBuffers;
use super::reduce::diverted_gradient::DivertedGradient;
use super::reduce::divided_backward::DividedBackward;
use super::reduce::gradient_reducer::{GradientReducer, ReducePlan};
use super::reduce::unreduced_gradients::UnreducedGradients;
use super::share::share_plan::SharePlan;
use super::share::sub_group::{SubGroup, param_slots};
use super::step::pipeline_vote::PipelineContext;
use super::step_executor::StepExecutor;
#[cfg(feature = "cuda")]
use super::transfer::device_copy::DeviceCopyQueues;
use crate::comm::Communicator;
#[cfg(feature = "cuda")]
use crate::comm::gpu_collectives::GpuCollectives;
use crate::config::ZeroConfig;
#[cfg(feature = "cuda")]
use crate::cuda::memory_pool;
use crate::error::{EngineError, Error, ParamError, Result};
use crate::graph::DeferredGradient;
use crate::layout::{MeshAxis, Placement};
use crate::memory::{MemoryLedger, MemoryReport, MemoryTier};
use crate::offload::{OffloadReport, OffloadStore};
use crate::param::gradient_capture::GradientSink;
use crate::param::{BufferSync, ModelBuffer, Param, ParamId, ROOT, UnitId};
use crate::tensor::flat_buffer::BufferDevice;
use crate::tensor::residency;
use crate::util::{format_bytes, list, lock, unpoisoned};
use candle_core::DType;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::WrapErr;
use candle_nn::Init;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock, Weak};
use std::thread::ThreadId;
#[cfg(feature = "cuda")]
use {crate::memory::TrackedBuffer, crate::tensor::flat_buffer::FlatBuffer, std::thread::JoinHandle};

/// The partitioned state of one rank.
pub(crate) struct RankCore {
    pub(super) comm: Arc<dyn Communicator>,
    /// The pipeline of this rank, if there is one.
    pub(super) pipeline: Option<PipelineContext>,
    /// The ranks among which experts are divided, if they are.
    pub(super) experts: Option<ExpertRanks>,
    pub(super) placement: Placement,
    pub(super) zero: ZeroConfig,
    pub(super) dtype: DType,
    /// The number of ranks in a group that keeps a second copy of gathered parameters, or 1 if none keeps one.
    pub(super) second_group: usize,
    /// The memory tier of complete parameters.
    pub(super) tensor_tier: MemoryTier,
    /// The memory that holds this rank's master weights, optimizer states and gradients, unless they are in files.
    pub(super) share_location: BufferDevice,
    /// The device on which the model computes.
    pub(super) model_location: BufferDevice,
    /// The copy queues between the host and the GPU on which the model computes.
    #[cfg(feature = "cuda")]
    pub(super) copies: Option<DeviceCopyQueues>,
    /// The update that has begun, if updates are delayed.
    #[cfg(feature = "cuda")]
    pub(super) delayed: Mutex<DelayedUpdate>,
    /// The thread that has launched the model's work so far.
    #[cfg(feature = "cuda")]
    pub(super) launches_on: Mutex<ThreadId>,
    /// The GPUs of all ranks, if NCCL connects them.
    #[cfg(feature = "cuda")]
    pub(super) gpus: OnceLock<GpuCollectives>,
    pub(super) ledger: MemoryLedger,
    /// The files of offloaded state.
    pub(super) offload: Option<Arc<OffloadStore>>,
    pub(super) params: Vec<Param>,
    /// The names of the units, the root (an empty name) first.
    pub(super) units: Vec<String>,
    /// The position of each unit relative to leaves.
    pub(super) leaves: Vec<LeafPosition>,
    pub(super) buffers: ModelBuffers,
    /// The sub-group and the slot of each parameter.
    pub(super) param_slots: RwLock<Vec<(usize, usize)>>,
    pub(super) share_plan: SharePlan,
    /// The parameters that each unit uses, including those of other units.
    used_by: Vec<BTreeSet<ParamId>>,
    pub(super) groups: Mutex<Vec<SubGroup<RankCore>>>,
    pub(super) gather: Mutex<ParamGatherer<RankCore>>,
    pub(super) gradients: Mutex<GradientReducer<RankCore>>,
    /// The gradients that are not reduced yet.
    pub(super) unreduced: Mutex<UnreducedGradients>,
    /// The gradient that is handed to the caller of the backward pass.
    pub(super) diverted: DivertedGradient,
    pub(super) divided: DividedBackward,
    pub(super) recomputation: RecomputeSettings,
    /// The seed for stochastic rounding. `None` means rounding to nearest.
    pub(super) rounding: Option<AtomicU64>,
    /// The number of the current update, on which rounding depends.
    pub(super) update: AtomicU64,
    /// Whether the model is only being evaluated, in which case nothing is recorded or kept.
    pub(super) evaluating: AtomicBool,
    /// Whether the engine's forward pass is running.
    pub(super) in_forward: AtomicBool,
    /// The state of a gradient check.
    pub(super) check: RankCheckState,
    /// The outputs of forward passes.
    pub(super) outputs: ForwardOutputs,
    /// The thread that runs the engine's backward pass: gradients count only in that thread.
    pub(super) backward_on: Mutex<Option<ThreadId>>,
    /// The first error inside an operation; Candle's own error type cannot carry it.
    failure: Mutex<Option<Error>>,
    /// Samples of the weights as the engine has left them.
    pub(super) weight_samples: Mutex<WeightSamples>,
}

/// An update that runs during the next step.
#[cfg(feature = "cuda")]
#[derive(Default)]
pub(crate) enum DelayedUpdate {
    #[default]
    None,
    /// The update runs on a thread, which has the states of all trained sub-groups and their gradients.
    Running(JoinHandle<Result<Vec<SubGroup<RankCore>>>>),
    /// The states are back. The new weights of each trained sub-group still have to be put in place.
    Ready(Vec<Option<TrackedBuffer<FlatBuffer>>>),
    /// The update failed, which ends training because states are lost. Contains the reason.
    Failed(String),
}

/// The parts that a core is made of.
pub(crate) struct RankCoreParts {
    pub comm: Arc<dyn Communicator>,
    /// The pipeline of this rank, if there is one.
    pub pipeline: Option<PipelineContext>,
    /// The ranks among which experts are divided, if they are.
    pub experts: Option<ExpertRanks>,
    pub zero: ZeroConfig,
    /// The number of ranks in a group that keeps a second copy of gathered parameters, or 1 if none keeps one.
    pub second_group: usize,
    pub reduce_plan: ReducePlan,
    pub share_plan: SharePlan,
    pub dtype: DType,
    pub recomputation: RecomputeSettings,
    /// The seed for stochastic rounding. `None` means rounding to nearest.
    pub rounding: Option<u64>,
    pub registered: RegisteredModel,
    pub buffer_sync: BufferSync,
    pub ledger: MemoryLedger,
    pub offload: Option<Arc<OffloadStore>>,
}

/// A model's parameters and units, and this rank's share of them.
pub(crate) struct RegisteredModel {
    pub params: Vec<Param>,
    /// The names of the units, the root (an empty name) first.
    pub units: Vec<String>,
    pub leaves: LeafUnits,
    /// The parameters that each unit uses, including those of other units.
    pub used_by: Vec<BTreeSet<ParamId>>,
    pub groups: Vec<SubGroup<RankCore>>,
    pub buffers: Vec<ModelBuffer>,
    /// The initialization that the model requested for each parameter, or a constant 0 if the values come from a file.
    pub inits: Vec<Init>,
}

impl RegisteredModel {
    /// Returns the names of all parameters and buffers.
    pub fn names(&self) -> impl Iterator<Item = &str> + Clone {
        let params = self.params.iter().map(|param| param.name.as_str());
        params.chain(self.buffers.iter().map(|buffer| buffer.name.as_str()))
    }
}

/// The configuration's `activation_checkpointing` section.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecomputeSettings {
    /// Whether every unit recomputes its forward pass in the backward pass.
    pub every_unit: bool,
    /// Whether the inputs that recomputing units keep are moved out of the model's memory.
    pub cpu_checkpointing: bool,
}

/// The link from an operation to the engine.
#[derive(Clone, Default)]
pub(crate) struct EngineLink(Arc<OnceLock<Weak<RankCore>>>);

impl EngineLink {
    /// Returns the engine's core, if an engine exists.
    pub fn core(&self) -> Option<Arc<RankCore>> {
        self.0.get().and_then(Weak::upgrade)
    }

    /// Connects the link to the engine, which exists from now on.
    pub fn connect(&self, core: &Arc<RankCore>) {
        assert!(self.0.set(Arc::downgrade(core)).is_ok(), "a link can be connected only once");
    }
}

impl std::fmt::Debug for EngineLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("is_connected", &self.core().is_some()).finish()
    }
}

impl GradientSink for EngineLink {
    fn takes_gradients(&self) -> bool {
        self.core().is_some_and(|core| core.is_in_backward())
    }

    fn no_longer_needed(&self, param: ParamId) -> candle_core::Result<()> {
        self.core().map_or(Ok(()), |core| core.no_longer_needed(param))
    }

    fn gradient_arrived(&self, param: ParamId, grad: DeferredGradient) -> candle_core::Result<()> {
        let Some(core) = self.core() else { return Ok(()) };
        match core.divided.keep(param, grad) {
            Some(grad) => core.gradient_arrived(param, grad.compute()?),
            None => Ok(()),
        }
    }
}

/// Returns the error, or, if a GPU has run out of memory, an error that lists the parts of the model in its memory.
pub(crate) fn explain_out_of_memory(error: Error, ledger: &MemoryLedger, rank: usize) -> Error {
    match error {
        Error::Candle(error) if residency::is_out_of_memory(&error) => {
            let held = ledger.held_in(MemoryTier::Device);
            let held: Vec<_> =
                held.iter().map(|(kind, b)| format!("{} {}", kind.name(), format_bytes(*b as u64))).collect();
            let held = if held.is_empty() { "0 bytes".into() } else { held.join(", ") };
            EngineError::DeviceMemory { rank, held }.into()
        }
        error => error,
    }
}

impl RankCore {
    /// Creates the core of a registered model.
    pub fn new(parts: RankCoreParts) -> Self {
        let RankCoreParts { comm, zero, second_group, reduce_plan, share_plan, dtype, recomputation, .. } = parts;
        let RankCoreParts { rounding, registered, buffer_sync, ledger, offload, pipeline, experts, .. } = parts;
        let RegisteredModel { params, units, leaves, used_by, groups, buffers, .. } = registered;
        let param_slots = param_slots(&groups, params.len());
        let gather = ParamGatherer::new(&params, &leaves, &zero, &share_plan);
        let optional = leaves.has_optional_gradient(&params, &zero);
        let gradients = GradientReducer::new(reduce_plan, zero.reduce_bucket_size, optional);
        let model_location = params.first().map_or(BufferDevice::Host, |p| BufferDevice::of(p.tensor.device()));
        Self {
            comm,
            pipeline,
            experts,
            placement: zero.stage.placement(),
            dtype,
            second_group,
            tensor_tier: params.first().map_or(MemoryTier::Host, |p| MemoryTier::of(p.tensor.device())),
            share_location: params.first().map_or(BufferDevice::Host, |p| share_plan.devices(p.tensor.device()).states),
            #[cfg(feature = "cuda")]
            delayed: Mutex::default(),
            #[cfg(feature = "cuda")]
            copies: model_location.gpu().map(|device| DeviceCopyQueues::new(device, &zero, &ledger)),
            model_location,
            #[cfg(feature = "cuda")]
            launches_on: Mutex::new(std::thread::current().id()),
            #[cfg(feature = "cuda")]
            gpus: OnceLock::new(),
            zero,
            ledger,
            offload,
            params,
            units,
            leaves: leaves.positions(),
            buffers: ModelBuffers::new(buffers, buffer_sync),
            param_slots: RwLock::new(param_slots),
            share_plan,
            used_by,
            groups: Mutex::new(groups),
            gather: Mutex::new(gather),
            gradients: Mutex::new(gradients),
            unreduced: Mutex::default(),
            diverted: DivertedGradient::default(),
            divided: DividedBackward::default(),
            recomputation,
            rounding: rounding.map(AtomicU64::new),
            update: AtomicU64::new(0),
            evaluating: AtomicBool::new(false),
            in_forward: AtomicBool::new(false),
            check: RankCheckState::default(),
            outputs: ForwardOutputs::default(),
            backward_on: Mutex::new(None),
            failure: Mutex::new(None),
            weight_samples: Mutex::default(),
        }
    }

    /// Returns the communicator of the ranks that save a checkpoint together: those of all stages of a pipeline, those
    /// of an island, or otherwise all ranks.
    pub fn job(&self) -> &dyn Communicator {
        self.pipeline.as_ref().map_or(&*self.comm, |position| &*position.job)
    }

    /// Returns the pipeline of this rank, if there is one.
    pub fn pipeline(&self) -> Option<&PipelineContext> {
        self.pipeline.as_ref()
    }

    /// Returns the index of this rank's file in checkpoints.
    pub fn file_index(&self) -> usize {
        self.file_index_of(self.job().rank())
    }

    fn file_index_of(&self, rank: usize) -> usize {
        let mesh = self.share_plan.mesh;
        match &self.pipeline {
            None => mesh.piece_of(rank),
            Some(PipelineContext { mesh: ranks, .. }) => {
                let piece = mesh.piece_of(ranks.coordinate(rank, MeshAxis::Data));
                ranks.coordinate(rank, MeshAxis::Pipeline) * mesh.world_size() + piece
            }
        }
    }

    /// Sorts one value per rank of the job into the order of their files in checkpoints.
    pub fn by_file<T>(&self, values: Vec<T>) -> Vec<T> {
        let mut by_rank: Vec<(usize, T)> = values.into_iter().enumerate().collect();
        by_rank.sort_by_key(|(rank, _)| self.file_index_of(*rank));
        by_rank.into_iter().map(|(_, value)| value).collect()
    }

    /// Notifies the other ranks that this rank gives up, with the reason.
    pub fn abort(&self, why: &str) {
        self.comm.abort(why);
        #[cfg(feature = "cuda")]
        self.gpus.get().into_iter().for_each(GpuCollectives::abort);
    }

    /// Connects the GPUs of all ranks through NCCL from now on, if models compute on them and NCCL can connect them.
    /// Resources whose creation waits for all of the GPU's work are created now rather than later. Collective, called
    /// after all ranks have been compared.
    ///
    /// # Errors
    /// An error of NCCL or of the driver; a failed collective.
    #[cfg(feature = "cuda")]
    pub fn join_gpus(&self) -> Result<()> {
        if let (Some(device), Some(copies)) = (self.model_location.gpu(), &self.copies) {
            memory_pool::retain_freed_memory(device)?;
            for kind in self.share_plan.copy_kinds(self.params.iter().any(Param::is_trained)) {
                copies.prepare(kind)?;
            }
        }
        if let Some(gpus) = GpuCollectives::join(&self.comm, self.model_location.gpu(), &self.ledger)? {
            self.gpus.get_or_init(|| gpus);
        }
        Ok(())
    }

    /// Waits for the work launched so far if a different thread launched it. A GPU keeps the launch order only for work
    /// from the same thread, so this must be called before a thread continues with the model.
    ///
    /// # Errors
    /// A driver error.
    pub fn follow_thread(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(device) = self.model_location.gpu() {
            let (mut launching, current) = (lock(&self.launches_on), std::thread::current().id());
            if *launching != current {
                device.cuda_stream().context().synchronize().w()?;
                *launching = current;
            }
        }
        Ok(())
    }

    /// Waits until the model's device has done all work that this thread has launched.
    ///
    /// # Errors
    /// An error of the device.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.params.first().map_or(Ok(()), |param| param.tensor.device().synchronize())?)
    }

    /// Returns the rank's communicator.
    pub fn comm(&self) -> &dyn Communicator {
        &*self.comm
    }

    /// Returns the number of training micro steps so far that used units in a different order from the previous micro
    /// step.
    pub fn order_changes(&self) -> u64 {
        lock(&self.gather).order_changes()
    }

    /// Returns the dtype to which loaded weights, including master weights, are rounded: the model's if
    /// `load_from_fp32_weights` is false, otherwise f32.
    pub fn loaded_weight_dtype(&self) -> DType {
        if self.zero.load_from_fp32_weights { DType::F32 } else { self.dtype }
    }

    /// Returns the seed for stochastic rounding, or `None` if states are rounded to nearest.
    pub fn rounding_seed(&self) -> Option<u64> {
        self.rounding.as_ref().map(|seed| seed.load(Ordering::Relaxed))
    }

    /// Sets the seed for stochastic rounding from now on, if states are rounded stochastically.
    pub fn set_rounding_seed(&self, seed: u64) {
        self.rounding.iter().for_each(|current| current.store(seed, Ordering::Relaxed));
    }

    /// Returns the model's dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the model's parameters, in order of registration.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// Returns the name and number of elements of each unit, the root (an empty name) first.
    pub fn units(&self) -> Vec<(String, usize)> {
        let mut units: Vec<(String, usize)> = self.units.iter().map(|name| (name.clone(), 0)).collect();
        self.params.iter().for_each(|param| units[param.unit].1 += param.numel);
        units
    }

    /// Returns the position of each unit relative to leaves.
    pub fn leaves(&self) -> &[LeafPosition] {
        &self.leaves
    }

    /// Returns whether parameters are gathered and released. Otherwise they stay in memory in full.
    pub fn shards_params(&self) -> bool {
        self.placement.params.is_sharded()
    }

    /// Returns whether parameter `param` is gathered and released.
    pub fn shards(&self, param: ParamId) -> bool {
        self.share_plan.shards(self.params[param].weights)
    }

    /// Returns whether the tensor of parameter `param` always holds the complete parameter.
    pub fn keeps_all_elements(&self, param: ParamId) -> bool {
        self.holds(param) && !self.shards(param)
    }

    /// Returns the ranks among which experts are divided, if they are.
    pub fn experts(&self) -> Option<&ExpertRanks> {
        self.experts.as_ref()
    }

    /// Returns the communicator of the ranks that hold these parameters, all of which are on the same ranks.
    pub(super) fn comm_of(&self, params: &[ParamId]) -> &dyn Communicator {
        match (&self.experts, params.first()) {
            (Some(experts), Some(param)) if self.params[*param].expert.is_some() => &*experts.holders,
            _ => &*self.comm,
        }
    }

    /// Returns the bytes of model state, together with those that the ZeRO formula gives.
    pub fn memory_report(&self) -> MemoryReport {
        #[cfg(feature = "cuda")]
        drop(self.join_update());
        let accumulate = lock(&self.gradients).accumulate_dtype();
        self.ledger_report(accumulate)
    }

    /// Returns the file accesses so far, or `None` if nothing is offloaded to files.
    pub fn offload_report(&self) -> Option<OffloadReport> {
        self.offload.as_ref().map(|offload| offload.report())
    }

    /// Returns the sub-group and slot of a parameter.
    pub(super) fn slot_of(&self, param: ParamId) -> (usize, usize) {
        unpoisoned(self.param_slots.read())[param]
    }

    /// Returns whether a unit uses parameters, and all of them are frozen.
    pub(super) fn is_frozen(&self, unit: UnitId) -> bool {
        let used = &self.used_by[unit];
        !used.is_empty() && used.iter().all(|param| !self.params[*param].is_trained())
    }

    /// Returns the unit of this name.
    pub(super) fn unit_named(&self, name: &str) -> Option<UnitId> {
        self.units.iter().skip(1).position(|unit| unit == name).map(|at| at + 1)
    }

    /// Returns a unit's name for messages.
    pub(super) fn unit_name(&self, unit: UnitId) -> String {
        if unit == ROOT { "root".to_owned() } else { self.units[unit].clone() }
    }

    /// Returns a hash of the parameters that share a collective, for the collectives' fingerprints.
    pub(super) fn tag(&self, params: &[ParamId]) -> u64 {
        let bytes: Vec<u8> = params.iter().flat_map(|param| param.to_le_bytes()).collect();
        crate::util::fnv1a(&bytes)
    }

    /// Keeps `error` for the engine and returns its text as a Candle error.
    pub(super) fn stash(&self, error: Error) -> candle_core::Error {
        let text = error.to_string();
        lock(&self.failure).get_or_insert(error);
        candle_core::Error::Msg(text)
    }

    /// Forgets the error of an operation outside the engine's calls.
    pub(super) fn forget_failure(&self) {
        *lock(&self.failure) = None;
    }

    /// Returns the typed error behind a failed Candle operation.
    pub(super) fn explain(&self, error: candle_core::Error) -> Error {
        self.explain_out_of_memory(self.cause_of(error))
    }

    /// Returns the error, or, if a GPU has run out of memory, an error that lists what occupies its memory.
    pub(super) fn explain_out_of_memory(&self, error: Error) -> Error {
        explain_out_of_memory(error, &self.ledger, self.comm.rank())
    }

    fn cause_of(&self, error: candle_core::Error) -> Error {
        if let Some(failure) = lock(&self.failure).take() {
            return failure;
        }
        if residency::is_refusal(&error) {
            let absent: Vec<&str> = self.params.iter().filter(|p| !p.is_whole()).map(|p| p.name.as_str()).collect();
            let why = crate::error::without_backtrace(&error.to_string());
            if !absent.is_empty() {
                return ParamError::Absent { names: list(&absent), why }.into();
            }
        }
        error.into()
    }
}
