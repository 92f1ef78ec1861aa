//! The folder of checkpoints: one folder per tag, and `latest`, a file that contains the newest tag.
//!
//! ```text
//!   .candle-zero-saving-TAG/   files written and synced by all ranks, then the manifest
//!   .candle-zero-latest-XXX    the tag, written and synced
//!   TAG/                       the folder above, renamed; then its parent is synced
//!   latest                     the file above, renamed; the last action
//! ```
//!
//! A folder under its final name is always complete. Files that a dead job was writing are removed by the next job that
//! saves there, before its first step. A job that dies before its first checkpoint becomes the latest leaves
//! `.candle-zero-latest-XXX` behind, which is used if there is no `latest`.
//!
//! A writer holds a lock on what it writes. On a file system without locks, a file in the folder names the writing
//! process, and the folder stays unless that process is known to be dead.

use super::manifest::{FileEntry, MANIFEST, Manifest};
use crate::error::{CheckpointError, Error, Result};
use crate::files::{WRITING, folder_of, new_temp_file, read_text, sweep, sync_folder};
use crate::notice::warn;
use crate::util::{list, lock};
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Result as IoResult, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tempfile::NamedTempFile;

pub(super) const LATEST: &str = "latest";
const SAVING_PREFIX: &str = ".candle-zero-saving-";
const NEW_LATEST_PREFIX: &str = ".candle-zero-latest-";
/// The prefix of files that ranks use to determine which of them share a folder.
pub(super) const VISIBILITY_PREFIX: &str = ".candle-zero-seen-";
/// The prefix of folders with data from other hosts during a load.
pub(super) const FETCHED_PREFIX: &str = ".candle-zero-fetched-";
/// The prefix of a checkpoint that is being replaced, on a file system that cannot exchange names.
const REPLACED_PREFIX: &str = ".candle-zero-replaced-";
/// The file that names the process that writes to the folder, on a file system without locks.
const OWNER_FILE: &str = ".candle-zero-owner";
/// The maximum size of [`OWNER_FILE`] in bytes.
const MAX_OWNER_BYTES: u64 = 256;
/// The suffix that older versions used instead of [`REPLACED_PREFIX`].
const OLD_REPLACED_SUFFIX: &str = ".replaced";

/// The maximum size of `latest` in bytes, with room for what editors add.
pub(super) const MAX_LATEST_BYTES: u64 = 4096;

/// The time for which a killed process may still hold its locks.
const LOCK_RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum length of a tag in bytes: file names have at most 255, and [`REPLACED_PREFIX`] comes before the tag.
pub(super) const MAX_TAG_BYTES: usize = 200;

/// Returns the folder in which `tag` is written before it is complete.
pub(super) fn unfinished_path(dir: &Path, tag: &str) -> PathBuf {
    dir.join(format!("{SAVING_PREFIX}{tag}"))
}

/// Returns an error for a tag that cannot be the name of a folder in `dir`.
pub(super) fn check_tag(dir: &Path, tag: &str) -> Result<()> {
    let mut parts = Path::new(tag).components();
    let is_name = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    let is_plain = !tag.contains(|c: char| c == '/' || c.is_control()) && !tag.starts_with('.') && tag.trim() == tag;
    if is_name && is_plain && tag != LATEST && tag.len() <= MAX_TAG_BYTES {
        return Ok(());
    }
    let problem = format!(
        "the tag {tag:?} cannot be the name of a folder in it; give a name without slashes, leading dots or \
         surrounding spaces, of at most {MAX_TAG_BYTES} bytes, such as global_step100"
    );
    Err(CheckpointError::Unusable { path: dir.to_owned(), problem }.into())
}

/// Creates an empty folder for `tag`. No other process clears the folder as long as the returned file is open.
/// Leftovers of unfinished saves are removed.
pub(super) fn begin(dir: &Path, tag: &str) -> Result<File> {
    let (path, from) = (dir.join(tag), unfinished_path(dir, tag));
    if path.symlink_metadata().is_ok() && !is_tag(&path) {
        let problem = "it exists but is not a checkpoint, so it is not replaced; give another tag or folder".into();
        return Err(CheckpointError::Unusable { path, problem }.into());
    }
    check_latest(dir)?;
    let start = Instant::now();
    create_all(dir).and_then(|()| clear(dir)).map_err(|e| write_error(dir, &e))?;
    while from.exists() {
        if start.elapsed() > LOCK_RELEASE_TIMEOUT {
            let problem =
                format!("another save of {tag} is in progress there; wait for it, or give another tag or folder");
            return Err(CheckpointError::Unusable { path: dir.to_owned(), problem }.into());
        }
        std::thread::sleep(Duration::from_millis(10));
        clear(dir).map_err(|e| write_error(dir, &e))?;
    }
    let lock = std::fs::create_dir(&from).and_then(|()| File::open(&from)).map_err(|e| write_error(dir, &e))?;
    record_owner(&from, try_lock(&lock)).map_err(|e| write_error(&from, &e))?;
    Ok(lock)
}

/// Tries to lock a file or folder.
fn try_lock(file: &File) -> rustix::io::Result<()> {
    flock(file, FlockOperation::NonBlockingLockExclusive)
}

/// Records in `folder` that this process owns it, if locking it failed.
fn record_owner(folder: &Path, locked: rustix::io::Result<()>) -> IoResult<()> {
    match (locked, OwnerProcess::this()) {
        (Err(_), Some(owner)) => std::fs::write(folder.join(OWNER_FILE), owner.to_text()),
        _ => Ok(()),
    }
}

/// Completes or undoes the saves and other writes that dead processes have left in `dir`.
fn clear(dir: &Path) -> IoResult<()> {
    sweep(dir, WRITING);
    clear_by(dir, try_lock)
}

/// Removes what dead jobs have left in `dir`, as the next save would. The check of the folder before training calls
/// this function, because a run may save nothing.
///
/// # Errors
/// Fails with [`CheckpointError::Unusable`] if something cannot be removed.
pub(super) fn remove_leftovers(dir: &Path) -> Result<()> {
    clear(dir).map_err(|e| write_error(dir, &e))
}

/// Clears `dir` of leftovers, with `try_lock` as the function that tries to lock a path.
fn clear_by(dir: &Path, try_lock: impl Fn(&File) -> rustix::io::Result<()>) -> IoResult<()> {
    let is_locked = |path: &Path| is_locked(path, &try_lock);
    for entry in std::fs::read_dir(dir)?.flatten() {
        let (name, path) = (entry.file_name().to_string_lossy().into_owned(), entry.path());
        let is_abandoned = |prefix: &str| name.starts_with(prefix) && !is_locked(&path);
        if is_abandoned(SAVING_PREFIX) || is_abandoned(FETCHED_PREFIX) {
            std::fs::remove_dir_all(path)?;
        } else if is_abandoned(VISIBILITY_PREFIX) {
            std::fs::remove_file(path)?;
        } else if is_abandoned(NEW_LATEST_PREFIX) {
            match named_by(dir, &path).filter(|_| dir.join(LATEST).symlink_metadata().is_err()) {
                Some(_) => std::fs::rename(path, dir.join(LATEST))?,
                None => std::fs::remove_file(path)?,
            }
        } else if let Some(tag) = replaced_tag(dir, &name).filter(|_| !is_locked(&path)) {
            match dir.join(tag).symlink_metadata() {
                Ok(_) => std::fs::remove_dir_all(path)?,
                Err(_) => std::fs::rename(&path, dir.join(tag))?,
            }
        }
    }
    Ok(())
}

/// Returns an error if `latest` in the folder belongs to another program: a save would replace it.
pub(super) fn check_latest(dir: &Path) -> Result<()> {
    let path = dir.join(LATEST);
    let is_foreign = path.symlink_metadata().is_ok_and(|found| !found.is_file() || found.len() > 0);
    if !is_foreign || named_by(dir, &path).is_some() || !tags(dir).is_empty() {
        return Ok(());
    }
    let problem =
        "it does not name a checkpoint of this library, so it is not replaced; save to another folder, or remove it"
            .into();
    Err(CheckpointError::Unusable { path, problem }.into())
}

/// Returns the tag of a checkpoint that was moved to `name` while another took its place.
fn replaced_tag<'a>(dir: &Path, name: &'a str) -> Option<&'a str> {
    name.strip_prefix(REPLACED_PREFIX).or_else(|| {
        let tag = name.strip_suffix(OLD_REPLACED_SUFFIX)?;
        Manifest::read(&dir.join(name).join(MANIFEST)).is_ok_and(|m| m.tag == tag).then_some(tag)
    })
}

/// Returns the tag that the file at `path` contains, if it names a complete checkpoint in `dir`.
fn named_by(dir: &Path, path: &Path) -> Option<String> {
    let tag = read_text(path, MAX_LATEST_BYTES).ok()?;
    let tag = tag.trim_end().to_owned();
    let is_complete = check_tag(dir, &tag).is_ok() && dir.join(&tag).join(MANIFEST).is_file();
    is_complete.then_some(tag)
}

/// Returns whether a save holds `path`, or may hold it.
fn is_locked(path: &Path, try_lock: impl Fn(&File) -> rustix::io::Result<()>) -> bool {
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path);
    match file.map(|file| try_lock(&file)) {
        Ok(Ok(())) => false,
        Ok(Err(Errno::WOULDBLOCK)) => true,
        // The file system has no locks.
        Ok(Err(_)) => {
            let owner =
                read_text(path.join(OWNER_FILE), MAX_OWNER_BYTES).ok().and_then(|text| OwnerProcess::of_text(&text));
            let is_dead = owner.is_some_and(|owner| owner.is_dead());
            if !is_dead {
                report_left_in_place(path);
            }
            !is_dead
        }
        // The path is gone, or this user may not open it.
        Err(_) => false,
    }
}

/// Reports that a path is left where it is, once for each path.
fn report_left_in_place(path: &Path) {
    static REPORTED_FOLDERS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    if lock(&REPORTED_FOLDERS).insert(path.to_owned()) {
        warn(&format!(
            "warning: {} is kept: another save may be writing it, which cannot be determined, because this \
             file system does not support locks; if none is in progress, remove it",
            path.display()
        ));
    }
}

/// A process, identified so that others on the same machine can determine whether it is alive.
#[derive(Debug, PartialEq, Eq)]
struct OwnerProcess {
    pid: u32,
    /// The start time as the kernel counts it, because process IDs are reused.
    start_time: String,
    /// The boot ID of the kernel, and the PID namespace.
    system: String,
}

impl OwnerProcess {
    fn this() -> Option<Self> {
        let pid = std::process::id();
        Some(Self { pid, start_time: start_time(pid)?, system: system()? })
    }

    fn to_text(&self) -> String {
        format!("{} {} {}\n", self.pid, self.start_time, self.system)
    }

    fn of_text(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace().map(str::to_owned);
        let (pid, start_time, system) = (words.next()?.parse().ok()?, words.next()?, words.next()?);
        Some(Self { pid, start_time, system })
    }

    /// Returns whether the process is known to have ended: it ran on this system, and no longer does.
    fn is_dead(&self) -> bool {
        system().is_some_and(|here| here == self.system)
            && start_time(self.pid).is_none_or(|time| time != self.start_time)
    }
}

/// Returns the start time of a process, in ticks since boot.
fn start_time(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name is in parentheses and may contain anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19).map(str::to_owned)
}

fn system() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let space = std::fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{}/{}", boot.trim(), space.display()))
}

/// Creates `dir` and its missing parents, and syncs them to disk.
pub(super) fn create_all(dir: &Path) -> IoResult<()> {
    if dir.is_dir() {
        return Ok(());
    }
    create_all(folder_of(dir))?;
    match std::fs::create_dir(dir) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
        created => created.and_then(|()| sync_folder(folder_of(dir))),
    }
}

/// Returns the error of a save that could not write to `path`.
pub(super) fn write_error(path: &Path, source: &std::io::Error) -> Error {
    let fix = match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free space there, or save elsewhere",
        _ => "correct this, or save elsewhere",
    };
    let problem = format!("it cannot be written ({source}); {fix}; earlier checkpoints are not affected");
    CheckpointError::Unusable { path: path.to_owned(), problem }.into()
}

/// A checkpoint on disk that lacks only its final name.
pub(super) struct PreparedCheckpoint {
    dir: PathBuf,
    tag: String,
    latest: Option<NamedTempFile>,
}

/// Writes the manifest, given as text, alongside the written files and, if `is_latest` is set, the file that will become
/// `latest`.
pub(super) fn prepare(dir: &Path, tag: &str, manifest: &str, is_latest: bool) -> Result<PreparedCheckpoint> {
    if let Err(problem) = Manifest::check_length(manifest).and_then(|()| Manifest::parse(manifest)) {
        let problem =
            format!("it could not be loaded again: {problem}; use a client_state that is small and plain JSON");
        return Err(CheckpointError::Unusable { path: unfinished_path(dir, tag), problem }.into());
    }
    let write = || {
        let from = unfinished_path(dir, tag);
        let mut file = File::create_new(from.join(MANIFEST))?;
        file.write_all(manifest.as_bytes())?;
        file.sync_all()?;
        sync_folder(&from)?;
        if is_latest { new_latest(dir, tag).map(Some) } else { Ok(None) }
    };
    let latest = write().map_err(|e| write_error(dir, &e))?;
    Ok(PreparedCheckpoint { dir: dir.to_owned(), tag: tag.to_owned(), latest })
}

impl PreparedCheckpoint {
    /// Renames the checkpoint to its final name. An existing checkpoint of that name is replaced, atomically if the
    /// file system can exchange names.
    pub fn publish(self) -> Result<()> {
        give_final_name(&self.dir, &self.tag, self.latest).map_err(|e| write_error(&self.dir, &e))
    }
}

fn give_final_name(dir: &Path, tag: &str, latest: Option<NamedTempFile>) -> IoResult<()> {
    let (from, to) = (unfinished_path(dir, tag), dir.join(tag));
    if !to.exists() {
        std::fs::rename(&from, &to)?;
    } else if renameat_with(CWD, &from, CWD, &to, RenameFlags::EXCHANGE).is_ok() {
        // At every moment, one of the two complete checkpoints had this name.
        sync_folder(dir)?;
        std::fs::remove_dir_all(&from)?;
    } else {
        replace(dir, tag)?;
    }
    // The folder is complete: nothing more is written into it.
    match std::fs::remove_file(to.join(OWNER_FILE)) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    sync_folder(dir)?;
    if let Some(latest) = latest {
        latest.persist(dir.join(LATEST))?;
        sync_folder(dir)?;
    }
    Ok(())
}

/// Creates the file that will become `latest`; no other process removes it.
fn new_latest(dir: &Path, tag: &str) -> IoResult<NamedTempFile> {
    let mut file = new_temp_file(dir, NEW_LATEST_PREFIX)?;
    _ = flock(file.as_file(), FlockOperation::NonBlockingLockExclusive);
    file.write_all(tag.as_bytes())?;
    file.as_file().sync_all()?;
    sync_folder(dir)?;
    Ok(file)
}

/// Replaces the checkpoint that has this name, on a file system that cannot exchange names. Between the two renames,
/// the old checkpoint is found under a separate name.
fn replace(dir: &Path, tag: &str) -> IoResult<()> {
    let (from, to, replaced) = (unfinished_path(dir, tag), dir.join(tag), dir.join(format!("{REPLACED_PREFIX}{tag}")));
    let guard = File::open(&to)?;
    _ = flock(&guard, FlockOperation::NonBlockingLockExclusive);
    if replaced.exists() {
        std::fs::remove_dir_all(&replaced)?;
    }
    std::fs::rename(&to, &replaced)?;
    std::fs::rename(&from, &to).inspect_err(|_| _ = std::fs::rename(&replaced, &to))?;
    sync_folder(dir)?;
    std::fs::remove_dir_all(replaced)
}

/// Removes the files that a failed save wrote.
pub(super) fn discard_save(dir: &Path, tag: &str) {
    // The save's own error is reported. The next save removes what remains.
    let _ = std::fs::remove_dir_all(unfinished_path(dir, tag));
}

/// Removes all complete checkpoints that were saved without a tag, except the `keep` newest, `saved`, and the one that
/// `latest` names. `saved` and the checkpoints that it descends from count as the newest, in this order. Checkpoints of
/// other runs, or of this run before it was resumed from an earlier checkpoint, are removed first, beginning with those
/// that have the fewest steps.
pub(super) fn keep_newest(dir: &Path, keep: usize, saved: &str) -> Result<()> {
    let latest = latest(dir)?;
    let read = |tag: String| Some((Manifest::read(&dir.join(&tag).join(MANIFEST)).ok()?, tag));
    let manifests: BTreeMap<String, Manifest> =
        tags(dir).into_iter().filter_map(read).map(|(m, tag)| (tag, m)).collect();
    let mut lineage = vec![saved];
    while let Some(previous) = manifests.get(lineage[lineage.len() - 1]).and_then(|m| m.previous.as_deref()) {
        if lineage.contains(&previous) {
            break;
        }
        lineage.push(previous);
    }
    let is_complete = |tag: &str, manifest: &Manifest| {
        let folder = dir.join(tag);
        let bytes = |file: &FileEntry| folder.join(&file.name).metadata().ok().map(|m| m.len());
        // Files in other hosts' folders are unknown here.
        let (here, elsewhere): (Vec<_>, Vec<_>) =
            manifest.files.iter().partition(|file| bytes(file) == Some(file.bytes));
        !here.is_empty() && elsewhere.iter().all(|file| file.host.is_some() && bytes(file).is_none())
    };
    let automatic = manifests.iter().filter(|(tag, m)| m.is_automatic() && **tag == m.tag && is_complete(tag, m));
    let position = |tag: &str| lineage.iter().position(|ancestor| *ancestor == tag).unwrap_or(usize::MAX);
    let mut newest: Vec<(&String, u64)> = automatic.map(|(tag, m)| (tag, m.global_steps)).collect();
    newest.sort_by_key(|(tag, steps)| (position(tag), Reverse(*steps)));
    let is_kept = |tag: &String| tag == saved || Some(tag) == latest.as_ref();
    let old: Vec<&String> = newest.into_iter().skip(keep).map(|(tag, _)| tag).filter(|tag| !is_kept(tag)).collect();
    let remove = || {
        // The checkpoint is incomplete from here on, so it must not have its final name.
        old.iter().try_for_each(|tag| std::fs::rename(dir.join(tag), unfinished_path(dir, tag)))?;
        sync_folder(dir)?;
        old.iter().try_for_each(|tag| std::fs::remove_dir_all(unfinished_path(dir, tag)))
    };
    remove().map_err(|source| Error::Io { action: "remove old checkpoints from", path: dir.to_owned(), source })
}

/// Returns the tag that `latest` names or, if there is no such file, the tag of the first checkpoint of a run that died
/// before it could write the file; `None` if there is neither.
pub(super) fn latest(dir: &Path) -> Result<Option<String>> {
    let path = dir.join(LATEST);
    let why = match read_text(&path, MAX_LATEST_BYTES) {
        Ok(text) => {
            let tag = text.trim_end().to_string();
            check_tag(dir, &tag)?;
            return Ok(Some(tag));
        }
        Err(e) if e.kind() == ErrorKind::NotFound => match path.symlink_metadata() {
            Ok(_) => "it is a broken link".to_string(),
            Err(_) => return Ok(almost_latest(dir)),
        },
        Err(e) => e.to_string(),
    };
    let problem =
        format!("{why}; give the tag to load, or replace this file with one that names it{}", list_checkpoints(dir));
    Err(CheckpointError::Unusable { path, problem }.into())
}

/// Returns the tag of the first checkpoint of a run that died before it could write `latest`.
fn almost_latest(dir: &Path) -> Option<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut new = entries.filter(|e| e.file_name().to_string_lossy().starts_with(NEW_LATEST_PREFIX));
    new.find_map(|e| named_by(dir, &e.path()))
}

/// Returns the list of checkpoints in a folder, to append to a message.
fn list_checkpoints(dir: &Path) -> String {
    let available_tags = tags(dir);
    if available_tags.is_empty() { String::new() } else { format!("; available: {}", list(&available_tags)) }
}

/// Returns an error if `dir`, which has no `latest`, contains checkpoints: it is unknown which one is meant.
pub(super) fn check_no_checkpoints(dir: &Path) -> Result<()> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    // Checkpoints that have lost their manifest count too: a run that should resume must not silently start from
    // scratch.
    let mut folders = entries.filter(|e| !e.file_name().to_string_lossy().starts_with('.')).map(|e| e.path());
    if !folders.any(|path| is_tag(&path)) {
        return Ok(());
    }
    let problem = format!(
        "it has no file `latest`, which names the checkpoint to load; give the tag, or write it to that file{}",
        list_checkpoints(dir)
    );
    Err(CheckpointError::Unusable { path: dir.to_owned(), problem }.into())
}

/// Returns the folder of `tag`, which must exist.
pub(super) fn find_tag_folder(dir: &Path, tag: &str) -> Result<PathBuf> {
    check_tag(dir, tag)?;
    let path = dir.join(tag);
    // The second path is left by a job that died while it was replacing the checkpoint.
    if let Some(found) = [path.clone(), dir.join(format!("{REPLACED_PREFIX}{tag}"))].into_iter().find(|p| p.is_dir()) {
        return Ok(found);
    }
    let available_tags = tags(dir);
    let problem = match available_tags.is_empty() {
        true => "there is no such checkpoint and no other in that folder; give another folder".to_string(),
        false => format!("there is no such checkpoint; available: {}", list(&available_tags)),
    };
    Err(CheckpointError::Unusable { path, problem }.into())
}

/// Returns whether `dir` is the folder of a tag: it has a manifest, or rank files whose manifest is lost.
pub(super) fn is_tag(dir: &Path) -> bool {
    let mut entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.any(|e| {
        let name = e.file_name().to_string_lossy().into_owned();
        let is_rank_file = name.starts_with("rank_") && name.contains("_of_") && name.ends_with(".safetensors");
        (name == MANIFEST || is_rank_file) && e.path().is_file()
    })
}

/// Returns the tags whose save has not finished.
pub(super) fn unfinished(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.map(|e| e.file_name().to_string_lossy().into_owned());
    let mut tags: Vec<String> = names.filter_map(|name| name.strip_prefix(SAVING_PREFIX).map(str::to_owned)).collect();
    tags.sort();
    tags
}

/// Returns the names of the folders with a manifest, except hidden folders and replaced checkpoints.
pub(super) fn tags(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter(|e| e.path().join(MANIFEST).is_file()).map(|e| e.file_name().to_string_lossy().into());
    let is_checkpoint = |name: &String| !name.starts_with('.') && replaced_tag(dir, name).is_none();
    let mut tags: Vec<String> = names.filter(is_checkpoint).collect();
    tags.sort();
    tags
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
