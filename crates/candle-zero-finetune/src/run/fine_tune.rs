//! A fine-tuning run, step by step.
//!
//! ```text
//! PreparedRun -> start -> step, step, ... -> finish
//!                         | forward and backward for each micro batch of the step, then the update
//!                         | validate if due, and keep the best model
//!                         | save if due, or if a checkpoint or the end of the run is requested
//! ```
//!
//! The rows of a step depend only on its number, so a run that resumes from a checkpoint does exactly what an
//! uninterrupted run would have done, bit for bit.

use super::auto_offload::{RunTopology, memory_of_all};
use super::expert_loads::{DeadExpertDetector, ExpertShares};
use super::model_card::RunOutcome;
use super::objective::ValidationResult;
use super::options::option_use_error;
use super::pipeline_fit::PipelineShape;
use super::plan::{RunPlan, eval_every, remembered_batch};
use super::prepare::{PreparedRun, StartModel};
use super::run_identity::{RunIdentity, SavedRun};
use super::step_report::{StepReport, StopReason};
use super::training_engine::{StepOutcome, TrainingEngine, TrainingEngineOptions};
use crate::chat::conversation::Conversation;
use crate::data::batches::Batches;
use crate::error::{Error, Result};
use crate::model::generator::{GeneratedText, Generator, Sampling};
use candle_zero::checkpoint;
use candle_zero::comm::Communicator;
use candle_zero::files::{OutputDigests, OutputLocks};
use candle_zero::models::Session;
use candle_zero::nn::Rewards;
use candle_zero::notice;
use candle_zero::runs::RunEnding;
use candle_zero::util::fnv1a;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

mod saving;

/// The values for early stopping and for reports that a checkpoint contains in addition to the engine's state.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
struct EarlyStopState {
    /// The best validation: the number of steps and the loss.
    best: Option<(u64, f64)>,
    /// The number of validations since the best one.
    stale: u64,
    /// The loss of the last step.
    loss: Option<f64>,
}

/// How a run starts.
#[derive(Debug, Clone, PartialEq, Eq)]
enum FineTuneStart {
    /// With the base model.
    New,
    /// From a checkpoint.
    Resumed(PathBuf),
    /// As an island, with the state of islands that were already training.
    Joined,
}

/// A fine-tuning run.
pub struct FineTune {
    prepared: PreparedRun,
    engine: TrainingEngine,
    /// The number of trained parameter tensors, and the number of all parameter tensors.
    parameters: (usize, usize),
    pipeline: Option<PipelineShape>,
    comm: Arc<dyn Communicator>,
    training: Batches,
    validation: Option<Batches>,
    total: u64,
    /// The identity of the run, on rank 0 of a run that saves checkpoints.
    identity: Option<RunIdentity>,
    shortened_row_tokens: Option<usize>,
    /// The settings, for the record next to the result.
    settings: Value,
    state: EarlyStopState,
    stop_reason: Option<StopReason>,
    start: FineTuneStart,
    skipped_before: u64,
    first_step: u64,
    config_explanation: Option<String>,
    /// The locks on outputs that no other job may write. Rank 0 holds them, unless the process that started it does.
    _claims: OutputLocks,
    /// The digests of what this run has written into the folders of its result.
    written: OutputDigests,
    /// The experts that routers may have stopped choosing.
    experts: DeadExpertDetector,
    /// Whether the best model could not be written.
    best_is_lost: bool,
    /// The number of steps after which the islands last exchanged everything.
    exchanged_at: Option<u64>,
    /// The reason why the newest checkpoint could not be saved.
    failed_save: Option<Error>,
}

impl FineTune {
    /// Builds the model on the ranks of `comm` and, if requested, resumes from the newest checkpoint. Collective.
    ///
    /// # Errors
    /// A configuration that cannot be used; weights that cannot be read; a checkpoint of another run or with more steps
    /// ([`FinetuneError::OtherRun`](crate::error::FinetuneError::OtherRun),
    /// [`FinetuneError::CheckpointBeyondEnd`](crate::error::FinetuneError::CheckpointBeyondEnd)); an output that is not
    /// writable, that another job writes, or that contains files that this run may not replace; a disk without room for
    /// the result.
    pub fn start(prepared: PreparedRun, comm: Arc<dyn Communicator>) -> Result<Self> {
        let memory = memory_of_all(&*comm)?;
        let remembered = remembered_batch(&prepared, &*comm)?;
        let abort = |error: &Error| comm.abort(&error.to_string());
        let ranks = RunTopology::of(&*comm, prepared.options.ds_config.is_none())?;
        let plan = RunPlan::new(&prepared, memory, ranks, remembered).inspect_err(abort)?;
        // Checkpoints contain the client state of rank 0.
        let identity = (comm.rank() == 0 && prepared.options.saving.is_some()).then(|| plan.identity(&prepared));
        let identity = identity.transpose().inspect_err(abort)?;
        let settings = json!(plan.settings(&prepared));
        let RunPlan { config, rates, pipeline, training, validation, validation_parts, total, .. } = plan;
        prepared.options.outputs_with(&config).check().inspect_err(|error| comm.abort(&error.to_string()))?;
        let claims = match comm.rank() == 0 && !prepared.is_claimed {
            true => {
                let claims = prepared.options.claim(|outputs| outputs);
                let claims = claims.and_then(|claims| prepared.check_room().map(|()| claims));
                claims.inspect_err(|error| comm.abort(&error.to_string()))?
            }
            false => OutputLocks::default(),
        };
        let written = prepared.options.written();
        let record = prepared.options.run.clone().map(|run| run.total_steps(total).settings(settings.clone()));
        let content = fnv1a(
            json!([settings, total, eval_every(&prepared.options, total), prepared.options.patience])
                .to_string()
                .as_bytes(),
        );
        let options =
            TrainingEngineOptions { config, rates, in_pipeline: pipeline.is_some(), record, settings: content };
        let mut engine = TrainingEngine::build(&prepared, options, comm.clone())?;
        let ((part, _), parameters) = (engine.data_position(), engine.parameter_counts()?);
        let training = training.of_rank(part);
        let validation = validation.map(|batches| batches.of_rank(part % validation_parts));
        let mut run = Self {
            prepared,
            engine,
            parameters,
            pipeline,
            comm,
            training,
            validation,
            total,
            shortened_row_tokens: plan.shortened_row_tokens,
            identity,
            settings,
            state: EarlyStopState::default(),
            stop_reason: None,
            start: FineTuneStart::New,
            skipped_before: 0,
            first_step: 0,
            config_explanation: plan.config_explanation,
            _claims: claims,
            written,
            experts: DeadExpertDetector::default(),
            best_is_lost: false,
            exchanged_at: None,
            failed_save: None,
        };
        run.resume()?;
        run.check_result()?;
        Ok(run)
    }

    /// Continues with the state of the other islands, if this island has joined them, or else from the newest
    /// checkpoint, if requested and if one exists.
    fn resume(&mut self) -> Result<()> {
        let saving = self.prepared.options.saving.clone();
        if let Some(saving) = &saving {
            self.engine.check_save_dir(&saving.dir)?;
        }
        if let Some(donated) = self.engine.donated_client_state() {
            let state = donated["finetune"].clone();
            // The result of another run must not be replaced.
            self.check_saved(self.prepared.saved().as_ref())?;
            self.begin(FineTuneStart::Joined, state);
            return Ok(());
        }
        let Some(saving) = saving else { return Ok(()) };
        if !saving.resume {
            return Ok(());
        }
        // The checkpoint is read again, because another job may have saved into the folder while this one waited for
        // its lock.
        let saved = self.prepared.saved();
        self.check_saved(saved.as_ref())?;
        let Some(loaded) = self.engine.load_checkpoint(&saving.dir)? else {
            return Ok(());
        };
        if saved.is_none() {
            // The checkpoint comes from an object store.
            let saved = SavedRun::of(loaded.path.clone(), self.engine.global_steps(), &loaded.client_state);
            self.check_saved(Some(&saved))?;
        }
        // A run that was killed after its last save may have left more checkpoints than are kept.
        if let (0, Some(keep), Some(tag)) = (self.comm.rank(), saving.keep, loaded.path.file_name()) {
            // An island has a separate folder.
            let dir = if loaded.path.is_dir() { loaded.path.parent() } else { None };
            checkpoint::keep_newest(dir.unwrap_or(&saving.dir), keep, &tag.to_string_lossy());
        }
        let state = loaded.client_state["finetune"].clone();
        self.begin(FineTuneStart::Resumed(loaded.path), state);
        Ok(())
    }

    /// Begins at the engine's step. `state` is the [`EarlyStopState`] in a checkpoint's client state.
    fn begin(&mut self, start: FineTuneStart, state: Value) {
        self.state = serde_json::from_value(state).unwrap_or_default();
        (self.first_step, self.skipped_before) = (self.engine.global_steps(), self.engine.skipped_steps());
        self.start = start;
        let patience = self.prepared.options.patience.unwrap_or(u64::MAX);
        if self.state.stale >= patience {
            self.stop_reason = Some(StopReason::NoImprovement);
        }
    }

    /// Checks, on rank 0, that this run may continue from a checkpoint.
    fn check_saved(&self, saved: Option<&SavedRun>) -> Result<()> {
        let (Some(saved), Some(identity)) = (saved, &self.identity) else { return Ok(()) };
        let note = saved.check(identity, self.total, self.prepared.options.resume_anyway);
        if let Some(note) = note.inspect_err(|error| self.abort(error))? {
            notice::emit(&note);
        }
        Ok(())
    }

    /// Refuses, before the first step, result folders with files that this run may not replace. A run may replace its
    /// own files only if it continues from a checkpoint, has joined other islands, or was restarted by `zerorun`.
    fn check_result(&mut self) -> Result<()> {
        if self.start == FineTuneStart::New && !self.prepared.options.is_restarted() {
            let saving = self.prepared.options.saving.as_ref();
            self.written = OutputDigests::empty(saving.map(|saving| saving.dir.as_path()));
        }
        // Only the host that writes is checked.
        match self.comm.rank() {
            0 => self.prepared.options.check_free(&self.written).inspect_err(|error| self.abort(error)),
            _ => Ok(()),
        }
    }

    /// Returns the prepared inputs.
    pub fn prepared(&self) -> &PreparedRun {
        &self.prepared
    }

    /// Returns the engine.
    pub fn engine(&self) -> &TrainingEngine {
        &self.engine
    }

    /// Records an answer of the model in the record of the run, if one is kept.
    pub fn record_sample(&mut self, prompt: &str, text: &str) {
        self.engine.record_sample(prompt, text);
    }

    /// Returns the number of trained parameter tensors of the model, and the number of all its parameter tensors.
    pub fn parameter_counts(&self) -> (usize, usize) {
        self.parameters
    }

    /// Returns the chosen stage and offload and the reason, if there was a choice.
    pub fn config_explanation(&self) -> Option<&str> {
        self.config_explanation.as_deref()
    }

    /// Returns the share of a step in which the ranks of a pipeline wait on average, if messages take no time; 0
    /// without a pipeline.
    pub fn waiting_share(&self) -> f64 {
        self.pipeline.map_or(0.0, |pipeline| pipeline.waiting)
    }

    /// Returns the number of steps of the complete run.
    pub fn total_steps(&self) -> u64 {
        self.total
    }

    /// Returns the number of steps completed so far.
    pub fn steps(&self) -> u64 {
        self.engine.global_steps()
    }

    /// Returns the number of rows in an epoch.
    pub fn rows_per_epoch(&self) -> usize {
        self.training.rows_per_epoch()
    }

    /// Returns the number of tokens in a row if rows hold fewer samples than would fit, so that an epoch has more
    /// steps.
    pub fn shortened_row_tokens(&self) -> Option<usize> {
        self.shortened_row_tokens
    }

    /// Returns the number of epochs of the run.
    pub fn epochs(&self) -> f64 {
        let rows = self.engine.config().batch.train_batch_size as f64 * self.total as f64;
        rows / self.training.rows_per_epoch() as f64
    }

    /// Returns the checkpoint that the run resumed from.
    pub fn resumed_from(&self) -> Option<&Path> {
        match &self.start {
            FineTuneStart::Resumed(checkpoint) => Some(checkpoint),
            FineTuneStart::New | FineTuneStart::Joined => None,
        }
    }

    /// Returns the step at which this run, as an island, joined others that were already training.
    pub fn joined_at(&self) -> Option<u64> {
        (self.start == FineTuneStart::Joined).then_some(self.first_step)
    }

    /// Returns why the run has ended, once [`step`](Self::step) returns `None`.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop_reason
    }

    /// Returns the best validation: the number of steps and the loss.
    pub fn best(&self) -> Option<(u64, f64)> {
        self.state.best
    }

    /// Returns whether the model of the best validation could not be written. This was reported when it happened.
    pub fn best_is_lost(&self) -> bool {
        self.best_is_lost
    }

    /// Runs the next step, and validates and saves if due. Returns `None` if the run has ended. Collective.
    ///
    /// # Errors
    /// Errors of the engine: a loss that is not finite in f32, a failed collective, a checkpoint that cannot be
    /// written when a request ends the run.
    pub fn step(&mut self) -> Result<Option<StepReport>> {
        self.step_with_progress(&mut |_, _| ())
    }

    /// Runs the next step as [`step`](Self::step) does. Calls `tell` after each of this rank's micro batches with its
    /// number, counted from 1, and the number of micro batches in the step.
    ///
    /// # Errors
    /// See [`step`](Self::step).
    pub fn step_with_progress(&mut self, tell: &mut dyn FnMut(usize, usize)) -> Result<Option<StepReport>> {
        let report = self.next_step(tell);
        report.inspect_err(|error| self.engine.end_run(RunEnding::Failed, Some(&error.to_string())))
    }

    fn next_step(&mut self, tell: &mut dyn FnMut(usize, usize)) -> Result<Option<StepReport>> {
        if self.stop_reason.is_none() {
            self.stop_reason = self.is_at_end()?;
        }
        if self.stop_reason.is_some() {
            let saved = self.engine.wait_for_checkpoint();
            self.report_failed_save(saved)?;
            return Ok(None);
        }
        let mut report = self.train(tell)?;
        self.state.loss = Some(report.loss);
        self.engine.record_metrics(&[("tokens", report.tokens as f64), ("tokens_per_s", report.tokens_per_s)]);
        let router_metrics = report.router_metrics();
        if !router_metrics.is_empty() {
            self.engine.record_metrics(&router_metrics);
        }
        let steps = self.engine.global_steps();
        if self.validation.is_some() && (steps == self.total || steps.is_multiple_of(self.eval_every())) {
            let validation = self.validate()?;
            report.val_loss = Some(validation.loss);
            (report.val_accuracy, report.val_f1) = (validation.accuracy, validation.f1);
            report.val_rewards = validation.rewards;
            let scores =
                [("val_loss", report.val_loss), ("val_accuracy", report.val_accuracy), ("val_f1", report.val_f1)];
            let scores: Vec<_> = scores.into_iter().filter_map(|(name, score)| Some((name, score?))).collect();
            self.engine.record_metrics(&scores);
            self.keep_if_best(steps, validation.loss)?;
            self.engine.set_donated_client_state(self.client_state());
        }
        let saving = self.prepared.options.saving.as_ref();
        let is_due = saving.and_then(|saving| saving.every).is_some_and(|every| steps.is_multiple_of(every));
        // A run without a folder for checkpoints does not check for requests to save, so the dashboard does not offer
        // them.
        let is_requested = saving.is_some() && self.engine.save_requested();
        if (is_due || is_requested) && steps != self.total {
            let saved = self.save(true);
            self.report_failed_save(saved)?;
        }
        Ok(Some(report))
    }

    /// Returns why the run ends before the next step, or `None` if it continues. If the run ends after new steps, or
    /// after it has joined other islands, saves a checkpoint.
    fn is_at_end(&mut self) -> Result<Option<StopReason>> {
        let steps = self.engine.global_steps();
        let patience = self.prepared.options.patience.unwrap_or(u64::MAX);
        let is_new = steps > self.first_step || self.start == FineTuneStart::Joined;
        let stop_reason = match () {
            () if steps >= self.total => StopReason::Complete,
            () if self.state.stale >= patience => StopReason::NoImprovement,
            () if self.engine.stop_requested()? => StopReason::Requested,
            () => return Ok(None),
        };
        self.stop_reason = Some(stop_reason);
        if is_new {
            if stop_reason != StopReason::Requested {
                self.synchronize_islands()?;
            }
            let saved = self.save(false);
            match stop_reason {
                // A run that is stopped leaves nothing but its checkpoint, so a failed save is an error.
                StopReason::Requested => saved?,
                _ => self.report_failed_save(saved)?,
            }
        }
        Ok(Some(stop_reason))
    }

    /// Handles the outcome of a save, which fails on all ranks or on none. An error of the checkpoint is reported, but
    /// does not end training, and the result is still written. Other errors are returned.
    fn report_failed_save(&mut self, saved: Result<()>) -> Result<()> {
        match saved {
            Err(error @ Error::Checkpoint(_)) => {
                if self.comm.rank() == 0 {
                    let next =
                        if self.stop_reason.is_some() { "the result is still written" } else { "training continues" };
                    notice::emit(&format!("warning: {error}; {next}"));
                }
                self.failed_save = Some(error);
                Ok(())
            }
            saved => saved,
        }
    }

    /// Runs the forward pass, the backward pass and the update.
    fn train(&mut self, tell: &mut dyn FnMut(usize, usize)) -> Result<StepReport> {
        let (start, step) = (Instant::now(), self.engine.global_steps());
        let files_before = self.engine.offload_report();
        let (lr, loss_scale) = (self.engine.lr()[0], self.engine.loss_scale());
        let objective = self.prepared.options.objective;
        let StepOutcome { loss, tokens, rewards, balance, loads, rss_peak_bytes, failed_save } =
            self.engine.train_step(step, &self.training, objective, tell)?;
        self.report_failed_save(failed_save.map_or(Ok(()), Err))?;
        if let Some(message) = self.experts.observe(&loads).filter(|_| self.comm.rank() == 0) {
            notice::emit(&message);
        }
        self.engine.record_expert_loads(&loads);
        let timings = self.engine.timings();
        let files = self.engine.offload_report().since(&files_before);
        Ok(StepReport {
            step,
            loss,
            lr,
            grad_norm: self.engine.global_grad_norm(),
            loss_scale,
            skipped: !self.engine.was_step_applied(),
            tokens: tokens as u64,
            tokens_per_s: tokens / start.elapsed().as_secs_f64(),
            forward_ms: timings.forward_ms,
            backward_ms: timings.backward_ms,
            step_ms: timings.step_ms,
            comm_ms: timings.comm_ms,
            disk_ms: timings.disk_ms,
            disk_read_bytes: files.bytes_read,
            disk_written_bytes: files.bytes_written,
            disk_bytes_per_s: files.bytes_per_s(),
            rss_peak_bytes: (rss_peak_bytes > 0.0).then_some(rss_peak_bytes as u64),
            val_loss: None,
            val_accuracy: None,
            val_f1: None,
            router_aux_loss: balance,
            experts: ExpertShares::of(&loads),
            rewards: objective.needs_reference().then(|| Rewards::of_numbers(rewards)),
            val_rewards: None,
        })
    }

    /// Returns the number of steps between two validations.
    fn eval_every(&self) -> u64 {
        eval_every(&self.prepared.options, self.total)
    }

    /// Validates the model on all of the validation data. Collective: every rank has the same number of batches.
    ///
    /// # Errors
    /// A failed collective.
    ///
    /// # Panics
    ///
    /// Panics if there is no validation data.
    pub fn validate(&mut self) -> Result<ValidationResult> {
        self.synchronize_islands()?;
        let batches = self.validation.as_ref().expect("a run with validation has data for it");
        self.engine.validate(batches, self.prepared.options.objective)
    }

    /// With local steps, gives all islands the same weights, unless they have exchanged everything since the last step.
    fn synchronize_islands(&mut self) -> Result<()> {
        if self.exchanged_at != Some(self.engine.global_steps()) {
            self.engine.synchronize_islands()?;
            self.exchanged_at = Some(self.engine.global_steps());
        }
        Ok(())
    }

    /// Returns the model's answer to a prompt, which is a user message if there is a chat template and otherwise a text
    /// to continue. Collective: all ranks must pass the same prompt.
    ///
    /// # Errors
    /// Errors of [`Generator::answer`]; a classifier; a model that is divided among the ranks of a pipeline; a failed
    /// collective.
    pub fn answer(&mut self, prompt: &str, sampling: &Sampling) -> Result<GeneratedText> {
        let PreparedRun { start, tokenizer, template, .. } = &self.prepared;
        let StartModel::Decoder { base, config } = start else {
            return Err(option_use_error("--prompt", "is for text generation: a classifier generates no answers"));
        };
        let generator = Generator::new(base, tokenizer, template.as_ref())?;
        let ids = match template {
            Some(_) => generator.encode_conversation(&Conversation::new([("user", prompt)]))?,
            None => generator.encode_text(prompt)?,
        };
        // Beyond the context, each further token would require recomputing all tokens.
        let max_tokens = sampling.max_tokens.min(config.ctx.saturating_sub(ids.len())).max(1);
        let engine = &mut self.engine;
        let extend = |session: &mut Session, ids: &[u32]| engine.extend(session, ids);
        generator.answer(&ids, &Sampling { max_tokens, ..sampling.clone() }, extend, |_| ControlFlow::Continue(()))
    }

    /// Returns the outcome of the run.
    fn outcome(&self) -> RunOutcome {
        let EarlyStopState { best, loss, .. } = self.state;
        RunOutcome { steps: self.engine.global_steps(), total: self.total, loss, best }
    }

    /// Returns the number of steps that this process has completed, not counting those before it resumed.
    pub fn steps_made(&self) -> u64 {
        self.engine.global_steps() - self.first_step
    }

    /// Returns the engine's totals of memory, transfers and files, for the last line of metrics.
    pub fn summary(&self) -> Value {
        json!({
            "summary": true,
            "world_size": self.engine.world_size(),
            "steps": self.total,
            "skipped_steps": self.engine.skipped_steps(),
            "memory": self.engine.memory_report(),
            "comm": self.engine.comm_report(),
            "offload": self.engine.offload_report(),
        })
    }
}
