//! A dry run of a training step that only counts: it makes the engine's decisions without memory, files or other ranks.
//!
//! Layout, gathers, reductions, optimizer sweeps and publications are decided by [`crate::zero`], both for the engine
//! and for the rehearsal. Every buffer is a [`MetaBuffer`](super::meta_buffer::MetaBuffer) and is recorded in a
//! [`MemoryLedger`], and the bytes that would be transferred are counted. Decisions that depend on the model's
//! operations assume a typical model: units run in the order of registration, and gradients arrive in the reverse
//! order.

use super::EstimateOptions;
use super::rehearsed_files::{RehearsedFileBuilder, RehearsedFiles};
use super::step_trace::{self, LaunchedCollectiveId, StepPhase, StepTrace};
use super::traffic::Traffic;
use crate::comm::{CollectiveKind as CommKind, WireFormat};
use crate::config::{Config, OptimizerConfig, SgdConfig};
use crate::error::Result;
use crate::island_server::PseudoGradientFormat;
use crate::layout::{FragmentSchedule, exchanged_len, fragments_of};
use crate::memory::{MemoryKind, MemoryLedger, MemoryLedgerEntry, MemoryReport, MemoryTier};
use crate::offload::DiskAccess;
use crate::optim;
use crate::optim::{GroupStepSettings, ParameterGrouping, StepContext, SubGroupKey};
use crate::param::{Param, ParamId, ROOT, UnitId};
use crate::precision::WeightPacking;
use crate::zero::gather::leaf_units::LeafUnits;
use crate::zero::gather::param_gatherer::ParamGatherer;
use crate::zero::gather::routed_units::FLAGS_PER_WORD;
use crate::zero::gather::unit_trace::UnitEvent;
use crate::zero::reduce::gradient_reducer;
use crate::zero::reduce::gradient_reducer::{GradientReducer, ReducePlan};
use crate::zero::share::share_plan::SharePlan;
use crate::zero::share::sub_group::{SubGroup, param_slots};
use crate::zero::share::sub_group_builder::SubGroupBuilder;
use crate::zero::step::outer_step::encoding;
use crate::zero::step::rank_zero_requests::RankZeroRequests;
use crate::zero::step::sharded_step::{update, vote};
use crate::zero::step::weight_publisher::WeightPublisher;
use crate::zero::step_executor::StepExecutor;
use candle_core::DType;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

mod executor;

/// A simulation of rank 0.
pub(super) struct Rehearsal<'a> {
    params: &'a [Param],
    config: &'a Config,
    plan: ReducePlan,
    share_plan: SharePlan,
    /// The number of ranks in a group that keeps a second copy of gathered parameters, or 1 if there is no such group.
    second_group: usize,
    /// The memory tier of full parameters.
    tier: MemoryTier,
    /// The memory tier of the share, unless it is in files.
    share_location: MemoryTier,
    /// Whether units recompute their forward pass.
    recompute: bool,
    /// The optimizers, and which of them trains which parameter.
    grouping: Arc<ParameterGrouping>,
    ledger: MemoryLedger,
    groups: Mutex<Vec<SubGroup<Self>>>,
    /// The sub-group and slot of each parameter.
    param_slots: Vec<(usize, usize)>,
    files: RehearsedFiles,
    /// The transfer windows between the host and the GPU, by kind.
    windows: RefCell<[Option<MemoryLedgerEntry>; 3]>,
    traffic: Rc<RefCell<Traffic>>,
    /// The trace of the current step.
    step_trace: RefCell<StepTrace>,
    leaves: LeafUnits,
    /// The bytes of the model's buffers, which every training forward pass broadcasts from rank 0.
    buffers: usize,
    /// The entries that last for the complete rehearsal: buffers, full parameters, and the space of delayed updates.
    _permanent: Vec<MemoryLedgerEntry>,
}

/// An optimizer without states, assumed if the configuration has no optimizer.
const PLAIN: OptimizerConfig =
    OptimizerConfig::Sgd(SgdConfig { lr: 0.0, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false });

/// Returns the size of the group for a second copy, as an engine on this number of hosts chooses it, or 1 if the engine
/// would keep no second copy or refuse the size.
fn second_group(config: &Config, hosts: usize) -> usize {
    let (group, ranks_per_host) = (config.zero.hpz_partition_size, config.world_size / hosts.max(1));
    let sharded = config.zero.stage.placement().params.is_sharded();
    if sharded && hosts > 1 && ranks_per_host.is_multiple_of(group) { group } else { 1 }
}

impl<'a> Rehearsal<'a> {
    /// Creates the rank as it is at the start of training.
    pub fn new(params: &'a [Param], leaves: LeafUnits, config: &'a Config, options: EstimateOptions) -> Result<Self> {
        let (zero, world_size, dtype) = (&config.zero, config.world_size, config.precision.dtype());
        let placement = zero.stage.placement();
        let plan = ReducePlan::new(config, placement, world_size, dtype);
        let optimizer = optim::from_config(config.optimizer.as_ref().unwrap_or(&PLAIN));
        let grouping = Arc::new(ParameterGrouping::new(Some(Arc::from(optimizer)), Vec::new())?);
        let (ledger, traffic) = (MemoryLedger::default(), Rc::<RefCell<Traffic>>::default());
        let largest = params.iter().map(|p| p.numel).max().unwrap_or(0);
        let access = options.disk_access.unwrap_or(DiskAccess::Direct);
        let mut files = RehearsedFiles::new(&config.aio, largest, access, ledger.clone(), traffic.clone());
        let packs = params.iter().any(|param| param.packing().is_some());
        let share_plan = SharePlan { packs, ..SharePlan::new(config, plan.accumulate, 0, grouping.clone()) };
        if share_plan.has_files() {
            // While the files are filled, they bypass the page cache unless the user chose otherwise.
            files.hold_copies();
        }
        let tier = if options.gpu { MemoryTier::Device } else { MemoryTier::Host };
        let devices = share_plan.devices_of(tier, MemoryTier::Host);
        let share_location = devices.states;
        let mut builder =
            SubGroupBuilder::with(share_plan.clone(), RehearsedFileBuilder(ledger.clone()), ledger.clone(), devices);
        let mut permanent = Vec::new();
        for (id, param) in params.iter().enumerate() {
            let Param { name, shape, numel, .. } = param;
            let role = ParameterGrouping::role(grouping.group(name, shape.dims()));
            let block = param.packing().map_or_else(|| share_plan.block(role), WeightPacking::unit);
            param.block.store(block, Ordering::Relaxed);
            let class = SubGroupKey::new(role, param.is_trained(), param.weights);
            builder.push(id, param.cut(), class, 0, &mut |_| Ok(Vec::new()))?;
            if !share_plan.shards(param.weights) && param.cut().is_on(share_plan.rank) {
                let size = param.weights.dtype(dtype).size_in_bytes();
                permanent.push(ledger.hold_in(tier, MemoryKind::Parameters, numel * size));
            }
        }
        let groups = builder.finish(params)?;
        if let (true, Some(offload)) = (options.gpu, &zero.offload_optimizer)
            && offload.delayed_update_after.is_some()
            && !share_plan.has_files()
            && grouping.updates_by_elements()
        {
            // A delayed update needs space for the new weights until the next step, and for gradients, which may still
            // be in use when those of the next step arrive.
            for group in groups.iter().filter(|group| group.class.is_trained()) {
                let weights = group.class.weights.dtype(dtype);
                permanent.push(ledger.hold(MemoryKind::Staging, group.len * weights.size_in_bytes()));
                permanent.push(ledger.hold(MemoryKind::Gradients, group.len * plan.accumulate.size_in_bytes()));
            }
        }
        if options.disk_access.is_none() {
            let kinds = [
                MemoryKind::Parameters,
                MemoryKind::Gradients,
                MemoryKind::MasterWeights,
                MemoryKind::Moments,
                MemoryKind::OuterStates,
            ];
            let bytes = kinds.map(|kind| ledger.bytes_in(MemoryTier::File, kind).held as u64).iter().sum::<u64>();
            files.access = DiskAccess::fastest(bytes.saturating_mul(world_size as u64), true);
        }
        Ok(Self {
            params,
            config,
            plan,
            share_plan,
            second_group: second_group(config, options.hosts),
            tier,
            share_location,
            recompute: options.recompute || config.activation_checkpointing,
            grouping,
            ledger,
            param_slots: param_slots(&groups, params.len()),
            groups: Mutex::new(groups),
            files,
            windows: RefCell::default(),
            traffic,
            step_trace: RefCell::default(),
            leaves,
            buffers: 0,
            _permanent: permanent,
        })
    }

    /// Adds model buffers of `bytes` bytes.
    pub fn with_buffers(mut self, bytes: usize) -> Self {
        self.buffers = bytes;
        self._permanent.push(self.ledger.hold_in(self.tier, MemoryKind::Buffers, bytes));
        self
    }

    /// Counts the memory of the exchanges between islands, and returns the entries of those that are in flight while
    /// the model trains.
    pub fn exchange(&self, islands: usize) -> Result<Vec<MemoryLedgerEntry>> {
        let Some(config) = &self.config.local_steps else { return Ok(Vec::new()) };
        let schedule = FragmentSchedule::new(config.steps, config.fragments, config.fragment_delay);
        let trained = self.params.iter().enumerate().filter(|(_, param)| param.is_trained());
        let (trained_ids, trained): (Vec<ParamId>, Vec<&Param>) = trained.unzip();
        let elements: Vec<usize> = trained.iter().map(|param| param.numel).collect();
        // An engine refuses more fragments than parameters.
        let fragments = schedule.fragments().min(trained.len().max(1));
        let fragment_ids = fragments_of(&elements, fragments);
        let (mesh, placement) = (self.mesh(), self.placement());
        let len = |fragment: usize, rank: usize| -> usize {
            let params = trained.iter().zip(&fragment_ids).filter(|(_, id)| **id == fragment);
            params.map(|(param, _)| mesh.piece(param.cut(), mesh.piece_of(rank)).len()).sum()
        };
        let (dtype, wire) = encoding(config.wire);
        let f32_bytes = DType::F32.size_in_bytes();
        let buffers = |bytes: usize| self.ledger.hold(MemoryKind::Buckets, bytes);
        let sent_elements = |fragment: usize| exchanged_len(len(fragment, 0), islands, wire.alignment());
        // The bytes of a change that is sent through a server.
        let format = config.server.as_ref().map(|_| PseudoGradientFormat::from(config.wire));
        let encoded = |fragment: usize| {
            let bytes = format.and_then(|format| format.encoded_len(len(fragment, 0) as u64))?;
            usize::try_from(bytes).ok()
        };
        for fragment in 0..fragments {
            let sends_f32 = dtype == DType::F32 && format.is_none();
            let received = match sends_f32 {
                true => sent_elements(fragment) * f32_bytes,
                false => len(fragment, 0) * f32_bytes,
            };
            let wire_copy = match encoded(fragment) {
                Some(bytes) => bytes,
                None if sends_f32 => 0,
                None => sent_elements(fragment) * dtype.size_in_bytes(),
            };
            drop(buffers(encoded(fragment).map_or(sent_elements(fragment) * f32_bytes, |bytes| received + bytes)));
            drop(buffers(received + wire_copy));
            let _received = buffers(received);
            let gathers = !placement.optim.is_sharded() || mesh.copies() > 1;
            let longest = (0..mesh.world_size()).map(|rank| len(fragment, rank)).max().unwrap_or(0);
            let _gathered = gathers.then(|| buffers(longest * mesh.world_size() * f32_bytes));
            let mut publisher = WeightPublisher::new(self.zero().allgather_bucket_size);
            let ids = trained_ids.iter().zip(&fragment_ids).filter(|(_, id)| **id == fragment);
            ids.map(|(id, _)| *id).try_for_each(|id| publisher.push(self, id))?;
            publisher.finish(self)?;
        }
        let in_flight = (fragments - schedule.max_in_flight().min(fragments))..fragments;
        let in_flight_bytes = |fragment| encoded(fragment).unwrap_or(sent_elements(fragment) * dtype.size_in_bytes());
        Ok(in_flight.map(|fragment| buffers(in_flight_bytes(fragment))).collect())
    }

    /// Trains for three steps, and returns the traffic and the trace of the last one.
    pub fn train(&self) -> Result<(Traffic, StepTrace)> {
        let zero = &self.config.zero;
        let mut gather = ParamGatherer::new(self.params, &self.leaves, zero, &self.share_plan);
        let optional = self.leaves.has_optional_gradient(self.params, zero);
        let mut gradients = GradientReducer::new(self.plan, zero.reduce_bucket_size, optional);
        gather.refresh_persistent(self)?;
        // From the third micro step on, all micro steps of a step are alike, so their traffic can be multiplied.
        let accumulation = self.config.batch.gradient_accumulation_steps;
        let micro_steps = accumulation.min(3);
        let mut step_traffic = Traffic::default();
        // The first step records the order of the units; the later ones follow it.
        for _ in 0..3 {
            let before = self.traffic.borrow().clone();
            let mut last = Traffic::default();
            self.step_trace.take();
            for _ in 0..micro_steps {
                let before = self.traffic.borrow().clone();
                self.step_trace.borrow_mut().begin_segment();
                self.micro_step(&mut gather, &mut gradients)?;
                last = self.traffic.borrow().since(&before);
            }
            self.step_trace.borrow_mut().repeat(accumulation - micro_steps);
            self.step_trace.borrow_mut().begin_segment();
            vote(self, 0.0, true, RankZeroRequests::default(), self.plan.accumulate)?;
            update(self, &|param| {
                let Param { name, shape, .. } = &self.params[param];
                let optimizer =
                    self.grouping.optimizer(ParameterGrouping::role(self.grouping.group(name, shape.dims())));
                let optimizer = optimizer.expect("the optimizer of an assigned role exists");
                GroupStepSettings { optimizer, ctx: StepContext::new(0.0, 1) }
            })?;
            gradients.clear(self);
            gather.refresh_persistent(self)?;
            step_traffic = self.traffic.borrow().since(&before);
            step_traffic.add(&last, (accumulation - micro_steps) as u64);
        }
        Ok((step_traffic, self.step_trace.take()))
    }

    /// Records work on parameters: in a forward pass, one unit of work per element.
    fn compute(&self, phase: StepPhase, work: usize) {
        self.step_trace.borrow_mut().compute(phase, work as f64);
    }

    /// Counts a collective among `world` ranks and records its launch in the trace.
    fn count(
        &self,
        kind: CommKind,
        elements: usize,
        dtype: DType,
        (wire, world): (WireFormat, usize),
    ) -> LaunchedCollectiveId {
        self.traffic.borrow_mut().collective(kind, elements, dtype, wire, world);
        self.step_trace.borrow_mut().launch(step_trace::CollectiveCall { kind, wire, dtype, elements })
    }

    /// Counts a control message of `words` numbers to each of `world` ranks, and waits for those of the others.
    fn control(&self, words: usize, world: usize) {
        let launched = self.count(CommKind::Control, words, DType::F64, (WireFormat::Exact, world));
        self.step_trace.borrow_mut().wait(launched);
    }

    /// Runs the forward pass and the backward pass.
    fn micro_step(&self, gather: &mut ParamGatherer<Self>, gradients: &mut GradientReducer<Self>) -> Result<()> {
        if self.buffers > 0 && self.world_size() > 1 {
            self.control(self.buffers.div_ceil(8), self.world_size());
        }
        let sharded = self.placement().params.is_sharded();
        let running_units = self.leaves.running_units();
        let mut elements = vec![0usize; running_units.len()];
        self.params.iter().for_each(|param| elements[running_units[param.unit]] += param.numel);
        let runners = &running_units;
        let params_of = |unit: UnitId| self.params.iter().filter(move |param| runners[param.unit] == unit);
        gather.enter(self, UnitEvent::Forward(ROOT))?;
        for unit in (0..running_units.len()).filter(|unit| *unit != ROOT && !self.leaves.is_routed(*unit)) {
            if sharded {
                if self.recompute {
                    gather.will_recompute();
                }
                gather.enter(self, UnitEvent::Forward(unit))?;
            }
            self.compute(StepPhase::Forward, elements[unit]);
            self.run_routed(gather, params_of(unit), true)?;
            if sharded {
                gather.leave_forward(self, unit)?;
            }
        }
        // Parameters outside units mostly belong to a head that follows the units.
        self.compute(StepPhase::Forward, elements[ROOT]);
        self.run_routed(gather, params_of(ROOT), true)?;
        gather.leave_forward(self, ROOT)?;
        gather.enter(self, UnitEvent::Backward(ROOT))?;
        let mut end = self.params.len();
        // Frozen units before the first trained parameter keep no graph.
        let first_trained = self.params.iter().position(Param::is_trained).unwrap_or(end);
        for params in self.params.chunk_by(|a, b| running_units[a.unit] == running_units[b.unit]).rev() {
            let unit = running_units[params[0].unit];
            if unit != ROOT && end <= first_trained {
                break;
            }
            // A recomputing unit runs a nested backward pass.
            let nests = sharded && unit != ROOT && self.recompute;
            if nests {
                gather.nest(false);
            }
            if sharded && unit != ROOT {
                gather.enter(self, UnitEvent::Backward(unit))?;
            }
            if unit != ROOT && self.recompute {
                self.compute(StepPhase::Backward, elements[unit]);
                self.run_routed(gather, params, true)?;
            }
            self.run_routed(gather, params, false)?;
            for (id, param) in (0..end).zip(&self.params[..end]).rev().take(params.len()) {
                // One gradient is for the input, and one is for the parameter.
                self.compute(StepPhase::Backward, param.numel * if param.is_trained() { 2 } else { 1 });
                if !param.is_trained() || !self.holds(id) {
                    continue;
                }
                gradients.arrive(self, id, gradient_reducer::GradientBackend::zeros(self, param))?;
                if sharded {
                    gather.release_param(self, id)?;
                }
            }
            if nests {
                gather.unnest(self, unit, false)?;
            }
            end -= params.len();
        }
        gradients.end_backward(self)?;
        gather.end(self)
    }

    /// Runs the routed units that `params` belong to, as if the inputs of all ranks together chose all of them. In a
    /// forward pass (`agrees`), ranks agree on the chosen units. If experts are divided among ranks, all ranks first
    /// exchange the numbers of rows that they will send. The rows themselves are not counted.
    fn run_routed<'p>(
        &self,
        gather: &mut ParamGatherer<Self>,
        params: impl IntoIterator<Item = &'p Param>,
        agrees: bool,
    ) -> Result<()> {
        for units in self.leaves.routed_of(params) {
            let ranks = self.config.expert_parallel_size;
            if agrees && ranks > 1 {
                self.control(ranks + 2, self.world_size());
            }
            if !units.iter().any(|unit| gather.has_params(*unit)) {
                continue;
            }
            if agrees && self.world_size() > ranks {
                self.control(units.len().div_ceil(FLAGS_PER_WORD), self.world_size() / ranks);
            }
            let sizes = gather.routed_groups(self, &units);
            let mut rest = &units[..];
            for (number, size) in sizes.iter().enumerate() {
                let (group, others) = rest.split_at(*size);
                rest = others;
                gather.enter_routed(self, group, &rest[..sizes.get(number + 1).copied().unwrap_or(0)])?;
                gather.leave_routed(self, group)?;
            }
        }
        Ok(())
    }

    /// Returns the ledger's counts together with those that the ZeRO formula gives.
    pub fn report(&self) -> MemoryReport {
        self.ledger_report(self.plan.accumulate)
    }
}
