//! Helpers for files: atomic writes (a temporary file next to the target is written and then renamed), reads that
//! refuse anything that is not a regular file, locks, and checks of output paths and of free space.

mod atomic_folder;
mod complete_lines;
pub(crate) mod error;
mod free_space;
mod lock;
mod output_ownership;
mod path_conflicts;
mod release_pages;
mod resolved_path;
mod scratch_folder;
mod unfinished_files;

pub use atomic_folder::{AtomicFile, AtomicFolder, free_folder, must_stay};
pub use complete_lines::{MAX_LINE_BYTES, complete_lines};
pub use free_space::check_free_space;
pub use lock::FolderLock;
pub use lock::FolderLockOutcome;
pub use lock::{FileLock, lacks_locks, sweep_locks};
pub(crate) use lock::{LOCK, owner as lock_owner};
pub use output_ownership::OutputDigests;
pub use path_conflicts::{InputKind, InputOutputPaths, OutputKind, OutputLocks};
pub use release_pages::release_pages;
pub use scratch_folder::{ScratchFolder, WRITING, sweep};
pub(crate) use unfinished_files::{UNFINISHED, remove_unfinished, sweep_unfinished, unfinished_files};

use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{Error, ErrorKind, Read as _, Result, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt, MetadataExt as _, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use tempfile::NamedTempFile;

/// Returns the folder that contains `path`.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Creates a new file in `folder` with a name that begins with `prefix`. The file is removed when the result is
/// dropped. Its permissions follow the umask, like those of any new file, whereas tempfile's default is owner-only.
pub fn new_temp_file(folder: &Path, prefix: &str) -> Result<NamedTempFile> {
    tempfile::Builder::new().prefix(prefix).permissions(Permissions::from_mode(0o666)).tempfile_in(folder)
}

/// Writes a file that is either complete or absent: until it is complete, its name begins with `prefix`. Returns the
/// file, positioned at its end. The folder is not synced.
pub fn write_atomically(path: &Path, prefix: &str, bytes: &[u8]) -> Result<File> {
    let mut file = new_temp_file(folder_of(path), prefix)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    Ok(file.persist(path)?)
}

/// Replaces the file at `path` in one step: a reader sees either the old or the new content. Nothing is synced to disk,
/// so both may be lost in a power failure. Until the file is complete, its name begins with `prefix`.
pub fn replace_unsynced(path: &Path, prefix: &str, bytes: &[u8]) -> Result<()> {
    let mut file = new_temp_file(folder_of(path), prefix)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}

/// Syncs the names in a folder to disk.
pub fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder)?.sync_all()
}

/// Opens the existing file at `path` with O_DIRECT, if its file system supports it.
pub(crate) fn open_direct(path: impl AsRef<Path>) -> Option<File> {
    let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).ok()
}

/// Opens the file at `path` for reading. Anything that is not a regular file is an error that names its kind: reading
/// from a pipe would block, and reading from a device may never end.
pub fn open(path: impl AsRef<Path>) -> Result<File> {
    let path = path.as_ref();
    // The kind is checked before opening, because opening a device can have side effects, and again afterwards, because
    // the path may lead to something else by then.
    check_regular_file(&path.metadata()?)?;
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    check_regular_file(&file.metadata()?)?;
    Ok(file)
}

/// Reads the complete file at `path`, which may be at most `max_bytes` bytes long.
pub fn read(path: impl AsRef<Path>, max_bytes: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 <= max_bytes {
        true => Ok(bytes),
        false => Err(Error::new(ErrorKind::FileTooLarge, format!("it is larger than {max_bytes} bytes"))),
    }
}

/// Reads the complete file as text.
pub fn read_text(path: impl AsRef<Path>, max_bytes: u64) -> Result<String> {
    String::from_utf8(read(path, max_bytes)?).map_err(|_| Error::new(ErrorKind::InvalidData, "it is not UTF-8 text"))
}

/// Checks that `path` does not exist, is an empty file, or is a file that begins with `prefix`, which marks an earlier
/// output of the same kind. `kind` names this kind in the error.
///
/// # Errors
/// A file of another kind, or one that cannot be read.
pub fn check_replaceable(path: &Path, prefix: &[u8], kind: &str) -> Result<()> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    let mut found = Vec::new();
    open(path)?.take(prefix.len() as u64).read_to_end(&mut found)?;
    match found.is_empty() || found == prefix {
        true => Ok(()),
        false => {
            let text = format!(
                "a file with that name exists, but is not a {kind}, so it is not replaced; give another name, or \
                 remove it"
            );
            Err(Error::new(ErrorKind::AlreadyExists, text))
        }
    }
}

/// Creates the folder `path`, which only this user can access, and its parents. An existing folder that this user owns
/// is restricted, too.
pub fn private_folder(path: &Path) -> Result<()> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent)?;
    }
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists && path.is_dir() => {
            tighten(path);
            Ok(())
        }
        result => result,
    }
}

/// Removes other users' permissions from a file or folder that this user owns. Anything else stays unchanged.
pub fn tighten(path: &Path) {
    let me = rustix::process::geteuid().as_raw();
    if let Ok(found) = path.symlink_metadata()
        && !found.is_symlink()
        && found.uid() == me
        && found.mode() & 0o077 != 0
    {
        _ = std::fs::set_permissions(path, Permissions::from_mode(found.mode() & 0o700));
    }
}

/// Returns an error that names the kind of `found`, unless it is a regular file.
pub(crate) fn check_regular_file(found: &Metadata) -> Result<()> {
    let kind = found.file_type();
    let name = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => return Err(rustix::io::Errno::ISDIR.into()),
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    Err(Error::new(ErrorKind::InvalidInput, format!("it is {name}, but a file is needed")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_is_named_and_never_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let [pipe, socket, file] = ["pipe", "socket", "file"].map(|name| dir.path().join(name));
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let text = |path: &Path| read(path, 10).unwrap_err().to_string();
        assert_eq!(text(&pipe), "it is a pipe, but a file is needed");
        assert_eq!(text(&socket), "it is a socket, but a file is needed");
        assert_eq!(text(Path::new("/dev/zero")), "it is a device, but a file is needed");
        assert_eq!(text(dir.path()), "Is a directory (os error 21)");
        std::fs::write(&file, [0; 10]).unwrap();
        assert_eq!(read(&file, 10).unwrap(), [0; 10]);
        assert_eq!(read(&file, 9).unwrap_err().to_string(), "it is larger than 9 bytes");
    }
}
