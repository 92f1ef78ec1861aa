//! What a run leaves: an adapter in PEFT's files, or a model in a Hugging Face folder.

use super::adapter::Adapter;
use super::merge::Merged;
use super::network::Network;
use super::out::new_folder;
use super::prepare::{Prepared, Start};
use crate::engine::Engine;
use crate::error::{Error, FinetuneError, ParamError, Result};
use crate::files::{folder_of, new_beside, sync_folder};
use crate::param::WeightFiles;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

/// Collective: writes the folder `to`, which must be absent or empty, from rank 0.
fn write(engine: &mut Engine<Network>, prepared: &Prepared, to: &Path) -> Result<()> {
    let (base, config) = match &prepared.start {
        Start::Encoder { base, .. } => {
            let folder = if engine.rank() == 0 { Some(new_folder(to)?) } else { None };
            let into = folder.as_ref().map_or(to, |folder| folder.path());
            let file = into.join("model.safetensors");
            engine.export_safetensors(&file)?;
            let Some(folder) = folder else { return Ok(()) };
            for (name, tensor) in WeightFiles::open(&file)?.tensors() {
                let numel = tensor.shape().iter().product();
                tensor.values(name, tensor.shape(), 0..numel).map_err(diverged)?;
            }
            base.write_beside(folder.path())?;
            return folder.finish().map_err(|source| Error::Io { action: "write", path: to.to_owned(), source });
        }
        Start::Decoder { base, config } => (base, config),
    };
    match prepared.options.method.lora() {
        Some(lora) => {
            let name = prepared.options.base_name.clone().unwrap_or_else(|| base.folder().display().to_string());
            let adapter = Adapter::of_engine(engine, lora.clone(), Some(name))?;
            if engine.rank() == 0 {
                adapter.check_finite().map_err(diverged)?;
                let parameters = config.parameters()?;
                adapter.write(to, parameters.iter().map(|(name, _)| name.as_str()))?;
            }
        }
        None => {
            // All weights in f32, which the folder's files are made of.
            let wrong = |source| Error::Io { action: "write", path: to.to_owned(), source };
            let whole = new_beside(folder_of(to), ".weights").map_err(wrong)?;
            let path = whole.path().with_extension("safetensors");
            let exported = engine.export_safetensors(&path).and_then(|()| match engine.rank() {
                0 => {
                    let values = WeightFiles::open(&path)?;
                    let merged = Merged::new(base, None)?.with_values(Arc::new(values));
                    merged.write_hugging_face(to, None).map_err(diverged)
                }
                _ => Ok(()),
            });
            if engine.rank() == 0 {
                _ = fs::remove_file(&path);
            }
            exported?;
        }
    }
    Ok(())
}

/// The error about a trained weight that is not finite, of the one about the file or adapter that has it.
fn diverged(error: Error) -> Error {
    match error {
        Error::Param(ParamError::NotFinite { name, element, value, .. }) => {
            FinetuneError::Diverged { tensor: name, element, value }.into()
        }
        other => other,
    }
}

/// Collective: writes the folder `to` from rank 0. It must be absent or empty, or have what such a run has left before, which
/// goes when the new one is whole.
pub(super) fn replace(engine: &mut Engine<Network>, prepared: &Prepared, to: &Path) -> Result<()> {
    if engine.rank() != 0 || !prepared.options.is_result(to) {
        return write(engine, prepared, to);
    }
    let mut name = std::ffi::OsString::from(".");
    name.push(to.file_name().unwrap_or_default());
    name.push(".new");
    let beside = folder_of(to).join(name);
    remove(&beside)?;
    write(engine, prepared, &beside)?;
    let wrong = |source| Error::Io { action: "replace", path: to.to_owned(), source };
    match renameat_with(CWD, &beside, CWD, to, RenameFlags::EXCHANGE) {
        Ok(()) => {}
        // The file system knows no exchange.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            remove(to)?;
            fs::rename(&beside, to).map_err(wrong)?;
        }
        Err(errno) => return Err(wrong(errno.into())),
    }
    sync_folder(folder_of(to)).map_err(wrong)?;
    remove(&beside)
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::Io { action: "remove", path: folder.to_owned(), source: error })
        }
        _ => Ok(()),
    }
}
