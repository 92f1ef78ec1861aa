//! Saving, loading and exporting an engine's state.

use super::reporter::SavingCheckpoint;
use super::{AccumulatedLoss, Engine, MicroStepPhase};
use crate::checkpoint::remote_failure;
use crate::checkpoint::store::{CheckpointUpload, UploadRequest, address, fetch};
use crate::checkpoint::{
    self, IslandOfJob, LoadOptions, LoadedCheckpoint, Manifest, SaveJob, SaveOptions, SaveRequest, TrainingProgress,
};
use crate::comm::agree::{JointOperationFailure, agree};
use crate::comm::engine_call::during;
use crate::error::Result;
use crate::notice::emit;
use crate::precision::Flat;
use crate::timeline;
use crate::util::list;
use candle_core::DType;
use serde_json::Value;
use std::path::{Path, PathBuf};

impl<M> Engine<M> {
    /// Saves the complete state of the training run as checkpoint `tag` in folder `dir`, points `latest` to it, and
    /// returns the checkpoint's folder. If `checkpoint.writer.decoupled` is set, the checkpoint is written in the
    /// background. Without a tag, the checkpoint is named `global_stepN`. Collective: every rank must call it with the
    /// same arguments; `client_state` is taken from rank 0. If the tags differ between ranks,
    /// `checkpoint.tag_validation` decides what happens. With `checkpoint.upload_to`, the checkpoint is uploaded to an
    /// object store while training continues; the next save waits for the upload.
    ///
    /// # Errors
    /// [`EngineError::MidAccumulation`](crate::error::EngineError::MidAccumulation) in the middle of an accumulation,
    /// because checkpoints do not contain its gradients; nothing is written in that case. A file cannot be written, or
    /// [another job](crate::error::CheckpointError::Busy) saves into the folder: reported on all ranks; the engine can
    /// continue, and earlier checkpoints are untouched. The error of an earlier background save or of an earlier
    /// [upload](crate::error::CheckpointError::Store). A failed collective.
    pub fn save_checkpoint(
        &mut self,
        dir: impl AsRef<Path>,
        tag: Option<&str>,
        client_state: Value,
    ) -> Result<PathBuf> {
        let options = SaveOptions { in_background: self.config.saves_in_background, ..SaveOptions::default() };
        self.save_checkpoint_with(dir, tag, client_state, &options)
    }

    /// Saves a checkpoint with options; otherwise the same as [`save_checkpoint`](Self::save_checkpoint). A background
    /// save finishes in the next [`step`](Self::step) that changes weights (with local steps, in the next one at an
    /// accumulation boundary), in [`wait_for_checkpoint`](Self::wait_for_checkpoint), in the next call that saves,
    /// loads or sets state, or when the engine is dropped.
    ///
    /// # Errors
    /// The same as [`save_checkpoint`](Self::save_checkpoint). The failure of a background save is reported by the
    /// call in which the save finishes.
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
        if let Some(islands) = &mut self.islands {
            islands.client_state = client_state.clone();
        }
        let folder = dir.as_ref().to_owned();
        let (dir, options) = self.island_folder_and_options(&folder, options);
        let mut manifest =
            checkpoint::manifest(&self.core, &self.trainer, &self.config, progress, tag, client_state, &options);
        manifest = self.manifest_of_island(manifest)?;
        manifest.previous = self.last_checkpoint.as_ref().and_then(|last| last.previous_of(&dir, &manifest.tag));
        let _here = timeline::enter(self.recorder.as_ref());
        let _span = timeline::span(timeline::EventCategory::Checkpoint, "save").with_subject(|| manifest.tag.clone());
        let request = SaveRequest {
            dir,
            manifest,
            options: options.clone(),
            validation: self.config.tag_validation,
            shows_statistics: self.config.shows_save_statistics,
            on_each_host: self.config.use_node_local_storage,
            upload_to: self.config.upload_checkpoints_to.clone(),
            island: self.island_of_job(),
        };
        let active_weights = self.active_weights;
        // A run that continues from the checkpoint does not repeat the steps before it, so they are recorded first.
        self.reporter.run.flush();
        let saving = self.settled(|engine| {
            SaveJob::begin(engine.core.clone(), &engine.trainer, request, &mut engine.locked_folders)
        })?;
        // A save changes nothing.
        self.active_weights = active_weights;
        let path = saving.path();
        self.reporter.saving = Some(SavingCheckpoint { step: self.global_steps, folder, path: path.clone() });
        self.saving = Some(saving);
        if !options.in_background {
            self.wait_for_checkpoint()?;
        }
        Ok(path)
    }

    /// Waits for a background save, if there is one. With `checkpoint.upload_to`, then starts the upload. Collective.
    ///
    /// # Errors
    /// The failure of the save: earlier checkpoints are untouched, and the engine can continue. An upload that cannot
    /// be started. A failed collective.
    pub fn wait_for_checkpoint(&mut self) -> Result<()> {
        let _call = during("wait_for_checkpoint");
        if let Some(saving) = self.saving.take() {
            let result = self.attempt(|_| saving.end());
            self.record_saved(result.as_ref().err());
            let (last, request) = result?;
            self.last_checkpoint = last;
            self.attempt(|engine| engine.start_upload(request))?;
        }
        Ok(())
    }

    /// Waits until the last checkpoint is completely uploaded to the object store of `checkpoint.upload_to`.
    /// Collective.
    ///
    /// # Errors
    /// [`CheckpointError::Store`](crate::error::CheckpointError::Store) with the object that could not be written, on
    /// all ranks: the checkpoint is complete on disk, and the engine can continue. A failed collective.
    pub fn wait_for_upload(&mut self) -> Result<()> {
        let _call = during("wait_for_upload");
        match self.upload.take() {
            Some(upload) => self.attempt(|engine| upload.wait(engine.core.job())),
            None => Ok(()),
        }
    }

    /// Starts the upload of a saved checkpoint. Collective.
    fn start_upload(&mut self, request: Option<UploadRequest>) -> std::result::Result<(), JointOperationFailure> {
        if let Some(request) = request {
            let url = request.url.clone();
            self.upload = agree(self.core.job(), CheckpointUpload::start(request), remote_failure(Path::new(&url)))?;
        }
        Ok(())
    }

    /// Checks whether [`save_checkpoint`](Self::save_checkpoint) can save into folder `dir`, so that a problem shows up
    /// now instead of after hours of training. A missing folder is created. As after a save, this job locks the folder
    /// until the engine is dropped: no other job can save into it. Incomplete files and folders that killed jobs have
    /// left in it are removed. Collective.
    ///
    /// # Errors
    /// [`CheckpointError::Unusable`](crate::error::CheckpointError::Unusable) on all ranks if any of them cannot write
    /// there; [`CheckpointError::Busy`](crate::error::CheckpointError::Busy) if another job saves into it; a failed
    /// collective.
    pub fn check_save_dir(&mut self, dir: impl AsRef<Path>) -> Result<()> {
        self.not_stopped()?;
        let on_each_host = self.config.use_node_local_storage;
        let (dir, _) = self.island_folder_and_options(dir.as_ref(), &SaveOptions::default());
        let island = self.island_of_job();
        self.attempt(|engine| {
            let checked = checkpoint::check_dir(engine.core.job(), &dir, on_each_host, &mut engine.locked_folders);
            IslandOfJob::agree(checked, island.as_ref(), &dir)
        })
    }

    /// Returns an error, before training, if [`export_safetensors`](Self::export_safetensors) could not write `path`
    /// later: the folder does not exist or is read-only, the name is taken by something else, or the disk has too
    /// little space. Not collective; call it on rank 0, which writes the file.
    ///
    /// # Errors
    /// [`OutputError`](crate::error::OutputError); [`Error::Io`](crate::Error::Io).
    pub fn check_export(&self, path: impl AsRef<Path>) -> Result<()> {
        self.core.check_export(&self.core.model_parameters()?, path.as_ref(), DType::F32)
    }

    /// Loads checkpoint `tag` from folder `dir`, or the one that `latest` names, whatever stage, number of ranks,
    /// precision and offload it was saved with. Without `tag`, returns `None` and loads nothing if the folder contains
    /// no checkpoint. `dir` may be the address of an object store (`s3://BUCKET/PREFIX`, feature `s3`); the checkpoint
    /// (without `tag`, the newest complete one) is first downloaded into a folder in the user's cache. Collective.
    ///
    /// Until its first step, an island that has joined others through an island server keeps their state, which is
    /// newer: nothing is loaded, and the result has the others' `global_samples` and client state.
    ///
    /// Everything needed is checked before anything changes. The optimizer states include the learning rates that were
    /// set with [`set_lr`](Self::set_lr) (DeepSpeed's `param_groups`); if it was never called, the rates of this
    /// engine's configuration apply. To resume the data at [`LoadedCheckpoint::global_samples`], see
    /// [`crate::data::Loader::resume`].
    ///
    /// # Errors
    /// [`CheckpointError::Unusable`](crate::error::CheckpointError::Unusable) on all ranks if the checkpoint is damaged
    /// or belongs to another model or optimizer, if checkpoint `tag` does not exist, or if, without `tag`, the folder
    /// has checkpoints but no `latest`. In that case, the engine is unchanged unless there was a delayed update: the
    /// update has then been completed, and a forward pass without a backward pass no longer counts.
    /// [`CheckpointError::Store`](crate::error::CheckpointError::Store) on all ranks if the checkpoint cannot be
    /// downloaded; [`EngineError::LocalSteps`](crate::error::EngineError::LocalSteps) if the islands' checkpoints do
    /// not belong together; [`EngineError::MidAccumulation`](crate::error::EngineError::MidAccumulation) in the middle
    /// of an accumulation; the error of an earlier background save; a failed collective.
    pub fn load_checkpoint(
        &mut self,
        dir: impl AsRef<Path>,
        tag: Option<&str>,
        options: &LoadOptions,
    ) -> Result<Option<LoadedCheckpoint>> {
        let _call = during("load_checkpoint");
        self.wait_for_checkpoint()?;
        self.between_steps("load_checkpoint")?;
        if let Some(joined) = self.joined_instead_of(dir.as_ref(), tag) {
            return Ok(Some(joined));
        }
        let saved = self.island_checkpoint_source(dir.as_ref(), tag, options)?;
        let island = self.island_of_job();
        let load = |engine: &mut Self| {
            let (core, trainer, on_each_host) = (&engine.core, &engine.trainer, engine.config.use_node_local_storage);
            let Some(url) = address(dir.as_ref()) else {
                let (dir, tag) = saved.as_ref().map_or((dir.as_ref(), tag), |saved| (&saved.dir, saved.tag.as_deref()));
                let loaded = checkpoint::load(core, trainer, dir, tag, options, on_each_host);
                return IslandOfJob::agree(loaded, island.as_ref(), dir);
            };
            match fetch(core.job(), url, tag)? {
                // `fetched` keeps the folder locked until all ranks have loaded the checkpoint.
                Some(fetched) => checkpoint::load(core, trainer, &fetched.dir, Some(&fetched.tag), options, true),
                None => Ok(None),
            }
        };
        if self.core.has_pending_update() {
            // A delayed update is completed before weights are loaded, because it would change them afterwards.
            self.forget_forward();
        }
        let Some(checkpoint) = self.settled(load)? else { return Ok(None) };
        self.forget_forward();
        self.last_checkpoint = None;
        if !options.load_module_only {
            self.last_checkpoint = checkpoint.as_last();
            self.set_progress(TrainingProgress::of(checkpoint.manifest(), self.progress(), options));
            if options.load_optimizer_states {
                self.restore_rates(checkpoint.manifest());
            }
        }
        if self.global_steps > 0 {
            self.core.skip_unused_check();
        }
        self.settled(|engine| engine.resume_local_steps(checkpoint.manifest(), options, saved.as_ref()))?;
        if let Some(islands) = &mut self.islands {
            islands.client_state = checkpoint.manifest().client_state.clone();
        }
        let loaded = checkpoint.into_loaded();
        if !options.load_module_only {
            self.record_loaded(dir.as_ref(), &loaded.path);
        }
        Ok(Some(loaded))
    }

    /// Collective: writes full f32 parameters (master weights, if there are any) to `path` as safetensors, from rank 0,
    /// with one parameter in memory at a time. The file appears when it is complete.
    ///
    /// # Errors
    /// The file cannot be written (reported on all ranks): the engine can continue, and can export elsewhere. A failed
    /// collective.
    pub fn export_safetensors(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let _call = during("export_safetensors");
        self.export(path.as_ref(), DType::F32)
    }

    /// Collective: writes full parameters in the model's compute precision (an f32 model's parameters stay f32), like
    /// DeepSpeed's call of the same name, as safetensors to `file_name` in `dir`, which is created. It works at every
    /// stage, without a configuration key that enables gathering. Otherwise the same as
    /// [`export_safetensors`](Self::export_safetensors).
    ///
    /// # Errors
    /// The same as [`export_safetensors`](Self::export_safetensors).
    pub fn save_16bit_model(&mut self, dir: impl AsRef<Path>, file_name: &str) -> Result<()> {
        let _call = during("save_16bit_model");
        let dtype = self.dtype();
        let path = dir.as_ref().join(file_name);
        if self.job().rank() == 0 {
            // If this fails, writing the file fails too, with an error for all ranks.
            _ = std::fs::create_dir_all(dir);
        }
        self.export(&path, dtype)
    }

    /// Collective: writes full parameters; with local steps, those of the first island.
    fn export(&mut self, path: &Path, dtype: DType) -> Result<()> {
        let island = self.island_of_job();
        self.attempt(|engine| {
            let exported = match island {
                Some(IslandOfJob { number: 1.., .. }) => Ok(()),
                _ => engine.core.export(path, dtype),
            };
            IslandOfJob::agree(exported, island.as_ref(), path)
        })
    }

    /// Returns the parameters' names, in order of registration.
    #[doc(hidden)]
    pub fn parameter_names(&self) -> Vec<String> {
        self.core.params().iter().map(|param| param.name.clone()).collect()
    }

    /// Collective: returns a full parameter in f32, by its index in [`parameter_names`](Self::parameter_names).
    #[doc(hidden)]
    pub fn whole_parameter(&self, param: usize) -> Result<Flat> {
        self.core.full_f32(param)
    }

    /// Finishes a background save before weights change. If the save failed, the step is still completed, and `step`
    /// then returns the error.
    pub(super) fn end_saving(&mut self) -> Result<()> {
        let Some(saving) = self.saving.take() else { return Ok(()) };
        let result = saving.end().and_then(|(last, request)| {
            self.last_checkpoint = last;
            self.start_upload(request)
        });
        match result {
            Ok(()) => {
                self.record_saved(None);
                Ok(())
            }
            Err(JointOperationFailure::InStep(error)) => {
                self.record_saved(Some(&error));
                self.failed_save = Some(error);
                Ok(())
            }
            Err(JointOperationFailure::OutOfStep(error)) => Err(error),
        }
    }

    pub(super) fn progress(&self) -> TrainingProgress {
        TrainingProgress {
            global_steps: self.global_steps,
            skipped_steps: self.skipped_steps,
            optimizer_steps: self.optimizer_steps,
            global_samples: self.global_samples,
            scaler: self.scaler.state(),
            last_batch_iteration: self.trainer.last_batch_iteration(),
        }
    }

    pub(super) fn set_progress(&mut self, progress: TrainingProgress) {
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

    /// Restores the learning rates that were set with `set_lr` in the saved run.
    pub(super) fn restore_rates(&mut self, manifest: &Manifest) {
        self.trainer.restore_rates(manifest.set_lr.as_deref());
        let Some(rates) = manifest.set_lr.as_ref().filter(|_| self.job().rank() == 0) else { return };
        let rates: Vec<String> = rates.iter().map(|lr| format!("{lr:e}")).collect();
        let (subject, verb, until) = match rates.as_slice() {
            [rate] => (format!("the learning rate {rate}"), "stays", "set_lr sets another"),
            rates => (format!("the learning rates {}", list(rates)), "stay", "set_lr sets others"),
        };
        let until = if self.trainer.is_scheduled() { "the schedule continues" } else { until };
        emit(&format!("checkpoint {}: {subject}, set with set_lr, {verb} in effect until {until}", manifest.tag));
    }

    /// Discards the last forward pass, whose loss was computed with other weights.
    pub(super) fn forget_forward(&mut self) {
        self.phase = MicroStepPhase::Ready;
        self.losses = AccumulatedLoss::default();
    }
}
