//! The engine of a run: of a complete model, or of a pipeline that divides the model's layers among ranks. The loop of
//! a run is the same with both.

use super::learning_rate::LearningRates;
use super::objective::ValidationResult;
use super::options::{Objective, Options, TuningMethod, option_use_error};
use super::prepare::{PreparedRun, StartModel};
use crate::data::batches::{Batches, NO_TARGET};
use crate::error::{Error, Result};
use crate::model::trainable_model::TrainableModel;
use crate::peft::adapter::{Adapter, AdapterTensor};
use crate::peft::qlora_weight_selection::{PACKING, quantized_except};
use candle_core::{DType, Device, Tensor};
use candle_zero::checkpoint::{LoadOptions, LoadedCheckpoint, SaveOptions, newest_island_checkpoint};
use candle_zero::comm::{CommReport, Communicator};
use candle_zero::config::Config;
use candle_zero::engine::{Engine, EngineBuilder, PipelineEngine};
use candle_zero::island_server::SLOT;
use candle_zero::memory::MemoryReport;
use candle_zero::models::{Decoder, DecoderBatch, ExpertLoad, RouterReport, Session, decoder_pipeline};
use candle_zero::monitor::rss_peak_bytes;
use candle_zero::nn::{LoraConfig, Rewards, is_adapter};
use candle_zero::offload::OffloadReport;
use candle_zero::profiler::StepTimings;
use candle_zero::runs::{RunEnding, RunSpec};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The engine of a run.
#[non_exhaustive]
pub enum TrainingEngine {
    /// Every rank runs the complete model on its own part of the data.
    DataParallel(Box<Engine<TrainableModel>>),
    /// Every rank runs some of the model's layers.
    Pipeline(Box<PipelineEngine<DecoderBatch>>),
}

/// Calls a method that both engines have.
macro_rules! on_either {
    ($of:expr, $engine:ident => $call:expr) => {
        match $of {
            Self::DataParallel($engine) => $call,
            Self::Pipeline($engine) => $call,
        }
    };
}

/// The settings of an engine that do not follow from the prepared model.
pub(super) struct TrainingEngineOptions {
    pub config: Config,
    /// The learning rates, unless the configuration has a schedule.
    pub rates: LearningRates,
    /// Whether the model is divided among ranks as a pipeline.
    pub in_pipeline: bool,
    /// The record of the run, if one is kept.
    pub record: Option<RunSpec>,
    /// A hash of the run's settings, which all ranks and islands must have in common.
    pub settings: u64,
}

/// The results of an optimizer step, over all ranks.
pub(super) struct StepOutcome {
    /// The mean loss.
    pub loss: f64,
    /// The number of tokens without padding.
    pub tokens: f64,
    /// The means of the four values of the rewards, if preferences are optimized.
    pub rewards: [f64; 4],
    /// The mean load-balancing loss, if the model is trained with one.
    pub balance: Option<f64>,
    /// The loads of the experts of all sparse blocks, over all micro batches and ranks.
    pub loads: Vec<ExpertLoad>,
    /// The peak memory of the rank that used the most; 0 if unknown.
    pub rss_peak_bytes: f64,
    /// The failure of a background save that ended in this step.
    pub failed_save: Option<Error>,
}

impl TrainingEngine {
    /// Builds the engine with the model's weights. Collective.
    pub(super) fn build(
        prepared: &PreparedRun,
        engine_options: TrainingEngineOptions,
        comm: Arc<dyn Communicator>,
    ) -> Result<Self> {
        let TrainingEngineOptions { config, rates, in_pipeline, record, settings } = engine_options;
        let Options { method, seed, .. } = &prepared.options;
        let mut builder: EngineBuilder = Engine::builder().communicator(comm).seed(*seed);
        builder = builder.initial_values(prepared.values.clone());
        builder = builder.same_on_all_ranks("training data", prepared.training.content_fingerprint());
        if let Some(validation) = &prepared.validation {
            builder = builder.same_on_all_ranks("validation data", validation.content_fingerprint());
        }
        builder = builder.same_on_all_ranks("settings of the run", settings);
        let is_island = config.local_steps.as_ref().is_some_and(|local_steps| local_steps.server.is_some());
        if is_island
            && std::env::var_os(SLOT).is_none()
            && let Some(saving) = prepared.options.saving.as_ref().filter(|saving| saving.resume)
            && let Some((island, ..)) = newest_island_checkpoint(&saving.dir)
        {
            // An island finds its checkpoints only in its earlier slot.
            builder = builder.island_slot(island);
        }
        if let Some(record) = record {
            builder = builder.run(record);
        }
        if config.scheduler.is_none() {
            builder = builder.schedule(rates);
        }
        if *method != TuningMethod::Full {
            let is_trained = prepared.start.trained(method);
            builder = builder.trainable(move |name, _| is_trained(name));
        }
        if let TuningMethod::Qlora(_) = method {
            builder = builder.quantized(PACKING, quantized_except(&prepared.options.keep_layers));
        }
        let complete_model = |engine: Engine<TrainableModel>| Self::DataParallel(Box::new(engine));
        let sizes = match &prepared.start {
            StartModel::Classifier { config: sizes, .. } => {
                return builder.initialize(|vb| sizes.build(vb), config).map(complete_model);
            }
            StartModel::Decoder { config, .. } => config,
        };
        if in_pipeline {
            let engine = builder.initialize_pipeline(decoder_pipeline(sizes)?, config)?;
            return Ok(Self::Pipeline(Box::new(engine)));
        }
        builder.initialize(|vb| Decoder::new(sizes, vb).map(TrainableModel::Decoder), config).map(complete_model)
    }

    /// Returns this process's rank in the job.
    pub fn rank(&self) -> usize {
        match self {
            Self::DataParallel(engine) => engine.job_rank(),
            Self::Pipeline(engine) => engine.rank(),
        }
    }

    /// Returns the number of ranks. With an island server, the ranks of all slots for islands are counted.
    pub fn world_size(&self) -> usize {
        on_either!(self, engine => engine.world_size())
    }

    /// Returns which part of the data this rank trains on, counted from 0, and the number of parts. The ranks of a
    /// pipeline train on the same part.
    pub fn data_position(&self) -> (usize, usize) {
        match self {
            Self::DataParallel(engine) => (engine.rank(), engine.world_size()),
            Self::Pipeline(engine) => engine.data_position(),
        }
    }

    /// Returns the number of this rank's island, counted from 0, and the number of islands, if the ranks take local
    /// steps.
    pub fn island(&self) -> Option<(usize, usize)> {
        match self {
            Self::DataParallel(engine) => engine.island(),
            Self::Pipeline(_) => None,
        }
    }

    /// Returns the number of ranks along the pipeline, if there is one.
    pub fn pipeline_ranks(&self) -> Option<usize> {
        match self {
            Self::DataParallel(_) => None,
            Self::Pipeline(engine) => Some(engine.position().1),
        }
    }

    /// Returns the configuration. In a pipeline, it is that of the ranks that train the same stages on different data.
    pub fn config(&self) -> &Config {
        on_either!(self, engine => engine.config())
    }

    /// Returns the device on which this rank computes.
    pub fn device(&self) -> &Device {
        on_either!(self, engine => engine.device())
    }

    /// Returns the number of optimizer steps, including skipped ones.
    pub fn global_steps(&self) -> u64 {
        on_either!(self, engine => engine.global_steps())
    }

    /// Returns the number of optimizer steps that changed nothing.
    pub fn skipped_steps(&self) -> u64 {
        on_either!(self, engine => engine.skipped_steps())
    }

    /// Returns whether the last optimizer step changed the weights.
    pub fn was_step_applied(&self) -> bool {
        on_either!(self, engine => engine.was_step_applied())
    }

    /// Returns the gradient norm of the last step, before clipping.
    pub fn global_grad_norm(&self) -> Option<f64> {
        on_either!(self, engine => engine.global_grad_norm())
    }

    /// Returns the learning rate of each parameter group.
    pub fn lr(&self) -> Vec<f64> {
        on_either!(self, engine => engine.lr())
    }

    /// Returns the loss scale of the next step.
    pub fn loss_scale(&self) -> f64 {
        on_either!(self, engine => engine.loss_scale())
    }

    /// Returns the times of the last optimizer step on this rank.
    pub fn timings(&self) -> StepTimings {
        on_either!(self, engine => engine.timings())
    }

    /// Returns this rank's memory by kind.
    pub fn memory_report(&self) -> MemoryReport {
        on_either!(self, engine => engine.memory_report())
    }

    /// Returns statistics of this rank's collectives so far.
    pub fn comm_report(&self) -> CommReport {
        on_either!(self, engine => engine.comm_report())
    }

    /// Returns what this rank has read from files of offloaded states and written to them.
    pub fn offload_report(&self) -> OffloadReport {
        on_either!(self, engine => engine.offload_report())
    }

    /// Collective: returns the `values` of every rank of the job, in rank order.
    ///
    /// # Errors
    /// A failed collective.
    pub fn gather_f64(&self, values: &[f64]) -> Result<Vec<Vec<f64>>> {
        on_either!(self, engine => engine.gather_f64(values))
    }

    /// Records values of the current step in the record of the run.
    pub(super) fn record_metrics(&mut self, values: &[(&str, f64)]) {
        on_either!(self, engine => engine.record_metrics(values));
    }

    /// Records how often each expert of a mixture was chosen in the current step. In a pipeline, this is not measured.
    pub(super) fn record_expert_loads(&mut self, loads: &[ExpertLoad]) {
        if let Self::DataParallel(engine) = self
            && !loads.is_empty()
        {
            engine.record_expert_loads(loads);
        }
    }

    /// Records an answer of the model in the record of the run.
    pub(super) fn record_sample(&mut self, prompt: &str, text: &str) {
        on_either!(self, engine => engine.record_sample(prompt, text));
    }

    /// Ends the record of the run.
    pub(super) fn end_run(&mut self, outcome: RunEnding, message: Option<&str>) {
        on_either!(self, engine => engine.end_run(outcome, message));
    }

    /// Collective: returns whether the job was asked to end, as [`Engine::stop_requested`] does.
    pub(super) fn stop_requested(&self) -> Result<bool> {
        on_either!(self, engine => engine.stop_requested())
    }

    /// Returns whether the user has asked for a checkpoint. The result is the same on all ranks.
    pub(super) fn save_requested(&self) -> bool {
        on_either!(self, engine => engine.save_requested())
    }

    /// Collective: checks whether checkpoints can be saved into `dir`.
    pub(super) fn check_save_dir(&mut self, dir: &Path) -> Result<()> {
        on_either!(self, engine => engine.check_save_dir(dir))
    }

    /// Collective: saves a checkpoint.
    pub(super) fn save_checkpoint(&mut self, dir: &Path, state: Value, options: &SaveOptions) -> Result<PathBuf> {
        on_either!(self, engine => engine.save_checkpoint_with(dir, None, state, options))
    }

    /// Collective: loads the newest checkpoint in `dir`, if there is one.
    pub(super) fn load_checkpoint(&mut self, dir: &Path) -> Result<Option<LoadedCheckpoint>> {
        on_either!(self, engine => engine.load_checkpoint(dir, None, &LoadOptions::default()))
    }

    /// Collective: waits for a background save.
    pub(super) fn wait_for_checkpoint(&mut self) -> Result<()> {
        on_either!(self, engine => engine.wait_for_checkpoint())
    }

    /// Collective: waits until the last checkpoint is uploaded.
    pub(super) fn wait_for_upload(&mut self) -> Result<()> {
        on_either!(self, engine => engine.wait_for_upload())
    }

    /// Returns the client state that this island received, if it has joined others and has not trained since.
    pub(super) fn donated_client_state(&self) -> Option<&Value> {
        match self {
            Self::DataParallel(engine) => engine.donated_client_state(),
            Self::Pipeline(_) => None,
        }
    }

    /// Sets the client state that a joining island receives from this one.
    pub(super) fn set_donated_client_state(&mut self, state: Value) {
        if let Self::DataParallel(engine) = self {
            engine.set_donated_client_state(state);
        }
    }

    /// Collective: with local steps, gives all islands the same weights.
    pub(super) fn synchronize_islands(&mut self) -> Result<()> {
        match self {
            Self::DataParallel(engine) => engine.synchronize_islands(),
            // A pipeline has no islands.
            Self::Pipeline(_) => Ok(()),
        }
    }

    /// Collective: writes the complete model in f32 to `path`, from rank 0.
    pub(super) fn export_safetensors(&mut self, path: &Path) -> Result<()> {
        on_either!(self, engine => engine.export_safetensors(path))
    }

    /// Collective: returns the number of trained parameter tensors of the complete model, and that of all its tensors.
    pub(super) fn parameter_counts(&mut self) -> Result<(usize, usize)> {
        Ok(match self {
            Self::DataParallel(engine) => (engine.trainable_parameters().len(), engine.parameter_names().len()),
            Self::Pipeline(engine) => {
                let parameters = engine.model_parameters()?;
                (parameters.iter().filter(|(_, is_trained)| *is_trained).count(), parameters.len())
            }
        })
    }

    /// Collective: returns the adapter that the engine trains. In a pipeline, it is complete on rank 0 only.
    pub(super) fn adapter(&mut self, config: LoraConfig, base: Option<String>) -> Result<Adapter> {
        let engine = match self {
            Self::DataParallel(engine) => return Adapter::of_engine(engine, config, base),
            Self::Pipeline(engine) => engine,
        };
        let mut parameters = Vec::new();
        for (name, tensor) in engine.gather_parameters(is_adapter)? {
            let (shape, values) = (tensor.dims().to_vec(), tensor.flatten_all()?.to_vec1()?);
            parameters.push((name, AdapterTensor { shape, values }));
        }
        Ok(Adapter::new(config, base, parameters))
    }

    /// Collective: returns the adapter of a classifier with the modules `saved`.
    ///
    /// # Errors
    /// Errors of [`Adapter::of_classifying_engine`].
    pub(super) fn classifier_adapter(
        &mut self,
        config: LoraConfig,
        base: Option<String>,
        saved: Vec<String>,
    ) -> Result<Adapter> {
        match self {
            Self::DataParallel(engine) => Adapter::of_classifying_engine(engine, config, base, saved),
            Self::Pipeline(_) => unreachable!("options with a pipeline and a classifier are refused"),
        }
    }

    /// Collective: runs an optimizer step on the rows of step `step`. Calls `tell` after each micro batch of this rank
    /// with its number, counted from 1, and the number of micro batches.
    pub(super) fn train_step(
        &mut self,
        step: u64,
        training: &Batches,
        objective: Objective,
        tell: &mut dyn FnMut(usize, usize),
    ) -> Result<StepOutcome> {
        let micro_steps = self.config().batch.gradient_accumulation_steps;
        let (device, (_, parts)) = (self.device().clone(), self.data_position());
        // The engine averages over ranks and micro batches. Each sum is divided by an equal share of the number of
        // targets, so the average is the mean over all targets.
        let divisor = training.targets_of_step(step).max(1) as f64 / (parts * micro_steps) as f64;
        let (mut tokens, mut rewards_sum, mut failed_save) = (0, [0.0; 4], None);
        let (mut balance_sum, mut loads) = (None, Vec::<ExpertLoad>::new());
        let mut keep_failed_save = |result: Result<()>| match result {
            // The checkpoint could not be saved, but the optimizer step has been completed.
            Err(error @ Error::Checkpoint(_)) => {
                failed_save = Some(error);
                Ok(())
            }
            result => result,
        };
        let loss = match self {
            Self::DataParallel(engine) => {
                let mut loss_sum = 0.0;
                for micro_step in 0..micro_steps {
                    let rows = training.batch(step, micro_step);
                    let reference = match objective.needs_reference() {
                        true => Some(engine.eval(|model| objective.reference(model, &rows, &device))?),
                        false => None,
                    };
                    let (mut rewards, mut routers) = (None, RouterReport::default());
                    let loss = engine.forward(|model| {
                        let batch_loss = objective.loss(model, &rows, reference.as_ref(), divisor, &device)?;
                        // If the closure runs again to check the gradient, the last run is the one with unchanged
                        // weights.
                        (rewards, routers) = (batch_loss.rewards, batch_loss.routers);
                        Ok(batch_loss.loss)
                    })?;
                    if let Some(balance) = &routers.balance {
                        *balance_sum.get_or_insert(0.0) += f64::from(balance.to_scalar::<f32>()?);
                    }
                    add_loads(&mut loads, routers.loads);
                    engine.backward(&loss)?;
                    keep_failed_save(engine.step())?;
                    let rewards = rewards.map(Rewards::to_numbers).unwrap_or_default();
                    rewards_sum.iter_mut().zip(rewards).for_each(|(sum, reward)| *sum += reward);
                    loss_sum += f64::from(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
                    tokens += rows.tokens;
                    tell(micro_step + 1, micro_steps);
                }
                loss_sum / micro_steps as f64
            }
            Self::Pipeline(engine) => {
                let next = |micro_step| {
                    let rows = training.batch(step, micro_step);
                    tokens += rows.tokens;
                    Ok(Objective::decoder_batch(&rows, Some(divisor), &device)?)
                };
                let on_progress = &mut |passed| tell(passed, micro_steps);
                keep_failed_save(engine.train_batch_with_progress(next, on_progress).map(drop))?;
                engine.last_loss()
            }
        };
        let mut local = vec![loss, tokens as f64, rss_peak_bytes().unwrap_or(0) as f64];
        local.extend(rewards_sum.map(|sum| sum / micro_steps as f64));
        local.push(balance_sum.unwrap_or(0.0) / micro_steps as f64);
        local.extend(loads.iter().flat_map(|load| &load.choices).map(|choices| *choices as f64));
        let ranks = self.gather_f64(&local)?;
        let sum = |i: usize| ranks.iter().map(|rank| rank[i]).sum::<f64>();
        let mean = |i: usize| sum(i) / ranks.len() as f64;
        let all_choices = loads.iter_mut().flat_map(|load| &mut load.choices);
        all_choices.enumerate().for_each(|(i, choices)| *choices = sum(8 + i) as u64);
        Ok(StepOutcome {
            // All ranks of a pipeline have the mean.
            loss: if self.pipeline_ranks().is_some() { loss } else { mean(0) },
            // All ranks of a pipeline have the same rows.
            tokens: sum(1) / self.pipeline_ranks().unwrap_or(1) as f64,
            rewards: [3, 4, 5, 6].map(mean),
            balance: balance_sum.map(|_| mean(7)),
            loads,
            rss_peak_bytes: ranks.iter().fold(0.0, |peak: f64, rank| peak.max(rank[2])),
            failed_save,
        })
    }

    /// Collective: validates the model on all batches, of which every rank has the same number.
    pub(super) fn validate(&mut self, batches: &Batches, objective: Objective) -> Result<ValidationResult> {
        let (device, count) = (self.device().clone(), batches.steps_per_epoch());
        let ranks = match self {
            Self::DataParallel(engine) => {
                let mut sums = vec![];
                for step in 0..count {
                    let rows = batches.batch(step, 0);
                    let batch_sums = engine.eval(|model| objective.sums(model, &rows, &device))?.to_vec1::<f64>()?;
                    sums.resize(batch_sums.len(), 0.0);
                    sums.iter_mut().zip(batch_sums).for_each(|(sum, value)| *sum += value);
                }
                engine.gather_f64(&sums)?
            }
            Self::Pipeline(engine) => {
                let mut targets = 0;
                let loss = engine.eval_sum(count as usize, |step| {
                    let rows = batches.batch(step as u64, 0);
                    targets += rows.targets.iter().filter(|target| **target != NO_TARGET).count();
                    Ok(Objective::decoder_batch(&rows, Some(1.0), &device)?)
                })?;
                // All ranks of a pipeline have the same rows.
                let ranks = engine.gather_f64(&[targets as f64])?;
                let targets = ranks.iter().map(|rank| rank[0]).sum::<f64>() / engine.position().1 as f64;
                vec![vec![loss, targets]]
            }
        };
        let length = ranks.first().map_or(0, Vec::len);
        let sums: Vec<f64> = (0..length).map(|i| ranks.iter().map(|rank| rank[i]).sum()).collect();
        Ok(objective.validation(&sums))
    }

    /// Collective: returns the logits of the token after `ids`, which continue the text of `session`.
    pub(super) fn extend(&mut self, session: &mut Session, ids: &[u32]) -> Result<Vec<f32>> {
        match self {
            Self::DataParallel(engine) => {
                let logits = engine.eval(|model| Tensor::new(model.decoder()?.extend(session, ids)?, &Device::Cpu))?;
                Ok(logits.to_vec1()?)
            }
            Self::Pipeline(_) => Err(option_use_error("--prompt", NO_ANSWERS)),
        }
    }
}

/// Adds the loads of a micro batch to those of earlier ones.
fn add_loads(sums: &mut Vec<ExpertLoad>, loads: Vec<ExpertLoad>) {
    if sums.is_empty() {
        *sums = loads;
        return;
    }
    for (sum, load) in sums.iter_mut().zip(loads) {
        sum.choices.iter_mut().zip(load.choices).for_each(|(sum, choices)| *sum += choices);
    }
}

/// The reason why a pipeline does not answer prompts.
pub(super) const NO_ANSWERS: &str = "is not supported in a pipeline, whose ranks have only parts of the model; leave \
                                     it out, and use zerorun generate with the result";
