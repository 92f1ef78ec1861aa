//! Downloads a checkpoint from an object store: the requested one, or the newest complete one, is written into a folder
//! on each host, and loaded from there.
//!
//! A local file counts only if it matches the checksums of the manifest: files of an interrupted or earlier download
//! are read, and reused if they match.

use super::DownloadedCheckpoint;
use super::bucket::{ObjectBucket, buffers_object, objects, rank_object, run, store_error};
use crate::checkpoint::buffers;
use crate::checkpoint::folder::{FETCHED_PREFIX, LATEST, MAX_LATEST_BYTES, check_tag};
use crate::checkpoint::manifest::{MANIFEST, Manifest};
use crate::checkpoint::rank_agreement::remote_failure;
use crate::checkpoint::rank_file::RankFileReader;
use crate::checkpoint::ranks_by_folder::RanksByFolder;
use crate::comm::Communicator;
use crate::comm::agree::{JointOperationFailure, agree, text_of_rank_0};
use crate::error::{CheckpointError, Error, Result};
use crate::files::{FolderLock, FolderLockOutcome, new_temp_file, private_folder, write_atomically};
use crate::notice::{emit, warn};
use crate::util::{cache_home, list};
use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use twox_hash::XxHash3_64;

/// The maximum time to wait for another job on this host that is downloading into the folder or loading from it.
const PEER_FETCH_TIMEOUT: Duration = Duration::from_secs(3600);

/// The interval at which rank 0 reports progress.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Downloads checkpoint `tag`, or the newest complete one, from `url` into a folder on each host. The folder is locked
/// for as long as the result exists. Returns `None` if there is no checkpoint. Collective.
///
/// # Errors
/// Fails on all ranks for an invalid address, if checkpoint `tag` is incomplete or, without `tag`, if checkpoints exist
/// but none is complete, if an object cannot be read or is damaged, or if the folder cannot be locked or written. On
/// ranks that did not find the problem, the error names the first rank that did. Also fails if a collective fails.
pub(crate) fn fetch(
    comm: &dyn Communicator,
    url: &str,
    tag: Option<&str>,
) -> Result<Option<DownloadedCheckpoint>, JointOperationFailure> {
    let elsewhere = || remote_failure(Path::new(url));
    let choose = || {
        let bucket = ObjectBucket::open(url)?;
        run(url, async || choose(&bucket, tag).await)
    };
    let chosen = if comm.rank() == 0 { choose() } else { Ok(None) };
    let tag = text_of_rank_0(comm, &agree(comm, chosen, elsewhere())?.unwrap_or_default())?;
    if tag.is_empty() {
        return Ok(None);
    }
    let dir = folder_of(url);
    let hosts = RanksByFolder::by_neighbours(comm, &dir)?;
    let download = || {
        let bucket = ObjectBucket::open(url)?;
        run(url, async || download(&bucket, &tag, &dir, comm.rank() == 0).await)
    };
    let downloaded = hosts.makes_folder().then(download).transpose();
    let lock = agree(comm, downloaded, elsewhere())?;
    Ok(Some(DownloadedCheckpoint { dir, tag, _lock: lock }))
}

/// Returns the folder for checkpoints from an address: a folder in the user's cache or, if there is no cache, among the
/// temporary files. It contains one checkpoint at a time.
fn folder_of(url: &str) -> PathBuf {
    let cache = cache_home(std::env::var_os("XDG_CACHE_HOME"), std::env::home_dir());
    let number = XxHash3_64::oneshot(url.trim_end_matches('/').as_bytes());
    cache.unwrap_or_else(std::env::temp_dir).join(format!("candle-zero/checkpoints/{number:016x}"))
}

/// Returns `tag`, which must be complete, or the newest complete tag: the one that `latest` names, otherwise the one
/// with the most steps. Returns `None` if there is no checkpoint.
pub(super) async fn choose(bucket: &ObjectBucket, tag: Option<&str>) -> Result<Option<String>> {
    if let Some(tag) = tag {
        check_tag(Path::new(bucket.url()), tag)?;
        return match steps_if_complete(bucket, tag).await? {
            Ok(_) => Ok(Some(tag.to_owned())),
            Err(problem) => Err(store_error(bucket.url(), format!("{tag} is incomplete: {problem}; give another tag"))),
        };
    }
    let latest =
        bucket.get(&[LATEST], MAX_LATEST_BYTES).await?.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
    let mut notes = Vec::new();
    if let Some(latest) = latest.as_deref().filter(|tag| check_tag(Path::new(bucket.url()), tag).is_ok()) {
        match steps_if_complete(bucket, latest).await? {
            Ok(_) => return Ok(Some(latest.to_owned())),
            Err(problem) => notes.push(format!("{latest}: {problem}")),
        }
    }
    let mut complete = Vec::new();
    for tag in bucket.tags().await?.into_iter().filter(|tag| Some(tag) != latest.as_ref()) {
        match steps_if_complete(bucket, &tag).await? {
            Ok(steps) => complete.push((Reverse(steps), tag)),
            Err(problem) => notes.push(format!("{tag}: {problem}")),
        }
    }
    complete.sort();
    match complete.into_iter().next() {
        None if notes.is_empty() => Ok(None),
        None => Err(store_error(
            bucket.url(),
            format!(
                "no checkpoint in it is complete ({}); to start from scratch, give a different address or remove these \
                 checkpoints",
                list(&notes)
            ),
        )),
        Some((_, tag)) => {
            if !notes.is_empty() {
                let (url, notes) = (bucket.url(), list(&notes));
                warn(&format!(
                    "warning: some checkpoints in {url} are incomplete and are skipped ({notes}); {tag} is loaded"
                ));
            }
            Ok(Some(tag))
        }
    }
}

/// Returns the number of steps of a checkpoint or, as the inner error, the reason why the checkpoint is incomplete.
async fn steps_if_complete(bucket: &ObjectBucket, tag: &str) -> Result<std::result::Result<u64, String>> {
    let manifest = match bucket.manifest(tag).await {
        Ok(Some(manifest)) => manifest,
        Ok(None) => return Ok(Err(format!("it has no {MANIFEST}"))),
        Err(Error::Checkpoint(CheckpointError::Store { problem, .. })) => return Ok(Err(problem)),
        Err(other) => return Err(other),
    };
    let sizes = bucket.sizes(tag).await?;
    let is_missing = |(object, bytes): &(String, u64)| sizes.get(object) != Some(bytes);
    let missing: Vec<String> = objects(&manifest).filter(is_missing).map(|(object, _)| object).collect();
    Ok(if missing.is_empty() { Ok(manifest.global_steps) } else { Err(format!("it lacks {}", list(&missing))) })
}

/// Downloads the files of `tag` into `dir`, from which other checkpoints are removed, and checks every byte. Until the
/// result is dropped, no other job writes there.
pub(super) async fn download(
    bucket: &ObjectBucket,
    tag: &str,
    dir: &Path,
    reports_progress: bool,
) -> Result<FolderLock> {
    let manifest = bucket.manifest(tag).await?;
    let manifest =
        manifest.ok_or_else(|| bucket.object_error("cannot read", &[tag, MANIFEST], &"it no longer exists"))?;
    let folder = dir.join(tag);
    let io = |action| move |source| Error::Io { action, path: dir.to_owned(), source };
    private_folder(dir).map_err(io("create"))?;
    let lock = match FolderLock::acquire(dir, PEER_FETCH_TIMEOUT).map_err(io("lock"))? {
        FolderLockOutcome::Held(lock) => lock,
        FolderLockOutcome::Busy(_) => {
            return Err(store_error(
                bucket.url(),
                format!("another job is downloading to {} or loading from it; wait until it is done", dir.display()),
            ));
        }
    };
    for other in
        std::fs::read_dir(dir).map_err(io("read"))?.flatten().filter(|e| e.file_name() != *tag && e.path().is_dir())
    {
        std::fs::remove_dir_all(other.path()).map_err(io("clear"))?;
    }
    std::fs::create_dir_all(&folder).map_err(io("create"))?;
    let total: u64 = objects(&manifest).map(|(_, bytes)| bytes).sum();
    let (mut last_report, mut finished_bytes) = (Instant::now(), 0);
    if reports_progress {
        emit(&format!("checkpoint {tag}: downloading {total} bytes from {} to {}", bucket.url(), dir.display()));
    }
    let ranks = manifest.files.iter().map(|file| (&file.name, rank_object(file), file.bytes));
    let buffers = manifest.buffers.iter().map(|file| (&file.name, buffers_object(file), file.bytes));
    for (number, (name, object, bytes)) in ranks.chain(buffers).enumerate() {
        if check_file(&folder, &manifest, number).is_err() {
            let file = new_temp_file(&folder, FETCHED_PREFIX).map_err(io("write"))?;
            let on_progress = |done: u64| {
                if reports_progress && last_report.elapsed() >= REPORT_INTERVAL {
                    last_report = Instant::now();
                    emit(&format!("checkpoint {tag}: {} of {total} bytes downloaded", finished_bytes + done));
                }
            };
            bucket.get_file(&[tag, &object], file.as_file(), bytes, on_progress).await?;
            file.persist(folder.join(name)).map_err(|e| io("write")(e.error))?;
            if let Err(error) = check_file(&folder, &manifest, number) {
                let problem = format!("it is damaged there: {error}");
                return Err(bucket.object_error("cannot use", &[tag, &object], &problem));
            }
        }
        finished_bytes += bytes;
    }
    write_atomically(&folder.join(MANIFEST), FETCHED_PREFIX, manifest.to_text().as_bytes())
        .map(|_| lock)
        .map_err(io("write"))
}

/// Checks all checksums of a file in the folder. `number` is the index of a rank's file; for the file of buffers, it is
/// the number of ranks' files.
fn check_file(folder: &Path, manifest: &Manifest, number: usize) -> Result<()> {
    match (&manifest.buffers, number < manifest.files.len()) {
        (Some(entry), false) => buffers::read(folder, entry).map(drop),
        _ => {
            let mut file = RankFileReader::open(folder, manifest, number)?;
            (0..file.blocks()).try_for_each(|block| file.check(block).map(drop))
        }
    }
}
