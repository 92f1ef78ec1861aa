//! The folder of checkpoints: one folder per tag, and `latest`, a file that names one of them.
//!
//! ```text
//!   .candle-zero-saving-TAG/   files written and synced by all ranks, then the manifest
//!   TAG/                       the same folder under its name: rename, sync of the parent
//!   latest                     written beside, synced, renamed: last
//! ```
//!
//! A folder that has its name is whole. What a dead job was writing is removed by the next save.

use super::manifest::{MANIFEST, Manifest};
use crate::error::{Error, Result};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs::File;
use std::io::{ErrorKind, Result as IoResult, Write};
use std::path::{Component, Path, PathBuf};

const LATEST: &str = "latest";
const SAVING: &str = ".candle-zero-saving-";

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
    let is_plain = !tag.contains(|c: char| c == '/' || c.is_control()) && !tag.starts_with('.') && tag != LATEST;
    if is_name && is_plain && tag.len() <= MAX_TAG {
        return Ok(());
    }
    let problem = format!(
        "the tag {tag:?} is not the name of a folder in it. Give a name without slashes and leading dots, of at most \
         {MAX_TAG} bytes, such as global_step100"
    );
    Err(Error::Checkpoint { path: dir.to_owned(), problem })
}

/// An empty folder for `tag`, on rank 0; what earlier saves did not end is removed.
pub(super) fn begin(dir: &Path, tag: &str) -> IoResult<()> {
    std::fs::create_dir_all(dir)?;
    for entry in std::fs::read_dir(dir)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(SAVING) {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    std::fs::create_dir(saving(dir, tag))
}

/// Gives the written files their manifest and their name, on rank 0. A checkpoint of that name is replaced at once.
pub(super) fn publish(dir: &Path, manifest: &Manifest, is_latest: bool) -> IoResult<()> {
    let tag = &manifest.tag;
    let from = saving(dir, tag);
    let mut file = File::create_new(from.join(MANIFEST))?;
    file.write_all(manifest.to_text().as_bytes())?;
    file.sync_all()?;
    sync(&from)?;
    let to = dir.join(tag);
    match renameat_with(CWD, &from, CWD, &to, RenameFlags::NOREPLACE) {
        Ok(()) => {}
        Err(rustix::io::Errno::EXIST) => {
            // At every moment one of the two is there whole.
            renameat_with(CWD, &from, CWD, &to, RenameFlags::EXCHANGE)?;
            sync(dir)?;
            std::fs::remove_dir_all(&from)?;
        }
        // A file system that knows no flags: a folder that exists is not replaced by a plain rename.
        Err(_) if !to.exists() => std::fs::rename(&from, &to)?,
        Err(errno) => return Err(errno.into()),
    }
    sync(dir)?;
    if is_latest {
        let mut file = tempfile::Builder::new().prefix(".candle-zero-latest-").tempfile_in(dir)?;
        file.write_all(tag.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(dir.join(LATEST)).map_err(|e| e.error)?;
        sync(dir)?;
    }
    Ok(())
}

/// Removes what a failed save has written.
pub(super) fn give_up(dir: &Path, tag: &str) {
    // The error is the save's. What stays is removed by the next one.
    let _ = std::fs::remove_dir_all(saving(dir, tag));
}

/// Removes all checkpoints but the `keep` newest, by their steps, and the one that `latest` names.
pub(super) fn keep_newest(dir: &Path, keep: usize) -> IoResult<()> {
    let latest = std::fs::read_to_string(dir.join(LATEST)).unwrap_or_default();
    let mut known: Vec<(u64, String)> = tags(dir)
        .into_iter()
        .filter_map(|tag| Some((Manifest::read(&dir.join(&tag).join(MANIFEST)).ok()?.global_steps, tag)))
        .collect();
    known.sort();
    known.reverse();
    for (_, tag) in known.iter().skip(keep).filter(|(_, tag)| *tag != latest) {
        // Not whole from now on, so it must not have its name.
        let gone = saving(dir, tag);
        std::fs::rename(dir.join(tag), &gone)?;
        std::fs::remove_dir_all(gone)?;
    }
    Ok(())
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
        Err(e) => {
            Err(Error::Checkpoint { path, problem: format!("{e}. Give the tag to load, or write it into this file") })
        }
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
        true => "there is no such checkpoint, and no other in that folder. Correct the folder".to_string(),
        false => format!("there is no such checkpoint. There are: {}", crate::param::list(&there)),
    };
    Err(Error::Checkpoint { path, problem })
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

/// Brings the names in a folder to disk.
pub(super) fn sync(dir: &Path) -> IoResult<()> {
    File::open(dir)?.sync_all()
}
