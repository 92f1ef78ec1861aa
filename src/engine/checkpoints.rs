//! Saving, loading and exporting an engine's state.

use super::{AccumulatedLoss, Engine, MicroStepPhase};
use crate::checkpoint::failed_elsewhere;
use crate::checkpoint::store::{CheckpointUpload, UploadRequest, address, fetch};
use crate::checkpoint::{
    self, LoadOptions, LoadedCheckpoint, Manifest, SaveJob, SaveOptions, SaveRequest, TrainingProgress,
};
use crate::comm::agree::{CollectiveFailure, agree};
use crate::comm::engine_call::during;
use crate::error::Result;
use crate::notice::say;
use crate::precision::Flat;
use crate::timeline;
use crate::util::list;
use candle_core::DType;
use serde_json::Value;
use std::path::{Path, PathBuf};

impl<M> Engine<M> {
    /// Saves all state of the training run as checkpoint `tag` of the folder `dir`, and lets `latest` name it; in the
    /// background where `checkpoint.writer.decoupled` asks for it. Without a tag it is `global_stepN`. Collective:
    /// every rank calls it, with the same arguments; `client_state` is rank 0's. Where the tags differ after all,
    /// `checkpoint.tag_validation` says what happens. Gives the folder of the checkpoint. With `checkpoint.upload_to` an
    /// object store gets it from there while training goes on; the next save waits for that.
    ///
    /// # Errors
    /// [`EngineError::MidAccumulation`](crate::error::EngineError::MidAccumulation) in the middle of an accumulation, whose gradients no checkpoint has, before
    /// anything is written; a file cannot be written, or [another job](crate::error::CheckpointError::Busy) saves into
    /// the folder: on all ranks, the engine can go on and earlier checkpoints are untouched; the error of an earlier
    /// save in the background, or [of an object store](crate::error::CheckpointError::Store) that should get one; a failed
    /// collective.
    pub fn save_checkpoint(
        &mut self,
        dir: impl AsRef<Path>,
        tag: Option<&str>,
        client_state: Value,
    ) -> Result<PathBuf> {
        let options = SaveOptions { in_background: self.config.saves_in_background, ..SaveOptions::default() };
        self.save_checkpoint_with(dir, tag, client_state, &options)
    }

    /// The same with options. A save in the background ends in the next [`step`](Self::step) that changes weights, in
    /// [`wait_for_checkpoint`](Self::wait_for_checkpoint), or when the engine is dropped.
    ///
    /// # Errors
    /// As [`save_checkpoint`](Self::save_checkpoint). A failure of a save in the background is reported where it ends.
    pub fn save_checkpoint_with(
        &mut self,
        dir: impl AsRef<Path>,
        tag: Option<&str>,
        client_state: Value,
        options: &SaveOptions,
    ) -> Result<PathBuf> {
        let _call = during("save_checkpoint");
        self.wait_for_checkpoint()?;
        self.wait_for_upload()?;
        self.between_steps("save_checkpoint")?;
        let progress = self.progress();
        let mut manifest =
            checkpoint::manifest(&self.core, &self.trainer, &self.config, progress, tag, client_state, options);
        manifest.previous =
            self.last_checkpoint.as_ref().and_then(|last| last.previous_of(dir.as_ref(), &manifest.tag));
        let _here = timeline::enter(self.recorder.as_ref());
        let _span = timeline::span(timeline::EventCategory::Checkpoint, "save").of(|| manifest.tag.clone());
        let request = SaveRequest {
            dir: dir.as_ref().to_owned(),
            manifest,
            options: options.clone(),
            validation: self.config.tag_validation,
            shows_statistics: self.config.shows_save_statistics,
            on_each_host: self.config.use_node_local_storage,
            upload_to: self.config.upload_checkpoints_to.clone(),
        };
        let saving = self.settled(|engine| {
            SaveJob::begin(engine.core.clone(), &engine.trainer, request, &mut engine.locked_folders)
        })?;
        let path = saving.path();
        self.saving = Some(saving);
        if !options.in_background {
            self.wait_for_checkpoint()?;
        }
        Ok(path)
    }

    /// Ends a save in the background, if there is one. Collective.
    ///
    /// # Errors
    /// The failure of the save: the checkpoints before it are untouched, and the engine can continue.
    pub fn wait_for_checkpoint(&mut self) -> Result<()> {
        let _call = during("wait_for_checkpoint");
        if let Some(saving) = self.saving.take() {
            let (last, sending) = self.attempt(|_| saving.end())?;
            self.last_checkpoint = last;
            self.attempt(|engine| engine.start_upload(sending))?;
        }
        Ok(())
    }

    /// Waits until the object store of `checkpoint.upload_to` has the last checkpoint whole. Collective.
    ///
    /// # Errors
    /// [`CheckpointError::Store`](crate::error::CheckpointError::Store) with the object that could not be written, on all
    /// ranks: the checkpoint is whole on disk, and the engine can continue. A failed collective.
    pub fn wait_for_upload(&mut self) -> Result<()> {
        let _call = during("wait_for_upload");
        match self.upload.take() {
            Some(upload) => self.attempt(|engine| upload.wait(engine.core.comm())),
            None => Ok(()),
        }
    }

    /// Begins to send a checkpoint that was saved. Collective.
    fn start_upload(&mut self, sending: Option<UploadRequest>) -> std::result::Result<(), CollectiveFailure> {
        if let Some(sending) = sending {
            let url = sending.url.clone();
            self.upload = agree(self.core.comm(), CheckpointUpload::start(sending), failed_elsewhere(Path::new(&url)))?;
        }
        Ok(())
    }

    /// Whether [`save_checkpoint`](Self::save_checkpoint) can save into the folder `dir`: to know now what a save would
    /// say after hours of training. The folder is created where it is missing, and belongs to this job from now on, as
    /// after a save: until the engine is dropped no other job can save into it. What killed jobs have left unfinished in
    /// it is removed. Collective.
    ///
    /// # Errors
    /// [`CheckpointError::Unusable`](crate::error::CheckpointError::Unusable) on all ranks where one of them cannot
    /// write there; [`CheckpointError::Busy`](crate::error::CheckpointError::Busy) where another job saves into it; a
    /// failed collective.
    pub fn check_save_dir(&mut self, dir: impl AsRef<Path>) -> Result<()> {
        self.not_stopped()?;
        let on_each_host = self.config.use_node_local_storage;
        self.attempt(|engine| {
            checkpoint::check_dir(engine.core.comm(), dir.as_ref(), on_each_host, &mut engine.locked_folders)
        })
    }

    /// Refuses, before training, a file that [`export_safetensors`](Self::export_safetensors) could not write in the end: a
    /// folder that is not there or is read-only, something else under that name, a disk
    /// without room. Not collective: of use on rank 0, which writes.
    ///
    /// # Errors
    /// [`OutputError`](crate::error::OutputError); [`Error::Io`](crate::Error::Io).
    pub fn check_export(&self, path: impl AsRef<Path>) -> Result<()> {
        self.core.check_export(path.as_ref(), DType::F32)
    }

    /// Loads checkpoint `tag` of folder `dir`, or the one that `latest` names, whatever stage, number of ranks,
    /// precision and offload it was saved with. Nothing is loaded, and none is the result, if there is no checkpoint
    /// there. `dir` may be the address of an object store (`s3://BUCKET/PREFIX`, feature `s3`), whose newest whole
    /// checkpoint comes into a folder of the user's cache first. Collective.
    ///
    /// Everything that is needed is checked before anything changes. With the optimizer's states come the learning rates
    /// that [`set_lr`](Self::set_lr) had given (DeepSpeed's `param_groups`); where it had not been called, those of this
    /// engine's configuration hold. The data goes on where
    /// [`LoadedCheckpoint::global_samples`] says: see [`crate::data::Loader::resume`].
    ///
    /// # Errors
    /// [`CheckpointError::Unusable`](crate::error::CheckpointError::Unusable) on all ranks for a checkpoint that is
    /// damaged or belongs to another model or optimizer, or where none is named and there are some: the engine is as it
    /// was; where an update was delayed, it has ended, and a forward without a backward does not count. [`EngineError::MidAccumulation`](crate::error::EngineError::MidAccumulation) in the middle of an accumulation; a failed collective.
    pub fn load_checkpoint(
        &mut self,
        dir: impl AsRef<Path>,
        tag: Option<&str>,
        options: &LoadOptions,
    ) -> Result<Option<LoadedCheckpoint>> {
        let _call = during("load_checkpoint");
        self.wait_for_checkpoint()?;
        self.between_steps("load_checkpoint")?;
        let load = |engine: &mut Self| {
            let (core, trainer, on_each_host) = (&engine.core, &engine.trainer, engine.config.use_node_local_storage);
            let Some(url) = address(dir.as_ref()) else {
                return checkpoint::load(core, trainer, dir.as_ref(), tag, options, on_each_host);
            };
            match fetch(core.comm(), url, tag)? {
                // It is locked until all ranks have loaded it.
                Some(fetched) => checkpoint::load(core, trainer, &fetched.dir, Some(&fetched.tag), options, true),
                None => Ok(None),
            }
        };
        if self.core.is_behind() {
            // The update that is delayed ends before weights are loaded: they would change after.
            self.forget_forward();
        }
        let Some(checkpoint) = self.settled(load)? else { return Ok(None) };
        self.forget_forward();
        self.last_checkpoint = None;
        if !options.load_module_only {
            self.last_checkpoint = checkpoint.as_last();
            self.set_progress(TrainingProgress::of(checkpoint.manifest(), self.progress(), options));
            if options.load_optimizer_states {
                self.go_on_with_rates(checkpoint.manifest());
            }
        }
        if self.global_steps > 0 {
            self.core.unused_was_judged();
        }
        Ok(Some(checkpoint.into_loaded()))
    }

    /// Collective: writes whole f32 parameters (master weights where there are any) to `path` as safetensors, from
    /// rank 0, one parameter in memory at a time. The file appears when it is complete.
    ///
    /// # Errors
    /// The file cannot be written, on all ranks: the engine can go on, and export elsewhere. A failed collective.
    pub fn export_safetensors(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let _call = during("export_safetensors");
        self.attempt(|engine| engine.core.export(path.as_ref(), DType::F32))
    }

    /// Collective: writes whole parameters in the precision that the model computes in (DeepSpeed's call; an f32
    /// model's stay f32) to `file_name` in `dir`, which is created, as safetensors, at every stage and without a key
    /// that asks for gathering. Otherwise as [`export_safetensors`](Self::export_safetensors).
    ///
    /// # Errors
    /// As [`export_safetensors`](Self::export_safetensors).
    pub fn save_16bit_model(&mut self, dir: impl AsRef<Path>, file_name: &str) -> Result<()> {
        let _call = during("save_16bit_model");
        let dtype = self.dtype();
        let path = dir.as_ref().join(file_name);
        if self.rank() == 0 {
            // Where that fails, so does the file, which says why for all ranks.
            _ = std::fs::create_dir_all(dir);
        }
        self.attempt(|engine| engine.core.export(&path, dtype))
    }

    /// Names of the parameters, in order of registration.
    #[doc(hidden)]
    pub fn parameter_names(&self) -> Vec<String> {
        self.core.params().iter().map(|param| param.name.clone()).collect()
    }

    /// Collective: a whole parameter in f32, by its place among the names.
    #[doc(hidden)]
    pub fn whole_parameter(&self, param: usize) -> Result<Flat> {
        self.core.whole_f32(param)
    }

    /// Ends a save in the background before weights change; if that failed, the step returns the error after it has
    /// been made.
    pub(super) fn end_saving(&mut self) -> Result<()> {
        let Some(saving) = self.saving.take() else { return Ok(()) };
        let ended = saving.end().and_then(|(last, sending)| {
            self.last_checkpoint = last;
            self.start_upload(sending)
        });
        match ended {
            Ok(()) => Ok(()),
            Err(CollectiveFailure::InStep(error)) => {
                self.failed_save = Some(error);
                Ok(())
            }
            Err(CollectiveFailure::OutOfStep(error)) => Err(error),
        }
    }

    fn progress(&self) -> TrainingProgress {
        TrainingProgress {
            global_steps: self.global_steps,
            skipped_steps: self.skipped_steps,
            optimizer_steps: self.optimizer_steps,
            global_samples: self.global_samples,
            scaler: self.scaler.state(),
            last_batch_iteration: self.trainer.last_batch_iteration(),
        }
    }

    fn set_progress(&mut self, progress: TrainingProgress) {
        self.global_steps = progress.global_steps;
        self.skipped_steps = progress.skipped_steps;
        self.optimizer_steps = progress.optimizer_steps;
        self.global_samples = progress.global_samples;
        self.micro_steps = progress.global_steps.saturating_mul(self.config.batch.gradient_accumulation_steps as u64);
        self.forwards = 0;
        self.trainer.restore(progress.last_batch_iteration);
        if let Some(state) = &progress.scaler {
            self.scaler.restore(state);
        }
        (self.grad_norm, self.was_applied) = (None, false);
    }

    /// The learning rates of `set_lr` are those of the run that was saved.
    fn go_on_with_rates(&mut self, manifest: &Manifest) {
        self.trainer.restore_rates(manifest.set_lr.as_deref());
        let Some(rates) = manifest.set_lr.as_ref().filter(|_| self.rank() == 0) else { return };
        let rates: Vec<String> = rates.iter().map(|lr| format!("{lr:e}")).collect();
        let until = if self.trainer.is_scheduled() { "the schedule goes on" } else { "set_lr gives another" };
        say(&format!(
            "checkpoint {}: the learning rate that set_lr gave, {}, stays in force until {until}",
            manifest.tag,
            list(&rates)
        ));
    }

    /// There was no forward since the last step: its loss is that of other weights.
    pub(super) fn forget_forward(&mut self) {
        self.phase = MicroStepPhase::Ready;
        self.losses = AccumulatedLoss::default();
    }
}
