//! A run's relation to its checkpoint folders: the sequence of checkpoints that it saved and resumed from, and its
//! locks on the folders that it saves into.

use super::folder;
use super::manifest::Manifest;
use crate::error::{CheckpointError, Error, Result};
use crate::files::{FolderLock, LOCK};
use crate::notice::emit;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The time for which a killed process may still hold the lock on a folder.
const LOCK_RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// The checkpoint that a run saved or loaded last.
pub(crate) struct LastCheckpoint {
    dir: PathBuf,
    tag: String,
    previous: Option<String>,
}

impl LastCheckpoint {
    /// Describes a checkpoint in `dir`, which must exist.
    pub fn new(dir: &Path, tag: &str, manifest: &Manifest) -> Option<Self> {
        let dir = dir.canonicalize().ok()?;
        Some(Self { dir, tag: tag.to_owned(), previous: manifest.previous.clone() })
    }

    /// Returns the predecessor of `tag`, which is about to be saved in `dir`.
    pub fn previous_of(&self, dir: &Path, tag: &str) -> Option<String> {
        let is_here = dir.canonicalize().is_ok_and(|dir| dir == self.dir);
        // A checkpoint that is saved again is not its own predecessor.
        let previous = if self.tag == tag { self.previous.clone() } else { Some(self.tag.clone()) };
        previous.filter(|_| is_here)
    }
}

/// The folders in which this rank creates checkpoints for the job. No other job saves there as long as this value
/// exists.
#[derive(Default)]
pub(crate) struct LockedFolders(Vec<(PathBuf, Arc<FolderLock>)>);

impl LockedFolders {
    /// Creates `dir` if it does not exist, and locks it for this process.
    ///
    /// # Errors
    /// Fails with [`CheckpointError::Busy`] if another job saves there, or with [`CheckpointError::Unusable`] if `dir`
    /// is a file, its `latest` belongs to another program, or it cannot be written to.
    pub fn lock(&mut self, dir: &Path) -> Result<()> {
        if dir.exists() && !dir.is_dir() {
            let problem = "it is a file, but checkpoints are saved to a folder; give another path".into();
            return Err(CheckpointError::Unusable { path: dir.to_owned(), problem }.into());
        }
        folder::check_latest(dir)?;
        folder::create_all(dir).map_err(|e| folder::write_error(dir, &e))?;
        let canonical_dir = dir.canonicalize().map_err(|e| folder::write_error(dir, &e))?;
        // A folder that was removed in the meantime is locked again after it is recreated.
        if self.0.iter().any(|(locked, lock)| *locked == canonical_dir && lock.locks(&canonical_dir)) {
            return Ok(());
        }
        let wrong = |e: std::io::Error| folder::write_error(&dir.join(LOCK), &e);
        let lock = match FolderLock::acquire_for_process(&canonical_dir, LOCK_RELEASE_TIMEOUT).map_err(wrong)? {
            Ok(lock) => lock,
            Err(owner) => return Err(Error::from(CheckpointError::Busy { path: dir.to_owned(), owner })),
        };
        if !lock.is_effective() {
            emit(&format!(
                "{} is on a file system without locks: nothing prevents another job from saving there too",
                dir.display()
            ));
        }
        self.0.push((canonical_dir, lock));
        Ok(())
    }
}

/// Checks that this rank can create files in the existing folder `dir`, by creating an unnamed one.
pub(super) fn try_to_write(dir: &Path) -> Result<()> {
    tempfile::tempfile_in(dir).map(drop).map_err(|e| folder::write_error(dir, &e))
}
