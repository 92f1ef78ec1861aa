//! Folders that a verification which was killed has left behind.

use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// How the name of such a folder begins.
pub(super) const PREFIX: &str = "candle-zero-verify-";

/// Marks `folder` as used until the result is dropped, or the process ends in whatever way. Where the file system knows
/// no locks, it is not marked.
pub(super) fn lock(folder: &Path) -> Option<File> {
    let file = File::open(folder).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok().map(|()| file)
}

/// Removes folders of this user in `parent` that nobody uses any more. What cannot be removed stays.
pub(super) fn remove(parent: &Path) {
    let me = rustix::process::geteuid().as_raw();
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_string_lossy().starts_with(PREFIX)
            && entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == me);
        // One that is empty may have been made just now.
        let is_in_use = || std::fs::read_dir(entry.path()).is_ok_and(|mut files| files.next().is_none());
        if is_ours && !is_in_use() && lock(&entry.path()).is_some() {
            _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_verification_left_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let folder = parent.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("rank_0"), "x").unwrap();
            folder
        };
        let left = folder(&format!("{PREFIX}left"));
        let used = folder(&format!("{PREFIX}used"));
        let other = folder("candle-zero-other");
        let held = lock(&used).unwrap();
        remove(parent.path());
        assert_eq!([left.exists(), used.exists(), other.exists()], [false, true, true]);
        drop(held);
        remove(parent.path());
        assert!(!used.exists());
    }
}
