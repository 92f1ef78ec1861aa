//! Examines checkpoints without an engine: lists them, and checks whether one is complete.

use super::buffers::{self, SavedBuffer};
use super::folder;
use super::manifest::{MANIFEST, Manifest};
use super::rank_file::RankFileReader;
use crate::error::{CheckpointError, Error, Result};
use crate::util::list;
use std::cmp::Reverse;
use std::path::{Path, PathBuf};

/// The content of a folder of checkpoints.
#[doc(hidden)]
pub struct CheckpointListing {
    /// The folder.
    pub dir: PathBuf,
    /// The tag that `latest` names or, if there is no such file, that of the first checkpoint of a run that died before
    /// it could write the file; `None` if there is neither.
    pub latest: Result<Option<String>>,
    /// Every tag with its manifest, sorted by steps; those that cannot be read are last.
    pub tags: Vec<(String, Result<Manifest>)>,
    /// The tags of saves that did not finish or are still running.
    pub unfinished: Vec<String>,
}

/// A checkpoint and all its problems.
#[doc(hidden)]
pub struct CheckpointExamination {
    pub path: PathBuf,
    pub manifest: Option<Manifest>,
    /// The checkpoint's buffers, by name; empty if their file is damaged.
    pub buffers: Vec<SavedBuffer>,
    /// One error for each damaged file; empty if the checkpoint is complete.
    pub problems: Vec<Error>,
}

/// Splits `dir` into the folder of checkpoints and a tag; `dir` may itself be the folder of a tag.
///
/// # Errors
/// Fails with [`Error::Io`] if `dir` cannot be read, or with [`CheckpointError::Unusable`] if `dir` is the folder of
/// one tag and `tag` names another.
#[doc(hidden)]
pub fn split_tag(dir: &Path, tag: Option<&str>) -> Result<(PathBuf, Option<String>)> {
    let dir = dir.canonicalize().map_err(|source| Error::Io { action: "read", path: dir.to_owned(), source })?;
    let name = dir.file_name().map(|name| name.to_string_lossy().into_owned());
    match (dir.parent(), name) {
        (Some(parent), Some(name)) if folder::is_tag(&dir) => match tag.filter(|tag| *tag != name) {
            None => Ok((parent.to_owned(), Some(name))),
            Some(tag) => {
                let problem = format!("it is itself the folder of a tag, so {tag:?} is not in it; omit the tag");
                Err(CheckpointError::Unusable { path: dir, problem }.into())
            }
        },
        _ => Ok((dir, tag.map(str::to_owned))),
    }
}

/// Lists the content of the folder `dir`.
#[doc(hidden)]
pub fn list_checkpoints(dir: &Path) -> CheckpointListing {
    let manifest = |tag: &String| Manifest::read(&dir.join(tag).join(MANIFEST));
    let mut tags: Vec<_> =
        folder::tags(dir).into_iter().map(|tag| (manifest(&tag), tag)).map(|(m, t)| (t, m)).collect();
    tags.sort_by_key(|(_, manifest)| manifest.as_ref().map_or(u64::MAX, |m| m.global_steps));
    CheckpointListing { dir: dir.to_owned(), latest: folder::latest(dir), tags, unfinished: folder::unfinished(dir) }
}

/// Returns the checkpoint in the folder `dir` that a run resumes from, and its manifest; `None` if there is none.
#[doc(hidden)]
pub fn newest_checkpoint(dir: &Path) -> Result<Option<(PathBuf, Manifest)>> {
    let Some(tag) = folder::latest(dir)? else { return Ok(None) };
    let path = folder::find_tag_folder(dir, &tag)?;
    let manifest = Manifest::read(&path.join(MANIFEST))?;
    Ok(Some((path, manifest)))
}

/// Returns whether the folder `dir` contains a checkpoint that a run can resume from: in the folder itself, or in that
/// of an island.
#[doc(hidden)]
pub fn has_checkpoints(dir: &Path) -> bool {
    islands_in(dir).any(|(_, dir)| folder::latest(&dir).is_ok_and(|latest| latest.is_some()))
}

/// Returns the islands that may have saved checkpoints in the folder `dir`, each with its folder.
fn islands_in(dir: &Path) -> impl Iterator<Item = (usize, PathBuf)> {
    let islands = std::fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name();
        Some((name.to_str()?.strip_prefix("island_")?.parse().ok()?, entry.path()))
    });
    std::iter::once((0, dir.to_owned())).chain(islands)
}

/// Returns the number of the island that saved the newest checkpoint in the folder `dir`, that checkpoint, and its
/// manifest. If the newest checkpoints of several islands are equally new, the island with the lowest number is chosen.
/// Without local steps, the number is 0.
#[doc(hidden)]
pub fn newest_island_checkpoint(dir: &Path) -> Option<(usize, PathBuf, Manifest)> {
    let newest = |(island, dir): (usize, PathBuf)| {
        let (path, manifest) = newest_checkpoint(&dir).ok().flatten()?;
        Some((island, path, manifest))
    };
    islands_in(dir).filter_map(newest).max_by_key(|(island, _, manifest)| (manifest.global_steps, Reverse(*island)))
}

impl CheckpointListing {
    /// Returns `tag`, or the tag that `latest` names.
    ///
    /// # Errors
    /// Fails if the folder has no checkpoint `tag` or, without `tag`, if there is no `latest` or it cannot be used.
    pub fn choose(self, tag: Option<String>) -> Result<String> {
        if let Some(tag) = tag {
            return folder::find_tag_folder(&self.dir, &tag).map(|_| tag);
        }
        let names: Vec<String> = self.tags.into_iter().map(|(tag, _)| tag).collect();
        let problem = match self.latest? {
            Some(tag) => return Ok(tag),
            None if names.is_empty() => "there is no checkpoint in it; give another folder".to_string(),
            None => format!("it has no file `latest`; give a tag with --tag; available: {}", list(&names)),
        };
        Err(CheckpointError::Unusable { path: self.dir, problem }.into())
    }
}

/// Examines checkpoint `tag` in `dir`: its manifest, the lengths and headers of its files, and, if `on_progress` is
/// given, every byte. `on_progress` is called with the number of bytes read so far and the total number of bytes.
#[doc(hidden)]
pub fn examine(dir: &Path, tag: &str, mut on_progress: Option<&mut dyn FnMut(u64, u64)>) -> CheckpointExamination {
    let unusable =
        |path, error| CheckpointExamination { path, manifest: None, buffers: Vec::new(), problems: vec![error] };
    // If a job died while it was replacing the checkpoint, the folder has another name.
    let path = match folder::find_tag_folder(dir, tag) {
        Ok(path) => path,
        Err(error) => return unusable(dir.join(tag), error),
    };
    let manifest = match Manifest::read(&path.join(MANIFEST)) {
        Ok(manifest) => manifest,
        Err(error) => return unusable(path, error),
    };
    let mut problems = Vec::new();
    let buffers = manifest.buffers.as_ref().map_or(Ok(Vec::new()), |entry| buffers::read(&path, entry));
    let buffers = buffers.unwrap_or_else(|error| {
        problems.push(error);
        Vec::new()
    });
    let (mut done, total) = (0, manifest.files.iter().map(|file| file.bytes).sum());
    for rank in 0..manifest.world_size {
        let result = RankFileReader::open(&path, &manifest, rank).and_then(|mut file| {
            let Some(on_progress) = &mut on_progress else { return Ok(()) };
            let mut bytes_read = done + manifest.files[rank].header_bytes;
            (0..file.blocks()).try_for_each(|block| {
                bytes_read += file.check(block)?.len() as u64;
                on_progress(bytes_read, total);
                Ok(())
            })
        });
        problems.extend(result.err());
        done += manifest.files[rank].bytes;
    }
    CheckpointExamination { path, manifest: Some(manifest), buffers, problems }
}
