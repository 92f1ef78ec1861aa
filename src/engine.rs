//! The engine: it is initialized once, and each training step then consists of forward, backward and step.
//!
//! ```text
//!   initialize   configuration -> communicator -> model, parameter by parameter -> shares -> optimizer states
//!   forward      [gather -> unit -> release] ...
//!   backward     loss x scale / accumulation -> [gather -> unit -> capture gradients -> reduce] ...
//!   step         at the accumulation boundary: vote -> scaler -> clip -> update -> publish -> schedule
//!                every so many steps, with local_steps: exchange between islands -> outer step -> publish
//! ```
//!
//! The engine runs these actions in order; almost all of their arithmetic is in other modules.

mod accumulation;
mod active_weights;
mod builder;
mod call_guard;
mod checkpoints;
mod config_comparison;
mod consistency;
mod construct;
pub(crate) mod error;
mod eval_model;
mod finite_difference_check;
mod gradient_check_report;
mod gradient_check_state;
mod island_checkpoints;
mod island_donation;
mod island_transport;
mod islands;
mod local_steps;
mod metrics;
mod param_access;
mod pipeline;
mod rank_reports;
mod reporter;
mod run_record;
mod run_recorder;
mod step_clock;
mod trainable;
mod training_output;

#[doc(inline)]
pub use crate::param::InitialValues;
pub use builder::EngineBuilder;
pub use gradient_check_report::{GradientCheckVerdict, GradientReport, GradientRow};
#[doc(hidden)]
pub use gradient_check_state::CHECK_GRADIENTS;
pub(crate) use pipeline::PipelineDivision;
pub use pipeline::PipelineEngine;

use crate::checkpoint::store::CheckpointUpload;
use crate::checkpoint::{LastCheckpoint, LockedFolders, SaveJob};
use crate::comm::agree::JointOperationFailure;
use crate::comm::engine_call::during;
use crate::config::{Config, Precision};
use crate::error::{EngineError, Error, OptimError, Result, without_backtrace};
use crate::graph::{RngStreamKey, autocast, stream_of};
use crate::notice::warn;
use crate::optim::GroupedOptimizer;
use crate::precision::{LossScaler, gradient_multiplier};
use crate::stop_signal::{asked_to_stop, is_planned_stop, planned_stop};
use crate::timeline::{self, TimelineRecorder};
use crate::util::list;
use crate::zero::rank_core::RankCore;
use crate::zero::step::active_weights::ActiveWeights;
use crate::zero::step::sharded_step::StepVoteResult;
use candle_core::{DType, Device, Tensor};
use gradient_check_state::EngineCheckState;
use islands::Islands;
use reporter::EngineReporter;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use step_clock::{MicroStepCall, StepClock};

/// A wrapper around a model that trains it with ZeRO.
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
    /// The instance that evaluations run instead of `model`, if one was built.
    eval_model: Option<M>,
    config: Config,
    core: Arc<RankCore>,
    trainer: GroupedOptimizer,
    scaler: LossScaler,
    /// The exchanges with the other islands, if the ranks take local steps.
    islands: Option<Islands>,
    device: Device,
    phase: MicroStepPhase,
    /// The weights that the model computes with, if the optimizer averages weights.
    active_weights: ActiveWeights,
    losses: AccumulatedLoss,
    check: EngineCheckState,
    global_steps: u64,
    micro_steps: u64,
    /// The seed for the random numbers drawn in forward passes.
    seed: u64,
    accumulation: AccumulationProgress,
    /// The number of forward passes in this micro step.
    forwards: u64,
    skipped_steps: u64,
    /// The number of updates that the optimizer states include.
    optimizer_steps: u64,
    /// The number of samples that all ranks together have processed.
    global_samples: u64,
    was_applied: bool,
    grad_norm: Option<f64>,
    clock: StepClock,
    reporter: EngineReporter,
    /// The checkpoint that is being written.
    saving: Option<SaveJob>,
    /// The checkpoint that is being uploaded to an object store.
    upload: Option<CheckpointUpload>,
    /// The checkpoint that was saved or loaded last.
    last_checkpoint: Option<LastCheckpoint>,
    /// The folders that this job saves into.
    locked_folders: LockedFolders,
    /// The error of a failed background save, until it has been reported.
    failed_save: Option<Error>,
    /// The error that ended the job for this rank.
    stopped: Option<String>,
    /// Must be the last field: it also records what happens while the other fields are dropped.
    recorder: Option<TimelineRecorder>,
}

/// The position of the engine within a micro step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MicroStepPhase {
    /// Before forward.
    Ready,
    /// After forward: a loss exists.
    AfterForward,
    /// After backward: gradients exist.
    AfterBackward,
    /// After a backward pass inside [`no_sync`](Engine::no_sync): each rank has only its own gradients.
    AfterNoSyncBackward,
}

/// The progress of the current accumulation.
#[derive(Debug, Clone, Copy, Default)]
struct AccumulationProgress {
    /// The number of micro steps completed.
    micro_steps: u64,
    /// Whether [`no_sync`](Engine::no_sync) is running.
    in_no_sync: bool,
    /// Whether `no_sync` has left gradients for the next backward pass or step to reduce.
    holds_gradients: bool,
}

/// This rank's losses in the current accumulation.
#[derive(Debug, Default)]
struct AccumulatedLoss {
    sum: f64,
    any_non_finite: bool,
}

impl<M> Engine<M> {
    /// Runs the model for training. `run` computes the loss, or a tensor that the loss is then computed from.
    ///
    /// Parameters are in memory while `run` runs; at stage 3, a unit's parameters are in memory only while the unit
    /// runs.
    ///
    /// In the first step, and in later ones while the result of the gradient check (`gradient_check`) is unclear, `run`
    /// is called at least three times, also with slightly perturbed weights. It must therefore compute its result
    /// from the model and from inputs fixed before the call (a batch, a step number), and must not fetch a new batch.
    /// Captured variables that it sets keep the values of the last call, which uses the true weights.
    ///
    /// # Errors
    /// [`EngineError::OutOfOrder`] between backward and step, unless that backward pass ran inside `no_sync`; the error
    /// of `run`; a failed collective.
    pub fn forward(&mut self, run: impl FnMut(&M) -> candle_core::Result<Tensor>) -> Result<Tensor> {
        let inside = self.stream_inside();
        let stream = stream_of(RngStreamKey {
            seed: self.seed,
            rank: self.rank() as u64,
            step: self.global_steps,
            micro_step: self.accumulation.micro_steps,
            forward: inside.unwrap_or(self.forwards),
        });
        if Self::is_repeating() {
            return self.attempt(|engine| engine.repeat_inside(stream, run));
        }
        self.check_order(
            "forward",
            &[MicroStepPhase::Ready, MicroStepPhase::AfterForward, MicroStepPhase::AfterNoSyncBackward],
        )?;
        self.begin_run();
        let watch = self.watch(MicroStepCall::Forward);
        let output = self.attempt(|engine| {
            engine.activate_weights(ActiveWeights::Trained)?;
            // Islands may have exchanged everything (`synchronize_islands`) since the exchange that named the donor.
            engine.donate()?;
            engine.run_forward(stream, run)
        })?;
        self.forwards += 1;
        self.phase = MicroStepPhase::AfterForward;
        self.end_watch(watch);
        Ok(output)
    }

    /// Runs `run` with `torch_autocast`'s matrix products.
    fn cast<T>(&self, run: impl FnOnce() -> T) -> T {
        autocast(self.config.autocast, run)
    }

    /// Runs the model without a graph; no step or sample is counted. Collective at stage 3.
    ///
    /// With AdamWScheduleFree, the model computes with the average of the weights. The first evaluation after a forward
    /// pass is then collective at every stage.
    ///
    /// This library's layers keep no activations. Candle's own operations on parameters keep activations until the end
    /// of the enclosing unit, or, outside units, until the end of `run`; [`build_for_eval`](Self::build_for_eval)
    /// avoids that too. [`nn::Dropout`](crate::nn::Dropout) drops nothing.
    ///
    /// # Errors
    /// The error of `run`; a failed collective.
    pub fn eval(&mut self, run: impl FnOnce(&M) -> candle_core::Result<Tensor>) -> Result<Tensor> {
        let (_call, _span) = (during("eval"), self.span("eval"));
        self.attempt(|engine| {
            engine.activate_weights(ActiveWeights::Averaged)?;
            let model = engine.eval_model.as_ref().unwrap_or(&engine.model);
            engine.cast(|| engine.core.evaluate(|| run(model)))
        })
    }

    /// Differentiates `loss`, which must have one element, after multiplying it by the loss scale and dividing it by
    /// the accumulation steps. During the backward pass, gradients are reduced over ranks.
    ///
    /// Only this call accumulates gradients of the model's parameters. Candle's own `loss.backward()`, and the backward
    /// pass of another engine whose loss passes through this model (a GAN's generator), leave this engine unchanged and
    /// return the gradients of inputs (`Var`s) as usual. At stage 3, these backward passes gather parameters, so all
    /// ranks must run them in the same order.
    ///
    /// # Errors
    /// [`EngineError::OutOfOrder`] without a preceding forward pass; [`OptimError::NoOptimizer`];
    /// [`EngineError::LossShape`]; [`EngineError::LossReachesNothing`] for a loss that depends on no trained parameter;
    /// [`EngineError::OldLoss`] for the loss of an older forward pass; [`EngineError::NonFiniteLoss`] in f32; a failed
    /// collective.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.check_order("backward", &[MicroStepPhase::AfterForward])?;
        self.check_loss(loss)?;
        let watch = self.watch(MicroStepCall::Backward);
        self.attempt(|engine| {
            // The graph uses tensors whose values an evaluation since the forward pass may have replaced.
            engine.activate_weights(ActiveWeights::Trained)?;
            let scaled = engine.scaled(loss)?;
            let is_measuring = engine.begin_measuring();
            engine.cast(|| engine.core.backward(&scaled, true))?;
            if is_measuring {
                engine.end_measuring();
            }
            Ok::<(), Error>(())
        })?;
        self.accumulation.holds_gradients |= self.accumulation.in_no_sync;
        self.phase = if self.accumulation.in_no_sync {
            MicroStepPhase::AfterNoSyncBackward
        } else {
            MicroStepPhase::AfterBackward
        };
        self.end_watch(watch);
        Ok(())
    }

    /// Ends a micro step and, at the accumulation boundary, updates the weights.
    ///
    /// If a loss or a gradient is not finite, the weights stay unchanged and the step counts as skipped (in fp16, and
    /// in bf16 with `check_grad_overflow`).
    ///
    /// # Errors
    /// [`EngineError::OutOfOrder`] without a preceding backward pass or inside `no_sync`;
    /// [`EngineError::NonFiniteGradient`] in f32; [`EngineError::LossScaleAtMinimum`] or
    /// [`EngineError::StaticLossScaleTooLarge`] in fp16; [`EngineError::NoGradient`] in the first step;
    /// [`EngineError::WrongGradient`] while gradients are checked; a failed collective. Also the error of a failed
    /// background save: in that case, the step has been completed, and the engine can continue.
    pub fn step(&mut self) -> Result<()> {
        self.check_order("step", &[MicroStepPhase::AfterBackward, MicroStepPhase::AfterNoSyncBackward])?;
        if self.accumulation.in_no_sync {
            return Err(EngineError::OutOfOrder { call: "step", when: "inside no_sync" }.into());
        }
        let watch = self.watch(MicroStepCall::Step);
        let updates = self.is_gradient_accumulation_boundary();
        let exchanged = updates && self.attempt(Self::optimizer_step)?;
        self.end_watch(watch);
        self.core.forget_outputs(updates && self.was_applied || exchanged);
        if updates {
            self.attempt(Self::report_step)?;
        }
        self.micro_steps += 1;
        self.accumulation.micro_steps = if updates { 0 } else { self.accumulation.micro_steps + 1 };
        self.accumulation.holds_gradients = false;
        self.forwards = 0;
        self.phase = MicroStepPhase::Ready;
        self.failed_save.take().map_or(Ok(()), Err)
    }

    /// Runs the optimizer step: vote, scaler, clip, update, publish. Returns whether an exchange between islands
    /// changed weights.
    fn optimizer_step(&mut self) -> Result<bool> {
        self.note_rates();
        self.core.look_for_writes()?;
        self.core.reduce_unreduced()?;
        self.core.settle()?;
        let vote = self.vote()?;
        self.judge_gradients(vote.has_overflow())?;
        // Gradients are unscaled with the scale that they were computed with, before the scale changes.
        let scale = self.scaler.scale();
        self.grad_norm = Some(if vote.has_overflow() { f64::INFINITY } else { vote.norm / scale });
        let applies = self.decide_update(&vote)?;
        let weights_changed = if applies {
            self.update(gradient_multiplier(vote.norm, scale, self.config.gradient_clipping))?
        } else {
            self.skipped_steps += 1;
            self.report_overflow(scale);
            false
        };
        self.was_applied = applies;
        self.global_steps += 1;
        self.global_samples += self.config.batch.train_batch_size as u64;
        let exchanged = self.exchange_between_islands(applies)?;
        self.core.end_step(weights_changed || exchanged)?;
        Ok(exchanged)
    }

    /// Returns an error if `call` is not allowed at this point of a micro step.
    fn check_order(&self, call: &'static str, allowed: &[MicroStepPhase]) -> Result<()> {
        self.not_stopped()?;
        if allowed.contains(&self.phase) {
            return Ok(());
        }
        let when = match (self.phase, allowed) {
            (MicroStepPhase::Ready, [MicroStepPhase::AfterForward]) => "before forward",
            (MicroStepPhase::AfterBackward | MicroStepPhase::AfterNoSyncBackward, [MicroStepPhase::AfterForward]) => {
                "twice on one loss"
            }
            (MicroStepPhase::AfterBackward, _) => "after backward without a step",
            _ => "before backward",
        };
        Err(EngineError::OutOfOrder { call, when }.into())
    }

    /// Returns an error if there is no optimizer, or if `loss` does not have exactly one element.
    fn check_loss(&self, loss: &Tensor) -> Result<()> {
        if !self.trainer.can_train() {
            return Err(OptimError::NoOptimizer.into());
        }
        if loss.elem_count() != 1 {
            return Err(EngineError::LossShape { shape: loss.dims().to_vec() }.into());
        }
        Ok(())
    }

    /// Returns the loss times the loss scale, divided by the accumulation steps, and records its value.
    fn scaled(&mut self, loss: &Tensor) -> Result<Tensor> {
        let value = loss.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?[0];
        if !value.is_finite() && self.config.precision == Precision::F32 {
            let (rank, step, micro_step) = (self.rank(), self.global_steps, self.micro_steps);
            return Err(EngineError::NonFiniteLoss { loss: value, rank, step, micro_step }.into());
        }
        self.losses.sum += value;
        self.losses.any_non_finite |= !value.is_finite();
        let factor = self.scaler.scale() / self.config.batch.gradient_accumulation_steps as f64;
        // The loss is scaled in f32, because the scale itself may overflow in 16 bits.
        Ok(if factor == 1.0 { loss.clone() } else { loss.to_dtype(DType::F32)?.affine(factor, 0.0)? })
    }

    /// Collective: returns the gradient norm, the overflow flag and the mean loss over all ranks.
    fn vote(&mut self) -> Result<StepVoteResult> {
        let AccumulatedLoss { sum, any_non_finite } = std::mem::take(&mut self.losses);
        let requests = self.due_requests();
        let loss = sum / self.config.batch.gradient_accumulation_steps as f64;
        let vote = self.core.vote(loss, !any_non_finite, requests)?;
        self.reporter.loss = vote.loss;
        self.note_requests(vote.requests);
        Ok(vote)
    }

    /// Returns whether the weights are updated with these gradients, and updates the scaler.
    fn decide_update(&mut self, vote: &StepVoteResult) -> Result<bool> {
        let overflow = vote.has_overflow();
        let applies = match self.config.precision {
            Precision::F32 if overflow => Err(self.non_finite_gradient(vote)),
            Precision::Bf16 { check_grad_overflow: false } => Ok(true),
            _ => Ok(!overflow),
        };
        let applies = applies.and_then(|applies| self.scaler.update(overflow).map(|()| applies));
        if self.islands.is_some() || !matches!(applies, Ok(false)) {
            // From here on, the state that is being saved changes, or the engine stops. Islands must end a save
            // together, so with islands every step ends it.
            self.end_saving()?;
        }
        applies
    }

    fn non_finite_gradient(&self, vote: &StepVoteResult) -> Error {
        let location = match self.core.non_finite_gradient() {
            Err(error) => return error,
            Ok(Some(name)) => format!("the gradient of {name} is not finite on rank {}", self.rank()),
            Ok(None) => {
                let ranks: Vec<String> = vote.overflowed.iter().map(usize::to_string).collect();
                let plural = if ranks.len() == 1 { "" } else { "s" };
                format!("gradients are not finite on rank{plural} {}", list(&ranks))
            }
        };
        EngineError::NonFiniteGradient { location, step: self.global_steps }.into()
    }

    /// Updates the weights with the gradients times `multiplier`, and publishes them. Returns whether the weights
    /// have changed, which is false if the update is delayed.
    fn update(&mut self, multiplier: f64) -> Result<bool> {
        let trained = self.trainer.for_step(self.optimizer_steps + 1, multiplier as f32)?;
        let weights_changed = self.core.update(&trained)?;
        self.active_weights = ActiveWeights::Trained;
        self.optimizer_steps += 1;
        self.trainer.step();
        Ok(weights_changed)
    }

    /// Reports on rank 0 that a step with loss scale `scale` was skipped. Each of the first skipped steps is reported,
    /// and later ones are reported increasingly rarely.
    fn report_overflow(&self, scale: f64) {
        const REPORTED_SKIPS: u64 = 10;
        let skipped = self.skipped_steps;
        if self.job().rank() != 0 || (skipped > REPORTED_SKIPS && !skipped.is_power_of_two()) {
            return;
        }
        let new_scale = self.scaler.scale();
        let consequence = match &self.scaler {
            LossScaler::None => "the weights stay as they are".to_string(),
            LossScaler::Static { .. } => format!("the loss scale stays at {scale} (fp16.loss_scale)"),
            LossScaler::Dynamic(_) if new_scale == scale => format!("the loss scale stays at {scale} this time"),
            LossScaler::Dynamic(_) => format!("the loss scale falls from {scale} to {new_scale}"),
        };
        let number = self.global_steps + 1;
        let note = if skipped == REPORTED_SKIPS {
            "; later ones are reported rarely, but engine.skipped_steps() counts all of them"
        } else {
            ""
        };
        warn(&format!(
            "step {number} is skipped: a gradient is not finite (skipped so far: {skipped}); {consequence}{note}"
        ));
    }

    /// Returns whether the job was asked to end: whether any rank has received SIGTERM, SIGINT or SIGHUP, whether the
    /// user has asked for it in `zerorun dash`, or whether the job has completed the number of steps given by the
    /// environment variable `CANDLE_ZERO_STOP_AT`. From the first call on, these signals no longer end the process, so
    /// that a loop that calls this method once per step can save a checkpoint and exit cleanly. Collective, so that all
    /// ranks end after the same step.
    ///
    /// Without `zerorun`, a second such signal ends the process. `zerorun` kills its ranks on a second signal, or after
    /// the `--grace` period.
    ///
    /// ```no_run
    /// # fn run(engine: &mut candle_zero::Engine<candle_nn::Linear>) -> candle_zero::Result<()> {
    /// while engine.global_steps() < 1000 {
    ///     // forward, backward, step ...
    ///     if engine.stop_requested()? {
    ///         engine.save_checkpoint("checkpoints", None, serde_json::Value::Null)?;
    ///         break;
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The signal handlers cannot be installed; a value of `CANDLE_ZERO_STOP_AT` that is not a number; a failed
    /// collective.
    pub fn stop_requested(&self) -> Result<bool> {
        // All ranks vote, even if one of them cannot listen for signals.
        let (signaled, planned) = (asked_to_stop(), planned_stop());
        let is_planned = planned.as_ref().is_ok_and(|planned| planned.is_some_and(|steps| self.global_steps >= steps));
        self.reporter.supported_requests.stop.store(true, Ordering::Relaxed);
        let vote = *signaled.as_ref().unwrap_or(&false) || is_planned || self.reporter.stop_in_record;
        let any = self.any_rank(vote)?;
        self.reporter.stop_requested.fetch_or(any, Ordering::Relaxed);
        signaled.map_err(|source| EngineError::Signals { source })?;
        planned.map_err(|found| EngineError::PlannedStop { found })?;
        Ok(any)
    }

    /// Returns whether the job has completed the number of steps given by the environment variable
    /// `CANDLE_ZERO_STOP_AT`, after which the job is to pause. A program that ends for this reason, rather than because
    /// of a signal, has not failed.
    pub fn is_planned_stop(&self) -> bool {
        is_planned_stop(self.global_steps)
    }

    /// Collective: returns the `values` of every rank of the job, in rank order.
    ///
    /// # Errors
    /// A failed collective.
    pub fn gather_f64(&self, values: &[f64]) -> Result<Vec<Vec<f64>>> {
        let _call = during("gather_f64");
        self.job().gather_f64(values.to_vec()).wait()
    }

    /// Collective: makes all ranks' buffers equal, according to [`EngineBuilder::buffer_sync`]; without a rule, all
    /// ranks get rank 0's. Call it before an evaluation that must give the same result on all ranks.
    ///
    /// # Errors
    /// [`ParamError::BufferChanged`](crate::error::ParamError::BufferChanged); a failed collective.
    pub fn sync_buffers(&mut self) -> Result<()> {
        self.attempt(|engine| engine.core.agree_on_buffers())
    }

    /// Runs `call`. After an error that leaves this rank out of step, notifies the other ranks and refuses further
    /// calls.
    fn attempt<T, E: Into<JointOperationFailure>>(
        &mut self,
        call: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T> {
        self.not_stopped()?;
        let _here = timeline::enter(self.recorder.as_ref());
        self.core.follow_thread()?;
        call(self).map_err(|failure| match failure.into() {
            JointOperationFailure::InStep(error) => error,
            JointOperationFailure::OutOfStep(error) => self.stop(error),
        })
    }

    /// Notifies the other ranks of an error that leaves this rank out of step, and refuses further calls.
    fn stop(&mut self, error: Error) -> Error {
        let error = self.core.name_parts(error);
        let why = without_backtrace(&error.to_string());
        self.core.abort(&why);
        self.record_error(&why);
        self.stopped = Some(why);
        TimelineRecorder::flush(self.recorder.as_ref());
        error
    }

    /// Runs a `call` that may change the model's state, through [`attempt`](Self::attempt). A delayed update is
    /// finished first, unless a backward pass still needs the weights from before the update.
    fn settled<T, E: Into<JointOperationFailure>>(
        &mut self,
        call: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T> {
        if self.phase != MicroStepPhase::AfterForward {
            self.attempt(|engine| engine.core.settle())?;
        }
        self.attempt(|engine| {
            let result = call(engine).map_err(Into::into)?;
            engine.active_weights = ActiveWeights::Mixed;
            engine.core.remember_weights()?;
            Ok::<_, JointOperationFailure>(result)
        })
    }

    fn not_stopped(&self) -> Result<()> {
        self.stopped.as_ref().map_or(Ok(()), |why| Err(EngineError::Stopped(why.clone()).into()))
    }
}

impl<M> Drop for Engine<M> {
    /// Finishes a background save and its upload if the ranks are in step, and abandons a delayed update, which no one
    /// will see.
    fn drop(&mut self) {
        // A GPU that no longer responds has no work in flight.
        let _ = self.core.follow_thread();
        self.core.wait_for_abandoned_update();
        if self.stopped.is_none() && !std::thread::panicking() {
            if self.saving.is_some()
                && let Err(error) = self.wait_for_checkpoint()
            {
                warn(&format!("a checkpoint was not saved: {error}"));
            }
            if self.upload.is_some()
                && let Err(error) = self.wait_for_upload()
            {
                warn(&format!("a checkpoint is on disk but was not uploaded: {error}"));
            }
        }
        if self.stopped.is_none() && !std::thread::panicking() {
            self.leave_islands();
        }
        if !std::thread::panicking() {
            self.report_at_end();
        }
        self.end_run_of_dropped();
    }
}
