//! The record of an engine's run: when it begins and ends, and what is recorded in between. `runs` writes it.

use super::Engine;
use crate::Error;
use crate::config::{Config, Precision};
use crate::error::{Result, without_backtrace};
use crate::notice::{emit, warn};
use crate::runs::{LoadedFrom, RunEnding, RunPlan, RunSpec, RunStart, RunWriter, check_folder, now};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// The record of a run, on the rank that writes it.
#[derive(Default)]
pub(super) enum RunRecorder {
    /// Nothing is recorded: on other ranks, without a request, or after the record has ended or failed.
    #[default]
    Off,
    /// The record begins with the first forward pass: only then is it known whether a checkpoint was loaded, and a
    /// program that only evaluates leaves no record.
    Waiting(Box<WaitingRecord>),
    /// The record is being written.
    Open(Box<OpenRecord>),
}

/// A record that has not begun.
pub(super) struct WaitingRecord {
    plan: RunPlan,
    start: RunStart,
}

/// A record that is being written.
pub(super) struct OpenRecord {
    writer: RunWriter,
    /// The checkpoint that is being saved.
    saving: Option<SavingCheckpoint>,
}

struct SavingCheckpoint {
    step: u64,
    folder: PathBuf,
    path: PathBuf,
}

impl RunRecorder {
    /// Decides whether the run is recorded, and checks that its folder can be written. `ranks` is the number of ranks of
    /// the job.
    ///
    /// # Errors
    /// A name that cannot be used; a folder that cannot be written, unless the program has not asked for this record.
    pub fn new(spec: Option<RunSpec>, config: &Config, ranks: usize) -> Result<Self> {
        let plan = RunPlan::new(spec, config.monitoring.run.as_ref(), |name| std::env::var_os(name))?;
        let Some(plan) = plan else { return Ok(Self::Off) };
        match check_folder(&plan.folder) {
            Err(error) if plan.is_required => return Err(error),
            Err(error) => {
                emit(&format!("no record of this run is kept: {error}; give another folder with CANDLE_ZERO_RUNS_DIR"));
                return Ok(Self::Off);
            }
            Ok(()) => {}
        }
        let configuration = config.to_deepspeed_json();
        let start = RunStart { world_size: ranks, configuration, time: now(), loaded: None };
        Ok(Self::Waiting(Box::new(WaitingRecord { plan, start })))
    }

    /// Begins the record if it is waiting.
    fn begin(&mut self) {
        let Self::Waiting(waiting) = self else { return };
        let opened = RunWriter::open(&waiting.plan, &waiting.start);
        *self = match opened {
            Ok(writer) => Self::Open(Box::new(OpenRecord { writer, saving: None })),
            Err(error) => Self::given_up(&error),
        };
    }

    /// Reports that the record cannot be written. Training matters more than its record.
    fn given_up(error: &Error) -> Self {
        warn(&format!("the record of this run ends here, and training continues without it: {error}"));
        Self::Off
    }

    /// Writes to the record, if there is one.
    fn write(&mut self, write: impl FnOnce(&mut OpenRecord) -> Result<()>) {
        self.begin();
        let Self::Open(open) = self else { return };
        if let Err(error) = write(open) {
            *self = Self::given_up(&error);
        }
    }

    /// Remembers a checkpoint that is being saved.
    pub fn saving(&mut self, step: u64, folder: PathBuf, path: &Path) {
        self.write(|open| {
            open.saving = Some(SavingCheckpoint { step, folder, path: path.to_owned() });
            Ok(())
        });
    }

    /// Ends the record, if it has begun.
    fn end(&mut self, step: u64, outcome: RunEnding, message: Option<&str>) {
        if let Self::Open(open) = std::mem::take(self)
            && let Err(error) = open.writer.end(step, outcome, message)
        {
            warn(&format!("the end of this run is not recorded: {error}"));
        }
    }
}

impl<M> Engine<M> {
    /// Records values of the current step in the record of the run ([`EngineBuilder::run`](super::EngineBuilder::run)),
    /// such as `val_loss`, the loss on validation data, which `zerorun runs` lists. Without a record, and on ranks other
    /// than 0, it does nothing.
    pub fn record_metrics(&mut self, values: &[(&str, f64)]) {
        self.record_values(values.iter().map(|(name, value)| ((*name).to_owned(), *value)));
    }

    /// Records a text that the model has generated in answer to `prompt`, in the record of the run. Without a record,
    /// and on ranks other than 0, it does nothing.
    pub fn record_sample(&mut self, prompt: &str, text: &str) {
        let step = self.global_steps;
        self.reporter.run.write(|open| open.writer.sample(step, prompt, text));
    }

    /// Ends the record of the run with its outcome, and a message if it has failed. Without this call the record ends
    /// when the engine is dropped: as failed after an error of the engine or in a panic, as stopped after
    /// [`stop_requested`](Self::stop_requested) has returned true, and otherwise as finished.
    pub fn end_run(&mut self, outcome: RunEnding, message: Option<&str>) {
        let step = self.global_steps;
        self.reporter.run.end(step, outcome, message);
    }

    /// Returns the folder with the record of the run, once it has begun, on the rank that writes it.
    pub fn run_folder(&self) -> Option<&Path> {
        match &self.reporter.run {
            RunRecorder::Open(open) => Some(open.writer.folder()),
            RunRecorder::Off | RunRecorder::Waiting(_) => None,
        }
    }

    /// Begins the record before the first forward pass.
    pub(super) fn begin_run(&mut self) {
        self.reporter.run.begin();
    }

    pub(super) fn record_values(&mut self, values: impl Iterator<Item = (String, f64)>) {
        let step = self.global_steps;
        self.reporter.run.write(|open| open.writer.record(step, values));
    }

    /// Remembers the learning rate and the loss scale of the step that begins.
    pub(super) fn note_rates(&mut self) {
        if matches!(self.reporter.run, RunRecorder::Open(_)) {
            self.reporter.rates = (self.trainer.lr().first().copied().unwrap_or_default(), self.scaler.scale());
        }
    }

    /// Records a finished optimizer step.
    pub(super) fn record_step(&mut self) {
        if matches!(self.reporter.run, RunRecorder::Off) {
            return;
        }
        let (time, (lr, loss_scale)) = (self.clock.last, self.reporter.rates);
        let fp16 = matches!(self.config.precision, Precision::Fp16(_));
        let has_files = self.core.offload_report().is_some();
        let values = [
            ("loss", Some(self.reporter.loss)),
            ("lr", Some(lr)),
            ("grad_norm", self.grad_norm),
            ("loss_scale", fp16.then_some(loss_scale)),
            ("samples", Some(self.global_samples as f64)),
            ("skipped", (!self.was_applied).then_some(1.0)),
            ("forward_ms", Some(time.forward_ms)),
            ("backward_ms", Some(time.backward_ms)),
            ("step_ms", Some(time.step_ms)),
            ("comm_ms", Some(time.comm_ms)),
            ("disk_ms", has_files.then_some(time.disk_ms)),
        ];
        self.record_values(values.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
    }

    /// Records that the checkpoint that was being saved is complete, or why it is not.
    pub(super) fn record_saved(&mut self, error: Option<&Error>) {
        self.reporter.run.write(|open| match (open.saving.take(), error) {
            (Some(saved), None) => open.writer.checkpoint(saved.step, &saved.folder, &saved.path),
            (Some(saved), Some(error)) => {
                open.writer.failed_checkpoint(saved.step, &without_backtrace(&error.to_string()))
            }
            (None, _) => Ok(()),
        });
    }

    /// Records that the run continues from a checkpoint.
    pub(super) fn record_loaded(&mut self, folder: &Path, path: &Path) {
        let loaded = LoadedFrom { folder: folder.to_owned(), path: path.to_owned(), step: self.global_steps };
        match &mut self.reporter.run {
            RunRecorder::Waiting(waiting) => waiting.start.loaded = Some(loaded),
            other => other.write(|open| open.writer.loaded(&loaded)),
        }
    }

    /// Records an error that ends the engine's work.
    pub(super) fn record_error(&mut self, message: &str) {
        let step = self.global_steps;
        self.reporter.run.write(|open| open.writer.error(step, message));
    }

    /// Ends the record of an engine that is being dropped.
    pub(super) fn end_run_of_dropped(&mut self) {
        let (outcome, message) = match &self.stopped {
            _ if std::thread::panicking() => (RunEnding::Failed, Some("the program panicked".to_owned())),
            Some(why) => (RunEnding::Failed, Some(why.clone())),
            None if self.reporter.stop_requested.load(Ordering::Relaxed) => (RunEnding::Stopped, None),
            None => (RunEnding::Finished, None),
        };
        self.end_run(outcome, message.as_deref());
    }
}
