//! Checks whether a given number of bytes can be written to a folder.

use super::error::OutputError;
use crate::error::{Error, Result};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::fs::File;
use std::path::Path;

/// Checks that files of `bytes` bytes in total can be created in `folder`. Creates an unnamed file and reserves the
/// bytes for a moment, which also checks quotas.
///
/// # Errors
/// [`OutputError::Refused`] if no file can be created; [`OutputError::NoSpace`] if the bytes would not fit.
pub fn check_free_space(folder: &Path, bytes: u64) -> Result<()> {
    let file = tempfile::tempfile_in(folder).map_err(|e| refused(folder, &e))?;
    if can_grow(&file, folder, bytes) {
        return Ok(());
    }
    drop(file);
    Err(OutputError::NoSpace { path: folder.to_owned(), needed: bytes, available: free_bytes(folder) }.into())
}

/// Returns whether the file can grow to `bytes` bytes.
fn can_grow(file: &File, folder: &Path, bytes: u64) -> bool {
    /// The type number of tmpfs. Nothing is reserved on tmpfs, because a reservation would fill the pages with zeros
    /// one by one, and because the free space that tmpfs reports is exact.
    const TMPFS: i64 = 0x0102_1994;
    #[allow(clippy::useless_conversion, reason = "the field's width differs between systems")]
    let is_memory = rustix::fs::fstatfs(file).is_ok_and(|s| i64::from(s.f_type) == TMPFS);
    // The folder itself also needs some space.
    let fits = || free_bytes(folder).checked_sub(bytes).is_some_and(|remaining| remaining > 0);
    if bytes == 0 {
        return true;
    }
    if is_memory {
        return fits();
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => true,
        Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => false,
        // The file system cannot reserve space, so only the reported free space can be checked.
        Err(_) => fits(),
    }
}

/// Returns the number of bytes that this user can still write to `folder`, or the maximum if the system does not
/// report it.
fn free_bytes(folder: &Path) -> u64 {
    rustix::fs::statvfs(folder).map_or(u64::MAX, |s| s.f_bavail.saturating_mul(s.f_frsize))
}

fn refused(folder: &Path, error: &std::io::Error) -> Error {
    let problem = match error.kind() {
        std::io::ErrorKind::PermissionDenied => "the folder is read-only for this user".to_owned(),
        std::io::ErrorKind::ReadOnlyFilesystem => "its disk is read-only".to_owned(),
        kind => kind.to_string(),
    };
    OutputError::Refused { path: folder.to_owned(), problem }.into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_no_disk_has_room_for_is_refused_and_leaves_nothing() {
        for folder in [tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()] {
            check_free_space(folder.path(), 1 << 20).unwrap();
            let error = check_free_space(folder.path(), 1 << 60).unwrap_err();
            assert!(
                matches!(error, Error::Output(OutputError::NoSpace { needed, .. }) if needed == 1 << 60),
                "{error}"
            );
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn a_folder_that_nothing_can_be_made_in_is_refused() {
        let error = check_free_space(Path::new("/proc"), 1).unwrap_err().to_string();
        assert!(error.starts_with("cannot write to /proc: "), "{error}");
    }
}
