//! The folder of checkpoints: one folder per tag, and `latest`, a file that names one of them.
//!
//! ```text
//!   .candle-zero-saving-TAG/   files written and synced by all ranks, then the manifest
//!   TAG/                       the same folder under its name: rename, sync of the parent
//!   latest                     written beside, synced, renamed: last
//! ```
//!
//! A folder under its final name is always complete. What a dead job was writing is removed by the next save.

use super::manifest::{FileEntry, MANIFEST, Manifest};
use crate::error::{CheckpointError, Error, Result};
use crate::files::{folder_of, sync_folder, write_whole};
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use std::fs::File;
use std::io::{ErrorKind, Result as IoResult, Write};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

const LATEST: &str = "latest";
const SAVING: &str = ".candle-zero-saving-";
const NEW_LATEST: &str = ".candle-zero-latest-";

/// How long a process that was killed may hold what it was writing.
const DYING: Duration = Duration::from_secs(5);

/// Bytes of a tag: names of files have 255 at most, and [`SAVING`] comes before it.
pub(super) const MAX_TAG: usize = 200;

/// Where `tag` is written before it is whole.
pub(super) fn saving(dir: &Path, tag: &str) -> PathBuf {
    dir.join(format!("{SAVING}{tag}"))
}

/// Refuses a tag that is not the name of a folder in `dir`.
pub(super) fn check_tag(dir: &Path, tag: &str) -> Result<()> {
    let mut parts = Path::new(tag).components();
    let is_name = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    let is_plain = !tag.contains(|c: char| c == '/' || c.is_control()) && !tag.starts_with('.') && tag.trim() == tag;
    if is_name && is_plain && tag != LATEST && tag.len() <= MAX_TAG {
        return Ok(());
    }
    let problem = format!(
        "the tag {tag:?} is not the name of a folder in it; give a name without slashes, leading dots and space around \
         it, of at most {MAX_TAG} bytes, such as global_step100"
    );
    Err(CheckpointError::Unusable { path: dir.to_owned(), problem }.into())
}

/// An empty folder for `tag`, on rank 0, which nobody else clears as long as the file is open; what saves of the past
/// did not end is removed.
pub(super) fn begin(dir: &Path, tag: &str) -> Result<File> {
    let (path, from) = (dir.join(tag), saving(dir, tag));
    if path.symlink_metadata().is_ok() && !is_tag(&path) {
        let problem = "it is there and is no checkpoint, so it is not replaced; give another tag or folder".into();
        return Err(CheckpointError::Unusable { path, problem }.into());
    }
    let clear = || {
        for entry in std::fs::read_dir(dir)?.flatten() {
            let name = entry.file_name();
            if name.to_string_lossy().starts_with(SAVING) && !is_locked(&entry.path()) {
                std::fs::remove_dir_all(entry.path())?;
            } else if name.to_string_lossy().starts_with(NEW_LATEST) {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    };
    let start = Instant::now();
    create_all(dir).and_then(|()| clear()).map_err(|e| not_written(dir, &e))?;
    while from.exists() {
        if start.elapsed() > DYING {
            let problem =
                format!("another save of {tag} is under way there; let it end, or give another tag or folder");
            return Err(CheckpointError::Unusable { path: dir.to_owned(), problem }.into());
        }
        std::thread::sleep(Duration::from_millis(10));
        clear().map_err(|e| not_written(dir, &e))?;
    }
    let lock = std::fs::create_dir(&from).and_then(|()| File::open(&from)).map_err(|e| not_written(dir, &e))?;
    // Where the file system knows no locks, nobody asks for them either.
    _ = flock(&lock, FlockOperation::NonBlockingLockExclusive);
    Ok(lock)
}

/// Whether a save that is still alive writes to folder `path`.
fn is_locked(path: &Path) -> bool {
    let asked = File::open(path).map(|file| flock(&file, FlockOperation::NonBlockingLockExclusive));
    matches!(asked, Ok(Err(rustix::io::Errno::WOULDBLOCK)))
}

/// Creates `dir` and the folders above it, on disk.
fn create_all(dir: &Path) -> IoResult<()> {
    if dir.is_dir() {
        return Ok(());
    }
    create_all(folder_of(dir))?;
    match std::fs::create_dir(dir) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
        created => created.and_then(|()| sync_folder(folder_of(dir))),
    }
}

/// The error of a save that could not write to `path`.
pub(super) fn not_written(path: &Path, source: &std::io::Error) -> Error {
    let fix = match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free space there, or save elsewhere",
        _ => "correct that, or save elsewhere",
    };
    let problem = format!("it cannot be written: {source}; {fix}; checkpoints that were saved before are whole");
    CheckpointError::Unusable { path: path.to_owned(), problem }.into()
}

/// Gives the written files their manifest and their name, on rank 0. A checkpoint of that name is replaced at once.
pub(super) fn publish(dir: &Path, manifest: &Manifest, is_latest: bool) -> Result<()> {
    let text = manifest.to_text();
    if let Err(problem) = Manifest::parse(&text) {
        let problem = format!("it could not be loaded again: {problem}; give a client_state that is plain JSON");
        return Err(CheckpointError::Unusable { path: saving(dir, &manifest.tag), problem }.into());
    }
    name(dir, &manifest.tag, &text, is_latest).map_err(|e| not_written(dir, &e))
}

fn name(dir: &Path, tag: &str, manifest: &str, is_latest: bool) -> IoResult<()> {
    let from = saving(dir, tag);
    let mut file = File::create_new(from.join(MANIFEST))?;
    file.write_all(manifest.as_bytes())?;
    file.sync_all()?;
    sync_folder(&from)?;
    let to = dir.join(tag);
    if !to.exists() {
        std::fs::rename(&from, &to)?;
    } else if renameat_with(CWD, &from, CWD, &to, RenameFlags::EXCHANGE).is_ok() {
        // At every moment one of the two was there whole.
        sync_folder(dir)?;
        std::fs::remove_dir_all(&from)?;
    } else {
        // A file system that cannot exchange names: the one that was there keeps a visible name until all is done.
        let replaced = dir.join(format!("{tag}.replaced"));
        std::fs::rename(&to, &replaced)?;
        std::fs::rename(&from, &to)?;
        sync_folder(dir)?;
        std::fs::remove_dir_all(replaced)?;
    }
    sync_folder(dir)?;
    if is_latest {
        write_whole(&dir.join(LATEST), NEW_LATEST, tag.as_bytes())?;
        sync_folder(dir)?;
    }
    Ok(())
}

/// Removes what a failed save has written.
pub(super) fn give_up(dir: &Path, tag: &str) {
    // The error is the save's. What stays is removed by the next one.
    let _ = std::fs::remove_dir_all(saving(dir, tag));
}

/// Removes all whole checkpoints but the `keep` newest, by their steps, `saved`, and the one that `latest` names.
pub(super) fn keep_newest(dir: &Path, keep: usize, saved: &str) -> Result<()> {
    let latest = latest(dir)?;
    let whole = |tag: &str| {
        let folder = dir.join(tag);
        let manifest = Manifest::read(&folder.join(MANIFEST)).ok()?;
        let is_there = |file: &FileEntry| folder.join(&file.name).metadata().is_ok_and(|m| m.len() == file.bytes);
        manifest.files.iter().all(is_there).then_some(manifest.global_steps)
    };
    let mut known: Vec<(u64, String)> = tags(dir).into_iter().filter_map(|tag| Some((whole(&tag)?, tag))).collect();
    known.sort();
    known.reverse();
    let is_kept = |tag: &String| tag == saved || Some(tag) == latest.as_ref();
    let old: Vec<&String> = known.iter().skip(keep).map(|(_, tag)| tag).filter(|tag| !is_kept(tag)).collect();
    let remove = || {
        // Not whole from now on, so it must not have its name.
        old.iter().try_for_each(|tag| std::fs::rename(dir.join(tag), saving(dir, tag)))?;
        sync_folder(dir)?;
        old.iter().try_for_each(|tag| std::fs::remove_dir_all(saving(dir, tag)))
    };
    remove().map_err(|source| Error::Io { action: "remove old checkpoints of", path: dir.to_owned(), source })
}

/// The tag that `latest` names; nothing if there is no such file.
pub(super) fn latest(dir: &Path) -> Result<Option<String>> {
    let path = dir.join(LATEST);
    match std::fs::read_to_string(&path) {
        Ok(text) => {
            let tag = text.trim_end().to_string();
            check_tag(dir, &tag)?;
            Ok(Some(tag))
        }
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(CheckpointError::Unusable {
            path,
            problem: format!("{e}; give the tag to load, or write it into this file"),
        }
        .into()),
    }
}

/// The folder of `tag`, which must be there.
pub(super) fn existing(dir: &Path, tag: &str) -> Result<PathBuf> {
    check_tag(dir, tag)?;
    let path = dir.join(tag);
    if path.is_dir() {
        return Ok(path);
    }
    let there = tags(dir);
    let problem = match there.is_empty() {
        true => "there is no such checkpoint, and no other in that folder; correct the folder".to_string(),
        false => format!("there is no such checkpoint; there are: {}", crate::util::list(&there)),
    };
    Err(CheckpointError::Unusable { path, problem }.into())
}

/// Whether `dir` is the folder of a tag: it has a manifest, or the files of ranks whose manifest is lost.
pub(super) fn is_tag(dir: &Path) -> bool {
    let mut entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.any(|e| {
        let name = e.file_name().to_string_lossy().into_owned();
        let is_rank_file = name.starts_with("rank_") && name.contains("_of_") && name.ends_with(".safetensors");
        (name == MANIFEST || is_rank_file) && e.path().is_file()
    })
}

/// Tags whose save has not ended.
pub(super) fn unfinished(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.map(|e| e.file_name().to_string_lossy().into_owned());
    let mut tags: Vec<String> = names.filter_map(|name| name.strip_prefix(SAVING).map(str::to_owned)).collect();
    tags.sort();
    tags
}

/// Folders with a manifest, by name.
pub(super) fn tags(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter(|e| e.path().join(MANIFEST).is_file()).map(|e| e.file_name().to_string_lossy().into());
    let mut tags: Vec<String> = names.filter(|name: &String| !name.starts_with('.')).collect();
    tags.sort();
    tags
}
