//! The folder that `nvme_path` names: checked before anything is built, locked against other jobs, and asked for space.

use super::available_memory::available_memory;
use crate::error::{Error, OffloadError, Result};
use crate::files::{FolderLock, LOCK, folder_of};
use crate::notice::emit;
use rustix::fs::{Mode, OFlags};
use std::fs::{DirBuilder, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The prefix of file names on file systems that do not support files without a name. On such a file system, a file has
/// a name only for a moment.
const FILE_PREFIX: &str = ".candle-zero-offload-";

/// The time for which a killed process may still hold the folder.
const LOCK_RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// The memory that files on tmpfs leave to everything else is the free memory divided by this number.
const TMPFS_RESERVE_DIVISOR: u64 = 16;

/// A folder for files of offloaded state.
#[derive(Debug)]
pub(crate) struct OffloadFolder {
    path: PathBuf,
    /// The lock of the first rank, held as long as this value lives. The engines of a process share the lock.
    _lock: Option<Arc<FolderLock>>,
    /// The bytes that this rank's files have received.
    granted: AtomicU64,
    /// The bytes that this rank's files have requested.
    requested: AtomicU64,
    /// Whether a file's request for space was refused.
    is_full: AtomicBool,
    /// The bytes that were free when the folder was opened.
    free: u64,
    /// The device number of the file system.
    device: u64,
    /// The memory that is available to files, if they are in memory.
    memory: Option<TmpfsMemory>,
}

/// The memory that is available to files on tmpfs.
#[derive(Debug)]
struct TmpfsMemory {
    /// The bytes that were free when the folder was opened.
    free: u64,
    /// A function that returns the number of bytes that are free now.
    free_now: fn() -> u64,
    /// Whether a file was refused for lack of memory.
    is_full: AtomicBool,
}

/// The space that a rank's files have requested from a folder: ranks exchange it to find out how much is missing.
#[derive(Debug, Clone, Copy)]
pub(super) struct SpaceDemand {
    pub device: u64,
    pub free: u64,
    pub requested: u64,
    pub granted: u64,
    pub is_full: bool,
    /// The bytes of memory that were free, if a file was refused for lack of memory; otherwise 0.
    pub memory: u64,
}

impl OffloadFolder {
    /// Checks `path`, and creates the folder if its parent exists or the path is below the home folder. The first rank
    /// of a job locks the folder for all ranks. Files have no names, so several engines of a process do not need
    /// separate folders.
    pub fn open(path: &Path, is_first: bool) -> Result<Arc<Self>> {
        let wrong = |problem: String| Error::from(OffloadError::Folder { path: path.to_owned(), problem });
        let found = match std::fs::metadata(path) {
            Err(e) if e.kind() == ErrorKind::NotFound => create(path).and_then(|()| std::fs::metadata(path)),
            found => found,
        };
        let metadata = found.map_err(|e| match e.kind() {
            ErrorKind::NotFound => wrong(format!(
                "neither this folder nor its parent exists; create it (mkdir -p {}), or correct nvme_path",
                path.display()
            )),
            _ => wrong(format!("{e}; correct nvme_path")),
        })?;
        if !metadata.is_dir() {
            return Err(wrong("it is a file; nvme_path must name a folder".into()));
        }
        drop(unnamed_file(path)?);
        let lock = if is_first { Some(lock(path)?) } else { None };
        let memory = TmpfsMemory { free: available_memory(), free_now: available_memory, is_full: false.into() };
        let folder = Self {
            path: path.to_owned(),
            _lock: lock,
            granted: 0.into(),
            requested: 0.into(),
            is_full: false.into(),
            free: free(path),
            device: metadata.dev(),
            memory: is_memory(path).then_some(memory),
        };
        // Files of another engine of this process are not leftovers of a dead job.
        if folder._lock.as_ref().is_some_and(|lock| Arc::strong_count(lock) == 1) {
            folder.remove_leftovers();
        }
        if is_first && folder.memory.is_some() {
            emit(&format!(
                "warning: {} is on tmpfs: data offloaded to it stays in memory; set nvme_path to a folder on a disk",
                path.display()
            ));
        }
        Ok(Arc::new(folder))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates a new file that has no name.
    pub fn unnamed_file(&self) -> Result<File> {
        unnamed_file(&self.path)
    }

    /// Removes the files of a job that died at a moment when they had names.
    fn remove_leftovers(&self) {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        for entry in entries.filter(|e| e.file_name().to_string_lossy().starts_with(FILE_PREFIX)) {
            // These files are empty, so a file that cannot be removed occupies no space.
            let _ = std::fs::remove_file(entry.path());
        }
    }

    /// Requests `bytes` bytes that a file is about to reserve. Returns whether the file may try to reserve them. On
    /// tmpfs, it may not if the bytes would not fit in memory: the system would grant them, and later kill a process
    /// for lack of memory.
    pub fn ask_for(&self, bytes: u64) -> bool {
        self.requested.fetch_add(bytes, Ordering::Relaxed);
        let Some(TmpfsMemory { free, free_now, is_full }) = &self.memory else { return true };
        // `free` is 0 if the system does not report it.
        let fits = *free == 0 || bytes.saturating_add(free / TMPFS_RESERVE_DIVISOR) <= free_now();
        is_full.fetch_or(!fits, Ordering::Relaxed);
        fits
    }

    /// Counts bytes that a file has received.
    pub fn count_granted(&self, bytes: u64) {
        self.granted.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the number of bytes that this rank's files have reserved.
    pub fn reserved(&self) -> u64 {
        self.granted.load(Ordering::Relaxed)
    }

    /// Returns the space that this rank's files have requested so far.
    pub(super) fn demand(&self) -> SpaceDemand {
        let load = |bytes: &AtomicU64| bytes.load(Ordering::Relaxed);
        SpaceDemand {
            device: self.device,
            free: self.free,
            requested: load(&self.requested),
            granted: load(&self.granted),
            is_full: self.is_full.load(Ordering::Relaxed),
            memory: self.memory.as_ref().filter(|m| m.is_full.load(Ordering::Relaxed)).map_or(0, |m| m.free),
        }
    }

    /// Records that a file's request was refused. Returns the error for this rank only.
    pub fn refused(&self) -> Error {
        self.is_full.store(true, Ordering::Relaxed);
        let demand = self.demand();
        self.too_small(SpaceDemand { free: demand.granted.saturating_add(free(&self.path)), ..demand })
    }

    /// Returns the error for files that have requested more than they have received.
    pub(super) fn too_small(&self, demand: SpaceDemand) -> Error {
        let SpaceDemand { free, requested, granted, memory, .. } = demand;
        let path = self.path.clone();
        if memory > 0 {
            return OffloadError::Memory { path, needed: requested, available: memory }.into();
        }
        // With a quota, or if another process takes the free space, less is available than was free.
        let available = if free < requested { free } else { granted };
        OffloadError::Space { path, needed: requested, available }.into()
    }

    /// Returns the number of bytes that the file system can give to this rank's files, including those that they
    /// already have.
    pub fn available(&self) -> u64 {
        free(&self.path).saturating_add(self.reserved())
    }
}

/// Creates a new file in `folder` that has no name.
fn unnamed_file(folder: &Path) -> Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let reason = match rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => return Ok(file.into()),
        Err(rustix::io::Errno::ACCESS | rustix::io::Errno::ROFS) => "it is read-only for this user".into(),
        Err(_) => match tempfile::Builder::new().prefix(FILE_PREFIX).tempfile_in(folder) {
            Ok(file) => return Ok(file.into_file()),
            // The error's own text names a file that the user does not know.
            Err(error) => error.kind().to_string(),
        },
    };
    let problem = format!("no file can be created in it: {reason}; use a writable folder");
    Err(OffloadError::Folder { path: folder.to_owned(), problem }.into())
}

/// Creates the folder if its parent exists, or if the path is below the user's home. Elsewhere, a missing parent may
/// mean that a disk is not mounted or that the path is wrong.
fn create(path: &Path) -> std::io::Result<()> {
    let parent = folder_of(path);
    if !parent.is_dir() && std::env::home_dir().is_some_and(|home| home.is_dir() && path.starts_with(home)) {
        DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        // Another rank may have created it.
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(e),
        Ok(()) => {
            emit(&format!("offload: created the folder {} (nvme_path)", path.display()));
            Ok(())
        }
    }
}

fn lock(path: &Path) -> Result<Arc<FolderLock>> {
    let wrong = |problem: String| Error::from(OffloadError::Folder { path: path.to_owned(), problem });
    let result = FolderLock::acquire_for_process(path, LOCK_RELEASE_TIMEOUT).map_err(|e| {
        wrong(format!("its file {LOCK} cannot be locked: {e}; another user may own it, so use your own folder"))
    })?;
    match result {
        Ok(lock) if lock.is_effective() => Ok(lock),
        Ok(_) => Err(wrong("its file system does not support locks; use a folder on a local disk".into())),
        Err(owner) => Err(OffloadError::Busy { path: path.to_owned(), owner }.into()),
    }
}

/// Returns the number of bytes that this user can still write to the disk of `path`, or of its nearest existing
/// ancestor; 0 if the system does not report this number.
#[doc(hidden)]
pub fn free(path: &Path) -> u64 {
    let existing = path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("."));
    rustix::fs::statvfs(existing).map_or(0, |s| s.f_bavail.saturating_mul(s.f_frsize))
}

/// Returns whether the files in a folder are in memory.
#[doc(hidden)]
pub fn is_memory(path: &Path) -> bool {
    const TMPFS: i64 = 0x0102_1994;
    const RAMFS: i64 = 0x8584_58f6;
    #[allow(clippy::useless_conversion, reason = "the field's width differs between systems")]
    rustix::fs::statfs(path).is_ok_and(|s| [TMPFS, RAMFS].contains(&i64::from(s.f_type)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::memory::{MemoryKind, MemoryLedger};
    use crate::offload::file_arena::FileArena;

    #[test]
    fn files_in_memory_that_would_not_fit_are_refused_before_they_take_any() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let folder = OffloadFolder::open(dir.path(), true).unwrap();
        let mut folder = Arc::into_inner(folder).unwrap();
        assert!(folder.memory.as_ref().unwrap().free > 0);
        // The test pretends that little memory is free.
        folder.memory = Some(TmpfsMemory { free: 1 << 20, free_now: || 1 << 20, is_full: false.into() });
        let arena =
            FileArena::create(&Arc::new(folder), MemoryKind::Gradients, "gradients", &MemoryLedger::default()).unwrap();
        arena.reserve(512 << 10).unwrap();
        let error = arena.reserve(1 << 20).unwrap_err();
        assert!(matches!(error, Error::Offload(OffloadError::Memory { needed: 0x18_0000, available: 0x10_0000, .. })));
        let text = error.to_string().replace(dir.path().to_str().unwrap(), "FOLDER");
        insta::assert_snapshot!(text, @"cannot offload to FOLDER: it is on tmpfs, so files there stay in memory, and they need 1572864 bytes or more, but 1048576 were free; set nvme_path to a folder on a disk");
    }

    #[test]
    fn a_folder_is_created_in_one_that_is_there_and_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one");
        drop(OffloadFolder::open(&path, true).unwrap());
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
        let text = OffloadFolder::open(&dir.path().join("no/such"), true).unwrap_err().to_string();
        insta::assert_snapshot!(text.replace(dir.path().to_str().unwrap(), "DIR"), @"cannot offload to DIR/no/such: neither this folder nor its parent exists; create it (mkdir -p DIR/no/such), or correct nvme_path");
        assert!(!dir.path().join("no").exists());
    }
}
