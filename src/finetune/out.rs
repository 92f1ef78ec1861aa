//! Folders that fine-tuning writes.

use crate::error::{Error, FinetuneError, Result};
use crate::files::{NewFolder, free_folder};
use std::path::Path;

/// A folder beside `out`, which must be absent or empty.
pub(super) fn new_folder(out: &Path) -> Result<NewFolder> {
    let wrong = |action| move |source| Error::Io { action, path: out.to_owned(), source };
    match free_folder(out).map_err(wrong("read"))? {
        Ok(out) => NewFolder::beside(&out).map_err(wrong("create")),
        Err(problem) => Err(FinetuneError::Output { path: out.to_owned(), problem: problem.into() }.into()),
    }
}
