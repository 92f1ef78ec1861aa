//! Resolves a command's model argument: a path, or else a repository on the Hugging Face Hub.

#[cfg(feature = "hub")]
use super::byte_progress::ByteProgress;
#[cfg(not(feature = "hub"))]
use crate::error::FinetuneError;
use crate::error::Result;
#[cfg(feature = "hub")]
use crate::launch::console::eprint;
#[cfg(feature = "hub")]
use candle_zero::util::format_bytes;
use candle_zero_finetune::hub::{FileSelection, Repository};
use std::path::{Path, PathBuf};

/// The help text of the argument.
pub(super) const HELP: &str = if cfg!(feature = "hub") {
    "Folder in Hugging Face format, GGUF file, folder that contains a GGUF file, or repository on the Hugging Face Hub \
     as org/name or org/name@revision"
} else {
    "Folder in Hugging Face format, GGUF file, or folder that contains a GGUF file"
};

/// A model at a local path.
#[derive(Debug, Clone)]
pub(super) struct ResolvedModel {
    pub path: PathBuf,
    /// The repository that the model came from.
    pub repository: Option<Repository>,
}

impl ResolvedModel {
    /// Returns the model at a path. If the path does not exist and the text names a repository, downloads it.
    pub fn find(argument: &Path, selection: FileSelection) -> Result<Self> {
        let repository = argument.to_str().and_then(Repository::parse).filter(|_| argument.symlink_metadata().is_err());
        match repository {
            // A missing file is reported when it is opened.
            None => Ok(Self { path: argument.to_owned(), repository: None }),
            Some(repository) => fetch(argument, repository, selection),
        }
    }

    /// Returns the model at the path where [`find`](Self::find) has found it in another process.
    pub fn already_resolved(argument: &Path, path: &Path) -> Self {
        let repository = argument.to_str().and_then(Repository::parse).filter(|_| argument != path);
        Self { path: path.to_owned(), repository }
    }
}

#[cfg(feature = "hub")]
fn fetch(_: &Path, repository: Repository, selection: FileSelection) -> Result<ResolvedModel> {
    let (mut file, mut progress) = (String::new(), ByteProgress::default());
    let path = repository.fetch(selection, &mut |at| {
        if at.file != file {
            std::mem::take(&mut progress).finish();
            file = at.file.to_owned();
            eprint(&format!("zerorun: {file}, {}", format_bytes(at.total_bytes)));
        }
        progress.report(at.bytes, at.total_bytes);
    });
    progress.finish();
    let path = path?;
    eprint(&format!("zerorun: {repository} is in {}", path.display()));
    Ok(ResolvedModel { path, repository: Some(repository) })
}

#[cfg(not(feature = "hub"))]
fn fetch(argument: &Path, _: Repository, _: FileSelection) -> Result<ResolvedModel> {
    let reason = "there is no such file or folder, and only a zerorun built with --features hub can \
                  download repositories from the Hugging Face Hub";
    Err(FinetuneError::NoModel { path: argument.to_owned(), reason: reason.into() }.into())
}
