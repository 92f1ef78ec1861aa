//! Writes the result of a run: an adapter in PEFT's files, or a model in a Hugging Face folder.

use super::model_card::ModelCard;
use super::prepare::{PreparedRun, StartModel};
use super::result_folders::ResultKind;
use super::training_engine::TrainingEngine;
use crate::Adapter;
use crate::data::sample_cache::cache_root;
use crate::error::{Error, FinetuneError, OutputError, ParamError, Result};
use crate::model::merged_model::MergedModel;
use candle_zero::files::{AtomicFolder, OutputDigests, folder_of};
use candle_zero::param::WeightFiles;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Writes a part of the result into its folder from rank 0, replacing what this run has written there before. If the
/// part cannot be written, returns the problem on all ranks and leaves the folder unchanged. Collective.
///
/// # Errors
/// A failed collective.
pub(super) fn write(
    engine: &mut TrainingEngine,
    card: &ModelCard<'_>,
    part: ResultKind,
    to: &Path,
    written: &mut OutputDigests,
) -> Result<Option<Error>> {
    let prepared = card.prepared;
    let output_location = |written: &OutputDigests| prepared.options.output_location(part, to, written);
    let wrong = |source| Error::Io { action: "write", path: to.to_owned(), source };
    let begin = || AtomicFolder::create_for(&output_location(written)?.0).map_err(wrong);
    let scratch = (engine.rank() == 0).then(begin).transpose();
    let folder = match agree(engine, to, scratch)? {
        Ok(folder) => folder,
        Err(error) => return Ok(Some(error)),
    };
    let filled = fill(engine, prepared, folder.as_ref().map_or(to, AtomicFolder::path))?;
    let filled = filled.and_then(|()| folder.as_ref().map_or(Ok(()), |folder| card.write(folder.path())));
    let filled = match agree(engine, to, filled)? {
        Ok(()) => Ok(()),
        Err(error) => return Ok(Some(error)),
    };
    let finished = filled.and_then(|()| {
        let Some(folder) = folder else { return Ok(()) };
        // Hours may have passed. Files that appeared in the meantime must not be replaced.
        let (_, is_replaced) = output_location(written)?;
        written.begin(part.name(), folder.path()).map_err(wrong)?;
        match is_replaced {
            true => folder.exchange(|path| written.is_own(part.name(), path)),
            false => folder.finish(),
        }
        .and_then(|()| written.end(part.name()))
        .map_err(wrong)
    });
    Ok(agree(engine, to, finished)?.err())
}

/// Returns this rank's value, or an error on all ranks if any rank failed. Collective.
fn agree<T>(engine: &TrainingEngine, to: &Path, result: Result<T>) -> Result<Result<T>> {
    let failed = engine.gather_f64(&[f64::from(u8::from(result.is_err()))])?;
    let remote_error = std::io::Error::other("rank 0 could not write, and reports why");
    Ok(match result {
        Ok(_) if failed.iter().any(|rank| rank[0] != 0.0) => {
            Err(Error::Io { action: "write", path: to.to_owned(), source: remote_error })
        }
        result => result,
    })
}

/// Writes the files from rank 0 into the empty folder `into`. The inner error is a failed write, or a trained
/// weight that is not finite. Collective.
fn fill(engine: &mut TrainingEngine, prepared: &PreparedRun, into: &Path) -> Result<Result<()>> {
    let is_first = engine.rank() == 0;
    let (base, config) = match &prepared.start {
        StartModel::Classifier { base, config, saved } => {
            if let Some(lora) = prepared.options.method.lora() {
                let name = prepared.options.base_name.clone().unwrap_or_else(|| base.folder().display().to_string());
                let adapter = engine.classifier_adapter(lora.clone(), Some(name), saved.clone())?;
                if !is_first {
                    return Ok(Ok(()));
                }
                let parameters = config.parameters()?;
                return Ok(write_adapter(&adapter, into, &parameters).and_then(|()| base.write_config(into)));
            }
            let file = into.join("model.safetensors");
            let exported = export(engine, &file)?;
            if !is_first {
                return Ok(exported);
            }
            let write = || {
                for (name, tensor) in WeightFiles::open(&file)?.tensors() {
                    let numel = tensor.shape().iter().product();
                    tensor.values(name, tensor.shape(), 0..numel).map_err(diverged)?;
                }
                base.write_companion_files(into)
            };
            return Ok(exported.and_then(|()| write()));
        }
        StartModel::Decoder { base, config } => (base, config),
    };
    if let Some(lora) = prepared.options.method.lora() {
        let name = prepared.options.base_name.clone().unwrap_or_else(|| base.folder().display().to_string());
        let adapter = engine.adapter(lora.clone(), Some(name))?;
        if !is_first {
            return Ok(Ok(()));
        }
        return Ok(config.parameters().and_then(|parameters| write_adapter(&adapter, into, &parameters)));
    }
    // This file, next to `into` in the scratch folder, holds all weights in f32. The files in `into` are written from
    // it.
    let weights_file = into.with_file_name("weights.safetensors");
    let exported = export(engine, &weights_file)?;
    if !is_first {
        return Ok(exported);
    }
    let merged = exported.and_then(|()| {
        let values = WeightFiles::open(&weights_file)?;
        MergedModel::new(base, None)?.with_values(Arc::new(values)).write_into(into, None).map_err(diverged)
    });
    _ = std::fs::remove_file(&weights_file);
    Ok(merged)
}

/// Writes the files of an adapter for a model with these parameters.
fn write_adapter(adapter: &Adapter, into: &Path, parameters: &[(String, Vec<usize>)]) -> Result<()> {
    adapter.check_finite().map_err(diverged)?;
    let written = adapter.write_into(into, parameters.iter().map(|(name, _)| name.as_str()));
    written.map_err(|source| Error::Io { action: "write", path: into.to_owned(), source })
}

/// Converts an error about a non-finite value in a file or adapter to one about a trained weight.
fn diverged(error: Error) -> Error {
    match error {
        Error::Param(ParamError::NotFinite { name, element, value, .. }) => {
            FinetuneError::Diverged { tensor: name, element, value }.into()
        }
        other => other,
    }
}

/// Writes all weights in f32. The inner error is a failed write, on all ranks. Collective.
fn export(engine: &mut TrainingEngine, path: &Path) -> Result<Result<()>> {
    match engine.export_safetensors(path) {
        Err(error @ (Error::Io { .. } | Error::Output(_))) => Ok(Err(error)),
        exported => exported.map(Ok),
    }
}

/// Writes a part of the result at the end of a run. If its folder is no longer writable, the result is saved in another
/// folder, which the error names. No other folder is used if the last checkpoint was saved, because the checkpoint
/// contains the result. Collective.
///
/// # Errors
/// [`OutputError`]; a trained weight that is not finite; a failed collective.
pub(super) fn finish(
    engine: &mut TrainingEngine,
    card: &ModelCard<'_>,
    (part, to): (ResultKind, PathBuf),
    written: &mut OutputDigests,
    is_saved: bool,
) -> Result<()> {
    let Some(error) = write(engine, card, part, &to, written)? else { return Ok(()) };
    let problem = match error {
        // There is no result to save.
        error if error.downcast_ref::<FinetuneError>().is_some() => return Err(error),
        Error::Output(OutputError::Refused { problem, .. }) => problem,
        other => other.to_string(),
    };
    if let Some(saving) = card.prepared.options.saving.as_ref().filter(|_| is_saved) {
        let saved = saving.dir.display();
        let problem = format!(
            "{problem}; nothing is lost: the last step is saved in {saved}, and the same command with --resume \
             continues from it"
        );
        return Err(OutputError::Refused { path: to, problem }.into());
    }
    for saved in fallback_folders(&to) {
        if write(engine, card, part, &saved, &mut OutputDigests::empty(None))?.is_none() {
            return Err(OutputError::SavedElsewhere { path: to, problem, saved }.into());
        }
    }
    Err(OutputError::Refused {
        path: to,
        problem: format!("{problem}; the result could not be saved elsewhere either"),
    }
    .into())
}

/// Returns unused folder names: next to the requested folder, in the current folder, in the user's cache, and in the
/// temporary folder. The number of names is the same on every rank.
fn fallback_folders(to: &Path) -> [PathBuf; 4] {
    let name = to.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let parent = folder_of(to).to_owned();
    let cache = cache_root().unwrap_or_else(|_| std::env::temp_dir());
    let current = std::env::current_dir().unwrap_or_else(|_| std::env::temp_dir());
    [parent, current, cache, std::env::temp_dir()].map(|folder| {
        let free = (1u32..).map(|n| folder.join(format!("{name}-saved-{n}")));
        let is_free = |path: &PathBuf| path.symlink_metadata().is_err();
        free.take(1000).find(is_free).unwrap_or_else(|| folder.join(format!("{name}-saved")))
    })
}
