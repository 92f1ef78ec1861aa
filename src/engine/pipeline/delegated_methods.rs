//! The calls, other than steps, that a training program makes to a pipeline's engine: ranks and times, checkpoints with
//! options, and the parameters of the complete model.

use super::PipelineEngine;
use crate::checkpoint::SaveOptions;
use crate::comm::CommReport;
use crate::comm::agree::{agree, rank_failed};
use crate::comm::engine_call::during;
use crate::error::{Error, Result};
use crate::offload::OffloadReport;
use crate::profiler::StepTimings;
use crate::tensor::residency::{storage_on, to_storage};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Tensor};
use std::path::{Path, PathBuf};

impl<B> PipelineEngine<B> {
    /// Returns this rank's number in the job.
    pub fn rank(&self) -> usize {
        self.engine.core.job().rank()
    }

    /// Returns the number of ranks of the job.
    pub fn world_size(&self) -> usize {
        self.engine.core.job().size()
    }

    /// Returns the mean loss of the last step over micro batches and pipelines, as
    /// [`train_batch`](Self::train_batch) returns it.
    pub fn last_loss(&self) -> f64 {
        self.engine.mean_loss()
    }

    /// Returns whether the last optimizer step changed the weights.
    pub fn was_step_applied(&self) -> bool {
        self.engine.was_step_applied()
    }

    /// Returns the times of the last optimizer step on this rank.
    pub fn timings(&self) -> StepTimings {
        self.engine.timings()
    }

    /// Returns statistics of this rank's file access so far, as
    /// [`Engine::offload_report`](crate::Engine::offload_report) does.
    pub fn offload_report(&self) -> OffloadReport {
        self.engine.offload_report()
    }

    /// Returns statistics of this rank's collectives so far with the other ranks that hold the same stages.
    pub fn comm_report(&self) -> CommReport {
        self.engine.comm_report()
    }

    /// Returns whether the job was asked to end, as [`Engine::stop_requested`](crate::Engine::stop_requested)
    /// does. Collective.
    ///
    /// # Errors
    /// The same as [`Engine::stop_requested`](crate::Engine::stop_requested).
    pub fn stop_requested(&self) -> Result<bool> {
        // First, the ranks that hold the same stages vote, and then all ranks of the job do.
        let stage_result = self.engine.stop_requested();
        let vote = *stage_result.as_ref().unwrap_or(&false);
        let any = self.gather_f64(&[f64::from(u8::from(vote))])?.iter().any(|rank| rank[0] != 0.0);
        stage_result.map(|_| any)
    }

    /// Returns whether the user has asked for a checkpoint, as
    /// [`Engine::save_requested`](crate::Engine::save_requested) does.
    pub fn save_requested(&self) -> bool {
        self.engine.save_requested()
    }

    /// Returns whether the job is meant to pause here, as
    /// [`Engine::is_planned_stop`](crate::Engine::is_planned_stop) does.
    pub fn is_planned_stop(&self) -> bool {
        self.engine.is_planned_stop()
    }

    /// Collective: returns the `values` of every rank of the job, in rank order.
    ///
    /// # Errors
    /// A failed collective.
    pub fn gather_f64(&self, values: &[f64]) -> Result<Vec<Vec<f64>>> {
        let _call = during("gather_f64");
        self.engine.core.job().gather_f64(values.to_vec()).wait()
    }

    /// Saves a checkpoint of all stages with options, as
    /// [`Engine::save_checkpoint_with`](crate::Engine::save_checkpoint_with) does. Collective.
    ///
    /// # Errors
    /// The same as [`Engine::save_checkpoint_with`](crate::Engine::save_checkpoint_with).
    pub fn save_checkpoint_with(
        &mut self,
        dir: impl AsRef<Path>,
        tag: Option<&str>,
        client_state: serde_json::Value,
        options: &SaveOptions,
    ) -> Result<PathBuf> {
        self.engine.save_checkpoint_with(dir, tag, client_state, options)
    }

    /// Checks whether checkpoints can be saved into `dir`, as
    /// [`Engine::check_save_dir`](crate::Engine::check_save_dir) does. Collective.
    ///
    /// # Errors
    /// The same as [`Engine::check_save_dir`](crate::Engine::check_save_dir).
    pub fn check_save_dir(&mut self, dir: impl AsRef<Path>) -> Result<()> {
        self.engine.check_save_dir(dir)
    }

    /// Waits until the last checkpoint is completely uploaded, as
    /// [`Engine::wait_for_upload`](crate::Engine::wait_for_upload) does. Collective.
    ///
    /// # Errors
    /// The same as [`Engine::wait_for_upload`](crate::Engine::wait_for_upload).
    pub fn wait_for_upload(&mut self) -> Result<()> {
        self.engine.wait_for_upload()
    }

    /// Returns the names of the complete model's parameters, in the order of registration, and whether each is trained.
    /// Collective.
    ///
    /// # Errors
    /// A failed collective.
    pub fn model_parameters(&mut self) -> Result<Vec<(String, bool)>> {
        let model = self.engine.attempt(|engine| engine.core.model_parameters())?;
        Ok(model.into_iter().map(|param| (param.name, param.is_trained)).collect())
    }

    /// Returns the parameters of all stages for whose names `is_selected` returns true, in f32, on rank 0 of the job,
    /// and nothing on the other ranks. Collective: all ranks must choose the same names.
    ///
    /// # Errors
    /// A failed collective.
    pub fn gather_parameters(&mut self, is_selected: impl Fn(&str) -> bool) -> Result<Vec<(String, Tensor)>> {
        let is_first = self.rank() == 0;
        self.engine.attempt(|engine| {
            let mut gathered = Vec::new();
            for param in engine.core.model_parameters()?.into_iter().filter(|param| is_selected(&param.name)) {
                let values = engine.core.on_first_rank(&param)?;
                if let Some(values) = values.filter(|_| is_first) {
                    let storage = storage_on(&Device::Cpu, to_storage(values))?;
                    let tensor = Tensor::from_storage(storage, param.dims, BackpropOp::none(), false);
                    gathered.push((param.name, tensor));
                }
            }
            Ok::<_, Error>(gathered)
        })
    }

    /// Writes the complete model in f32 to `path` as safetensors, from rank 0 of the job, as
    /// [`Engine::export_safetensors`](crate::Engine::export_safetensors) does. Collective.
    ///
    /// # Errors
    /// The same as [`Engine::export_safetensors`](crate::Engine::export_safetensors).
    pub fn export_safetensors(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.engine.export_safetensors(path)
    }

    /// Returns an error on all ranks, before training, if [`export_safetensors`](Self::export_safetensors) could not
    /// write `path` later, as [`Engine::check_export`](crate::Engine::check_export) does. Collective.
    ///
    /// # Errors
    /// The same as [`Engine::check_export`](crate::Engine::check_export); a failed collective.
    pub fn check_export(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        self.engine.attempt(|engine| {
            let (core, model) = (&engine.core, engine.core.model_parameters()?);
            let checked = if core.job().rank() == 0 { core.check_export(&model, path, DType::F32) } else { Ok(()) };
            let elsewhere = |rank| {
                let source = std::io::Error::other(rank_failed(rank));
                Error::Io { action: "write", path: path.to_owned(), source }
            };
            agree(core.job(), checked, elsewhere)
        })
    }
}
