//! Folders that appear under their names whole.

use super::{folder_of, sync_folder};
use std::fs::Permissions;
use std::io::{ErrorKind, Result};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A folder under construction beside its place. What is dropped before it is finished leaves nothing.
pub(crate) struct NewFolder {
    beside: TempDir,
    out: PathBuf,
}

impl NewFolder {
    /// A folder, as readable as any new one, that becomes `out`, which is [free](free_folder).
    pub fn beside(out: &Path) -> Result<Self> {
        let parent = folder_of(out);
        std::fs::create_dir_all(parent)?;
        let mut builder = tempfile::Builder::new();
        builder.prefix(".candle-zero-writing-").permissions(Permissions::from_mode(0o777));
        Ok(Self { beside: builder.tempdir_in(parent)?, out: out.to_owned() })
    }

    /// Where its files are written.
    pub fn path(&self) -> &Path {
        self.beside.path()
    }

    /// Brings it to disk and under its name. Its files are on disk already.
    pub fn finish(self) -> Result<()> {
        sync_folder(self.path())?;
        std::fs::rename(self.path(), &self.out)?;
        // It has another name now: there is nothing to remove.
        let _ = self.beside.keep();
        sync_folder(folder_of(&self.out))
    }
}

/// The folder that `out` means, if it is absent or empty; else why it cannot be written to.
pub(crate) fn free_folder(out: &Path) -> Result<std::result::Result<PathBuf, &'static str>> {
    // What a link names is replaced, not the link.
    let out = if out.exists() { out.canonicalize()? } else { out.to_owned() };
    match std::fs::read_dir(&out) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(Ok(out)),
        Ok(mut entries) => Ok(match entries.next() {
            None => Ok(out),
            Some(_) => Err("files are written into a folder that is absent or empty, and it has files"),
        }),
        Err(e) if e.kind() == ErrorKind::NotADirectory => {
            Ok(Err("files are written into a folder that is absent or empty, and it is a file"))
        }
        Err(e) => Err(e),
    }
}
