//! The engine of a pipeline: one optimizer step, operation by operation.

use super::division::RankLayers;
use super::layer_times::{LayerTimes, check_same_partition};
use super::p2p::{BoundaryMessageKind, BoundaryTensor, StageP2p, check_boundary};
use super::setup::PipelineSetup;
use super::tied_weight::{OutputGradient, TiedWeight};
use crate::checkpoint::{LoadOptions, LoadedCheckpoint};
use crate::comm::RankEnv;
use crate::config::{Config, ConfigSource};
use crate::engine::{Engine, EngineBuilder};
use crate::error::{EngineError, Result};
use crate::graph::precomputed_op::seed_backward;
use crate::graph::{deliver_gradients, subgraph_input, without_gradients};
use crate::layout::{MeshAxis, RankMesh};
use crate::memory::{MemoryLedgerEntry, MemoryReport};
use crate::pipeline::{PartitionMethod, PipelineModule, PipelineOp, PipelinePass, PipelineSchedule};
use crate::runs::RunEnding;
use crate::tensor::residency;
use crate::zero::reduce::divided_backward::WaitingGradients;
use candle_core::{Device, Tensor, Var};
use candle_nn::VarBuilder;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// An engine that trains a model whose layers are divided among ranks (DeepSpeed's `PipelineEngine`).
///
/// A rank builds, reads and keeps only the parameters of its stages. Losses, gradient norms and weights have the same
/// bits as those of one rank that accumulates the gradients of the same micro batches.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_nn::{Activation, linear};
/// use candle_zero::Engine;
/// use candle_zero::pipeline::PipelineModule;
///
/// let module = PipelineModule::new(
///     |(x, _): &(Tensor, Tensor)| Ok(x.clone()),
///     |y, (_, target)| y.sub(target)?.sqr()?.mean_all(),
/// );
/// let module = module
///     .layer("fc1", |vb| linear(4, 16, vb))
///     .layer("act", |_| Ok(Activation::Silu))
///     .layer("fc2", |vb| linear(16, 1, vb));
/// let config = r#"{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
///                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}"#;
/// // All ranks form one pipeline. This program runs as a single rank.
/// let mut engine = Engine::builder().initialize_pipeline(module, config)?;
/// let inputs = Tensor::ones((2, 4), candle_core::DType::F32, &Device::Cpu)?;
/// let targets = Tensor::zeros((2, 1), candle_core::DType::F32, &Device::Cpu)?;
/// let batch = (inputs, targets);
/// let first = engine.train_batch(|_| Ok(batch.clone()))?;
/// let second = engine.train_batch(|_| Ok(batch.clone()))?;
/// assert!(second < first);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PipelineEngine<B> {
    pub(super) engine: Engine<RankLayers<B>>,
    pub(super) module: PipelineModule<B>,
    pub(super) boundaries: StageP2p,
    /// The messages between the first stage and the last one, which have their own order.
    pub(super) tied_messages: StageP2p,
    pub(super) schedule: PipelineSchedule,
    /// The number of pipelines, and the index of this rank's pipeline.
    pub(super) pipelines: usize,
    pub(super) pipeline: usize,
    /// This rank's position along the pipeline.
    pub(super) rank: usize,
    /// The weight that the first layer and the last one share, if it is trained and this rank has it.
    pub(super) tied: Option<TiedWeight>,
}

/// A forward pass whose backward pass has not run yet.
struct PendingForward {
    /// The stage's input, if the previous stage or, for a tied weight, the last stage needs its gradient.
    input: Option<Var>,
    /// The stage's output, or the loss.
    output: Tensor,
    /// The entry of both in the ledger.
    memory: MemoryLedgerEntry,
}

/// The state of one optimizer step.
struct PipelineStep<B> {
    batches: Vec<B>,
    /// The forward passes whose backward passes have not run yet, by stage and micro batch.
    forwards: BTreeMap<(usize, usize), PendingForward>,
    /// The gradients of parameters between the two parts of a divided backward pass, by stage and micro batch.
    waiting: BTreeMap<(usize, usize), (WaitingGradients, MemoryLedgerEntry)>,
    /// The tensors that stages of this rank pass to each other, by the later stage and the micro batch.
    activations: BTreeMap<(usize, usize), BoundaryTensor>,
    gradients: BTreeMap<(usize, usize), BoundaryTensor>,
}

impl EngineBuilder {
    /// Divides the layers of `module` among the ranks of a pipeline, as the configuration's `pipeline` section
    /// specifies, and builds those of this rank's stages. If `pipeline.stages` is smaller than the number of ranks,
    /// which it must divide, there are several pipelines, which train on different micro batches. Collective.
    ///
    /// # Errors
    /// The errors of [`initialize`](Self::initialize); numbers of ranks, chunks, layers and micro batches that are
    /// incompatible; a `pipeline.partition` that differs between ranks, or that the layers do not allow; a buffer that
    /// layers share; a parameter that layers share, unless it is the first layer's only parameter and the other layer
    /// is the last one; ZeRO stage 2 or 3.
    pub fn initialize_pipeline<B>(
        mut self,
        module: PipelineModule<B>,
        config: impl Into<ConfigSource>,
    ) -> Result<PipelineEngine<B>> {
        let config = config.into();
        let job = match self.communicator.take() {
            Some(job) => job,
            None => crate::comm::from_env(&RankEnv::from_env()?)?,
        };
        let section = config.pipeline(&self.run_values).inspect_err(|error| job.abort(&error.to_string()))?;
        let measure = |mesh: &RankMesh| {
            if section.partition != PartitionMethod::Time {
                return Ok(None);
            }
            let config = Config::load_for(config.clone(), mesh.len(MeshAxis::Data), &self.run_values)?;
            let device = self.device_or_default()?;
            LayerTimes::measured(&module, &config, &device, self.trainable.as_ref(), (&job, mesh)).map(Some)
        };
        let setup = self.weight_source(0).and_then(|source| {
            check_same_partition(&*job, &section.partition)?;
            PipelineSetup::new(&module, &section, &job, (source, self.buffer_rule.as_ref()), measure)
        });
        let setup = setup.inspect_err(|error| job.abort(&error.to_string()))?;
        let (pipeline_comm, division) = (setup.pipeline_comm.clone(), setup.division.clone());
        let (pipelines, pipeline) = (setup.data.size(), setup.data.rank());
        let (job, ends) = (setup.job.clone(), setup.ends);
        let build = |vb: VarBuilder<'_>| division.build(&module, pipeline_comm.rank(), vb);
        let mut builder = self.communicator(setup.data.clone());
        builder.pipeline = Some(setup);
        let mut engine = builder.initialize(build, config)?;
        let micro_batches = engine.config().batch.gradient_accumulation_steps;
        let schedule = PipelineSchedule::new(section.schedule, pipeline_comm.size(), section.chunks, micro_batches);
        let schedule = schedule.map_err(|error| EngineError::Pipeline { why: error.to_string() }.into());
        let schedule = engine.in_step(schedule)?;
        let tied = match &division.tied {
            Some(name) => TiedWeight::agree(&engine, name, &*pipeline_comm, ends, schedule)?,
            None => None,
        };
        let boundaries = StageP2p::new(pipeline_comm.clone(), engine.device().clone(), engine.ledger().clone());
        let tied_messages = StageP2p::new(job, engine.device().clone(), engine.ledger().clone());
        Ok(PipelineEngine {
            engine,
            module,
            boundaries,
            tied_messages,
            schedule,
            pipelines,
            pipeline,
            rank: pipeline_comm.rank(),
            tied,
        })
    }
}

impl<B> PipelineEngine<B> {
    /// Runs one optimizer step: `gradient_accumulation_steps` micro batches through all stages, and an update. `next`
    /// returns micro batch i of the step, the same on all ranks of a pipeline. Returns the mean loss over micro batches
    /// and pipelines, on every rank. Collective.
    ///
    /// # Errors
    /// The error of `next` or of a layer; a stage's output whose dtype or number of dimensions the next stage cannot
    /// receive; [`OptimError::NoOptimizer`](crate::error::OptimError::NoOptimizer); [`EngineError::LossShape`];
    /// [`EngineError::NonFiniteLoss`] in f32; the errors of [`Engine::step`].
    pub fn train_batch(&mut self, next: impl FnMut(usize) -> Result<B>) -> Result<f64> {
        self.train_batch_with_progress(next, &mut |_| ())
    }

    /// Runs one optimizer step as [`train_batch`](Self::train_batch) does. Calls `on_progress` with the number of micro
    /// batches that have passed through this rank's stages, each time this number grows, and possibly again with the
    /// same number.
    ///
    /// # Errors
    /// The same as [`train_batch`](Self::train_batch).
    pub fn train_batch_with_progress(
        &mut self,
        next: impl FnMut(usize) -> Result<B>,
        on_progress: &mut dyn FnMut(usize),
    ) -> Result<f64> {
        self.engine.check_in_step()?;
        self.engine.begin_run();
        let start = Instant::now();
        let micro_batches = self.schedule.micro_batches();
        let result = self.run_micro_batches(next, on_progress);
        self.engine.in_step(result)?;
        self.engine.end_micro_batches(micro_batches, start);
        let step_result = self.engine.step();
        if self.engine.check_in_step().is_ok() {
            // The weight is published even if a background save has failed, because the step is complete.
            let result = self.publish_tied();
            self.engine.in_step(result)?;
        }
        step_result.map(|()| self.engine.mean_loss())
    }

    /// Runs the forward and backward passes of a step.
    fn run_micro_batches(
        &mut self,
        next: impl FnMut(usize) -> Result<B>,
        on_progress: &mut dyn FnMut(usize),
    ) -> Result<()> {
        let schedule = self.schedule;
        let (stages, mut backward_passes) = (schedule.stages_of(self.rank).len(), 0);
        let mut step = PipelineStep {
            batches: (0..schedule.micro_batches()).map(next).collect::<Result<_>>()?,
            forwards: BTreeMap::new(),
            waiting: BTreeMap::new(),
            activations: BTreeMap::new(),
            gradients: BTreeMap::new(),
        };
        self.boundaries.begin_step(schedule);
        for (done, op) in schedule.operations(self.rank).into_iter().enumerate() {
            match op.pass {
                PipelinePass::Forward => self.forward(&mut step, op)?,
                PipelinePass::Backward | PipelinePass::BackwardInput => self.backward(&mut step, op)?,
                PipelinePass::BackwardWeight => self.backward_weights(&mut step, op)?,
            }
            self.accumulate_tied(&step, Some(done))?;
            backward_passes += usize::from(op.pass != PipelinePass::Forward && op.pass != PipelinePass::BackwardWeight);
            if op.pass != PipelinePass::Forward && backward_passes.is_multiple_of(stages) {
                on_progress(backward_passes / stages);
            }
        }
        self.accumulate_tied(&step, None)?;
        self.boundaries.finish()?;
        self.tied_messages.finish()
    }

    /// Saves a checkpoint of all stages, as [`Engine::save_checkpoint`] does. Any number of ranks and stages can load
    /// it, with a pipeline or without one. Collective.
    ///
    /// # Errors
    /// The same as [`Engine::save_checkpoint`].
    pub fn save_checkpoint(
        &mut self,
        dir: impl AsRef<Path>,
        tag: Option<&str>,
        client_state: serde_json::Value,
    ) -> Result<PathBuf> {
        self.engine.save_checkpoint(dir, tag, client_state)
    }

    /// Loads a checkpoint, whether or not it was saved by a pipeline, as [`Engine::load_checkpoint`] does. Collective.
    ///
    /// # Errors
    /// The same as [`Engine::load_checkpoint`].
    pub fn load_checkpoint(
        &mut self,
        dir: impl AsRef<Path>,
        tag: Option<&str>,
        options: &LoadOptions,
    ) -> Result<Option<LoadedCheckpoint>> {
        self.engine.load_checkpoint(dir, tag, options)
    }

    /// Returns a parameter in f32, if a stage of this rank has it. Collective among the ranks that train this rank's
    /// stages on different data. If the first stage and the last one share a weight, the first stage has a copy of it,
    /// which, in half precision, is rounded to the dtype of the model.
    ///
    /// # Errors
    /// A failed collective.
    pub fn parameter(&mut self, name: &str) -> Result<Option<Tensor>> {
        match self.engine.param_named(name) {
            Some(_) => self.engine.safe_get_full_fp32_param(name).map(Some),
            None => Ok(None),
        }
    }

    /// Returns the names of the parameters of this rank's stages.
    pub fn parameter_names(&self) -> Vec<String> {
        self.engine.parameter_names()
    }

    /// Records a text that the model has generated, as [`Engine::record_sample`] does.
    pub fn record_sample(&mut self, prompt: &str, text: &str) {
        self.engine.record_sample(prompt, text);
    }

    /// Ends the record of the run, as [`Engine::end_run`] does.
    pub fn end_run(&mut self, outcome: RunEnding, message: Option<&str>) {
        self.engine.end_run(outcome, message);
    }

    /// Records values of the current step in the record of the run, as [`Engine::record_metrics`] does.
    pub fn record_metrics(&mut self, values: &[(&str, f64)]) {
        self.engine.record_metrics(values);
    }

    /// Returns the number of optimizer steps, including skipped ones.
    pub fn global_steps(&self) -> u64 {
        self.engine.global_steps()
    }

    /// Returns the number of samples that all pipelines together have processed.
    pub fn global_samples(&self) -> u64 {
        self.engine.global_samples()
    }

    /// Returns the number of optimizer steps that changed nothing.
    pub fn skipped_steps(&self) -> u64 {
        self.engine.skipped_steps()
    }

    /// Returns the gradient norm of the last step over all stages, before clipping.
    pub fn global_grad_norm(&self) -> Option<f64> {
        self.engine.global_grad_norm()
    }

    /// Returns the learning rate of each parameter group.
    pub fn lr(&self) -> Vec<f64> {
        self.engine.lr()
    }

    /// Returns the memory of this rank's stages by kind.
    pub fn memory_report(&self) -> MemoryReport {
        self.engine.memory_report()
    }

    /// Returns the index of this rank's pipeline, counted from 0, and the number of pipelines. The ranks of a pipeline
    /// train on the same micro batches, and different pipelines on different micro batches (DeepSpeed's data-parallel
    /// rank and size).
    pub fn data_position(&self) -> (usize, usize) {
        (self.pipeline, self.pipelines)
    }

    /// Returns the device on which this rank computes, and on which the tensors of micro batches must be.
    pub fn device(&self) -> &Device {
        self.engine.device()
    }

    /// Sets the learning rate of all parameter groups, as [`Engine::set_lr`] does. Collective.
    ///
    /// # Errors
    /// The same as [`Engine::set_lr`].
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.engine.set_lr(lr)
    }

    /// Returns the loss scale of the next step (fp16).
    pub fn loss_scale(&self) -> f64 {
        self.engine.loss_scale()
    }

    /// Waits until a background save is complete, as [`Engine::wait_for_checkpoint`] does. Collective.
    ///
    /// # Errors
    /// The same as [`Engine::wait_for_checkpoint`].
    pub fn wait_for_checkpoint(&mut self) -> Result<()> {
        self.engine.wait_for_checkpoint()
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Config {
        self.engine.config()
    }

    /// Returns the position of this rank in its pipeline, and the number of ranks along that pipeline.
    pub fn position(&self) -> (usize, usize) {
        (self.rank, self.schedule.ranks())
    }

    fn forward(&mut self, step: &mut PipelineStep<B>, op: PipelineOp) -> Result<()> {
        let PipelineOp { stage, micro_batch, .. } = op;
        let key = (stage, micro_batch);
        let batch = &step.batches[micro_batch];
        let BoundaryTensor { tensor, next_draw, memory: received_memory } = match stage.checked_sub(1) {
            None => BoundaryTensor { tensor: self.module.input(batch)?, next_draw: 0, memory: None },
            Some(previous) => match self.schedule.rank_of(previous) {
                rank if rank == self.rank => step.activations.remove(&key).expect("the previous stage has run"),
                rank => self.boundaries.receive(BoundaryMessageKind::Activation, key, rank)?,
            },
        };
        let looks_up = stage == 0 && self.tied.is_some();
        let mut input = if stage > 0 { Some(Var::from_tensor(&tensor)?) } else { None };
        let mut memory = self.engine.record_activations(0);
        let (module, is_last) = (&self.module, stage + 1 == self.schedule.stages());
        let (output, next_draw) = self.engine.forward_stage(micro_batch, next_draw, |layers| {
            let mut layers = layers.stages[&stage].iter();
            if looks_up && let Some(lookup) = layers.next() {
                // The last stage differentiates the lookup.
                let rows = without_gradients(|| lookup.forward(&tensor, batch))?.detach();
                input = Some(Var::from_tensor(&rows)?);
            }
            let first = input.as_ref().map_or(Ok(tensor.clone()), subgraph_input)?;
            // The backward pass needs the input's place in the graph, but not its values.
            input.as_ref().map_or(Ok(()), |input| residency::clear(input))?;
            memory.resize(input.as_ref().map_or(0, |input| bytes_of(input)));
            let output = layers.try_fold(first, |x, layer| layer.forward(&x, batch))?;
            if is_last { module.loss(&output, batch) } else { Ok(output) }
        })?;
        if !is_last {
            check_boundary(stage, &output)?;
            let message = BoundaryTensor { tensor: output.detach(), next_draw, memory: None };
            let next = (stage + 1, micro_batch);
            match self.schedule.rank_of(stage + 1) {
                rank if rank == self.rank => drop(step.activations.insert(next, message)),
                rank => self.boundaries.send(BoundaryMessageKind::Activation, next, rank, &message)?,
            }
        }
        memory.resize(memory.bytes() + bytes_of(&output));
        drop(received_memory);
        step.forwards.insert(key, PendingForward { input, output, memory });
        Ok(())
    }

    fn backward(&mut self, step: &mut PipelineStep<B>, op: PipelineOp) -> Result<()> {
        let PipelineOp { stage, micro_batch, .. } = op;
        let key = (stage, micro_batch);
        let PendingForward { input, output, memory } =
            step.forwards.remove(&key).expect("the stage's forward pass has run");
        let input_tensor = input.as_ref().map(Var::as_tensor);
        let is_last = stage + 1 == self.schedule.stages();
        let (scalar, gradient_memory) = if is_last {
            (self.engine.scaled_loss(&output)?, None)
        } else {
            let next = (stage + 1, micro_batch);
            let grad = match self.schedule.rank_of(stage + 1) {
                rank if rank == self.rank => step.gradients.remove(&next).expect("the next stage has run"),
                rank => self.boundaries.receive(BoundaryMessageKind::Gradient, next, rank)?,
            };
            (seed_backward(&output, grad.tensor)?, grad.memory)
        };
        let grad = match (op.pass, self.tied.as_mut().filter(|_| is_last)) {
            (PipelinePass::BackwardInput, _) => {
                let (grad, waiting) = self.engine.backward_stage_inputs(&scalar, input_tensor)?;
                let bytes = waiting.iter().map(|(_, gradient)| gradient.bytes()).sum();
                step.waiting.insert(key, (waiting, self.engine.record_activations(bytes)));
                grad
            }
            (_, Some(tied)) => {
                let (grad, output_gradient) = self.engine.backward_diverting(&scalar, input_tensor, tied.param)?;
                let memory = self.boundaries.record_memory(output_gradient.bytes());
                tied.output_gradients.push_back(OutputGradient { micro_batch, gradient: output_gradient, memory });
                grad
            }
            (_, None) => self.engine.backward_stage(&scalar, input_tensor)?,
        };
        drop((scalar, gradient_memory, memory));
        if let Some(tensor) = grad {
            let memory = self.boundaries.record_memory(bytes_of(&tensor));
            let message = BoundaryTensor { tensor, next_draw: 0, memory: Some(memory) };
            match (stage.checked_sub(1), &mut self.tied) {
                (Some(previous), _) => match self.schedule.rank_of(previous) {
                    rank if rank == self.rank => drop(step.gradients.insert(key, message)),
                    rank => self.boundaries.send(BoundaryMessageKind::Gradient, key, rank, &message)?,
                },
                (None, Some(tied)) if tied.is_last => tied.lookup_gradients.push_back(message),
                (None, _) => {
                    let [_, rank] = self.tied.as_ref().map_or([0; 2], |tied| tied.ends);
                    self.tied_messages.send(BoundaryMessageKind::LookupGradient, key, rank, &message)?;
                }
            }
        }
        Ok(())
    }

    /// Runs the second part of a divided backward pass.
    fn backward_weights(&mut self, step: &mut PipelineStep<B>, op: PipelineOp) -> Result<()> {
        let PipelineOp { stage, micro_batch, .. } = op;
        let (waiting, _held) = step.waiting.remove(&(stage, micro_batch)).expect("the first part has run");
        let tied = self.tied.as_mut().filter(|_| stage + 1 == self.schedule.stages());
        let output_gradient = self.engine.backward_stage_weights(waiting, tied.as_ref().map(|tied| tied.param))?;
        if let (Some(tied), Some(output_gradient)) = (tied, output_gradient) {
            let memory = self.boundaries.record_memory(output_gradient.bytes());
            tied.output_gradients.push_back(OutputGradient { micro_batch, gradient: output_gradient, memory });
        }
        Ok(())
    }

    /// Completes gradients of the tied weight, and accumulates them: all of them if `done` is `None`; otherwise, after
    /// operation `done` of this rank, only those whose other part arrives without any further operation of this rank.
    fn accumulate_tied(&mut self, step: &PipelineStep<B>, done: Option<usize>) -> Result<()> {
        let Some(tied) = self.tied.as_mut().filter(|tied| tied.is_last) else { return Ok(()) };
        // The first stage's part of the newest gradients is still on its way, and this rank does not wait for it.
        let newest = if done.is_some() { self.schedule.ranks() } else { 0 };
        while tied.output_gradients.len() > newest {
            if done.is_some_and(|done| tied.lookup_dependencies[tied.output_gradients[0].micro_batch] > done) {
                return Ok(());
            }
            let row_gradients = match tied.is_first {
                true => tied.lookup_gradients.pop_front(),
                false => {
                    let key = (0, tied.output_gradients[0].micro_batch);
                    Some(self.tied_messages.receive(BoundaryMessageKind::LookupGradient, key, tied.ends[0])?)
                }
            };
            let (Some(oldest), Some(row_gradients)) = (tied.output_gradients.pop_front(), row_gradients) else {
                return Ok(());
            };
            let OutputGradient { micro_batch, gradient: output_gradient, memory: _memory } = oldest;
            let (batch, module) = (&step.batches[micro_batch], &self.module);
            let weight = self.engine.weight(tied.param);
            let (scalar, _) = self.engine.forward_stage(micro_batch, 0, |layers| {
                let lookup = layers.lookup.as_ref().expect("the rank of the last stage has the lookup");
                let rows = lookup.forward(&module.input(batch)?, batch)?;
                deliver_gradients(&rows, row_gradients.tensor, &weight, output_gradient)
            })?;
            self.engine.backward_stage(&scalar, None)?;
        }
        Ok(())
    }

    /// Sends the new values of the tied weight to the first stage.
    fn publish_tied(&mut self) -> Result<()> {
        let Some(tied) = self.tied.as_ref().filter(|tied| tied.is_first != tied.is_last) else { return Ok(()) };
        if !self.engine.was_step_applied() {
            return Ok(());
        }
        if tied.is_last {
            let tensor = self.engine.weight(tied.param).detach();
            let weight = BoundaryTensor { tensor, next_draw: 0, memory: None };
            self.tied_messages.send(BoundaryMessageKind::TiedWeight, (0, 0), tied.ends[0], &weight)?;
            return self.tied_messages.finish();
        }
        let weight = self.tied_messages.receive(BoundaryMessageKind::TiedWeight, (0, 0), tied.ends[1])?.tensor;
        self.engine.replace_weight(tied.param, &weight)
    }
}

/// Returns the size in bytes of a tensor's values.
fn bytes_of(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}
