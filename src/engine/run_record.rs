//! The record of an engine's run: when it begins and ends, and what is recorded in between. `runs` writes it.

use super::Engine;
use super::run_recorder::RunRecorder;
use crate::Error;
use crate::config::Precision;
use crate::error::without_backtrace;
use crate::models::ExpertLoad;
use crate::monitor::MonitorEvent;
use crate::runs::{BlockLoads, LoadedFrom, RunEnding};
use std::path::Path;
use std::sync::atomic::Ordering;

impl<M> Engine<M> {
    /// Records values of the current step in the record of the run ([`EngineBuilder::run`](super::EngineBuilder::run)),
    /// such as `val_loss`, the loss on validation data, which `zerorun runs` lists. Monitors get them, too, with the
    /// names as tags. On ranks other than 0, this call does nothing.
    pub fn record_metrics(&mut self, values: &[(&str, f64)]) {
        if !self.reporter.monitors.is_empty() {
            let event = |(name, value): &(&str, f64)| MonitorEvent::new(*name, *value, self.global_samples);
            let events: Vec<MonitorEvent> = values.iter().map(event).collect();
            self.reporter.monitors.write(&events);
        }
        self.record_values(values.iter().map(|(name, value)| ((*name).to_owned(), *value)));
    }

    /// Records a text that the model has generated in answer to `prompt`, in the record of the run. Without a record,
    /// and on ranks other than 0, this call does nothing.
    pub fn record_sample(&mut self, prompt: &str, text: &str) {
        let step = self.global_steps;
        self.reporter.run.write(|open| open.writer.sample(step, prompt, text));
    }

    /// Records how often the routers of a mixture of experts chose each expert in the current step, on all ranks
    /// together. The record keeps only the newest loads, which the dashboard shows. Without a record, and on ranks
    /// other than 0, this call does nothing.
    pub fn record_expert_loads(&mut self, loads: &[ExpertLoad]) {
        let step = self.global_steps;
        let block = |load: &ExpertLoad| BlockLoads { block: load.block, choices: load.choices.clone() };
        self.reporter.run.write(|open| open.writer.expert_loads(step, loads.iter().map(block).collect()));
    }

    /// Ends the record of the run, and the runs that monitors write, with the run's outcome and, if it has failed, a
    /// message. Without this call, the run ends when the engine is dropped: as failed after an error from the engine or
    /// during a panic, as stopped after [`stop_requested`](Self::stop_requested) has returned true, and otherwise as
    /// finished.
    pub fn end_run(&mut self, outcome: RunEnding, message: Option<&str>) {
        let step = self.global_steps;
        self.reporter.run.end(step, outcome, message);
        self.reporter.monitors.end(outcome);
    }

    /// Returns the folder with the record of the run, once it has begun, on the rank that writes it.
    pub fn run_folder(&self) -> Option<&Path> {
        match &self.reporter.run {
            RunRecorder::Open(open) => Some(open.writer.folder()),
            RunRecorder::Off | RunRecorder::Waiting(_) => None,
        }
    }

    /// Begins the record, and the runs that monitors write, before the first forward pass.
    pub(super) fn begin_run(&mut self) {
        self.reporter.run.begin();
        self.reporter.monitors.begin();
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
        let saved = self.reporter.saving.take();
        if let (Some(saved), None) = (&saved, error) {
            self.reporter.monitors.note_saved(&saved.folder);
        }
        self.reporter.run.write(|open| match (saved, error) {
            (Some(saved), None) => open.writer.checkpoint(saved.step, &saved.folder, &saved.path),
            (Some(saved), Some(error)) => {
                open.writer.failed_checkpoint(saved.step, &without_backtrace(&error.to_string()))
            }
            (None, _) => Ok(()),
        });
    }

    /// Records that the run continues from a checkpoint.
    pub(super) fn record_loaded(&mut self, folder: &Path, path: &Path) {
        self.reporter.monitors.note_loaded(folder, self.global_samples);
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
