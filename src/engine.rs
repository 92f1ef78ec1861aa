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

mod builder;
pub(crate) mod error;
mod reports;
mod telling;

pub use builder::EngineBuilder;
pub use reports::StepTimings;

use crate::checkpoint::Saving;
use crate::config::{Config, Precision};
use crate::error::{EngineError, Error, OptimError, Result, without_backtrace};
use crate::graph::{once, without_gradients};
use crate::monitor::say;
use crate::nn::draw_from;
use crate::optim::Trainer;
use crate::param::{ROOT, lock};
use crate::precision::{LossScaler, ScalerState, gradient_multiplier};
use crate::profiler::spans::Half;
use crate::timeline::{self, Recorder, Span};
use crate::zero::core::Core;
use crate::zero::trace::Event;
use candle_core::{DType, Device, Tensor};
use reports::Clock;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use telling::Telling;

/// Stack that Candle's recursive backward may use, and how much of it must be left before a new one is taken.
const BACKWARD_STACK: usize = 64 << 20;
const RED_ZONE: usize = 16 << 20;

/// Values of the user's that travel in one control message.
const VALUES_AT_A_TIME: usize = 4096;

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

impl<M> Engine<M> {
    /// Runs the model in training: `run` computes the loss (or anything the loss is then made from).
    ///
    /// Parameters are in memory while `run` runs; at stage 3 those of a unit only while the unit runs.
    ///
    /// # Errors
    /// [`EngineError::OutOfOrder`] between backward and step; what `run` returns; a failed collective.
    pub fn forward(&mut self, run: impl FnOnce(&M) -> candle_core::Result<Tensor>) -> Result<Tensor> {
        self.not_stopped()?;
        if self.phase == Phase::Backwarded {
            return Err(EngineError::OutOfOrder { call: "forward", when: "after backward without a step" }.into());
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
    /// [`EngineError::OutOfOrder`] without a forward before; [`EngineError::NonFiniteLoss`] in f32;
    /// [`EngineError::NoGradient`] after the first backward; a failed collective.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.not_stopped()?;
        match self.phase {
            Phase::Forwarded => {}
            Phase::Ready => return Err(EngineError::OutOfOrder { call: "backward", when: "before forward" }.into()),
            Phase::Backwarded => {
                return Err(EngineError::OutOfOrder { call: "backward", when: "twice on one loss" }.into());
            }
        }
        if !self.trainer.can_train() {
            return Err(OptimError::NoOptimizer.into());
        }
        if loss.elem_count() != 1 {
            return Err(EngineError::LossShape { shape: loss.dims().to_vec() }.into());
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
                return Err(EngineError::NonFiniteLoss { loss: value, rank, step, micro_step }.into());
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
    /// [`EngineError::OutOfOrder`] without a backward before; [`EngineError::NonFiniteGradient`] in f32;
    /// [`EngineError::LossScaleAtMinimum`]; a failed collective. What a save in the background could not do: then the
    /// step has been made, and the engine can go on.
    pub fn step(&mut self) -> Result<()> {
        self.not_stopped()?;
        if self.phase != Phase::Backwarded {
            return Err(EngineError::OutOfOrder { call: "step", when: "before backward" }.into());
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
            return Err(OptimError::NoOptimizer.into());
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
                return Err(EngineError::NonFiniteGradient { where_, step: self.global_steps }.into());
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
            true => {
                Err(EngineError::OutOfOrder { call, when: "in the middle of an accumulation, before its last step" }
                    .into())
            }
            false => Ok(()),
        }
    }

    /// Collective: the `values` of every rank, in rank order.
    ///
    /// # Errors
    /// A failed collective.
    pub fn gather_f64(&self, values: &[f64]) -> Result<Vec<Vec<f64>>> {
        let mut all = vec![Vec::with_capacity(values.len()); self.world_size()];
        // No values are gathered too: ranks meet here.
        for part in std::iter::once(values).filter(|v| v.is_empty()).chain(values.chunks(VALUES_AT_A_TIME)) {
            let parts = self.core.comm.gather_f64(part.to_vec()).wait()?;
            all.iter_mut().zip(parts).for_each(|(all, part)| all.extend(part));
        }
        Ok(all)
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
        self.stopped.as_ref().map_or(Ok(()), |why| Err(EngineError::Stopped(why.clone()).into()))
    }
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
