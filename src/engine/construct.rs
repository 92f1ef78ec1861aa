//! Construction of an engine.
//!
//! ```text
//!   communicator -> configuration -> model, parameter by parameter -> shares -> optimizer states -> all ranks compared
//! ```

use super::config_comparison::CustomComponents;
use super::consistency::check_same_on_all_ranks;
use super::gradient_check_state::EngineCheckState;
use super::island_transport::IslandRanks;
use super::islands::Islands;
use super::pipeline::PipelineSetup;
use super::reporter::EngineReporter;
use super::run_recorder::RunRecorder;
use super::step_clock::StepClock;
use super::{AccumulatedLoss, AccumulationProgress, Engine, EngineBuilder, MicroStepPhase};
use crate::checkpoint::{self, LockedFolders};
use crate::comm::Communicator;
use crate::config::{Config, LeafModule};
use crate::error::{EngineError, Error, OptimError, ParamError, Result};
use crate::layout::ZeroStage;
use crate::memory::MemoryLedger;
use crate::monitor::RunDescription;
use crate::notice::{emit, suppress_below};
use crate::offload::{DiskAccess, OffloadStore};
use crate::optim::{
    self, GroupedOptimizer, LrSchedule, Optimizer, OptimizerRole, ParameterGroup, ParameterGrouping, TrainableFilter,
};
use crate::param::{Param, WeightSource};
use crate::precision::{LossScaler, WeightPacking};
use crate::runs::{RunSpec, job, restart, run_name, settings_without_secrets};
use crate::util::list;
use crate::zero::expert_ranks::ExpertRanks;
use crate::zero::gather::leaf_units::LeafPosition;
use crate::zero::gather::unit::building;
use crate::zero::rank_core::{
    EngineLink, RankCore, RankCoreParts, RecomputeSettings, RegisteredModel, explain_out_of_memory,
};
use crate::zero::reduce::gradient_reducer::ReducePlan;
use crate::zero::share::share_plan::SharePlan;
use crate::zero::share::var_builder_backend::VarBuilderBackend;
use crate::zero::step::active_weights::ActiveWeights;
use candle_core::Device;
use candle_nn::VarBuilder;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

impl<M> Engine<M> {
    /// Builds the model and partitions it. Collective.
    pub(super) fn new(
        build: impl FnOnce(VarBuilder<'_>) -> candle_core::Result<M>,
        config: Config,
        source: WeightSource,
        comm: Arc<dyn Communicator>,
        device: Device,
        (options, islands): (EngineBuilder, Option<IslandRanks>),
    ) -> Result<Self> {
        if let Some(level) = config.monitoring.log_level {
            suppress_below(level);
        }
        let (buffer_rule, buffer_sync) = (options.buffer_rule, options.buffer_sync);
        let seed = options.seed.unwrap_or(config.seed);
        let rounding = options.stochastic_rounding.then_some(seed);
        let EngineBuilder {
            disk_access,
            schedule,
            optimizer,
            parameter_groups,
            trainable,
            quantized,
            monitors,
            leaf_units,
            shared_content,
            pipeline,
            run,
            ..
        } = options;
        let custom = CustomComponents { optimizer: optimizer.is_some(), schedule: schedule.is_some(), buffer_sync };
        let first_island = islands.as_ref().is_none_or(|islands| islands.number() == 0);
        let reports = comm.rank() == 0 && first_island && pipeline.as_ref().is_none_or(PipelineSetup::reports);
        if reports {
            report_notes(&config, custom);
        }
        if let Some(url) = &config.upload_checkpoints_to {
            checkpoint::store::check(url)?;
        }
        let mut reporter = EngineReporter::open(&config.monitoring, &*comm, reports, monitors)?;
        let (ledger, link) = (MemoryLedger::default(), EngineLink::default());
        let weights = source.fingerprint();
        let copied = pipeline.as_ref().and_then(PipelineSetup::copied);
        let grouping = grouping(&config, optimizer, parameter_groups, (trainable, copied), quantized)?;
        check_experts(&config, &grouping, &device, pipeline.is_some())?;
        // Ranks of all stages and islands share the disks of their host.
        let job = match (&pipeline, &islands) {
            (Some(pipeline), _) => pipeline.job().clone(),
            (None, Some(islands)) => islands.job().clone(),
            (None, None) => comm.clone(),
        };
        let offload = open_offload(&config, &*job, disk_access, &ledger)?;
        check_groups(&config, &*comm)?;
        let reduce_plan =
            ReducePlan::new(&config, config.zero.stage.placement(), comm.size(), config.precision.dtype());
        let share_plan = SharePlan::new(&config, reduce_plan.accumulate, comm.rank(), grouping.clone());
        if islands.is_some() && share_plan.averages() {
            let why = "the optimizer already averages weights; leave local_steps out, or use an optimizer without \
                       averaging, such as AdamW";
            return Err(EngineError::LocalSteps { why: why.into() }.into());
        }
        if pipeline.is_some() && share_plan.averages() {
            let why = "the optimizer averages weights, but the stages of a pipeline evaluate with the weights that are \
                       trained; use an optimizer without averaging, such as AdamW";
            return Err(EngineError::Pipeline { why: why.into() }.into());
        }
        let experts = ExpertRanks::new(&*comm, config.expert_parallel_size)?;
        let registry = VarBuilderBackend::new(
            share_plan.clone(),
            device.clone(),
            offload.clone(),
            source,
            link.clone(),
            ledger.clone(),
        );
        registry.also_buffers(buffer_rule);
        if let Some(pipeline) = &pipeline {
            registry.part_of(pipeline.names().map(String::from).chain(pipeline.buffers().iter().cloned()).collect());
        }
        let (model, mut registered) = build_model(build, registry, &config, &device)
            .map_err(|error| explain_out_of_memory(error, &ledger, comm.rank()))?;
        match &pipeline {
            Some(pipeline) => {
                grouping.kept_modules().check(pipeline.names())?;
                if reports && !leaf_units.is_empty() {
                    emit("EngineBuilder::leaf_units has no effect in a pipeline, where no parameters are gathered");
                }
            }
            None => {
                grouping.kept_modules().check(registered.names())?;
                mark_leaves(&mut registered, &config.zero.leaf_module, &leaf_units, reports)?;
                check_leaves(&registered)?;
            }
        }
        if let Some(offload) = &offload {
            choose_access(offload, &*job)?;
        }
        let trainer = trainer(grouping, &mut registered, schedule, &config, (pipeline.as_ref(), reports))?;
        let inits = std::mem::take(&mut registered.inits);
        let pipeline = pipeline.map(|setup| setup.position(registered.params.iter().map(|param| param.name.as_str())));
        let second_group = second_group(&config, &*comm, reports)?;
        if reports {
            note_compression(&config, &*comm);
        }
        let core = Arc::new(RankCore::new(RankCoreParts {
            comm,
            pipeline,
            experts,
            second_group,
            zero: config.zero.clone(),
            reduce_plan,
            share_plan,
            dtype: config.precision.dtype(),
            recomputation: RecomputeSettings {
                every_unit: config.activation_checkpointing,
                cpu_checkpointing: config.cpu_checkpointing,
            },
            rounding,
            registered,
            buffer_sync,
            ledger,
            offload,
        }));
        link.connect(&core);
        let island_fingerprint = check_same_on_all_ranks(
            (&core, islands.as_ref()),
            &config,
            custom,
            &trainer,
            weights,
            &inits,
            &shared_content,
        )?;
        #[cfg(feature = "cuda")]
        core.join_gpus()?;
        core.refresh()?;
        let islands = match (islands, &config.local_steps) {
            (Some(ranks), Some(config)) => Some(Islands::begin(ranks, config, &core, island_fingerprint)?),
            _ => None,
        };
        if reports {
            report_delay(&core, &config);
            reporter.monitors.describe(describe(run.as_ref(), &config, job.size()));
            reporter.run = RunRecorder::new(run, &config, job.size())?;
        }
        let mut engine = Self {
            check: EngineCheckState::of_first_step(config.gradient_check),
            model,
            eval_model: None,
            core,
            trainer,
            islands,
            scaler: LossScaler::new(&config.precision, config.zero.stage),
            config,
            device,
            phase: MicroStepPhase::Ready,
            active_weights: ActiveWeights::Trained,
            losses: AccumulatedLoss::default(),
            global_steps: 0,
            micro_steps: 0,
            seed,
            accumulation: AccumulationProgress::default(),
            forwards: 0,
            skipped_steps: 0,
            optimizer_steps: 0,
            global_samples: 0,
            was_applied: false,
            grad_norm: None,
            clock: StepClock::default(),
            reporter,
            saving: None,
            last_checkpoint: None,
            upload: None,
            locked_folders: LockedFolders::default(),
            failed_save: None,
            stopped: None,
            recorder: None,
        };
        engine.arm();
        engine.join_islands()?;
        engine.dump_state();
        Ok(engine)
    }
}

/// Describes the run to the monitors.
fn describe(spec: Option<&RunSpec>, config: &Config, world_size: usize) -> RunDescription {
    let (settings, total_steps) = spec.map(RunSpec::settings_and_steps).unwrap_or_default();
    let variable = |name: &str| std::env::var_os(name);
    RunDescription {
        name: run_name(spec, config.monitoring.run.as_ref(), variable),
        job: job().to_owned(),
        restart: restart(),
        world_size,
        configuration: settings_without_secrets(config.to_deepspeed_json()),
        settings: settings_without_secrets(settings),
        total_steps,
        ..RunDescription::default()
    }
}

/// Reports why updates that should be delayed are not.
fn report_delay(core: &RankCore, config: &Config) {
    let is_set = config.zero.offload_optimizer.as_ref().is_some_and(|offload| offload.delayed_update_after.is_some());
    if let (true, Some(why)) = (is_set, core.reason_not_to_delay()) {
        emit(&format!("offload_optimizer.delayed_update: no update is delayed: {why}"));
    }
}

/// Reports the configuration's notes, and the sections that are not used.
fn report_notes(config: &Config, custom: CustomComponents) {
    config.notes.iter().for_each(|note| emit(&format!("config: {}: {}", note.path, note.message)));
    let sections = [
        ("optimizer", config.optimizer.is_some() && custom.optimizer),
        ("scheduler", config.scheduler.is_some() && custom.schedule),
    ];
    for (section, _) in sections.into_iter().filter(|(_, is_replaced)| *is_replaced) {
        emit(&format!("config: {section}: not used because the engine has a custom one"));
    }
}

/// Returns the optimizer, from the user or the configuration, with the user's parameter groups.
fn grouping(
    config: &Config,
    custom: Option<Arc<dyn Optimizer>>,
    parameter_groups: Vec<ParameterGroup>,
    (trainable, copied): (Option<TrainableFilter>, Option<String>),
    quantized: Option<(WeightPacking, TrainableFilter)>,
) -> Result<Arc<ParameterGrouping>> {
    let optimizer = match custom {
        Some(custom) => Some(allowed_optimizer(custom, config)?),
        None => config.optimizer.as_ref().map(|config| Arc::from(optim::from_config(config))),
    };
    let grouping = ParameterGrouping::new(optimizer, parameter_groups)?.trainable(trainable).copied(copied);
    let grouping = grouping.keep_f32(&config.keep_in_fp32_modules);
    let quantized = match quantized {
        None if config.zero.quantized_nontrainable_weights => Some(frozen_matrices(&grouping)),
        rule => rule,
    };
    Ok(Arc::new(grouping.quantized(quantized)))
}

/// Returns the rule of `zero_quantized_nontrainable_weights`: int8 for all matrices that are frozen at the start.
fn frozen_matrices(grouping: &ParameterGrouping) -> (WeightPacking, TrainableFilter) {
    let trains = grouping.trains_rule();
    (WeightPacking::Int8, Arc::new(move |name, shape| shape.len() >= 2 && !trains(name, shape)))
}

/// Returns the user's optimizer, if the configuration allows it.
fn allowed_optimizer(custom: Arc<dyn Optimizer>, config: &Config) -> Result<Arc<dyn Optimizer>> {
    let stage = config.zero.stage;
    if stage > ZeroStage::Zero && !config.allows_untested_optimizer {
        return Err(OptimError::Untested { name: custom.name().into(), stage: stage.number() }.into());
    }
    Ok(custom)
}

/// Opens the files for offloaded state.
fn open_offload(
    config: &Config,
    comm: &dyn Communicator,
    access: Option<DiskAccess>,
    ledger: &MemoryLedger,
) -> Result<Option<Arc<OffloadStore>>> {
    let offload = OffloadStore::open(config, comm.rank() == 0, access, ledger)?;
    if offload.is_some() {
        // Nothing is written before the first rank has locked the folders and all ranks have determined how much space
        // is free in them.
        comm.barrier().wait()?;
    }
    Ok(offload)
}

/// Builds the model. Its parameters are partitioned among the ranks as they are registered.
fn build_model<M>(
    build: impl FnOnce(VarBuilder<'_>) -> candle_core::Result<M>,
    registry: VarBuilderBackend,
    config: &Config,
    device: &Device,
) -> Result<(M, RegisteredModel)> {
    let vb = VarBuilder::from_backend(Box::new(registry.clone()), config.precision.dtype(), device.clone());
    let model = building(&registry, || build(vb));
    let model = model.map_err(|e| registry.explain(e))?;
    Ok((model, registry.finish()?))
}

/// Marks the units named in the configuration and the builder as leaves.
fn mark_leaves(registered: &mut RegisteredModel, config: &LeafModule, names: &[String], reports: bool) -> Result<()> {
    let RegisteredModel { units, leaves, .. } = registered;
    for name in leaves.mark_named(units, config).into_iter().filter(|_| reports) {
        emit(&format!(
            "config: zero_optimization.leaf_module: no unit has the name or suffix {name}, so it has no effect"
        ));
    }
    for name in names {
        let module = match name.strip_prefix('*') {
            Some(suffix) => LeafModule { name_suffixes: vec![suffix.into()], ..LeafModule::default() },
            None => LeafModule { names: vec![name.clone()], ..LeafModule::default() },
        };
        if !leaves.mark_named(units, &module).is_empty() {
            let units: Vec<&str> = units.iter().skip(1).map(String::as_str).collect();
            return Err(ParamError::NoSuchUnit { name: name.clone(), units: list(&units) }.into());
        }
    }
    Ok(())
}

/// Returns an error if experts that are divided among ranks are in a leaf, which would gather them together.
fn check_leaves(registered: &RegisteredModel) -> Result<()> {
    let positions = registered.leaves.positions();
    let is_in_leaf = |param: &&Param| param.expert.is_some() && positions[param.unit] != LeafPosition::Outside;
    match registered.params.iter().find(is_in_leaf) {
        Some(param) => {
            let why = format!(
                "{} is in a leaf unit, all of whose parameters are gathered together; do not mark the unit as a leaf, or \
                 remove the section expert_parallel",
                param.name
            );
            Err(EngineError::ExpertParallel { why }.into())
        }
        None => Ok(()),
    }
}

/// Returns an error unless each group of `mics_shard_size` ranks is on one host, or one group contains all ranks.
fn check_groups(config: &Config, comm: &dyn Communicator) -> Result<()> {
    let (mesh, here) = (config.zero.mesh(config.ranks_per_island()), comm.ranks_here());
    match mesh.copies() == 1 || groups_are_on_one_host(mesh.shards(), &here) {
        true => Ok(()),
        false => Err(not_on_one_host("mics_shard_size", mesh.shards(), here)),
    }
}

/// Returns an error if this engine's settings do not allow experts to be divided among ranks.
fn check_experts(config: &Config, grouping: &ParameterGrouping, device: &Device, has_pipeline: bool) -> Result<()> {
    if config.expert_parallel_size == 1 {
        return Ok(());
    }
    let has_files = config.zero.param_files().is_some() || config.zero.optimizer_files().is_some();
    let leaves = &config.zero.leaf_module;
    let conflicts = [
        (has_pipeline, "the model is a pipeline, whose stages hold complete blocks; remove one of the two"),
        (has_files, "states are offloaded to files; use the device cpu, or remove one of the two"),
        (!device.is_cpu(), "the model is on a GPU, and tokens are exchanged only between CPUs; use the CPU"),
        (
            !grouping.updates_by_elements(),
            "the optimizer needs complete parameters, or their norms over all ranks; use an optimizer such as AdamW",
        ),
        (
            OptimizerRole::ALL.into_iter().any(|role| grouping.averaging(role).is_some()),
            "the optimizer averages weights; use an optimizer such as AdamW",
        ),
        (
            config.zero.ignore_unused_parameters || !leaves.names.is_empty() || !leaves.name_suffixes.is_empty(),
            "zero_optimization.ignore_unused_parameters or leaf_module is set, and neither can be combined with \
             experts that are divided among ranks; remove it",
        ),
    ];
    match conflicts.into_iter().find(|(applies, _)| *applies) {
        Some((_, why)) => {
            let why = format!("expert_parallel.autoep_size is {}, but {why}", config.expert_parallel_size);
            Err(EngineError::ExpertParallel { why }.into())
        }
        None => Ok(()),
    }
}

/// Returns whether each group of `ranks` consecutive ranks is on one host, judging by `here`, the ranks of this host.
fn groups_are_on_one_host(ranks: usize, here: &Range<usize>) -> bool {
    here.start.is_multiple_of(ranks) && here.len().is_multiple_of(ranks)
}

fn not_on_one_host(key: &'static str, found: usize, here: Range<usize>) -> Error {
    EngineError::GroupAcrossHosts { key, found, first: here.start, last: here.end - 1 }.into()
}

/// Returns the size of the groups that keep a second copy of gathered parameters; 1 if there is no second copy.
fn second_group(config: &Config, comm: &dyn Communicator, reports: bool) -> Result<usize> {
    let (ranks, here) = (config.zero.hpz_partition_size, comm.ranks_here());
    if ranks == 1 {
        return Ok(1);
    }
    let why = if config.zero.stage != ZeroStage::Three {
        "parameters are gathered only at stage 3"
    } else if here.len() == comm.size() {
        "all ranks are on one host, so no copy would be faster to reach"
    } else if groups_are_on_one_host(ranks, &here) {
        return Ok(ranks);
    } else {
        return Err(not_on_one_host("zero_hpz_partition_size", ranks, here));
    };
    if reports {
        emit(&format!("config: zero_optimization.zero_hpz_partition_size has no effect: {why}"));
    }
    Ok(1)
}

/// Prints a note if `compress_between_hosts_only` leaves nothing to compress.
fn note_compression(config: &Config, comm: &dyn Communicator) {
    let (compresses, all_here) =
        (config.zero.compresses(config.communication_data_type), comm.ranks_here().len() == comm.size());
    if config.zero.compress_between_hosts_only && compresses && all_here {
        emit(
            "config: zero_optimization.compress_between_hosts_only: all ranks are on one host, so nothing is compressed",
        );
    }
}

/// Checks that all ranks have disk space for everything that the files will contain, and chooses how files are
/// accessed.
fn choose_access(offload: &OffloadStore, comm: &dyn Communicator) -> Result<()> {
    offload.check_space(comm)?;
    let access = offload.choose_access(comm.ranks_here().len());
    if comm.rank() == 0 {
        emit(&format!("offload: files are read and written {access}"));
    }
    Ok(())
}

/// Assigns parameters to their parameter groups and creates the optimizer.
fn trainer(
    grouping: Arc<ParameterGrouping>,
    registered: &mut RegisteredModel,
    schedule: Option<Arc<dyn LrSchedule>>,
    config: &Config,
    (pipeline, reports): (Option<&PipelineSetup>, bool),
) -> Result<GroupedOptimizer> {
    let freezing: Vec<usize> = grouping.freezing().collect();
    let mut trains = registered.params.iter().any(|param| param.is_trained() && param.numel > 0);
    let mut count = registered.params.len();
    let mut used: BTreeSet<usize> = registered.params.iter().map(|param| param.group).collect();
    if let Some(pipeline) = pipeline {
        // Groups have the same numbers on all ranks, whichever parameters a rank has.
        (used, trains) = pipeline.used_by_any_stage(&used, trains)?;
        count = pipeline.names().count();
    }
    let (groups, used): (_, Vec<usize>) =
        (registered.params.iter_mut().map(|param| &mut param.group).collect(), used.into_iter().collect());
    let (trainer, empty) = GroupedOptimizer::new(grouping, (groups, &used), schedule, config.scheduler.as_ref())?;
    if let Some(index) = empty.iter().copied().find(|index| freezing.contains(index)) {
        return Err(ParamError::NothingFrozen { index }.into());
    }
    if trainer.can_train() && !trains {
        return Err(ParamError::NothingTrained { count }.into());
    }
    for group in empty.iter().filter(|_| reports) {
        emit(&format!("parameter group {group} (counted from 0) selects no remaining parameter and is dropped"));
    }
    for group in trainer.with_ignored_rates().iter().filter(|_| reports) {
        emit(&format!(
            "parameter group {group} (counted from 0): its learning rate has no effect because the schedule sets {:e} \
             in the first step; give the scheduler a list of rates, one per group, or remove the scheduler",
            trainer.lr()[*group]
        ));
    }
    Ok(trainer)
}
