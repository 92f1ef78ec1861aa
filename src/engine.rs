//! A training step told in order: initialize, forward, backward, step.
//!
//! ```text
//!   initialize   configuration -> communicator -> model, parameter by parameter -> shares -> optimizer states
//!   forward      [gather -> unit -> release] ...
//!   backward     loss x scale / accumulation -> [gather -> unit -> gradients arrive -> reduce] ...
//!   step         at the accumulation boundary: vote -> scaler -> clip -> update -> publish -> schedule
//! ```
//!
//! The engine owns no arithmetic: each word is a module of its own.

mod telling;

use crate::checkpoint::Saving;
use crate::comm::{CommReport, Communicator};
use crate::config::{Config, ConfigSource, Precision, RunValues};
use crate::error::{Error, Result, without_backtrace};
use crate::graph::{once, without_gradients};
use crate::launch::RankEnv;
use crate::layout::ZeroStage;
use crate::memory::{ElementBytes, Ledger, MemoryReport};
use crate::monitor::{Monitor, Opening, say};
use crate::nn::draw_from;
use crate::offload::{DiskAccess, Offload, OffloadReport};
use crate::optim::{self, Grouping, LrSchedule, Momentum, Optimizer, ParameterGroup, Trainer};
use crate::param::registry::{Holding, Registry};
use crate::param::{ROOT, Source, fnv1a, lock};
use crate::precision::{LossScaler, ScalerState, gradient_multiplier};
use crate::profiler::spans::Half;
use crate::timeline::{self, Recorder, Span};
use crate::zero::core::{Core, Link};
use crate::zero::gradients::ReducePlan;
use crate::zero::trace::Event;
use crate::zero::unit::building;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use telling::Telling;

/// Stack that Candle's recursive backward may use, and how much of it must be left before a new one is taken.
const BACKWARD_STACK: usize = 64 << 20;
const RED_ZONE: usize = 16 << 20;

/// Wraps a model and trains it under ZeRO.
///
/// ```
/// use candle_core::Tensor;
/// use candle_nn::Module;
/// use candle_zero::Engine;
///
/// let config = r#"{
///     "train_batch_size": 8,
///     "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
///     "zero_optimization": {"stage": 2}
/// }"#;
/// let mut engine = Engine::initialize(|vb| candle_nn::linear(4, 1, vb), config)?;
/// let x = Tensor::arange(0f32, 32f32, engine.device())?.reshape((8, 4))?;
/// let mut losses = vec![];
/// for _ in 0..5 {
///     let loss = engine.forward(|model| model.forward(&x)?.sqr()?.mean_all())?;
///     engine.backward(&loss)?;
///     engine.step()?;
///     losses.push(loss.to_scalar::<f32>()?);
/// }
/// assert!(losses[4] < losses[0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Engine<M> {
    model: M,
    config: Config,
    core: Arc<Core>,
    trainer: Trainer,
    scaler: LossScaler,
    device: Device,
    phase: Phase,
    /// All losses of this accumulation were finite.
    loss_is_finite: bool,
    global_steps: u64,
    micro_steps: u64,
    skipped_steps: u64,
    /// Updates that the optimizer's states have seen.
    optimizer_steps: u64,
    /// Samples of all ranks.
    global_samples: u64,
    was_applied: bool,
    grad_norm: Option<f64>,
    clock: Clock,
    telling: Telling,
    /// A checkpoint that is being written.
    saving: Option<Saving>,
    /// Why it could not be, until it has been told.
    failed_save: Option<Error>,
    /// The error that ended the job for this rank.
    stopped: Option<String>,
    /// The last field: what the others do while they are dropped is recorded too.
    recorder: Option<Recorder>,
}

/// How far a run is: what a checkpoint holds besides the model's state.
pub(crate) struct Progress {
    pub global_steps: u64,
    pub skipped_steps: u64,
    pub optimizer_steps: u64,
    pub global_samples: u64,
    pub scaler: Option<ScalerState>,
    pub last_batch_iteration: i64,
}

/// Where in a micro step the engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Before forward.
    Ready,
    /// A loss exists.
    Forwarded,
    /// Its gradients exist.
    Backwarded,
}

/// Milliseconds that the last optimizer step took on this rank, accumulation included.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct StepTimings {
    /// In `forward`.
    pub forward_ms: f64,
    /// In `backward`.
    pub backward_ms: f64,
    /// In `step`.
    pub step_ms: f64,
    /// Waiting for collectives, a part of the others.
    pub comm_ms: f64,
    /// Waiting for files, a part of the others.
    pub disk_ms: f64,
}

#[derive(Default)]
struct Clock {
    forward: Duration,
    backward: Duration,
    step: Duration,
    /// Seconds waited for collectives in backward.
    backward_wait: f64,
    /// Seconds waited for collectives, and for files, until the last boundary.
    waited: [f64; 2],
    last: StepTimings,
    last_backward_wait_ms: f64,
}

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

    /// Runs the model in training: `run` computes the loss (or anything the loss is then made from).
    ///
    /// Parameters are in memory while `run` runs; at stage 3 those of a unit only while the unit runs.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`] between backward and step; what `run` returns; a failed collective.
    pub fn forward(&mut self, run: impl FnOnce(&M) -> candle_core::Result<Tensor>) -> Result<Tensor> {
        self.not_stopped()?;
        if self.phase == Phase::Backwarded {
            return Err(Error::OutOfOrder { call: "forward", when: "after backward without a step" });
        }
        self.tell_memory("before forward", self.global_steps + 1);
        let start = Instant::now();
        self.telling.micro_step = Some(start);
        let _span = self.span("forward");
        let draws = ((self.rank() as u64) << 40 | self.micro_steps, 0);
        let profile = self.record(Half::Forward);
        let output = self.attempt(|engine| draw_from(draws, || engine.run_model(run)))?;
        drop(profile);
        self.phase = Phase::Forwarded;
        self.clock.forward += start.elapsed();
        self.tell_memory("after forward", self.global_steps + 1);
        Ok(output)
    }

    /// Runs the model without keeping a graph and without counting anything. Collective at stage 3.
    ///
    /// # Errors
    /// What `run` returns; a failed collective.
    pub fn eval(&mut self, run: impl FnOnce(&M) -> candle_core::Result<Tensor>) -> Result<Tensor> {
        let _span = self.span("eval");
        self.attempt(|engine| {
            engine.core.set_evaluating(true);
            let output = without_gradients(|| engine.run_model(run));
            let ended = lock(&engine.core.gather).end(&*engine.core);
            engine.core.set_evaluating(false);
            ended?;
            Ok(output?.detach())
        })
    }

    fn run_model(&mut self, run: impl FnOnce(&M) -> candle_core::Result<Tensor>) -> Result<Tensor> {
        let core = &self.core;
        let run = || {
            core.enter(Event::Forward(ROOT))?;
            let output = run(&self.model)?;
            core.leave_forward(ROOT)?;
            Ok(output)
        };
        run().map_err(|e| core.explain(e))
    }

    /// Differentiates `loss`, which has one element: scaled by the loss scale, divided by the accumulation steps.
    /// Gradients are reduced over ranks while this runs.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`] without a forward before; [`Error::NonFiniteLoss`] in f32; [`Error::NoGradient`] after
    /// the first backward; a failed collective.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.not_stopped()?;
        match self.phase {
            Phase::Forwarded => {}
            Phase::Ready => return Err(Error::OutOfOrder { call: "backward", when: "before forward" }),
            Phase::Backwarded => return Err(Error::OutOfOrder { call: "backward", when: "twice on one loss" }),
        }
        if !self.trainer.can_train() {
            return Err(Error::NoOptimizer);
        }
        if loss.elem_count() != 1 {
            return Err(Error::LossShape { shape: loss.dims().to_vec() });
        }
        let (start, waited) = (Instant::now(), self.core.comm.report().waited_s);
        let profile = self.record(Half::Backward);
        let _span = self.span("backward");
        self.attempt(|engine| engine.differentiate(loss))?;
        drop(profile);
        self.phase = Phase::Backwarded;
        self.clock.backward += start.elapsed();
        self.clock.backward_wait += self.core.comm.report().waited_s - waited;
        self.tell_memory("after backward", self.global_steps + 1);
        Ok(())
    }

    fn differentiate(&mut self, loss: &Tensor) -> Result<()> {
        let value = loss.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?[0];
        if !value.is_finite() {
            if self.config.precision == Precision::F32 {
                let (rank, step, micro_step) = (self.rank(), self.global_steps, self.micro_steps);
                return Err(Error::NonFiniteLoss { loss: value, rank, step, micro_step });
            }
            self.loss_is_finite = false;
        }
        self.telling.losses += value;
        let factor = self.scaler.scale() / self.config.batch.gradient_accumulation_steps as f64;
        let core = &self.core;
        let run = || {
            // Scaled in f32: in 16 bits the scale itself may overflow.
            let scaled = if factor == 1.0 { loss.clone() } else { loss.to_dtype(DType::F32)?.affine(factor, 0.0)? };
            let _sections = timeline::sections();
            core.enter(Event::Backward(ROOT))?;
            once(|| stacker::maybe_grow(RED_ZONE, BACKWARD_STACK, || scaled.backward())).map(drop)
        };
        run().map_err(|e| core.explain(e))?;
        lock(&core.gradients).end_backward(core)?;
        lock(&core.gather).end(&**core)
    }

    /// Ends a micro step; at the accumulation boundary, updates the weights.
    ///
    /// With a non-finite gradient the weights stay as they are and the step counts as skipped (fp16; bf16 with
    /// `check_grad_overflow`).
    ///
    /// # Errors
    /// [`Error::OutOfOrder`] without a backward before; [`Error::NonFiniteGradient`] in f32;
    /// [`Error::LossScaleAtMinimum`]; a failed collective. What a save in the background could not do: then the step has
    /// been made, and the engine can go on.
    pub fn step(&mut self) -> Result<()> {
        self.not_stopped()?;
        if self.phase != Phase::Backwarded {
            return Err(Error::OutOfOrder { call: "step", when: "before backward" });
        }
        let start = Instant::now();
        let span = self.span("step");
        if self.is_gradient_accumulation_boundary() {
            self.attempt(Self::optimizer_step)?;
            self.tell_memory("after step", self.global_steps);
        }
        drop(span);
        self.clock.step += start.elapsed();
        self.end_micro_step();
        if self.is_gradient_accumulation_boundary() {
            self.clock.boundary([self.core.comm.report().waited_s, self.offload_report().waited_s]);
            self.tell();
            self.attempt(Self::end_profile)?;
        }
        self.micro_steps += 1;
        self.phase = Phase::Ready;
        self.failed_save.take().map_or(Ok(()), Err)
    }

    fn optimizer_step(&mut self) -> Result<()> {
        if !self.trainer.can_train() {
            return Err(Error::NoOptimizer);
        }
        let accumulate = lock(&self.core.gradients).accumulate_dtype();
        let loss = self.telling.losses / self.config.batch.gradient_accumulation_steps as f64;
        let vote = self.core.vote(loss, self.loss_is_finite, accumulate)?;
        (self.telling.loss, self.telling.losses) = (vote.loss, 0.0);
        let overflow = !vote.overflowed.is_empty();
        // Gradients carry the scale that they were made with, so they are unscaled with it before it changes.
        let scale = self.scaler.scale();
        self.grad_norm = Some(if overflow { f64::INFINITY } else { vote.norm / scale });
        let applied = match self.config.precision {
            Precision::F32 if overflow => {
                let where_ = match self.core.non_finite_gradient() {
                    Some(name) => format!("the gradient of {name} is not finite on rank {}", self.rank()),
                    None => format!("gradients are not finite on ranks {:?}", vote.overflowed),
                };
                self.end_saving()?;
                return Err(Error::NonFiniteGradient { where_, step: self.global_steps });
            }
            Precision::Bf16 { check_grad_overflow: false } => true,
            _ => !overflow,
        };
        if let Err(error) = self.scaler.update(overflow) {
            self.end_saving()?;
            return Err(error);
        }
        if applied {
            let multiplier = gradient_multiplier(vote.norm, scale, self.config.gradient_clipping);
            let step = self.optimizer_steps + 1;
            // What is being saved changes now.
            self.end_saving()?;
            let trained = self.trainer.for_step(step, multiplier as f32)?;
            self.core.update(&trained)?;
            self.optimizer_steps += 1;
            self.trainer.step();
        } else {
            self.skipped_steps += 1;
        }
        self.was_applied = applied;
        self.global_steps += 1;
        self.global_samples += self.config.batch.train_batch_size as u64;
        self.loss_is_finite = true;
        lock(&self.core.gradients).clear(&self.core);
        if applied {
            lock(&self.core.gather).refresh_persistent(&*self.core)?;
        }
        Ok(())
    }

    /// Ends a save in the background; where that failed, the step says so when it has been made.
    fn end_saving(&mut self) -> Result<()> {
        if let Some(saving) = self.saving.take() {
            self.failed_save = self.core.end_save(saving)?.err();
        }
        Ok(())
    }

    /// Samples that all ranks together have trained on.
    pub fn global_samples(&self) -> u64 {
        self.global_samples
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    pub(crate) fn saving(&mut self) -> &mut Option<Saving> {
        &mut self.saving
    }

    /// The optimizer, and what it keeps of which parameter.
    pub(crate) fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    pub(crate) fn progress(&self) -> Progress {
        Progress {
            global_steps: self.global_steps,
            skipped_steps: self.skipped_steps,
            optimizer_steps: self.optimizer_steps,
            global_samples: self.global_samples,
            scaler: self.scaler.state(),
            last_batch_iteration: self.trainer.last_batch_iteration(),
        }
    }

    pub(crate) fn set_progress(&mut self, progress: Progress) {
        self.global_steps = progress.global_steps;
        self.skipped_steps = progress.skipped_steps;
        self.optimizer_steps = progress.optimizer_steps;
        self.global_samples = progress.global_samples;
        self.micro_steps = progress.global_steps.saturating_mul(self.config.batch.gradient_accumulation_steps as u64);
        self.trainer.restore(progress.last_batch_iteration);
        if let Some(state) = &progress.scaler {
            self.scaler.restore(state);
        }
        (self.grad_norm, self.was_applied) = (None, false);
    }

    /// There was no forward since the last step: its loss is that of other weights.
    pub(crate) fn forget_forward(&mut self) {
        (self.phase, self.loss_is_finite, self.telling.losses) = (Phase::Ready, true, 0.0);
    }

    /// An error in the middle of an accumulation: its gradients are no part of a checkpoint.
    pub(crate) fn between_steps(&self, call: &'static str) -> Result<()> {
        self.not_stopped()?;
        let accumulation = self.config.batch.gradient_accumulation_steps as u64;
        match self.phase == Phase::Backwarded || !self.micro_steps.is_multiple_of(accumulation) {
            true => Err(Error::OutOfOrder { call, when: "in the middle of an accumulation, before its last step" }),
            false => Ok(()),
        }
    }

    /// Whether the coming [`step`](Self::step) updates the weights.
    pub fn is_gradient_accumulation_boundary(&self) -> bool {
        (self.micro_steps + 1).is_multiple_of(self.config.batch.gradient_accumulation_steps as u64)
    }

    /// Optimizer steps so far, skipped ones included.
    pub fn global_steps(&self) -> u64 {
        self.global_steps
    }

    /// Micro steps so far.
    pub fn micro_steps(&self) -> u64 {
        self.micro_steps
    }

    /// Optimizer steps that were skipped because a gradient was not finite.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped_steps
    }

    /// Whether the last optimizer step changed the weights.
    pub fn was_step_applied(&self) -> bool {
        self.was_applied
    }

    /// Learning rate of the coming optimizer step, one per parameter group: those that the
    /// [builder](EngineBuilder::parameter_groups) was given and that have parameters, in their order, then the group of all
    /// other parameters. With Muon each group counts as two, its matrices and its other parameters.
    pub fn get_lr(&self) -> Vec<f64> {
        self.trainer.lr()
    }

    /// Momentum of the coming optimizer step, one per parameter group, as [`get_lr`](Self::get_lr).
    pub fn get_mom(&self) -> Vec<Momentum> {
        self.trainer.momentum()
    }

    /// Global L2 norm of the last optimizer step's gradients, before clipping, loss scale divided out; infinite after
    /// an overflow, nothing before the first step.
    pub fn get_global_grad_norm(&self) -> Option<f64> {
        self.grad_norm
    }

    /// The loss scale of the coming backward; 1 without fp16.
    pub fn loss_scale(&self) -> f64 {
        self.scaler.scale()
    }

    /// Bytes of model state that this rank holds, beside the ZeRO formula.
    pub fn memory_report(&self) -> MemoryReport {
        let core = &self.core;
        let share = lock(&core.groups).iter().map(|g| g.len).sum();
        let master = if core.dtype == DType::F32 { 0 } else { 4 };
        let each = ElementBytes {
            params: core.dtype.size_in_bytes(),
            grads: lock(&core.gradients).accumulate_dtype().size_in_bytes(),
            master,
            moments: core.params.iter().map(|p| 4 * p.numel * self.trainer.state_names(p.group).len()).sum(),
        };
        let moments = lock(&core.groups).iter().map(|g| 4 * g.len * g.moments.len()).sum();
        let parameters = core.params.iter().map(|p| p.numel).sum();
        MemoryReport::new(&core.ledger, self.config.zero.stage, self.world_size(), parameters, [share, moments], each)
    }

    /// File access of this rank so far; zeros where nothing is offloaded to files.
    pub fn offload_report(&self) -> OffloadReport {
        self.core.offload.as_ref().map_or_else(OffloadReport::default, |o| o.report())
    }

    /// Collectives of this rank so far.
    pub fn comm_report(&self) -> CommReport {
        self.core.comm.report()
    }

    /// How long the last optimizer step took.
    pub fn timings(&self) -> StepTimings {
        self.clock.last
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.core.comm.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.core.comm.size()
    }

    /// The resolved configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Where the model computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The model's dtype.
    pub fn dtype(&self) -> DType {
        self.core.dtype
    }

    /// The model. Its parameters may be used only inside [`forward`](Self::forward) and [`eval`](Self::eval).
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Collective: the `values` of every rank, in rank order.
    ///
    /// # Errors
    /// A failed collective.
    pub fn gather_f64(&self, values: &[f64]) -> Result<Vec<Vec<f64>>> {
        self.core.comm.gather_f64(values.to_vec()).wait()
    }

    /// Collective: writes whole f32 parameters (master weights where there are any) to `path` as safetensors, from
    /// rank 0, one parameter in memory at a time. The file appears when it is complete.
    ///
    /// # Errors
    /// The file cannot be written, on all ranks: the engine can go on, and export elsewhere. A failed collective.
    pub fn export_safetensors(&mut self, path: &Path) -> Result<()> {
        self.attempt(|engine| engine.core.export(path, DType::F32))?
    }

    /// Collective: writes whole parameters in the precision that the model computes in (DeepSpeed's call; an f32 model's
    /// stay f32) to `file_name` in `dir`, which is created, as safetensors, at every stage and without a key that asks for
    /// gathering. Otherwise as [`export_safetensors`](Self::export_safetensors).
    ///
    /// # Errors
    /// As [`export_safetensors`](Self::export_safetensors).
    pub fn save_16bit_model(&mut self, dir: impl AsRef<Path>, file_name: &str) -> Result<()> {
        let dtype = self.dtype();
        let path = dir.as_ref().join(file_name);
        if self.rank() == 0 {
            // Where that fails, so does the file, which says why for all ranks.
            _ = std::fs::create_dir_all(dir);
        }
        self.attempt(|engine| engine.core.export(&path, dtype))?
    }

    /// Runs `call`; after an error this rank is out of step, so it tells the others and refuses to go on.
    pub(crate) fn attempt<T>(&mut self, call: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.not_stopped()?;
        let _here = timeline::enter(self.recorder.as_ref());
        call(self).inspect_err(|e| {
            let why = without_backtrace(&e.to_string());
            self.core.comm.abort(&why);
            self.stopped = Some(why);
            Recorder::flush(self.recorder.as_ref());
        })
    }

    /// A call in the timeline, from now on.
    fn span(&self, name: &'static str) -> Span {
        let span = Recorder::span(self.recorder.as_ref(), timeline::Kind::Engine, name);
        span.with("step", self.global_steps).with("micro_step", self.micro_steps)
    }

    pub(crate) fn recorder(&self) -> Option<&Recorder> {
        self.recorder.as_ref()
    }

    fn not_stopped(&self) -> Result<()> {
        self.stopped.as_ref().map_or(Ok(()), |why| Err(Error::Stopped(why.clone())))
    }
}

impl Clock {
    /// An optimizer step is over; `waited` are the totals of seconds waited for collectives and for files.
    fn boundary(&mut self, waited: [f64; 2]) {
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        self.last = StepTimings {
            forward_ms: ms(self.forward),
            backward_ms: ms(self.backward),
            step_ms: ms(self.step),
            comm_ms: (waited[0] - self.waited[0]) * 1e3,
            disk_ms: (waited[1] - self.waited[1]) * 1e3,
        };
        let last_backward_wait_ms = self.backward_wait * 1e3;
        *self = Self { waited, last: self.last, last_backward_wait_ms, ..Self::default() };
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

impl<M> Drop for Engine<M> {
    /// Ends a save in the background, as long as the ranks are in step.
    fn drop(&mut self) {
        if self.saving.is_some()
            && self.stopped.is_none()
            && !std::thread::panicking()
            && let Err(error) = self.wait_for_checkpoint()
        {
            say(&format!("a checkpoint was not saved: {error}"));
        }
        if !std::thread::panicking() {
            self.tell_at_end();
        }
    }
}
