//! Locks for folders that belong to one job, and for work that one process does on behalf of all. A lock is an `flock`
//! on a file.
//!
//! The file exists as long as the lock is held. Processes that only open or lock the folder itself do not interfere. A
//! killed job leaves a file that no process has locked.

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// The name of the lock file in a locked folder.
pub(crate) const LOCK: &str = ".candle-zero.lock";

/// The folders that this process has locked with [`FolderLock::acquire_for_process`], so that its engines share the
/// locks.
static SHARED: Mutex<Vec<Weak<FolderLock>>> = Mutex::new(Vec::new());

/// A file that this process has locked. It is removed when this value is dropped, if the file system supports locks.
#[derive(Debug)]
pub struct FileLock {
    file: File,
    path: PathBuf,
    /// False if the file system does not support locks.
    is_effective: bool,
}

/// A folder that this process has locked. It is unlocked when this value is dropped.
#[derive(Debug)]
pub struct FolderLock {
    file: FileLock,
    /// The device and inode of the folder.
    folder: (u64, u64),
}

/// The outcome of an attempt to lock a folder.
pub enum FolderLockOutcome {
    /// This process holds the lock.
    Held(FolderLock),
    /// Another process holds the lock. The value is its id, if the system reports it.
    Busy(Option<u32>),
}

impl FolderLock {
    /// Locks `folder`, and waits for at most `timeout` if another process holds the lock.
    ///
    /// # Errors
    /// The lock file in the folder cannot be created or opened, or is not empty.
    pub fn acquire(folder: &Path, timeout: Duration) -> Result<FolderLockOutcome> {
        let start = Instant::now();
        loop {
            let outcome = Self::try_once(folder)?;
            match outcome {
                Some(FolderLockOutcome::Busy(_)) | None if start.elapsed() < timeout => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Some(outcome) => return Ok(outcome),
                None => return Ok(FolderLockOutcome::Busy(None)),
            }
        }
    }

    /// Locks `folder` for this process: all callers in the process share the lock. The inner error is the id of another
    /// process that holds the lock, if the system reports it.
    ///
    /// # Errors
    /// The same as [`acquire`](Self::acquire).
    pub fn acquire_for_process(
        folder: &Path,
        timeout: Duration,
    ) -> Result<std::result::Result<Arc<Self>, Option<u32>>> {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let folder_id = folder_id(folder)?;
        if let Some(lock) = shared.iter().filter_map(Weak::upgrade).find(|lock| lock.folder == folder_id) {
            return Ok(Ok(lock));
        }
        match Self::acquire(folder, timeout)? {
            FolderLockOutcome::Busy(owner) => Ok(Err(owner)),
            FolderLockOutcome::Held(held) => {
                let held = Arc::new(held);
                shared.retain(|lock| lock.strong_count() > 0);
                shared.push(Arc::downgrade(&held));
                Ok(Ok(held))
            }
        }
    }

    /// Returns whether this is the lock of the folder that is now at this path.
    pub fn locks(&self, folder: &Path) -> bool {
        folder_id(folder).is_ok_and(|folder_id| folder_id == self.folder)
    }

    /// Returns whether the file system supports locks. If it does not, other processes are not kept out.
    pub fn is_effective(&self) -> bool {
        self.file.is_effective
    }

    /// Tries once to lock the folder. Returns `None` if the lock file was removed in the meantime.
    fn try_once(folder: &Path) -> Result<Option<FolderLockOutcome>> {
        let operation = FlockOperation::NonBlockingLockExclusive;
        Ok(match FileLock::attempt(&folder.join(LOCK), operation)? {
            FileLockOutcome::Held(file) => Some(FolderLockOutcome::Held(Self { file, folder: folder_id(folder)? })),
            FileLockOutcome::Busy(inode) => Some(FolderLockOutcome::Busy(owner(inode))),
            FileLockOutcome::Gone => None,
        })
    }
}

/// The outcome of an attempt to lock a file.
pub(super) enum FileLockOutcome {
    Held(FileLock),
    /// Another process holds the lock. The value is the inode of the file.
    Busy(u64),
    /// The file was removed in the meantime.
    Gone,
}

impl FileLock {
    /// Locks the file at `path`, and waits as long as another process holds it.
    ///
    /// # Errors
    /// The file cannot be created or opened, or is not empty.
    pub fn wait(path: &Path) -> Result<Self> {
        loop {
            match Self::attempt(path, FlockOperation::LockExclusive) {
                Ok(FileLockOutcome::Held(held)) => return Ok(held),
                Ok(FileLockOutcome::Busy(_) | FileLockOutcome::Gone) => {}
                // A signal arrived, which is handled elsewhere.
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Tries to lock the file at `path`, which is created if it does not exist.
    ///
    /// # Errors
    /// The file cannot be created or opened, or is not empty. A file with contents is not a lock.
    pub(super) fn attempt(path: &Path, operation: FlockOperation) -> Result<FileLockOutcome> {
        // A link may belong to another user and is not followed. A pipe must not block.
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let mut open = OpenOptions::new();
        open.read(true).write(true).create(true).mode(0o600).custom_flags(flags.bits().cast_signed());
        let file = match open.open(path) {
            // The file was removed while it was being opened.
            Err(e) if e.kind() == ErrorKind::NotFound && super::folder_of(path).is_dir() => {
                return Ok(FileLockOutcome::Gone);
            }
            opened => opened?,
        };
        let found = file.metadata()?;
        super::check_regular_file(&found)?;
        if found.len() > 0 {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                "it is not empty, so it is not a lock file and is not removed",
            ));
        }
        let is_effective = match flock(&file, operation) {
            Ok(()) => true,
            Err(Errno::WOULDBLOCK) => return Ok(FileLockOutcome::Busy(found.ino())),
            Err(errno) if lacks_locks(errno) => false,
            Err(errno) => return Err(errno.into()),
        };
        // If the previous holder has removed the file, this lock has no effect.
        match path.symlink_metadata() {
            Ok(now) if (now.dev(), now.ino()) == (found.dev(), found.ino()) => {}
            _ => return Ok(FileLockOutcome::Gone),
        }
        Ok(FileLockOutcome::Held(Self { file, path: path.to_owned(), is_effective }))
    }
}

/// Returns whether an error of `flock` means that the file system has no locks.
#[doc(hidden)]
pub fn lacks_locks(errno: Errno) -> bool {
    matches!(errno, Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL)
}

/// Removes lock files that dead jobs have left in a folder: empty, unlocked files of this user whose names match.
pub fn sweep_locks(folder: &Path, is_of_lock: impl Fn(&OsStr) -> bool) {
    let uid = rustix::process::geteuid().as_raw();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_lock = |found: std::fs::Metadata| found.is_file() && found.len() == 0 && found.uid() == uid;
        if is_of_lock(&entry.file_name()) && entry.metadata().is_ok_and(is_lock) {
            // Dropping the lock removes the file.
            drop(FileLock::attempt(&entry.path(), FlockOperation::NonBlockingLockExclusive));
        }
    }
}

impl Drop for FileLock {
    /// Unlocks explicitly, because closing the file is not enough: a process that another thread is starting has a copy
    /// of the open file until it executes its program.
    fn drop(&mut self) {
        // If the file cannot be removed, it remains, unlocked. If it cannot be unlocked, the lock lasts until the last
        // copy of the open file is closed.
        if self.is_effective {
            _ = std::fs::remove_file(&self.path);
        }
        _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// Returns the device and inode of a folder.
fn folder_id(folder: &Path) -> Result<(u64, u64)> {
    folder.metadata().map(|m| (m.dev(), m.ino()))
}

/// Returns the process that holds a lock on the file with that inode, if the system reports it.
pub(crate) fn owner(inode: u64) -> Option<u32> {
    // A read into a large buffer returns a page of locks, all as of the same moment. Between two reads, locks move in
    // the list, and a lock can be missed or seen twice.
    let mut locks = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    let mut file = File::open("/proc/locks").ok()?;
    loop {
        match file.read(&mut buffer).ok()? {
            0 => break,
            count => locks.extend_from_slice(&buffer[..count]),
        }
    }
    // "1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF"
    let suffix = format!(":{inode}");
    let locks = String::from_utf8_lossy(&locks);
    let mut owners: Vec<u32> = locks
        .lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let is_match = words.get(1) == Some(&"FLOCK") && words.get(5).is_some_and(|w| w.ends_with(&suffix));
            if is_match { words.get(4)?.parse().ok() } else { None }
        })
        .collect();
    owners.dedup();
    // Inodes are unique only per file system, and this list does not show the device of every file system. Therefore,
    // if locks of two processes match, neither process is reported.
    if let [owner] = owners[..] { Some(owner) } else { None }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn held(folder: &Path) -> Option<FolderLock> {
        match FolderLock::acquire(folder, Duration::ZERO).unwrap() {
            FolderLockOutcome::Held(held) => Some(held),
            FolderLockOutcome::Busy(owner) => {
                assert_eq!(owner, Some(std::process::id()));
                None
            }
        }
    }

    #[test]
    fn a_folder_is_held_once_and_nothing_stays_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, path) = (File::open(dir.path()).unwrap(), dir.path().join(LOCK));
        flock(&folder, FlockOperation::NonBlockingLockExclusive).unwrap();
        let first = held(dir.path()).unwrap();
        assert!(first.is_effective());
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        assert!(held(dir.path()).is_none());
        drop(first);
        assert!(!path.exists());
        // A file left by a killed job.
        std::fs::write(&path, "").unwrap();
        assert!(held(dir.path()).is_some());
        assert!(!path.exists());
    }

    #[test]
    fn those_who_share_a_folder_hold_it_until_the_last_lets_go() {
        let dir = tempfile::tempdir().unwrap();
        let share = || FolderLock::acquire_for_process(dir.path(), Duration::ZERO).unwrap().unwrap();
        let (first, second) = (share(), share());
        drop(first);
        assert!(held(dir.path()).is_none());
        drop(second);
        assert!(held(dir.path()).is_some());
    }

    #[test]
    fn a_file_is_held_by_one_after_another_and_gone_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.lock");
        let inside = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let held = FileLock::wait(&path).unwrap();
                        assert!(held.is_effective);
                        assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        std::thread::yield_now();
                        inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(!path.exists());
    }

    #[test]
    fn the_owner_of_a_lock_is_known_while_others_lock_and_unlock() {
        let dir = tempfile::tempdir().unwrap();
        let first = held(dir.path()).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for name in ["x.lock", "y.lock"] {
                let (path, stop) = (dir.path().join(name), &stop);
                scope.spawn(move || {
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        drop(FileLock::wait(&path).unwrap());
                    }
                });
            }
            let known = (0..500).filter(|_| owner(first.file.file.metadata().unwrap().ino()).is_some()).count();
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(known, 500);
        });
    }

    #[test]
    fn a_link_in_its_place_is_not_followed_and_a_pipe_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(LOCK);
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &path).unwrap();
        assert!(FolderLock::acquire(dir.path(), Duration::ZERO).is_err());
        std::fs::remove_file(&path).unwrap();
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).unwrap();
        assert!(FolderLock::acquire(dir.path(), Duration::ZERO).is_err());
    }
}
