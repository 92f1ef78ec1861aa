//! The options of an engine.

use super::Engine;
use super::config_comparison::ContentFingerprint;
use super::island_transport::IslandRanks;
use super::pipeline::{PipelineDivision, PipelineSetup};
use crate::comm::Communicator;
use crate::comm::RankEnv;
use crate::config::{Config, ConfigNote, ConfigSource, PipelineConfig, RunValues};
use crate::error::{EngineError, Result};
use crate::kernels;
use crate::monitor::{Monitor, MonitorOpener};
use crate::offload::DiskAccess;
use crate::optim::{LrSchedule, Optimizer, ParameterGroup, TrainableFilter};
use crate::param::{BufferFilter, BufferSync, InitialValues, WeightSource};
use crate::precision::WeightPacking;
use crate::runs::RunSpec;
use crate::timeline::{self, TimelineRecorder};
use crate::util::counted;
use candle_core::Device;
use candle_nn::VarBuilder;
use std::path::PathBuf;
use std::sync::Arc;

/// Options of an engine that are not part of its configuration.
#[derive(Default)]
pub struct EngineBuilder {
    pub(super) communicator: Option<Arc<dyn Communicator>>,
    device: Option<Device>,
    pub(super) seed: Option<u64>,
    init_from: Option<PathBuf>,
    initial_values: Option<Arc<dyn InitialValues>>,
    pub(super) disk_access: Option<DiskAccess>,
    pub(super) schedule: Option<Arc<dyn LrSchedule>>,
    pub(super) run_values: RunValues,
    pub(super) monitors: Vec<MonitorOpener>,
    pub(super) optimizer: Option<Arc<dyn Optimizer>>,
    pub(super) parameter_groups: Vec<ParameterGroup>,
    pub(super) trainable: Option<TrainableFilter>,
    pub(super) stochastic_rounding: bool,
    pub(super) quantized: Option<(WeightPacking, TrainableFilter)>,
    timeline: Option<PathBuf>,
    pub(super) run: Option<RunSpec>,
    pub(super) buffer_rule: Option<BufferFilter>,
    pub(super) buffer_sync: BufferSync,
    ignore_unused_parameters: bool,
    gradient_check: Option<bool>,
    pub(super) leaf_units: Vec<String>,
    island_slot: Option<usize>,
    pub(super) shared_content: Vec<ContentFingerprint>,
    /// This rank's position in a pipeline, if there is one.
    pub(super) pipeline: Option<PipelineSetup>,
}

impl Engine<()> {
    /// Returns a builder for an engine with options.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }
}

impl EngineBuilder {
    /// Sets the communicator, and thereby the job to take part in. Default: the communicator of the job that the
    /// environment describes (zerorun, mpirun or srun; on one host, also torchrun's variables, whichever program has
    /// set them).
    ///
    /// A process can have several engines, at the same time or one after the other, for example for a GAN, or for a
    /// teacher and a student. Engines of one job share its communicator, by default or because each of them was given
    /// that communicator. All ranks must therefore build and call the engines in the same order, and from one thread.
    /// An error that stops one engine stops the others, and [`Engine::comm_report`] counts the collectives of all of
    /// them.
    #[must_use]
    pub fn communicator(mut self, communicator: Arc<dyn Communicator>) -> Self {
        self.communicator = Some(communicator);
        self
    }

    /// Sets the device that the model computes on. Default: the CPU; with feature `cuda`, the GPU whose index is the
    /// local rank. If there are more ranks than GPUs, ranks share GPUs.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Sets the slot that this island requests from the island server (`local_steps.server`), counted from 0. Default:
    /// that of `zerorun --island_slot`; otherwise, after a restart, the previous slot; otherwise, the lowest free one.
    #[must_use]
    pub fn island_slot(mut self, slot: usize) -> Self {
        self.island_slot = Some(slot);
        self
    }

    /// Sets the seed for the initial weights. Default: the configuration's `seed`, or 42 without one.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Reads the initial weights from safetensors files that contain exactly the model's parameters and buffers,
    /// instead of initializing them randomly. `path` is a file, an index of several files
    /// (`model.safetensors.index.json`), or a Hugging Face folder with either. Each rank reads only the parts that it
    /// keeps.
    #[must_use]
    pub fn init_from(mut self, path: impl Into<PathBuf>) -> Self {
        self.init_from = Some(path.into());
        self
    }

    /// Takes initial values from `values`; parameters that `values` does not contain are initialized randomly. Takes
    /// precedence over [`EngineBuilder::init_from`].
    #[must_use]
    pub fn initial_values(mut self, values: Arc<dyn InitialValues>) -> Self {
        self.initial_values = Some(values);
        self
    }

    /// Rounds weights and optimizer states that are kept in bfloat16 (`bf16_master_weights_and_grads`,
    /// `bf16_optimizer_states`) stochastically after each step, so that small changes are not lost. The random numbers
    /// are derived from the seed, the parameter's name, the element and the step: they are the same at all stages and
    /// with any number of ranks. A checkpoint stores the seed, so a run that resumes from it draws the same numbers
    /// regardless of its own seed. Must be the same on all ranks. Default: false, which rounds to nearest.
    #[must_use]
    pub fn stochastic_rounding(mut self, stochastic_rounding: bool) -> Self {
        self.stochastic_rounding = stochastic_rounding;
        self
    }

    /// Sets how files of offloaded state are accessed. Default: the fastest access for their size.
    #[must_use]
    pub fn disk_access(mut self, access: DiskAccess) -> Self {
        self.disk_access = Some(access);
        self
    }

    /// Sets a custom learning-rate schedule, which must be the same on all ranks. It takes precedence over the
    /// configuration's `scheduler`.
    #[must_use]
    pub fn schedule(mut self, schedule: impl LrSchedule + 'static) -> Self {
        self.schedule = Some(Arc::new(schedule));
        self
    }

    /// Sets the values that replace `"auto"` in the configuration.
    #[must_use]
    pub fn run_values(mut self, values: RunValues) -> Self {
        self.run_values = values;
        self
    }

    /// Adds a monitor to those of the configuration: [`JsonLines`](crate::monitor::JsonLines),
    /// [`Prometheus`](crate::monitor::Prometheus), or a custom one. `open` is called only on rank 0, when the engine is
    /// built.
    #[must_use]
    pub fn monitor<N: Monitor + 'static>(mut self, open: impl FnOnce() -> Result<N> + Send + 'static) -> Self {
        self.monitors.push(Box::new(|| Ok(Box::new(open()?))));
        self
    }

    /// Sets a custom optimizer, which must be the same on all ranks. It takes precedence over the configuration's
    /// `optimizer`. At stages 1 to 3, the configuration must allow it with `zero_allow_untested_optimizer`, as in
    /// DeepSpeed.
    #[must_use]
    pub fn optimizer(mut self, optimizer: impl Optimizer + 'static) -> Self {
        self.optimizer = Some(Arc::new(optimizer));
        self
    }

    /// Sets parameter groups with their own learning rate, weight decay or betas, which must be the same on all ranks.
    /// A parameter belongs to the first group that selects it; parameters that no group selects form a last group.
    #[must_use]
    pub fn parameter_groups(mut self, groups: Vec<ParameterGroup>) -> Self {
        self.parameter_groups = groups;
        self
    }

    /// Selects buffers, by name and shape, among the tensors of the `VarBuilder`: tensors that the model changes itself
    /// or that are not trained. The following are always buffers: all integer tensors, and tensors whose name ends with
    /// the component `running_mean`, `running_var`, `num_batches_tracked`, `position_ids` or `inv_freq`.
    ///
    /// Every rank keeps a full copy of a buffer, as a variable of the requested dtype (running statistics in a
    /// 16-bit model are f32). A buffer has no gradient and is not a parameter; it is saved, loaded and exported with
    /// the parameters.
    #[must_use]
    pub fn buffers(mut self, rule: impl Fn(&str, &[usize]) -> bool + Send + 'static) -> Self {
        self.buffer_rule = Some(Box::new(rule));
        self
    }

    /// Sets the rule that keeps buffers equal on all ranks. Default: [`BufferSync::FromRankZero`], as in PyTorch's
    /// `DistributedDataParallel`.
    #[must_use]
    pub fn buffer_sync(mut self, sync: BufferSync) -> Self {
        self.buffer_sync = sync;
        self
    }

    /// Treats the missing gradient of a parameter that no backward pass reaches as zero instead of as an error; rank 0
    /// reports the parameters that the first step missed, once. Ranks may miss different parameters in one step. This
    /// is the same as `zero_optimization.ignore_unused_parameters: true`.
    ///
    /// Missing gradients are known only when the backward pass has finished. Therefore, gradients are held until then
    /// at every stage, as they always are at stage 1: at the end of each backward pass, a rank holds the full gradient
    /// in memory.
    #[must_use]
    pub fn ignore_unused_parameters(mut self) -> Self {
        self.ignore_unused_parameters = true;
        self
    }

    /// Sets whether the gradient of the first step is compared with the change in the loss when the weights are moved
    /// slightly up and down, which costs two extra forward passes in that step. If the result is unclear, the check is
    /// repeated in the next steps, up to eight steps in total. If a part of the graph is cut off, an operation's
    /// backward pass is wrong or a second-order term is dropped, the step that shows this fails with
    /// [`EngineError::WrongGradient`] before it changes any weight. Default: the configuration's `gradient_check`, or
    /// true without it. In a pipeline, or if experts are divided among ranks, the check is always off.
    #[must_use]
    pub fn gradient_check(mut self, gradient_check: bool) -> Self {
        self.gradient_check = Some(gradient_check);
        self
    }

    /// Trains only the parameters for which `rule`, given the name and the shape, returns true, and freezes all others.
    /// The rule must be the same on all ranks. Frozen parameters are sharded, gathered and offloaded like all others,
    /// and have no gradient, master weights or optimizer states. [`Engine::set_trainable`] changes the selection
    /// between steps. Default: all parameters are trained except those of [frozen groups](ParameterGroup::frozen).
    ///
    /// A unit whose parameters are all frozen keeps no graph if its input has none. Outside units, Candle's own
    /// operations still compute gradients of frozen parameters, which are dropped; the operations of
    /// [`candle_zero::nn`](crate::nn) do not.
    #[must_use]
    pub fn trainable(mut self, rule: impl Fn(&str, &[usize]) -> bool + Send + Sync + 'static) -> Self {
        self.trainable = Some(Arc::new(rule));
        self
    }

    /// Marks units as leaves, as [`Unit::leaf`](crate::zero::Unit::leaf) does: by their names, or by name endings after
    /// a `*`, such as `*.moe`. A unit's name is the prefix of the `VarBuilder` that it was built from. A name that
    /// matches no unit is an error. Has no effect in a pipeline, which is reported.
    #[must_use]
    pub fn leaf_units<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.leaf_units.extend(names.into_iter().map(Into::into));
        self
    }

    /// Quantizes the frozen parameters for which `rule`, given the name and the shape, returns true, in the format
    /// `packing`. Both must be the same on all ranks. At stage 3, a rank's share is packed in memory and in files,
    /// packed bytes are gathered, and a unit's parameters are unpacked while the unit needs them. Below stage 3, where
    /// every rank keeps full parameters, the model computes with the same values, but the parameters take the memory of
    /// the model's dtype. Takes precedence over `zero_quantized_nontrainable_weights`.
    ///
    /// Blocks run through a parameter's elements in row-major order; the last one may be shorter.
    #[must_use]
    pub fn quantized(
        mut self,
        packing: WeightPacking,
        rule: impl Fn(&str, &[usize]) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.quantized = Some((packing, Arc::new(rule)));
        self
    }

    /// Records a timeline of this rank as a trace for Perfetto (ui.perfetto.dev) in `file`, which is written when the
    /// last engine of the process that records into it is dropped. Ranks that are processes write one file each, with
    /// the rank added to the name of `file`. `zerorun --timeline` writes one file for all ranks, and takes precedence.
    /// Default: the file that the environment variable `CANDLE_ZERO_TIMELINE` names; without it, nothing is recorded.
    #[must_use]
    pub fn timeline(mut self, file: impl Into<PathBuf>) -> Self {
        self.timeline = Some(file.into());
        self
    }

    /// Keeps a record of the run, which `zerorun runs` lists, shows and compares: a folder with the configuration, the
    /// command line, the machine, the values of each step, checkpoints, errors and samples. `run` is a name, or a
    /// [`RunSpec`] with more settings. Rank 0 writes the record, from the first forward pass on. A restarted job
    /// continues its record, and a job that loads a checkpoint of a run with the same name continues the record of that
    /// run. Default: no record, unless the configuration has a section `run` or the environment variable
    /// `CANDLE_ZERO_RUN` contains a name.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::Module;
    /// # use candle_zero::Engine;
    /// # use candle_zero::runs::{RunSpec, RunsFolder};
    /// # let config = r#"{"train_batch_size": 2, "optimizer": {"type": "AdamW"}}"#;
    /// # let folder = tempfile::tempdir()?;
    /// let run = RunSpec::new("regression").folder(folder.path());
    /// let mut engine = Engine::builder().run(run).initialize(|vb| candle_nn::linear(4, 1, vb), config)?;
    /// # let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
    /// let loss = engine.forward(|model| model.forward(&x)?.sqr()?.mean_all())?;
    /// engine.backward(&loss)?;
    /// engine.step()?;
    /// engine.record_metrics(&[("val_loss", 0.5)]);
    /// drop(engine);
    ///
    /// let runs = RunsFolder::find(Some(folder.path().into()));
    /// let run = runs.open("regression")?;
    /// assert_eq!(run.summary().steps, 1);
    /// assert_eq!(run.metrics()?.rows[0].values["val_loss"], 0.5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn run(mut self, run: impl Into<RunSpec>) -> Self {
        self.run = Some(run.into());
        self
    }

    /// Requires all ranks to have the same content for `name` (data or a tokenizer, for example), given as a hash such
    /// as [`TokenData::fingerprint`]. If two ranks differ, every rank's error names both. May be called several times,
    /// in the same order on all ranks.
    ///
    /// [`TokenData::fingerprint`]: crate::data::TokenData::fingerprint
    #[must_use]
    pub fn same_on_all_ranks(mut self, name: impl Into<String>, content: u64) -> Self {
        self.shared_content.push(ContentFingerprint { name: name.into(), content });
        self
    }

    /// Builds the model and partitions it. Collective.
    ///
    /// # Errors
    /// A configuration, environment, device, folder or weight file that cannot be used; a model, configuration, data or
    /// weights that differ between ranks; too little memory or disk space; the error of `build` or of a monitor; a
    /// failed collective.
    pub fn initialize<M>(
        self,
        build: impl FnOnce(VarBuilder<'_>) -> candle_core::Result<M>,
        config: impl Into<ConfigSource>,
    ) -> Result<Engine<M>> {
        let env = RankEnv::from_env();
        let is_process_of_several = env.as_ref().is_ok_and(|env| env.world_size > 1);
        let comm = match self.communicator.clone() {
            Some(comm) => comm,
            None => crate::comm::from_env(&env?)?,
        };
        kernels::checked_level().inspect_err(|e| comm.abort(&e.to_string()))?;
        let device = self.device_or_default()?;
        // Ranks that are threads share a file.
        let job = self.pipeline.as_ref().map_or(&comm, PipelineSetup::job);
        let ranks_are_processes = is_process_of_several && job.size() > 1;
        let recorder = TimelineRecorder::open(self.timeline.clone(), job.rank(), ranks_are_processes);
        let recorder = recorder.inspect_err(|e| comm.abort(&e.to_string()))?;
        let _here = timeline::enter(recorder.as_ref());
        let _span = timeline::span(timeline::EventCategory::Engine, "initialize");
        let _call = crate::comm::engine_call::during("initialize");
        let engine = Config::load_for(config, comm.size(), &self.run_values).and_then(|mut config| {
            if let (None, Some(stages @ 2..)) = (&self.pipeline, config.pipeline.stages) {
                let why = format!(
                    "pipeline.stages is {stages}, but the model is not given as layers; use \
                     EngineBuilder::initialize_pipeline, or remove the key"
                );
                return Err(EngineError::Pipeline { why }.into());
            }
            if self.pipeline.is_some() {
                PipelineDivision::check_stage(config.zero.stage)?;
            }
            if self.pipeline.is_none() && config.pipeline != PipelineConfig::default() {
                let message = "no effect: the model is not given as layers (EngineBuilder::initialize_pipeline)".into();
                config.notes.push(ConfigNote { path: "pipeline".into(), message });
            }
            config.zero.ignore_unused_parameters |= self.ignore_unused_parameters;
            // The check is off in a pipeline: moving the weights of one stage would require forward passes through all
            // stages. It is also off if experts are divided: a rank's experts change the losses of other ranks.
            let is_possible = self.pipeline.is_none() && config.expert_parallel_size == 1;
            config.gradient_check = self.gradient_check.unwrap_or(config.gradient_check) && is_possible;
            let source = self.weight_source(self.seed.unwrap_or(config.seed))?;
            let islands = self.islands(&mut config, &comm)?;
            let comm = islands.as_ref().map_or(&comm, |islands| &islands.island).clone();
            Engine::new(build, config, source, comm, device, (self, islands))
        });
        let mut engine = engine.inspect_err(|e| comm.abort(&e.to_string()))?;
        engine.recorder = recorder;
        Ok(engine)
    }
}

impl EngineBuilder {
    /// Returns the device that the model computes on.
    ///
    /// # Errors
    /// The device cannot be opened.
    pub(super) fn device_or_default(&self) -> Result<Device> {
        self.device.clone().map_or_else(crate::device::default, Ok)
    }

    /// Collective if ranks take local steps: divides them into islands, and completes the configuration.
    fn islands(&self, config: &mut Config, job: &Arc<dyn Communicator>) -> Result<Option<IslandRanks>> {
        let Some(local_steps) = &mut config.local_steps else { return Ok(None) };
        let refused = |why: String| Err(EngineError::LocalSteps { why }.into());
        if self.pipeline.is_some() {
            return refused("the stages of a pipeline cannot be islands; remove local_steps or the pipeline".into());
        }
        if let Some(url) = &config.upload_checkpoints_to {
            return refused(format!(
                "checkpoint.upload_to is {url}, but the checkpoints of islands are not uploaded; remove upload_to or \
                 local_steps"
            ));
        }
        let ranks = IslandRanks::new(local_steps, job, self.island_slot)?;
        if ranks.count() == 1 {
            config.local_steps = None;
            let message = "no effect: all ranks form one island; set islands to a number, or use several hosts".into();
            config.notes.push(ConfigNote { path: "local_steps".into(), message });
            return Ok(None);
        }
        local_steps.islands = Some(ranks.count());
        let size = ranks.island.size();
        match config.zero.mics_shard_size {
            Some(shards) if !size.is_multiple_of(shards) => refused(format!(
                "zero_optimization.mics_shard_size is {shards}, but an island has {}; use a divisor of that number",
                counted(size, "rank")
            )),
            _ => Ok(Some(ranks)),
        }
    }

    /// Returns the source of the parameters' initial values.
    pub(super) fn weight_source(&self, seed: u64) -> Result<WeightSource> {
        Ok(match (&self.initial_values, &self.init_from) {
            (Some(values), _) => WeightSource::Given { values: values.clone(), seed },
            (None, Some(path)) => WeightSource::files(path)?,
            (None, None) => WeightSource::Random { seed },
        })
    }
}

impl<M> Engine<M> {
    /// Builds the model and partitions it among the ranks that the environment describes. Collective.
    ///
    /// `config` is a path, a JSON text, a `serde_json::Value` or a [`Config`].
    ///
    /// # Errors
    /// The same as [`EngineBuilder::initialize`].
    pub fn initialize(
        build: impl FnOnce(VarBuilder<'_>) -> candle_core::Result<M>,
        config: impl Into<ConfigSource>,
    ) -> Result<Self> {
        Engine::builder().initialize(build, config)
    }
}
