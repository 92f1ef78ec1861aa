//! The `VarBuilder` backend behind a model under construction.
//!
//! For each parameter that the model requests, the backend creates the initial values (at stage 3 only this rank's
//! share), puts the share into its sub-group, and hands the model a tensor. At stage 3, it never holds a whole
//! parameter, except for parameters that [`SharePlan::shards`] excludes.

use super::packed_weight_shards;
use super::share_plan::SharePlan;
use super::sub_group_builder::{LOAD_CHUNK, SubGroupBuilder};
use crate::config::StatePrecision;
use crate::error::{EngineError, Error, ParamError, Result};
use crate::layout::{ExpertPlacement, ShardCut, ShardMesh, ZeroStage};
use crate::memory::{MemoryKind, MemoryLedger, MemoryTier};
use crate::offload::OffloadStore;
use crate::optim::{OptimizerRole, ParameterGrouping, SubGroupKey, WeightFormat};
use crate::param::{
    BufferFilter, ModelBuffer, Param, ParamId, ROOT, Residency, UnitId, WeightSource, gradient_capture,
};
use crate::param::{dtype_of_buffer, has_name_of_buffer};
use crate::precision::{Flat, FlatRef, WeightPacking};
use crate::tensor::{bytes, residency};
use crate::util::{lock, pieces};
use crate::zero::expert_ranks::indivisible;
use crate::zero::gather::leaf_units::LeafUnits;
use crate::zero::gather::unit::UnitRegistrar;
use crate::zero::rank_core::{EngineLink, RegisteredModel};
use candle_core::{DType, Device, Shape, Storage, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};

/// A `VarBuilder` backend that collects the parameters of a model under construction.
#[derive(Clone)]
pub(crate) struct VarBuilderBackend(Arc<Mutex<VarBuilderBackendInner>>);

struct VarBuilderBackendInner {
    plan: SharePlan,
    device: Device,
    source: WeightSource,
    link: EngineLink,
    ledger: MemoryLedger,
    params: Vec<Param>,
    inits: Vec<Init>,
    buffers: Vec<ModelBuffer>,
    /// The rule that selects further buffers, in addition to those recognized by their names and types.
    buffer_rule: Option<BufferFilter>,
    /// The names of the complete model's parameters and buffers, if this rank builds only a part of the model.
    complete: Option<BTreeSet<String>>,
    by_name: HashMap<String, usize>,
    units: Vec<String>,
    leaves: LeafUnits,
    /// For each unit that belongs to an expert, the ranks that hold it, if experts are divided among ranks.
    experts: Vec<Option<ExpertPlacement>>,
    open_units: Vec<UnitId>,
    /// The parameters that each unit uses, including those of other units.
    used_by: Vec<BTreeSet<ParamId>>,
    groups: SubGroupBuilder,
    /// Complete parameters and the values that they get once the model is built. If a model computed something from
    /// them earlier, the result would keep the initial values forever.
    waiting: Vec<(Tensor, Storage)>,
    /// Whether only names, shapes and units are collected: no parameter gets memory or a share.
    shapes_only: bool,
    /// The first error; Candle's own error type cannot carry it.
    failure: Option<Error>,
}

impl VarBuilderBackend {
    /// Creates a backend. `offload` has the files of offloaded state.
    pub fn new(
        plan: SharePlan,
        device: Device,
        offload: Option<Arc<OffloadStore>>,
        source: WeightSource,
        link: EngineLink,
        ledger: MemoryLedger,
    ) -> Self {
        let groups = SubGroupBuilder::new(plan.clone(), offload, ledger.clone(), plan.devices(&device));
        Self(Arc::new(Mutex::new(VarBuilderBackendInner {
            plan,
            device,
            source,
            link,
            ledger,
            params: Vec::new(),
            inits: Vec::new(),
            buffers: Vec::new(),
            buffer_rule: None,
            complete: None,
            by_name: HashMap::new(),
            units: vec![String::new()],
            leaves: LeafUnits::default(),
            experts: vec![None],
            open_units: vec![ROOT],
            used_by: vec![BTreeSet::new()],
            groups,
            waiting: Vec::new(),
            shapes_only: false,
            failure: None,
        })))
    }

    /// Creates a backend that collects names, shapes and units, for a model that is only inspected: its tensors are
    /// absent.
    pub fn of_shapes(dtype: DType) -> Self {
        let plan = SharePlan {
            states: StatePrecision { master_weights: true, bf16_moments: false },
            offloads_states: false,
            offloads_weights: false,
            packs: false,
            rank: 0,
            mesh: ShardMesh::among_all(1),
            expert_ranks: 1,
            placement: ZeroStage::Three.placement(),
            dtype,
            sub_group_size: usize::MAX,
            grad_dtype: dtype,
            buffer_dtype: None,
            grouping: Arc::default(),
            weights_in_memory: None,
            states_in_files: None,
            outer_states: &[],
        };
        let registry = Self::new(
            plan,
            Device::Cpu,
            None,
            WeightSource::Random { seed: 0 },
            EngineLink::default(),
            MemoryLedger::default(),
        );
        lock(&registry.0).shapes_only = true;
        registry
    }

    /// Declares that this rank builds only a part of a model. `complete` contains the names of all parameters and
    /// buffers of the model. The part may have no parameters.
    pub fn part_of(&self, complete: BTreeSet<String>) {
        lock(&self.0).complete = Some(complete);
    }

    /// Replaces the source of initial values. If the model asks whether a tensor exists, the backend also searches
    /// `source`.
    pub fn with_source(self, source: WeightSource) -> Self {
        lock(&self.0).source = source;
        self
    }

    /// Also turns the tensors that `rule` selects by name and shape into buffers, from now on.
    pub fn also_buffers(&self, rule: Option<BufferFilter>) {
        lock(&self.0).buffer_rule = rule;
    }

    /// Begins a unit: parameters registered until [`VarBuilderBackend::close_unit`] belong to it.
    pub fn open_unit(&self, name: String) -> (UnitId, EngineLink) {
        let mut inner = lock(&self.0);
        let (id, enclosing) = (inner.units.len(), inner.open_unit());
        inner.units.push(name);
        inner.leaves.push(enclosing);
        let expert = inner.experts[enclosing];
        inner.experts.push(expert);
        inner.used_by.push(BTreeSet::new());
        inner.open_units.push(id);
        (id, inner.link.clone())
    }

    pub fn close_unit(&self) {
        lock(&self.0).open_units.pop();
    }

    /// Returns the typed error behind a failed construction.
    pub fn explain(&self, error: candle_core::Error) -> Error {
        let mut inner = lock(&self.0);
        if let Some(failure) = inner.failure.take() {
            return failure;
        }
        let last = inner.params.last().filter(|_| residency::names_absent(&error));
        match last {
            Some(last) => ParamError::UsedWhileBuilding { last: last.name.clone() }.into(),
            None => error.into(),
        }
    }

    /// Ends the registration.
    pub fn finish(&self) -> Result<RegisteredModel> {
        let mut inner = lock(&self.0);
        let params = std::mem::take(&mut inner.params);
        for (tensor, values) in std::mem::take(&mut inner.waiting) {
            residency::fill(&tensor, values)?;
        }
        if params.is_empty() && inner.complete.is_none() {
            return Err(ParamError::NoParameters.into());
        }
        if inner.plan.expert_ranks > 1 && params.iter().all(|param| param.expert.is_none()) {
            let why = format!(
                "expert_parallel.autoep_size is {}, but the model has no experts whose tensors are separate units; \
                 build its experts with routed_units, or remove the section",
                inner.plan.expert_ranks
            );
            return Err(EngineError::ExpertParallel { why }.into());
        }
        let buffers = std::mem::take(&mut inner.buffers);
        let names = params.iter().map(|p| p.name.as_str()).chain(buffers.iter().map(|b| b.name.as_str()));
        let other_names = inner.complete.iter().flatten().map(String::as_str);
        inner.source.check_all_used(&names.chain(other_names).collect::<BTreeSet<_>>())?;
        let (units, used_by) = (std::mem::take(&mut inner.units), std::mem::take(&mut inner.used_by));
        let leaves = std::mem::take(&mut inner.leaves);
        let inits = std::mem::take(&mut inner.inits);
        let groups = inner.groups.finish(&params)?;
        Ok(RegisteredModel { params, units, leaves, used_by, groups, buffers, inits })
    }
}

impl VarBuilderBackend {
    /// Takes the parameters and buffers that a part of a model has registered, which may be none.
    pub fn take(&self) -> (Vec<Param>, Vec<ModelBuffer>) {
        let mut inner = lock(&self.0);
        inner.by_name.clear();
        let buffers = std::mem::take(&mut inner.buffers);
        (std::mem::take(&mut inner.params), buffers)
    }
}

/// The settings of a parameter.
struct ParamSettings {
    group: usize,
    role: OptimizerRole,
    trained: Arc<AtomicBool>,
    weights: WeightFormat,
}

impl VarBuilderBackendInner {
    fn register(&mut self, name: &str, shape: Shape, init: Init, dtype: DType) -> Result<Tensor> {
        /// The name of the metadata object in the header of safetensors files.
        const RESERVED: &str = "__metadata__";
        if name == RESERVED {
            return Err(ParamError::ReservedName { name: RESERVED }.into());
        }
        if self.is_buffer(name, &shape, dtype) {
            return self.buffer(name, shape, init, dtype);
        }
        let expert = self.experts[self.open_unit()];
        self.check_expert(name, expert)?;
        if let Some(registered) = self.registered(name) {
            if registered.shape != shape {
                let (first, second) = (registered.shape.dims().to_vec(), shape.dims().to_vec());
                return Err(ParamError::Twice { name: name.into(), first, second }.into());
            }
            return Ok(registered.tensor.clone());
        }
        let plan = self.plan.clone();
        if dtype != plan.dtype {
            let (found, expected) = (format!("{dtype:?}"), format!("{:?}", plan.dtype));
            return Err(ParamError::Dtype { name: name.into(), found, expected }.into());
        }
        let is_trained = plan.grouping.trains(name, shape.dims());
        let trained = Arc::new(AtomicBool::new(is_trained));
        let mut weights = plan.grouping.weights(name, shape.dims());
        if weights == WeightFormat::F32 && plan.dtype == DType::F32 {
            weights = WeightFormat::Model;
        }
        let packing = weights.packing();
        if packing.is_some() && is_trained {
            return Err(ParamError::QuantizedTrained { name: name.into() }.into());
        }
        let group = plan.grouping.group(name, shape.dims());
        let settings = ParamSettings { group, role: ParameterGrouping::role(group), trained, weights };
        let dtype = weights.dtype(dtype);
        if self.shapes_only {
            let tensor = self.absent(&shape, dtype, &settings.trained)?;
            return Ok(self.add(name, (shape, ShardCut::anywhere(0)), settings, tensor, Residency::Absent));
        }
        let numel = shape.elem_count();
        let block = packing.map_or_else(|| plan.block(settings.role), WeightPacking::unit);
        let cut = ShardCut { numel, block, expert };
        let (id, class) = (self.params.len(), SubGroupKey::new(settings.role, is_trained, weights));
        self.inits.push(self.source.hint(init));
        if !cut.is_on(plan.rank) {
            // The parameter belongs to an expert on other ranks: it has no values here, and gets no gradient.
            self.groups.push_share(id, cut, FlatRef::F32(&[]), class)?;
            let tensor = self.absent(&shape, dtype, &Arc::default())?;
            return Ok(self.add(name, (shape, cut), settings, tensor, Residency::Absent));
        }
        let mesh = plan.mesh.of(cut);
        let shard = mesh.shard(cut, mesh.shard_of(plan.mesh.number_of(cut, plan.rank)));
        // Values are read in f32: the master weights begin with the full precision of the source.
        let (tensor, residency) = if plan.shards(weights) {
            let (source, start) = (&self.source, shard.start);
            let mut read = |part: Range<usize>| source.values(name, &shape, init, start + part.start..start + part.end);
            self.groups.push(id, cut, class, shard.len(), &mut read)?;
            (self.absent(&shape, dtype, &settings.trained)?, Residency::Absent)
        } else {
            let values = match packing {
                None if !is_trained => {
                    // No state of a frozen parameter needs full precision.
                    self.groups.push_share(id, cut, FlatRef::F32(&[]), class)?;
                    let mut values = Flat::with_capacity(dtype, numel);
                    for part in pieces(numel, LOAD_CHUNK) {
                        values.extend_cast(FlatRef::F32(&self.source.values(name, &shape, init, part)?));
                    }
                    values
                }
                _ => {
                    let values = self.source.values(name, &shape, init, 0..numel)?;
                    let owned = &values[if plan.placement.optim.is_sharded() { shard } else { 0..numel }];
                    self.groups.push(id, cut, class, owned.len(), &mut |part| Ok(owned[part].to_vec()))?;
                    match packing {
                        // These are the values that stage 3 computes with.
                        Some(packing) => packed_weight_shards::rounded(packing, FlatRef::F32(&values), dtype),
                        None => Flat::from_f32(values, dtype),
                    }
                }
            };
            let held =
                self.ledger.hold_in(MemoryTier::of(&self.device), MemoryKind::Parameters, values.capacity_in_bytes());
            let tensor = self.absent(&shape, dtype, &settings.trained)?;
            let values = residency::storage_on(&self.device, residency::to_storage(values))?;
            self.waiting.push((tensor.clone(), values));
            (tensor, Residency::Whole(held))
        };
        Ok(self.add(name, (shape, cut), settings, tensor, residency))
    }

    /// Checks that a parameter of an expert belongs only to that expert, if experts are divided among ranks.
    fn check_expert(&self, name: &str, expert: Option<ExpertPlacement>) -> Result<()> {
        let Some(registered) = self.by_name.get(name).map(|id| &self.params[*id]) else { return Ok(()) };
        if registered.expert.is_none() && expert.is_none() || registered.unit == self.open_unit() {
            return Ok(());
        }
        let why = format!(
            "{name} is used by an expert and by another part of the model, which may be on different ranks; give each \
             expert its own parameters, or remove the section expert_parallel"
        );
        Err(EngineError::ExpertParallel { why }.into())
    }

    /// Returns whether the tensor that the model requests is a buffer.
    fn is_buffer(&self, name: &str, shape: &Shape, dtype: DType) -> bool {
        let is_chosen = || self.buffer_rule.as_ref().is_some_and(|rule| rule(name, shape.dims()));
        !self.by_name.contains_key(name)
            && (self.registered_buffer(name).is_some() || dtype.is_int() || has_name_of_buffer(name) || is_chosen())
    }

    fn registered_buffer(&self, name: &str) -> Option<&ModelBuffer> {
        self.buffers.iter().find(|buffer| buffer.name == name)
    }

    /// Returns the tensor of a buffer: a variable, which is created at the first request.
    fn buffer(&mut self, name: &str, shape: Shape, init: Init, dtype: DType) -> Result<Tensor> {
        let dtype = match self.plan.buffer_dtype {
            Some(cast) if dtype.is_float() => cast,
            None if dtype == self.plan.dtype && self.plan.grouping.kept_modules().keep(name) => DType::F32,
            _ => dtype_of_buffer(name, dtype, self.plan.dtype),
        };
        let open = self.open_units.clone();
        if let Some(registered) = self.buffers.iter_mut().find(|buffer| buffer.name == name) {
            if *registered.tensor.shape() != shape {
                let (first, second) = (registered.tensor.dims().to_vec(), shape.dims().to_vec());
                return Err(ParamError::Twice { name: name.into(), first, second }.into());
            }
            if registered.tensor.dtype() != dtype {
                let (first, second) = (format!("{:?}", registered.tensor.dtype()), format!("{dtype:?}"));
                return Err(ParamError::BufferTwice { name: name.into(), first, second }.into());
            }
            registered.units.extend(open);
            return Ok(registered.tensor.clone());
        }
        if !bytes::has_bytes(dtype) {
            return Err(ParamError::BufferDtype { name: name.into(), found: format!("{dtype:?}") }.into());
        }
        let values = self.source.buffer(name, &shape, init, dtype)?;
        let ledger_entry = self.ledger.hold_in(MemoryTier::of(&self.device), MemoryKind::Buffers, values.len());
        let tensor = bytes::variable(&self.device, dtype, shape, &values)?;
        self.buffers.push(ModelBuffer { name: name.into(), tensor: tensor.clone(), units: open, ledger_entry });
        Ok(tensor)
    }

    /// Creates the tensor of the next parameter, whose initial values are `values`.
    fn tensor(&self, shape: &Shape, values: Flat, trained: &Arc<AtomicBool>) -> Result<Tensor> {
        let storage = residency::storage_on(&self.device, residency::to_storage(values))?;
        let (id, sink) = (self.params.len(), Arc::new(self.link.clone()));
        Ok(gradient_capture::capture(id, trained.clone(), sink, &self.device, (storage, shape.clone()))?)
    }

    /// Creates the tensor of the next parameter, whose values are absent.
    fn absent(&self, shape: &Shape, dtype: DType, trained: &Arc<AtomicBool>) -> Result<Tensor> {
        // The tensor takes its dtype from the storage, which has one element because CUDA may refuse an empty storage.
        let tensor = self.tensor(shape, Flat::zeros(dtype, 1), trained)?;
        residency::clear(&tensor)?;
        Ok(tensor)
    }

    /// Adds a parameter and returns its tensor.
    fn add(
        &mut self,
        name: &str,
        (shape, ShardCut { block, expert, .. }): (Shape, ShardCut),
        settings: ParamSettings,
        tensor: Tensor,
        residency: Residency,
    ) -> Tensor {
        let ParamSettings { group, role, trained, weights } = settings;
        self.by_name.insert(name.into(), self.params.len());
        self.record_use(self.params.len());
        self.params.push(Param {
            name: name.into(),
            numel: shape.elem_count(),
            block: AtomicUsize::new(block),
            expert,
            weights,
            shape,
            group,
            unit: self.open_unit(),
            trained,
            role,
            updates_before: AtomicU64::new(0),
            tensor: tensor.clone(),
            residency: Mutex::new(residency),
        });
        tensor
    }

    /// Returns the unit under construction.
    fn open_unit(&self) -> UnitId {
        self.open_units.last().copied().unwrap_or(ROOT)
    }

    /// Records that the units under construction use a parameter.
    fn record_use(&mut self, param: ParamId) {
        for unit in &self.open_units {
            self.used_by[*unit].insert(param);
        }
    }

    /// Returns the parameter that was registered under `name`, for one more use of it.
    fn registered(&mut self, name: &str) -> Option<&Param> {
        let (unit, id) = (self.open_unit(), *self.by_name.get(name)?);
        self.record_use(id);
        let param = &mut self.params[id];
        if param.unit != unit {
            // Otherwise, one unit would release a parameter that another unit is using. The root's parameters are
            // available to all units.
            param.unit = ROOT;
        }
        Some(param)
    }

    fn fail(&mut self, error: Error) -> candle_core::Error {
        let text = error.to_string();
        self.failure.get_or_insert(error);
        candle_core::Error::Msg(text)
    }
}

impl UnitRegistrar for VarBuilderBackend {
    fn open_unit(&self, name: String) -> candle_core::Result<(UnitId, EngineLink)> {
        Ok(self.open_unit(name))
    }

    fn close_unit(&self) {
        self.close_unit();
    }

    fn mark_leaf(&self, unit: UnitId) {
        lock(&self.0).leaves.mark(unit);
    }

    fn mark_routed(&self, unit: UnitId, first: UnitId, (number, count): (usize, usize)) -> candle_core::Result<()> {
        let mut inner = lock(&self.0);
        inner.leaves.mark_routed(unit, first);
        let ranks = inner.plan.expert_ranks;
        if !count.is_multiple_of(ranks) {
            let layer = inner.units[unit].rsplit_once('.').map_or("the layer", |(layer, _)| layer);
            let error = indivisible(ranks, count, layer);
            return Err(inner.fail(error.into()));
        }
        inner.experts[unit] = (ranks > 1).then(|| ExpertPlacement::of(number, count, ranks));
        Ok(())
    }

    fn link(&self) -> EngineLink {
        lock(&self.0).link.clone()
    }
}

impl SimpleBackend for VarBuilderBackend {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        let mut inner = lock(&self.0);
        inner.register(name, shape, init, dtype).map_err(|e| inner.fail(e))
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        let mut inner = lock(&self.0);
        if let Some(param) = inner.registered(name) {
            return Ok(param.tensor.clone());
        }
        if let Some(buffer) = inner.registered_buffer(name) {
            return Ok(buffer.tensor.clone());
        }
        Err(inner.fail(ParamError::WithoutShape { name: name.into() }.into()))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let inner = lock(&self.0);
        inner.by_name.contains_key(name) || inner.registered_buffer(name).is_some() || inner.source.contains(name)
    }
}
