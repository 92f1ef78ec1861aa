//! An engine's options, and how it comes to be.
//!
//! ```text
//!   configuration -> communicator -> model, parameter by parameter -> shares -> optimizer states -> all ranks compared
//! ```

use super::reports::Clock;
use super::telling::Telling;
use super::{Engine, Phase};
use crate::comm::Communicator;
use crate::config::{Config, ConfigSource, RunValues};
use crate::error::{Error, Result};
use crate::kernels;
use crate::launch::RankEnv;
use crate::layout::ZeroStage;
use crate::memory::Ledger;
use crate::monitor::{Monitor, Opening, say};
use crate::offload::{DiskAccess, Offload};
use crate::optim::{self, Grouping, LrSchedule, Optimizer, ParameterGroup, Trainer};
use crate::param::registry::{Holding, Registry};
use crate::param::{Source, fnv1a, lock};
use crate::precision::LossScaler;
use crate::timeline::{self, Recorder};
use crate::zero::core::{Core, Link};
use crate::zero::gradients::ReducePlan;
use crate::zero::unit::building;
use candle_core::Device;
use candle_nn::VarBuilder;
use std::path::PathBuf;
use std::sync::Arc;

/// Options of an engine besides its configuration.
#[derive(Default)]
pub struct EngineBuilder {
    communicator: Option<Arc<dyn Communicator>>,
    device: Option<Device>,
    seed: Option<u64>,
    init_from: Option<PathBuf>,
    disk_access: Option<DiskAccess>,
    schedule: Option<Arc<dyn LrSchedule>>,
    run_values: RunValues,
    monitors: Vec<Opening>,
    optimizer: Option<Arc<dyn Optimizer>>,
    parameter_groups: Vec<ParameterGroup>,
    timeline: Option<PathBuf>,
}

impl Engine<()> {
    /// An engine with options.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }
}

impl EngineBuilder {
    /// The job to take part in. Default: the one that the environment names (zerorun, mpirun, srun, torchrun).
    #[must_use]
    pub fn communicator(mut self, communicator: Arc<dyn Communicator>) -> Self {
        self.communicator = Some(communicator);
        self
    }

    /// Where the model computes. Default: the CPU; with feature `cuda` the GPU of the local rank's number, and more
    /// ranks than GPUs share them.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Seed of the initial weights. Default: the configuration's `seed`, 42 without one.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// A safetensors file with exactly the model's parameters, instead of random ones.
    #[must_use]
    pub fn init_from(mut self, path: impl Into<PathBuf>) -> Self {
        self.init_from = Some(path.into());
        self
    }

    /// How files of offloaded state are accessed. Default: what is fastest for their size.
    #[must_use]
    pub fn disk_access(mut self, access: DiskAccess) -> Self {
        self.disk_access = Some(access);
        self
    }

    /// A learning-rate schedule of your own, the same on all ranks. It wins over the configuration's `scheduler`.
    #[must_use]
    pub fn schedule(mut self, schedule: impl LrSchedule + 'static) -> Self {
        self.schedule = Some(Arc::new(schedule));
        self
    }

    /// What `"auto"` in the configuration stands for.
    #[must_use]
    pub fn run_values(mut self, values: RunValues) -> Self {
        self.run_values = values;
        self
    }

    /// A monitor besides those of the configuration: [`JsonLines`](crate::monitor::JsonLines),
    /// [`Prometheus`](crate::monitor::Prometheus), or your own. `open` is called on rank 0 alone, when the engine is built.
    #[must_use]
    pub fn monitor<N: Monitor + 'static>(mut self, open: impl FnOnce() -> Result<N> + Send + 'static) -> Self {
        self.monitors.push(Box::new(|| Ok(Box::new(open()?))));
        self
    }

    /// An optimizer of your own, the same on all ranks. It wins over the configuration's `optimizer`. At stage 1 to 3 the
    /// configuration has to allow it: `zero_allow_untested_optimizer`, as in DeepSpeed.
    #[must_use]
    pub fn optimizer(mut self, optimizer: impl Optimizer + 'static) -> Self {
        self.optimizer = Some(Arc::new(optimizer));
        self
    }

    /// Parameters with a learning rate, a weight decay or betas of their own, the same on all ranks. The first group that
    /// selects a parameter has it; what none selects forms a last group.
    #[must_use]
    pub fn parameter_groups(mut self, groups: Vec<ParameterGroup>) -> Self {
        self.parameter_groups = groups;
        self
    }

    /// Records what this rank does when, as a trace for Perfetto (ui.perfetto.dev) in `file`, which appears when the last
    /// engine of the process that records into it is dropped. Ranks that are processes write a file each, `file` with the
    /// rank's number in its name; `zerorun --timeline` makes one of all, and wins over this. Default: the file that the
    /// environment variable `CANDLE_ZERO_TIMELINE` names, nothing without it.
    #[must_use]
    pub fn timeline(mut self, file: impl Into<PathBuf>) -> Self {
        self.timeline = Some(file.into());
        self
    }

    /// Builds the model and partitions it. Collective.
    ///
    /// # Errors
    /// A configuration, environment or weight file that cannot be used; a model that differs between ranks; what
    /// `build` returns.
    pub fn initialize<M>(
        self,
        build: impl FnOnce(VarBuilder<'_>) -> candle_core::Result<M>,
        config: impl Into<ConfigSource>,
    ) -> Result<Engine<M>> {
        let env = RankEnv::from_env();
        let comm = match self.communicator.clone() {
            Some(comm) => comm,
            None => crate::comm::from_env(&env?)?,
        };
        kernels::checked_level().inspect_err(|e| comm.abort(&e.to_string()))?;
        let device = match self.device.clone() {
            Some(device) => device,
            None => crate::device::default()?,
        };
        let recorder = Recorder::open(self.timeline.clone(), comm.rank(), comm.size());
        let recorder = recorder.inspect_err(|e| comm.abort(&e.to_string()))?;
        let _here = timeline::enter(recorder.as_ref());
        let _span = timeline::span(timeline::Kind::Engine, "initialize");
        let engine = Config::load_for(config, comm.size(), &self.run_values).and_then(|config| {
            let source = match &self.init_from {
                Some(path) => Source::file(path)?,
                None => Source::Random { seed: self.seed.unwrap_or(config.seed) },
            };
            Engine::new(build, config, source, comm.clone(), device, self)
        });
        let mut engine = engine.inspect_err(|e| comm.abort(&e.to_string()))?;
        engine.recorder = recorder;
        Ok(engine)
    }
}

impl<M> Engine<M> {
    /// Builds the model and partitions it among the ranks that the environment names. Collective.
    ///
    /// `config` is a path, a JSON text, a `serde_json::Value` or a [`Config`].
    ///
    /// # Errors
    /// As [`EngineBuilder::initialize`].
    pub fn initialize(
        build: impl FnOnce(VarBuilder<'_>) -> candle_core::Result<M>,
        config: impl Into<ConfigSource>,
    ) -> Result<Self> {
        Engine::builder().initialize(build, config)
    }

    fn new(
        build: impl FnOnce(VarBuilder<'_>) -> candle_core::Result<M>,
        config: Config,
        source: Source,
        comm: Arc<dyn Communicator>,
        device: Device,
        options: EngineBuilder,
    ) -> Result<Self> {
        let (rank, world_size) = (comm.rank(), comm.size());
        if rank == 0 {
            config.notes.iter().for_each(|note| say(&format!("config: {}: {}", note.path, note.message)));
        }
        let EngineBuilder {
            disk_access,
            schedule: own_schedule,
            optimizer: own_optimizer,
            parameter_groups,
            monitors,
            ..
        } = options;
        let telling = Telling::open(&config.monitoring, &*comm, monitors)?;
        let dtype = config.precision.dtype();
        let placement = config.zero.stage.placement();
        let (ledger, link) = (Ledger::default(), Link::default());
        let weights = source.fingerprint();
        let sub_group_size = config.zero.sub_group_size;
        let has_own = [own_optimizer.is_some(), own_schedule.is_some()];
        let sections = [("optimizer", config.optimizer.is_some()), ("scheduler", config.scheduler.is_some())];
        for ((section, is_given), has_own) in sections.into_iter().zip(has_own) {
            if rank == 0 && is_given && has_own {
                say(&format!("config: {section}: not used, the engine was given one of its user's own"));
            }
        }
        let optimizer = match own_optimizer {
            Some(own) => Some(allowed(own, &config)?),
            None => config.optimizer.as_ref().map(|config| Arc::from(optim::from_config(config))),
        };
        let grouping = Arc::new(Grouping::new(optimizer, parameter_groups)?);
        let plan = ReducePlan::new(&config, placement, world_size, dtype);
        let offload = Offload::open(&config, &grouping, rank == 0, disk_access, &ledger)?;
        if offload.is_some() {
            // Nothing is written before the first rank has locked the folders, and all know what is free in them.
            comm.barrier().wait()?;
        }
        let holding = Holding {
            rank,
            world_size,
            placement,
            dtype,
            device: device.clone(),
            sub_group_size,
            grad_dtype: plan.accumulate,
            grouping: grouping.clone(),
            offload: offload.clone(),
        };
        let registry = Registry::new(holding, source, link.clone(), ledger.clone());
        let vb = VarBuilder::from_backend(Box::new(registry.clone()), dtype, device.clone());
        let model = building(&registry, || build(vb));
        let model = model.map_err(|e| registry.take_failure().unwrap_or_else(|| e.into()))?;
        let mut registered = registry.finish()?;
        if let Some(offload) = &offload {
            offload.check_space(&*comm)?;
        }

        let access = offload.as_ref().map(|o| o.choose_access(world_size));
        if let (0, Some(access)) = (rank, access) {
            say(&format!("offload: files are read and written {access}"));
        }
        let recompute = [config.activation_checkpointing, config.cpu_checkpointing];
        let (trainer, empty) = Trainer::new(grouping, &mut registered.params, own_schedule, config.scheduler.as_ref())?;
        for group in empty.iter().filter(|_| rank == 0) {
            say(&format!("parameter group {group} (from 0) selects no parameter that is left: it is dropped"));
        }
        let core = Core::new(comm, config.zero.clone(), plan, dtype, recompute, registered, ledger, offload, &link);
        core.check_same_on_all_ranks(&config, (has_own, &trainer), weights)?;
        lock(&core.gather).refresh_persistent(&*core)?;
        let scaler = LossScaler::new(&config.precision, config.zero.stage);
        let engine = Self {
            model,
            config,
            core,
            trainer,
            scaler,
            device,
            phase: Phase::Ready,
            loss_is_finite: true,
            global_steps: 0,
            micro_steps: 0,
            skipped_steps: 0,
            optimizer_steps: 0,
            global_samples: 0,
            was_applied: false,
            grad_norm: None,
            clock: Clock::default(),
            telling,
            saving: None,
            failed_save: None,
            stopped: None,
            recorder: None,
        };
        engine.dump_state();
        Ok(engine)
    }
}

impl Core {
    /// Collective: an error where ranks built different models, read different configurations, begin with different
    /// `weights` (a hash) or with a different `trainer` (whether optimizer and schedule are the user's own, and all of it).
    fn check_same_on_all_ranks(&self, config: &Config, trainer: ([bool; 2], &Trainer), weights: u64) -> Result<()> {
        let mut text = String::new();
        for param in &self.params {
            text += &format!("{} {:?} {};", param.name, param.shape, param.unit);
        }
        let elements: usize = self.params.iter().map(|p| p.numel).sum();
        let groups: Vec<usize> = self.params.iter().map(|p| p.group).collect();
        let config = format!("{:?} {trainer:?} {groups:?}", Config { notes: Vec::new(), ..config.clone() });
        let hashes = [fnv1a(text.as_bytes()), fnv1a(config.as_bytes()), weights];
        // Halves, because f64 carries 53 bits exactly.
        let halves = hashes.iter().flat_map(|h| [(h >> 32) as f64, (h & 0xffff_ffff) as f64]);
        let mine = [self.params.len() as f64, elements as f64].into_iter().chain(halves).collect();
        let all = self.comm.gather_f64(mine).wait()?;
        let rank = self.comm.rank();
        let Some(other) = (0..all.len()).find(|r| all[*r] != all[rank]) else { return Ok(()) };
        let (mine, theirs) = (&all[rank], &all[other]);
        let describe = |v: &[f64]| format!("{} parameters of {} elements, {:08x}", v[0], v[1], v[3] as u64);
        Err(match () {
            () if mine[..4] != theirs[..4] => {
                Error::ModelsDiffer { rank, other, mine: describe(mine), theirs: describe(theirs) }
            }
            () if mine[4..6] != theirs[4..6] => Error::ConfigsDiffer { rank, other },
            () => Error::WeightsDiffer { rank, other },
        })
    }
}

/// An optimizer of the user's own, if the configuration lets it train.
fn allowed(own: Arc<dyn Optimizer>, config: &Config) -> Result<Arc<dyn Optimizer>> {
    let stage = config.zero.stage;
    if stage > ZeroStage::Zero && !config.allows_untested_optimizer {
        return Err(Error::UntestedOptimizer { name: own.name().into(), stage: stage.number() });
    }
    Ok(own)
}
