//! The folder of a Weights & Biases run, and the file in it by which a job finds the run that it continues.

use super::super::RunDescription;
use super::records::WandbRunIdentity;
use super::transaction_log::TransactionLog;
use crate::error::{Error, Result};
use crate::files::{self, FolderLock, FolderLockOutcome};
use crate::util::fnv1a;
use crate::wall_clock::stamp;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The prefix of the folders' names.
const PREFIX: &str = "offline-run-";
/// The file by which a job finds the run that it continues.
const ORIGIN: &str = "candle-zero.json";
/// The maximum size of that file.
const MAX_ORIGIN: u64 = 64 << 10;
/// The maximum length of an id, the same as in wandb.
const MAX_ID: usize = 64;
/// The time for which a killed process may still hold the lock of its run.
const LOCK_RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// The contents of [`ORIGIN`], by which a job finds the run that it continues.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct ResumeInfo {
    id: String,
    display_name: String,
    start: f64,
    /// The name of the run, even if wandb shows a different one.
    name: String,
    job: String,
    restart: u64,
    /// A hash of the path of the folder of checkpoints, if one has been saved. A path may contain a secret.
    checkpoints: Option<u64>,
}

impl ResumeInfo {
    fn read(folder: &Path) -> Option<Self> {
        let bytes = files::read(folder.join(ORIGIN), MAX_ORIGIN).ok()?;
        let origin: Self = serde_json::from_slice(&bytes).ok()?;
        is_id(&origin.id).then_some(origin)
    }
}

/// The folder of a run that this process writes. It is locked as long as this value exists.
#[derive(Debug)]
pub(super) struct WandbRunFolder {
    path: PathBuf,
    identity: WandbRunIdentity,
    origin: ResumeInfo,
    _lock: FolderLock,
}

impl WandbRunFolder {
    /// Creates the folder of a new run in `folder`, and the empty file of its log.
    pub fn create(folder: &Path, identity: &WandbRunIdentity, run: &RunDescription) -> Result<(Self, File)> {
        /// The number of start times, one second apart, that are tried in the folder's name. Runs whose id the
        /// environment gives may begin in the same second.
        const MAX_SECONDS: u32 = 100;
        files::sweep_unfinished(folder);
        for offset in 0..MAX_SECONDS {
            let stamp = stamp(identity.start + f64::from(offset)).replace('-', "_");
            let path = folder.join(format!("{PREFIX}{stamp}-{}", identity.id));
            match std::fs::create_dir(&path) {
                Ok(()) => return Self::begin_in(path, identity, run),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(source) => return Err(Error::Io { action: "create", path, source }),
            }
        }
        let text = format!("there are already {MAX_SECONDS} runs with the id {}", identity.id);
        let source = std::io::Error::new(ErrorKind::AlreadyExists, text);
        Err(Error::Io { action: "create a run in", path: folder.to_owned(), source })
    }

    fn begin_in(path: PathBuf, identity: &WandbRunIdentity, run: &RunDescription) -> Result<(Self, File)> {
        let io_error = |source| Error::Io { action: "write to", path: path.clone(), source };
        let FolderLockOutcome::Held(lock) = FolderLock::acquire(&path, LOCK_RELEASE_TIMEOUT).map_err(io_error)? else {
            return Err(io_error(std::io::Error::new(ErrorKind::WouldBlock, "another process has locked it")));
        };
        let origin = ResumeInfo {
            id: identity.id.clone(),
            display_name: identity.display_name.clone(),
            start: identity.start,
            name: run.name.clone(),
            job: run.job.clone(),
            restart: run.restart,
            checkpoints: None,
        };
        // wandb's own runs have this folder for files that are uploaded with them.
        std::fs::create_dir(path.join("files")).map_err(io_error)?;
        let folder = Self { identity: identity.clone(), origin, _lock: lock, path };
        folder.write_origin()?;
        let path = folder.log_path();
        let file = OpenOptions::new().read(true).append(true).create_new(true).open(&path);
        Ok((folder, file.map_err(|source| Error::Io { action: "create", path, source })?))
    }

    /// Returns the folders in `folder` of the runs that `run` may continue, best first: those that saved to the folder
    /// from which a checkpoint was loaded, newest first, then those of the same job before its restart, oldest first.
    /// Folders to which another process writes are left out.
    pub fn continued_by<'a>(run: &'a RunDescription, folder: &Path) -> impl Iterator<Item = Self> + 'a {
        let loaded = run.loaded_from.as_ref().map(|folder| path_hash(folder));
        let mut candidates: Vec<(PathBuf, ResumeInfo)> = std::fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX))
            .filter_map(|entry| Some((entry.path(), ResumeInfo::read(&entry.path())?)))
            // A run that this job has written since its last restart belongs to another engine of this process.
            .filter(|(_, origin)| origin.name == run.name && (origin.job != run.job || origin.restart < run.restart))
            .collect();
        candidates.sort_by(|a, b| a.0.file_name().cmp(&b.0.file_name()));
        let same_checkpoints =
            candidates.iter().rev().filter(|(_, origin)| loaded.is_some() && origin.checkpoints == loaded);
        let same_job = candidates.iter().filter(|(_, origin)| origin.job == run.job);
        let paths: Vec<PathBuf> = same_checkpoints.chain(same_job).map(|(path, _)| path.clone()).collect();
        paths.into_iter().filter_map(Self::lock)
    }

    fn lock(path: PathBuf) -> Option<Self> {
        let Ok(FolderLockOutcome::Held(lock)) = FolderLock::acquire(&path, LOCK_RELEASE_TIMEOUT) else { return None };
        files::remove_unfinished(&path);
        // Another process may have continued the run in the meantime.
        let origin = ResumeInfo::read(&path)?;
        let identity =
            WandbRunIdentity { id: origin.id.clone(), display_name: origin.display_name.clone(), start: origin.start };
        Some(Self { path, identity, origin, _lock: lock })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn identity(&self) -> &WandbRunIdentity {
        &self.identity
    }

    /// Returns the path of the log.
    pub fn log_path(&self) -> PathBuf {
        self.path.join(format!("run-{}.wandb", self.identity.id))
    }

    /// Opens the log to continue it after the last record that is kept. Returns `None` if there is no log, or if the
    /// file is not a log.
    pub fn resume_log(&self, is_kept: impl FnMut(&[u8]) -> bool) -> Result<Option<TransactionLog>> {
        let path = self.log_path();
        let open = || {
            // A link may lead anywhere and is not followed. A pipe must not block.
            let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
            let file =
                OpenOptions::new().append(true).read(true).custom_flags(flags.bits().cast_signed()).open(&path)?;
            files::check_regular_file(&file.metadata()?)?;
            TransactionLog::resume(file, is_kept)
        };
        match open() {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            result => result.map_err(|source| Error::Io { action: "continue", path, source }),
        }
    }

    /// Records which job continues the run.
    pub fn remember(&mut self, run: &RunDescription) -> Result<()> {
        (self.origin.job, self.origin.restart) = (run.job.clone(), run.restart);
        self.write_origin()
    }

    /// Records the folder in which the job saves checkpoints.
    pub fn remember_checkpoints(&mut self, folder: &Path) -> Result<()> {
        let hash = Some(path_hash(folder));
        if std::mem::replace(&mut self.origin.checkpoints, hash) == hash {
            return Ok(());
        }
        self.write_origin()
    }

    fn write_origin(&self) -> Result<()> {
        let path = self.path.join(ORIGIN);
        let text = serde_json::to_vec_pretty(&self.origin).expect("text and numbers are JSON");
        match files::write_atomically(&path, files::UNFINISHED, &text) {
            Ok(_) => Ok(()),
            Err(source) => Err(Error::Io { action: "write", path, source }),
        }
    }
}

/// Returns a hash of a folder's path with all links resolved, or of the address of an object store.
fn path_hash(folder: &Path) -> u64 {
    let path = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    fnv1a(path.as_os_str().as_encoded_bytes())
}

/// Returns whether a text can be the id of a run, which becomes part of file names.
pub(super) fn is_id(text: &str) -> bool {
    (1..=MAX_ID).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
}

/// Returns a new id: eight random letters and digits, like those of wandb.
pub(super) fn new_id() -> String {
    const LETTERS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    // A new hasher has random keys.
    let mut random = std::hash::BuildHasher::hash_one(&std::collections::hash_map::RandomState::new(), 0);
    let mut letter = || {
        let letter = LETTERS[(random % 36) as usize];
        random /= 36;
        char::from(letter)
    };
    (0..8).map(|_| letter()).collect()
}
