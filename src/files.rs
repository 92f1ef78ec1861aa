//! Files that appear under their names whole: written beside, synced, renamed, their folder synced.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{Result, Write as _};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use tempfile::NamedTempFile;

/// The folder that `path` is in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A new file in `folder` whose name begins with `prefix`, removed when it is dropped. It is readable for whom the
/// umask allows, as any new file: tempfile's default is the owner alone.
pub(crate) fn new_beside(folder: &Path, prefix: &str) -> Result<NamedTempFile> {
    tempfile::Builder::new().prefix(prefix).permissions(Permissions::from_mode(0o666)).tempfile_in(folder)
}

/// Writes a file that is there whole or not at all, under a name that begins with `prefix` until it is. Gives the file,
/// at its end. The folder is not synced.
pub(crate) fn write_whole(path: &Path, prefix: &str, bytes: &[u8]) -> Result<File> {
    let mut file = new_beside(folder_of(path), prefix)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    Ok(file.persist(path)?)
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
