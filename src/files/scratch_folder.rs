//! Scratch folders, in which outputs are created next to their final path.
//!
//! A scratch folder is locked while its job is running, and contains a marker file. A marked folder without a lock is
//! left over from a killed job, and the next job that writes to the same parent folder removes it. Any other folder
//! with a similar name stays, unless it is empty.

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io::{Error, ErrorKind, Result, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// The default prefix of scratch folders' names.
pub const WRITING: &str = ".candle-zero-writing-";
/// The marker file.
const MARK: &str = ".candle-zero-unfinished";
const MARK_TEXT: &str =
    "candle-zero creates incomplete files here; files left by a killed job are removed by the next one\n";
/// The number of letters and digits that make a name unique.
const UNIQUE_CHARS: usize = 6;

/// A folder for files that are not complete yet. It is removed with its contents when this value is dropped.
#[derive(Debug)]
pub struct ScratchFolder {
    path: PathBuf,
    /// The open folder, locked if the file system supports locks.
    folder: File,
    is_kept: bool,
}

impl ScratchFolder {
    /// Creates a folder in `parent` with access only for this user, and removes the leftovers of dead jobs there.
    pub fn new(parent: &Path, prefix: &str) -> Result<Self> {
        const MAX_ATTEMPTS: usize = 100;
        sweep(parent, prefix);
        let owner_only = Permissions::from_mode(0o700);
        for _ in 0..MAX_ATTEMPTS {
            let folder = tempfile::Builder::new().prefix(prefix).permissions(owner_only.clone()).tempdir_in(parent)?;
            let path = folder.keep();
            match Self::mark(&path) {
                Ok(Some(folder)) => return Ok(Self { path, folder, is_kept: false }),
                // A process that was cleaning up mistook the folder for a dead job's, because it was neither locked nor
                // marked yet.
                Ok(None) => {}
                Err(e) => {
                    _ = std::fs::remove_file(path.join(MARK));
                    _ = std::fs::remove_dir(&path);
                    return Err(e);
                }
            }
        }
        Err(Error::new(ErrorKind::ResourceBusy, "new folders are removed as soon as they are created"))
    }

    /// Locks and marks a newly created folder; returns `None` if it is gone or another process has locked it.
    fn mark(path: &Path) -> Result<Option<File>> {
        let none_if_gone = |e: Error| if e.kind() == ErrorKind::NotFound { Ok(None) } else { Err(e) };
        let folder = match open_folder(path) {
            Ok(folder) => folder,
            Err(e) => return none_if_gone(e),
        };
        // If the file system does not support locks, no process cleans up either.
        if flock(&folder, FlockOperation::NonBlockingLockExclusive) == Err(rustix::io::Errno::WOULDBLOCK) {
            return Ok(None);
        }
        match File::create_new(path.join(MARK)).and_then(|mut mark| mark.write_all(MARK_TEXT.as_bytes())) {
            Ok(()) => Ok(Some(folder)),
            Err(e) => none_if_gone(e),
        }
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves the folder and its contents to the user: the folder is not removed on drop.
    pub fn keep(mut self) -> PathBuf {
        self.is_kept = true;
        _ = std::fs::remove_file(self.path.join(MARK));
        self.path.clone()
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        if !self.is_kept {
            // The next job removes what cannot be removed now.
            _ = remove(&self.path);
        }
        // Closing is not enough: a process that another thread is starting holds a copy of the open folder until it
        // executes its program.
        _ = flock(&self.folder, FlockOperation::Unlock);
    }
}

/// Removes folders of dead jobs in `parent` whose names begin with `prefix`. Folders that cannot be removed stay.
pub fn sweep(parent: &Path, prefix: &str) {
    let uid = rustix::process::geteuid().as_raw();
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        if !is_named(&entry.file_name(), prefix)
            || !entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == uid)
        {
            continue;
        }
        let Ok(folder) = open_folder(&entry.path()) else { continue };
        if flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok() {
            if is_marked(&entry.path()) {
                _ = remove(&entry.path());
            } else {
                // The folder's job died before it could mark the folder. A folder that contains files is not a scratch
                // folder, and stays.
                _ = std::fs::remove_dir(entry.path());
            }
        }
    }
}

/// Returns whether a name consists of `prefix` and letters and digits that make it unique.
pub(super) fn is_named(name: &OsStr, prefix: &str) -> bool {
    let unique = name.to_str().and_then(|name| name.strip_prefix(prefix));
    unique.is_some_and(|u| u.len() == UNIQUE_CHARS && u.bytes().all(|b| b.is_ascii_alphanumeric()))
}

/// Returns whether a folder has the marker of a scratch folder.
fn is_marked(folder: &Path) -> bool {
    let mark = folder.join(MARK);
    let is_file = mark.symlink_metadata().is_ok_and(|found| found.is_file());
    // A job that died, or a full disk, may have left only a part of the marker's text.
    is_file && super::read(&mark, MARK_TEXT.len() as u64).is_ok_and(|text| MARK_TEXT.as_bytes().starts_with(&text))
}

/// Removes a folder and its contents; the marker is removed last.
fn remove(folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder)?.flatten().filter(|entry| entry.file_name() != MARK) {
        match entry.file_type()?.is_dir() {
            true => std::fs::remove_dir_all(entry.path())?,
            false => std::fs::remove_file(entry.path())?,
        }
    }
    _ = std::fs::remove_file(folder.join(MARK));
    std::fs::remove_dir(folder)
}

/// Opens a folder itself, without following a link.
fn open_folder(path: &Path) -> Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Acts as if the process were killed: the lock is released, and the folder stays.
    fn kill(scratch: ScratchFolder) -> PathBuf {
        flock(&scratch.folder, FlockOperation::Unlock).unwrap();
        let path = scratch.path.clone();
        std::mem::forget(scratch);
        path
    }

    #[test]
    fn what_a_killed_job_left_goes_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        // Folders with similar names that candle-zero did not create.
        for name in ["notes", "abcdef", "abcdefg", "abc-ef"] {
            std::fs::create_dir(at(&format!("{WRITING}{name}"))).unwrap();
            std::fs::write(at(&format!("{WRITING}{name}/thesis")), name).unwrap();
        }
        std::fs::write(at(&format!("{WRITING}ghijkl")), "a file").unwrap();
        std::os::unix::fs::symlink(at(&format!("{WRITING}abcdef")), at(&format!("{WRITING}mnopqr"))).unwrap();
        let theirs = names(dir.path());
        let alive = ScratchFolder::new(dir.path(), WRITING).unwrap();
        let dead = ScratchFolder::new(dir.path(), WRITING).unwrap();
        std::fs::create_dir(dead.path().join("new")).unwrap();
        std::fs::write(dead.path().join("new/weights"), "w").unwrap();
        let dead = kill(dead);
        let early = kill(ScratchFolder::new(dir.path(), WRITING).unwrap());
        std::fs::remove_file(early.join(MARK)).unwrap();
        sweep(dir.path(), WRITING);
        assert!(!dead.exists() && !early.exists() && alive.path().exists());
        drop(alive);
        assert_eq!(names(dir.path()), theirs);
        assert_eq!(std::fs::read_to_string(at(&format!("{WRITING}abcdef/thesis"))).unwrap(), "abcdef");
    }

    #[test]
    fn what_is_kept_is_the_users() {
        let dir = tempfile::tempdir().unwrap();
        let scratch = ScratchFolder::new(dir.path(), WRITING).unwrap();
        assert_eq!(scratch.path().metadata().unwrap().mode() & 0o777, 0o700);
        std::fs::write(scratch.path().join("x"), "x").unwrap();
        let kept = scratch.keep();
        sweep(dir.path(), WRITING);
        assert_eq!(names(&kept), ["x"]);
    }

    #[test]
    fn many_at_once_do_not_remove_each_other() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let scratch = ScratchFolder::new(dir.path(), WRITING).unwrap();
                        std::fs::write(scratch.path().join("x"), "x").unwrap();
                        assert!(scratch.path().join("x").exists());
                    }
                });
            }
        });
        assert!(names(dir.path()).is_empty());
    }
}
