//! The files that a run writes: its checkpoints, its best weights, and its result.

use super::{EarlyStopState, FineTune};
use crate::error::{Error, Result};
use crate::run::export;
use crate::run::model_card::ModelCard;
use crate::run::options::{CheckpointOptions, TuningMethod};
use crate::run::result_folders::ResultKind;
use crate::run::run_identity::{KEY, RunIdentity};
use candle_zero::checkpoint::SaveOptions;
use candle_zero::notice;
use candle_zero::runs::RunEnding;
use serde_json::{Value, json};
use std::path::PathBuf;

impl FineTune {
    /// Keeps the model if its loss is below that of every earlier validation.
    pub(super) fn keep_if_best(&mut self, steps: u64, loss: f64) -> Result<()> {
        if self.state.best.is_some_and(|(_, best)| loss >= best) {
            self.state.stale += 1;
            return Ok(());
        }
        self.state = EarlyStopState { best: Some((steps, loss)), stale: 0, ..self.state };
        let to = self.prepared.options.best();
        let outcome = self.outcome();
        let card = ModelCard { prepared: &self.prepared, settings: &self.settings, outcome };
        let failed = export::write(&mut self.engine, &card, ResultKind::Best, &to, &mut self.written)
            .inspect_err(|error| self.abort(error))?;
        self.best_is_lost = failed.is_some();
        if let (Some(error), 0) = (failed, self.comm.rank()) {
            notice::emit(&format!("warning: the best model so far was not saved: {error}; training continues"));
        }
        Ok(())
    }

    /// Saves a checkpoint, if there is a folder for checkpoints.
    pub(super) fn save(&mut self, in_background: bool) -> Result<()> {
        let Some(CheckpointOptions { dir, keep, .. }) = self.prepared.options.saving.clone() else { return Ok(()) };
        let options = SaveOptions {
            in_background,
            keep,
            exclude_frozen_parameters: self.prepared.options.method != TuningMethod::Full,
            ..SaveOptions::default()
        };
        let state = self.client_state();
        self.engine.save_checkpoint(&dir, state, &options)?;
        self.failed_save = None;
        Ok(())
    }

    /// Returns the client state of checkpoints.
    pub(super) fn client_state(&self) -> Value {
        let identity = self.identity.as_ref().map(RunIdentity::to_json);
        json!({ "finetune": self.state, KEY: identity })
    }

    /// Writes the result. Collective.
    ///
    /// # Errors
    /// A folder that is not writable, or that contains files that this run may not replace; a run in which all steps
    /// were skipped; a trained weight that is not finite; a checkpoint that could not be saved or uploaded to an object
    /// store, in which case the result is still written to its folder.
    pub fn finish(mut self) -> Result<()> {
        let finished = self.write_result();
        finished.inspect_err(|error| self.engine.end_run(RunEnding::Failed, Some(&error.to_string())))
    }

    pub(super) fn write_result(&mut self) -> Result<()> {
        let saved = self.engine.wait_for_checkpoint();
        self.report_failed_save(saved)?;
        let (steps_made, skipped) =
            (self.engine.global_steps() - self.first_step, self.engine.skipped_steps() - self.skipped_before);
        // An island that resumes from its last checkpoint may find no others at the server.
        if steps_made > 0 || self.engine.config().local_steps.as_ref().is_none_or(|islands| islands.server.is_none()) {
            self.synchronize_islands()?;
        }
        if steps_made > 0 && skipped == steps_made {
            return Err(candle_zero::error::EngineError::NothingLearned {
                steps: steps_made,
                adapts: self.engine.config().precision.adapts_loss_scale(),
            }
            .into());
        }
        // A run that was stopped after its last step may already have written the result.
        let (to, is_saved) = (self.prepared.options.out.clone(), self.failed_save.is_none());
        let outcome = self.outcome();
        let card = ModelCard { prepared: &self.prepared, settings: &self.settings, outcome };
        export::finish(&mut self.engine, &card, (ResultKind::Result, to), &mut self.written, is_saved)
            .inspect_err(|error| self.abort(error))?;
        if let Some(error) = self.failed_save.take() {
            if self.comm.rank() == 0 {
                notice::emit(&format!("the result is in {}", self.prepared.options.out.display()));
            }
            return Err(error);
        }
        self.engine.wait_for_upload()
    }

    /// Writes the current model of a run that was stopped and has no checkpoints, and returns its folder:
    /// [`Options::stopped`](crate::Options::stopped) or, if that already exists, a folder of that name with a
    /// number appended. Training cannot be resumed from this folder. Collective.
    ///
    /// # Errors
    /// A folder that is not writable; a trained weight that is not finite.
    pub fn finish_stopped(mut self) -> Result<PathBuf> {
        let first = self.prepared.options.stopped();
        let numbered = (2..1000u32).map(|number| {
            let mut name = first.file_name().unwrap_or_default().to_os_string();
            name.push(format!("-{number}"));
            first.with_file_name(name)
        });
        let free = std::iter::once(first.clone()).chain(numbered).find(|path| path.symlink_metadata().is_err());
        let to = free.unwrap_or(first);
        let outcome = self.outcome();
        let card = ModelCard { prepared: &self.prepared, settings: &self.settings, outcome };
        export::finish(&mut self.engine, &card, (ResultKind::Stopped, to.clone()), &mut self.written, false)
            .inspect_err(|error| self.abort(error))?;
        Ok(to)
    }

    /// Reports to the other ranks why this one cannot continue.
    pub(super) fn abort(&self, error: &Error) {
        self.comm.abort(&error.to_string());
    }
}
