//! Files that appear under their names whole: written beside, synced, renamed, their folder synced.

use std::fs::{File, OpenOptions, Permissions};
use std::io::Result;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use tempfile::NamedTempFile;

/// The folder that `path` is in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A new file in `folder` whose name begins with `prefix`, removed when it is dropped. It is readable for whom the umask
/// allows, as any new file: tempfile's default is the owner alone.
pub(crate) fn new_beside(folder: &Path, prefix: &str) -> Result<NamedTempFile> {
    tempfile::Builder::new().prefix(prefix).permissions(Permissions::from_mode(0o666)).tempfile_in(folder)
}

/// Brings the names in a folder to disk.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder)?.sync_all()
}

/// The file at `path`, which exists, around the page cache, where its file system knows that.
pub(crate) fn open_direct(path: impl AsRef<Path>) -> Option<File> {
    let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).ok()
}
