//! Files that a job is writing into a folder that it has locked with [`FolderLock`].
//!
//! Until a file is complete, its name begins with [`UNFINISHED`]. A killed job leaves the unfinished file and the lock
//! file behind; the next job that writes to the folder, or creates another folder next to it, removes the unfinished
//! file.

use super::lock::{FolderLock, FolderLockOutcome, LOCK};
use super::scratch_folder::is_named;
use std::fs::DirEntry;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The beginning of the names of files that are not complete yet.
pub(crate) const UNFINISHED: &str = ".writing-";

/// Returns whether an entry of a folder is named like an unfinished file.
fn is_unfinished(entry: &DirEntry) -> bool {
    is_named(&entry.file_name(), UNFINISHED)
}

/// Returns the paths of the unfinished files in a folder.
pub(crate) fn unfinished_files(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.filter(|entry| is_unfinished(entry) && entry.file_type().is_ok_and(|kind| kind.is_file()));
    files.map(|entry| entry.path())
}

/// Removes the unfinished files in a folder that this process has locked. Files that cannot be removed stay.
pub(crate) fn remove_unfinished(folder: &Path) {
    for path in unfinished_files(folder) {
        _ = std::fs::remove_file(path);
    }
}

/// Removes the unfinished files of killed jobs from the folders in `parent`, and the empty folders with which jobs have
/// checked that they can write to `parent`. Folders that are locked, or that no job has locked before, are left alone.
pub(crate) fn sweep_unfinished(parent: &Path) {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    for folder in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        let path = folder.path();
        if is_unfinished(&folder) {
            // A folder that contains anything stays.
            _ = std::fs::remove_dir(&path);
        } else if path.join(LOCK).symlink_metadata().is_ok_and(|found| found.is_file())
            && unfinished_files(&path).next().is_some()
            && let Ok(FolderLockOutcome::Held(lock)) = FolderLock::acquire(&path, Duration::ZERO)
            // If the file system does not support locks, the files may belong to a job that is still running.
            && lock.is_effective()
        {
            remove_unfinished(&path);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn unfinished_files_of_killed_jobs_are_removed_and_all_others_stay() {
        let parent = tempfile::tempdir().unwrap();
        let at = |name: &str| parent.path().join(name);
        let names = [".writing-a1B2c3", ".writing-", ".writing-a1B2c3d", ".writing-a1B2c.", "a.json"];
        for folder in ["killed", "running", "foreign"] {
            std::fs::create_dir(at(folder)).unwrap();
            for name in names {
                std::fs::write(at(folder).join(name), "text").unwrap();
            }
        }
        std::os::unix::fs::symlink(at("foreign"), at("link")).unwrap();
        std::fs::create_dir(at("killed/.writing-folder")).unwrap();
        std::fs::create_dir(at(".writing-Empty0")).unwrap();
        std::fs::create_dir(at(".writing-mine00")).unwrap();
        std::fs::write(at(".writing-mine00/text"), "text").unwrap();
        std::fs::write(at("killed").join(LOCK), "").unwrap();
        let Ok(FolderLockOutcome::Held(lock)) = FolderLock::acquire(&at("running"), Duration::ZERO) else { panic!() };

        sweep_unfinished(parent.path());
        assert!(!at(".writing-Empty0").exists() && at(".writing-mine00/text").exists());
        let first = |folder: &str| at(folder).join(names[0]).exists();
        assert_eq!(["killed", "running", "foreign"].map(first), [false, true, true]);
        assert!(
            names[1..].iter().all(|name| at("killed").join(name).exists()) && at("killed/.writing-folder").exists()
        );
        assert!(!at("killed").join(LOCK).exists(), "the folder is no longer locked");

        remove_unfinished(&at("running"));
        assert!(!first("running"));
        drop(lock);
    }
}
