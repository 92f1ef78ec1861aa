//! The folder of `nvme_path`: looked at before anything is built, locked against other jobs, and asked for space.

use crate::error::{Error, OffloadError, Result};
use crate::notice::say;
use crate::util::lock as unpoisoned_lock;
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Beginning of the names of files on file systems that know no files without a name. They have one for a moment.
const PREFIX: &str = ".candle-zero-offload-";

/// A folder for files of offloaded state.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// Locked by the first rank as long as this lives; the engines of a process share the lock.
    _lock: Option<Arc<Lock>>,
    /// Bytes that this rank's files have been given, and bytes that they have asked for.
    got: AtomicU64,
    asked: AtomicU64,
    /// Whether a file was refused what it asked for.
    is_full: AtomicBool,
    /// Bytes that were free when it was opened, and the number of the file system.
    free: u64,
    device: u64,
}

/// The space that a rank's files have asked of a folder: ranks exchange it to find out how much is missing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Demand {
    pub device: u64,
    pub free: u64,
    pub asked: u64,
    pub got: u64,
    pub is_full: bool,
}

impl Folder {
    /// Looks at `path`; the first rank of a job locks it for all of them. Files have no names, so several engines of a
    /// process have no need of folders of their own.
    pub fn open(path: &Path, is_first: bool) -> Result<Arc<Self>> {
        let wrong = |problem: String| Error::from(OffloadError::Folder { path: path.to_owned(), problem });
        let metadata = match std::fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(wrong("there is no such folder; create it, or correct nvme_path".into()));
            }
            Err(e) => return Err(wrong(format!("{e}; correct nvme_path"))),
        };
        if !metadata.is_dir() {
            return Err(wrong("it is a file; nvme_path names a folder".into()));
        }
        let lock = if is_first { Some(lock(path, &metadata)?) } else { None };
        let folder = Self {
            path: path.to_owned(),
            _lock: lock,
            got: 0.into(),
            asked: 0.into(),
            is_full: false.into(),
            free: free(path),
            device: metadata.dev(),
        };
        drop(folder.unnamed_file()?);
        if is_first {
            folder.remove_leftovers();
            if is_memory(path) {
                say(&format!(
                    "warning: {} is on tmpfs: what is offloaded to it stays in memory; let nvme_path name a folder on \
                     a disk",
                    path.display()
                ));
            }
        }
        Ok(Arc::new(folder))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A new file that has no name.
    pub fn unnamed_file(&self) -> Result<File> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let why = match rustix::fs::open(&self.path, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => return Ok(file.into()),
            Err(rustix::io::Errno::ACCESS | rustix::io::Errno::ROFS) => "it is read-only for this user".into(),
            Err(_) => match tempfile::Builder::new().prefix(PREFIX).tempfile_in(&self.path) {
                Ok(file) => return Ok(file.into_file()),
                // Its own text names a file that the user has not asked for.
                Err(error) => error.kind().to_string(),
            },
        };
        let problem = format!("no file can be created in it: {why}; give a folder that can be written to");
        Err(OffloadError::Folder { path: self.path.clone(), problem }.into())
    }

    /// Files of a job that died in the moment in which they had a name.
    fn remove_leftovers(&self) {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        for entry in entries.filter(|e| e.file_name().to_string_lossy().starts_with(PREFIX)) {
            // Whoever cannot be removed takes no space.
            let _ = std::fs::remove_file(entry.path());
        }
    }

    /// A file is about to reserve `bytes`.
    pub fn ask_for(&self, bytes: u64) {
        self.asked.fetch_add(bytes, Ordering::Relaxed);
    }

    /// It has got them.
    pub fn got(&self, bytes: u64) {
        self.got.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes that this rank's files have reserved.
    pub fn reserved(&self) -> u64 {
        self.got.load(Ordering::Relaxed)
    }

    /// The space that this rank's files have asked for so far.
    pub(super) fn demand(&self) -> Demand {
        let load = |bytes: &AtomicU64| bytes.load(Ordering::Relaxed);
        Demand {
            device: self.device,
            free: self.free,
            asked: load(&self.asked),
            got: load(&self.got),
            is_full: self.is_full.load(Ordering::Relaxed),
        }
    }

    /// A file was refused what it asked for: the error for this rank alone.
    pub fn refused(&self) -> Error {
        self.is_full.store(true, Ordering::Relaxed);
        let Demand { asked, got, .. } = self.demand();
        self.too_small(asked, got.saturating_add(free(&self.path)), got)
    }

    /// The error of files that need `needed` bytes, where `got` of `available` bytes were to be had.
    pub(super) fn too_small(&self, needed: u64, available: u64, got: u64) -> Error {
        // With a quota, or where somebody else takes what is free, less can be had than what is free.
        let available = if available < needed { available } else { got };
        OffloadError::Space { path: self.path.clone(), needed, available }.into()
    }

    /// Bytes that the file system can give to this rank's files, those included that they have.
    pub fn available(&self) -> u64 {
        free(&self.path).saturating_add(self.reserved())
    }
}

/// Bytes that this user may still write to the disk of `path`; 0 where it does not say.
pub(crate) fn free(path: &Path) -> u64 {
    rustix::fs::statvfs(path).map_or(0, |s| s.f_bavail.saturating_mul(s.f_frsize))
}

/// A folder that this job has locked.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    /// Closing the file is not enough: a process that another thread is starting holds a copy of it until it runs its program.
    fn drop(&mut self) {
        // An error leaves the lock to the end of the last copy.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// The lock of this process on a folder: a new one, or that of another engine.
fn lock(path: &Path, metadata: &std::fs::Metadata) -> Result<Arc<Lock>> {
    type Locks = BTreeMap<(u64, u64), Weak<Lock>>;
    static LOCKS: Mutex<Locks> = Mutex::new(Locks::new());
    let mut locks = unpoisoned_lock(&LOCKS);
    locks.retain(|_, lock| lock.strong_count() > 0);
    let key = (metadata.dev(), metadata.ino());
    if let Some(known) = locks.get(&key).and_then(Weak::upgrade) {
        return Ok(known);
    }
    let new = Arc::new(new_lock(path, metadata)?);
    locks.insert(key, Arc::downgrade(&new));
    Ok(new)
}

fn new_lock(path: &Path, metadata: &std::fs::Metadata) -> Result<Lock> {
    let wrong = |problem: String| Error::from(OffloadError::Folder { path: path.to_owned(), problem });
    let folder = File::open(path).map_err(|e| wrong(format!("{e}; give a folder that this user may open")))?;
    match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Lock(folder)),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(OffloadError::Busy { path: path.to_owned(), owner: owner_of_lock(metadata.ino()) }.into())
        }
        Err(errno) => Err(wrong(format!("it cannot be locked: {errno}; give a folder on a local disk"))),
    }
}

/// The process that holds a lock on the file of that number.
fn owner_of_lock(inode: u64) -> Option<u32> {
    // "1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF"
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    let suffix = format!(":{inode}");
    let mut owners = locks.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_it = words.get(1) == Some(&"FLOCK") && words.get(5).is_some_and(|w| w.ends_with(&suffix));
        if is_it { words.get(4)?.parse().ok() } else { None }
    });
    // File systems number their files alike, and not all show there the device that they are on: of two, neither is
    // named.
    owners.next().filter(|_| owners.next().is_none())
}

/// Whether the files of a folder lie in memory.
pub(crate) fn is_memory(path: &Path) -> bool {
    const TMPFS: i64 = 0x0102_1994;
    const RAMFS: i64 = 0x8584_58f6;
    #[allow(clippy::useless_conversion, reason = "the field's width differs between systems")]
    rustix::fs::statfs(path).is_ok_and(|s| [TMPFS, RAMFS].contains(&i64::from(s.f_type)))
}
