//! The paths that a run reads and writes, checked together before the first step: none of the user's files may be
//! overwritten, and there must be enough room.

use super::options::{Options, TuningMethod, ValidationData};
use super::prepare::{PreparedRun, StartModel};
use crate::error::{Error, OutputError, Result};
use crate::model::output_dir::COMPANION_FILES;
use candle_zero::checkpoint;
use candle_zero::config::Config;
use candle_zero::files::{
    InputKind, InputOutputPaths, OutputDigests, OutputKind, OutputLocks, check_free_space, free_folder, must_stay,
};
use candle_zero::nn::is_adapter;
use candle_zero::stop_signal::RESTART;
use std::path::{Path, PathBuf};

/// The kind of model in a folder of a run's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResultKind {
    /// The model at the end.
    Result,
    /// The model with the best validation result.
    Best,
    /// The model of a run that was stopped and has no checkpoints.
    Stopped,
}

impl ResultKind {
    /// Returns the folder's name in the record of what a run has written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Result => "result",
            Self::Best => "best",
            Self::Stopped => "stopped",
        }
    }
}

impl Options {
    /// Returns whether the run may resume from a checkpoint.
    pub(super) fn is_resumed(&self) -> bool {
        self.saving.as_ref().is_some_and(|saving| saving.resume)
    }

    /// Returns whether `zerorun` has restarted this job, so that an earlier start may have written a part of the
    /// result.
    pub(super) fn is_restarted(&self) -> bool {
        let restarts = std::env::var(RESTART).ok().and_then(|restarts| restarts.parse::<u64>().ok());
        self.is_resumed() && restarts.is_some_and(|restarts| restarts > 0)
    }

    /// Returns the folder for the model with the best validation result: the result's folder with the suffix `-best`.
    pub fn best(&self) -> PathBuf {
        self.beside_out("-best")
    }

    /// Returns the folder for the model of a run that was stopped and has no checkpoints: the result's folder with the
    /// suffix `-stopped`.
    pub fn stopped(&self) -> PathBuf {
        self.beside_out("-stopped")
    }

    fn beside_out(&self, end: &str) -> PathBuf {
        let mut name = self.out.file_name().unwrap_or_default().to_os_string();
        name.push(end);
        self.out.with_file_name(name)
    }

    /// Iterates over the folders of the result.
    pub(super) fn parts(&self) -> impl Iterator<Item = (ResultKind, PathBuf)> {
        let best = self.validation.is_some().then(|| (ResultKind::Best, self.best()));
        [(ResultKind::Result, self.out.clone())].into_iter().chain(best)
    }

    /// Returns the paths that the run reads and writes according to the options.
    pub(crate) fn outputs(&self) -> InputOutputPaths {
        let mut outputs = InputOutputPaths::default().reads("MODEL", &self.model, InputKind::Model);
        let validation_files = match &self.validation {
            Some(ValidationData::Files(files)) => files.as_slice(),
            _ => &[],
        };
        for (flag, sources) in [("--data", self.data.as_slice()), ("--val", validation_files)] {
            outputs =
                sources.iter().fold(outputs, |outputs, source| outputs.reads(flag, &source.path, InputKind::File));
        }
        if let Some(adapter) = &self.adapter {
            outputs = outputs.reads("--adapter", adapter, InputKind::Model);
        }
        if let Some(file) = &self.ds_config {
            outputs = outputs.reads("--ds_config", file, InputKind::File);
        }
        for (part, folder) in self.parts() {
            let flag = if part == ResultKind::Best { "the folder for the best model" } else { "--out" };
            outputs = outputs.writes(flag, folder, OutputKind::Folder);
        }
        if let Some(saving) = &self.saving {
            outputs = outputs.writes("--save", &saving.dir, OutputKind::Checkpoints);
        }
        match &self.cache {
            Some(cache) => outputs.writes("--cache", cache, OutputKind::Shared),
            None => outputs,
        }
    }

    /// Returns the paths of [`outputs`](Self::outputs) and those that a configuration adds.
    pub(super) fn outputs_with(&self, config: &Config) -> InputOutputPaths {
        let (zero, monitoring) = (&config.zero, &config.monitoring);
        let optimizer = zero.optimizer_files().and_then(|section| section.device.nvme_path());
        let param = zero.param_files().and_then(|section| section.device.nvme_path());
        let mut offload: Vec<&Path> = optimizer.into_iter().chain(param).collect();
        offload.dedup();
        let mut outputs = self.outputs();
        for folder in offload {
            outputs = outputs.writes("nvme_path", folder, OutputKind::Shared);
        }
        if let Some(file) = monitoring.flops_profiler.as_ref().and_then(|profiler| profiler.output_file.as_ref()) {
            outputs = outputs.writes("flops_profiler.output_file", file, OutputKind::File);
        }
        outputs
    }

    /// Returns the files that a run may replace: those that it has written before, if it resumes from an existing
    /// checkpoint or if `zerorun` has restarted it.
    pub(super) fn written(&self) -> OutputDigests {
        match &self.saving {
            Some(saving) if saving.resume && (checkpoint::has_checkpoints(&saving.dir) || self.is_restarted()) => {
                OutputDigests::of_run(&saving.dir)
            }
            saving => OutputDigests::empty(saving.as_ref().map(|saving| saving.dir.as_path())),
        }
    }

    /// Refuses result folders with files that the run may not replace.
    ///
    /// # Errors
    /// [`OutputError::Refused`]; [`Error::Io`].
    pub(super) fn check_free(&self, written: &OutputDigests) -> Result<()> {
        self.parts().try_for_each(|(part, folder)| self.output_location(part, &folder, written).map(drop))
    }

    /// Returns the location of a part's folder if the run may write there, and whether existing files are replaced.
    ///
    /// # Errors
    /// [`OutputError::Refused`]; [`Error::Io`].
    pub(super) fn output_location(
        &self,
        part: ResultKind,
        folder: &Path,
        written: &OutputDigests,
    ) -> Result<(PathBuf, bool)> {
        let refuse = |problem: String| Err(OutputError::Refused { path: folder.to_owned(), problem }.into());
        let wrong = |source| Error::Io { action: "read", path: folder.to_owned(), source };
        match free_folder(folder).map_err(wrong)? {
            Ok(free) => match free.file_name() {
                Some(_) => Ok((free, false)),
                None => refuse("it has no name".into()),
            },
            Err(problem) if !folder.is_dir() => refuse(problem.into()),
            Err(problem) => match written.may_replace(part.name(), folder) {
                Ok(()) => Ok((folder.canonicalize().map_err(wrong)?, true)),
                Err(reason) if self.is_resumed() => refuse(reason),
                Err(_) => refuse(problem.into()),
            },
        }
    }

    /// Locks all outputs for this process.
    ///
    /// # Errors
    /// Outputs that conflict with inputs or with each other; outputs that are not writable; another job that writes
    /// there.
    #[doc(hidden)]
    pub fn claim(&self, add_paths: impl FnOnce(InputOutputPaths) -> InputOutputPaths) -> Result<OutputLocks> {
        // The paths are checked before the contents of folders, because a wrong path is the more important error.
        let outputs = add_paths(self.outputs());
        outputs.check()?;
        self.check_places()?;
        let claims = outputs.claim()?;
        // Another job may have ended while this one waited for its locks.
        self.check_places()?;
        Ok(claims)
    }

    /// Refuses folders with files that the run neither continues nor may replace.
    fn check_places(&self) -> Result<()> {
        if let Some(saving) =
            self.saving.as_ref().filter(|saving| !saving.resume && checkpoint::has_checkpoints(&saving.dir))
        {
            let problem = "it has checkpoints of an earlier run, which --resume continues".into();
            return Err(OutputError::Refused { path: saving.dir.clone(), problem }.into());
        }
        self.check_free(&self.written())
    }
}

impl PreparedRun {
    /// Refuses result folders whose disk has too little room.
    ///
    /// # Errors
    /// [`OutputError::NoSpace`]; [`OutputError::Refused`]; [`Error::Io`].
    pub(super) fn check_room(&self) -> Result<()> {
        /// Room for descriptions and headers, and for the file system's entries.
        const OVERHEAD_BYTES: u64 = 1 << 16;
        let (final_bytes, while_written) = self.bytes()?;
        let folders = self.options.parts().count() as u64;
        let needed = final_bytes.saturating_add(OVERHEAD_BYTES).saturating_mul(folders).saturating_add(while_written);
        let out = &self.options.out;
        let path =
            std::path::absolute(out).map_err(|source| Error::Io { action: "find", path: out.clone(), source })?;
        let is_inside = path.is_dir() && must_stay(&path);
        let folder = path.ancestors().skip(usize::from(!is_inside)).find(|folder| folder.is_dir());
        check_free_space(folder.unwrap_or(Path::new("/")), needed)
    }

    /// Returns the size in bytes of a result folder, and the additional bytes needed while it is written.
    fn bytes(&self) -> Result<(u64, u64)> {
        let count = |shape: &[usize]| shape.iter().fold(1u64, |product, n| product.saturating_mul(*n as u64));
        let sum = |numbers: &mut dyn Iterator<Item = u64>| numbers.fold(0u64, u64::saturating_add);
        let (folder, weights, temporary) = match &self.start {
            StartModel::Classifier { base, config, .. } => {
                let (all, is_written) = (config.parameters()?, self.start.trained(&self.options.method));
                let written = all.iter().filter(|(name, _)| is_written(name));
                (base.folder(), sum(&mut written.map(|(_, shape)| count(shape))).saturating_mul(4), 0)
            }
            StartModel::Decoder { base, config } => {
                let all = config.parameters()?;
                let is_written = |name: &str| self.options.method == TuningMethod::Full || is_adapter(name);
                let elements = sum(&mut all.iter().filter(|(name, _)| is_written(name)).map(|(_, shape)| count(shape)));
                match self.options.method {
                    TuningMethod::Full => {
                        (base.folder(), elements.saturating_mul(base.dtype().bytes()), elements.saturating_mul(4))
                    }
                    _ => (base.folder(), elements.saturating_mul(4), 0),
                }
            }
        };
        let companions = COMPANION_FILES.iter().filter_map(|name| folder.join(name).metadata().ok());
        Ok((sum(&mut companions.map(|file| file.len()).chain([weights])), temporary))
    }
}
