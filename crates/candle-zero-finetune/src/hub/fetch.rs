//! Fetches the model of a repository into the cache, except for files that are already there.

use super::client::HubClient;
use super::download::{FileDownload, part_of};
use super::error::HubError;
use super::repository::{FileSelection, Repository, is_part};
use super::settings::HubSettings;
use super::snapshot::{CONFIG, Snapshot, non_weight_files};
use crate::ADDITIONAL_TEMPLATES;
use crate::error::{Error, Result};
use candle_zero::files::{FolderLock, FolderLockOutcome};
use candle_zero::notice;
use candle_zero::offload::free_space;
use candle_zero::param::{FILE_OF_FOLDER, INDEX_OF_FOLDER};
use candle_zero::util::{counted, format_bytes, list};
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// The progress of fetching a file.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct FetchProgress<'a> {
    /// The name of the file.
    pub file: &'a str,
    /// The number of the file's bytes that are in the cache so far.
    pub bytes: u64,
    /// The size of the file in bytes.
    pub total_bytes: u64,
}

impl Repository {
    /// Returns the folder of the model's files in Hugging Face's cache, after fetching the missing ones: `config.json`,
    /// the tokenizer's and other small files and, unless `parts` excludes the weights, `model.safetensors` or its
    /// shards, all of one commit. With `HF_HUB_OFFLINE`, nothing is fetched.
    ///
    /// If several processes need the same repository, one fetches it and the others wait.
    ///
    /// # Errors
    /// An environment variable whose value cannot be used; a repository or revision that does not exist or may not be
    /// read; a repository without a model in safetensors; a Hub that cannot be reached; a download that stalls or is
    /// cut off; a full disk; with `HF_HUB_OFFLINE`, a file that is not in the cache. The received part of a file is
    /// kept, and the next call resumes after it.
    pub fn fetch(&self, parts: FileSelection, tell: &mut dyn FnMut(FetchProgress<'_>)) -> Result<PathBuf> {
        let settings = HubSettings::from_env()?;
        if settings.is_offline {
            let snapshot = Snapshot::newest(self, &settings)?;
            return match snapshot.missing(parts)? {
                None => Ok(snapshot.folder),
                Some(file) => {
                    Err(HubError::NotCached { repository: self.to_string(), file, cache: settings.cache }.into())
                }
            };
        }
        let client = HubClient::new(self, &settings)?;
        let listing = client.listing()?;
        let names: BTreeSet<&str> = listing.siblings.iter().map(|file| file.rfilename.as_str()).collect();
        let snapshot = Snapshot::of_commit(self, &settings, &listing.sha);
        let mut fetch =
            SnapshotFetch { repository: self, client: &client, commit: &listing.sha, snapshot: &snapshot, tell };
        fetch.check(&names, parts)?;
        let mut files: Vec<&str> = non_weight_files().filter(|name| names.contains(name)).collect();
        files.extend(named_templates(&names));
        fetch.fetch_missing(files)?;
        if parts == FileSelection::All {
            if names.contains(FILE_OF_FOLDER) {
                fetch.fetch_missing(vec![FILE_OF_FOLDER])?;
            } else {
                fetch.fetch_missing(vec![INDEX_OF_FOLDER])?;
                let shards = snapshot.shards()?;
                for shard in &shards {
                    // The name becomes part of an address.
                    if !is_part(shard) || !names.contains(shard.as_str()) {
                        return Err(fetch.no_file(
                            shard,
                            format!(
                                "the repository is incomplete ({INDEX_OF_FOLDER} lists this file); use another revision"
                            ),
                        ));
                    }
                }
                fetch.fetch_missing(shards.iter().map(String::as_str).collect())?;
            }
        }
        snapshot.remember(self, &listing.sha)?;
        Ok(snapshot.folder)
    }
}

/// Returns the model's additional chat templates, which are found by their file names.
fn named_templates<'a>(names: &BTreeSet<&'a str>) -> impl Iterator<Item = &'a str> {
    let is_template = |name: &&str| {
        let file = name.strip_prefix(ADDITIONAL_TEMPLATES).and_then(|rest| rest.strip_prefix('/'));
        file.is_some_and(|file| file.ends_with(".jinja") && is_part(file))
    };
    names.iter().copied().filter(is_template)
}

/// The fetch of one commit.
struct SnapshotFetch<'a, 't> {
    repository: &'a Repository,
    client: &'a HubClient<'a>,
    commit: &'a str,
    snapshot: &'a Snapshot,
    tell: &'t mut dyn FnMut(FetchProgress<'_>),
}

impl SnapshotFetch<'_, '_> {
    /// Checks that the files include a model.
    fn check(&self, names: &BTreeSet<&str>, parts: FileSelection) -> Result<()> {
        if !names.contains(CONFIG) {
            let has: Vec<&str> = names.iter().copied().collect();
            let has = if has.is_empty() { "no files".into() } else { list(&has) };
            return Err(self.no_file(CONFIG, format!("it has {has}; use the repository of a model for transformers")));
        }
        if parts == FileSelection::All && !names.contains(FILE_OF_FOLDER) && !names.contains(INDEX_OF_FOLDER) {
            let is_weights = |name: &&&str| {
                [".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack"].iter().any(|end| name.ends_with(end))
            };
            let has: Vec<&str> = names.iter().filter(is_weights).copied().collect();
            let has = if has.is_empty() { "no weights".into() } else { list(&has) };
            return Err(self.no_file(
                &format!("{FILE_OF_FOLDER} or {INDEX_OF_FOLDER}"),
                format!(
                    "it has {has}; use a repository with safetensors files, or convert this one, for example with \
                     AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(FOLDER)"
                ),
            ));
        }
        Ok(())
    }

    /// Fetches the files that are missing.
    fn fetch_missing(&mut self, files: Vec<&str>) -> Result<()> {
        let snapshot = self.snapshot;
        let files: Vec<&str> = files.into_iter().filter(|file| !snapshot.has(file)).collect();
        if files.is_empty() {
            return Ok(());
        }
        let _lock = self.lock()?;
        let mut remotes = vec![];
        let (mut needed, mut count) = (0u64, 0);
        // Another process may have fetched some of them in the meantime.
        for file in files.into_iter().filter(|file| !snapshot.has(file)) {
            let remote = self.client.remote(self.commit, file)?;
            let content = self.snapshot.content(&remote.etag);
            let file_size = |path: &PathBuf| path.metadata().map_or(0, |found| found.len());
            // Another revision may have the same content.
            let has_content = content.is_file() && file_size(&content) == remote.size;
            if !has_content {
                needed = needed.saturating_add(remote.size.saturating_sub(file_size(&part_of(&content))));
                count += 1;
            }
            remotes.push((file, remote, content, has_content));
        }
        let (repository, folder) = (self.repository.to_string(), self.snapshot.repository.clone());
        let free = free_space(&folder);
        if needed > free {
            let files: Vec<&str> = remotes.iter().map(|(file, ..)| *file).collect();
            return Err(HubError::NoSpace {
                repository,
                file: list(&files),
                folder,
                needed: format_bytes(needed).into(),
                free: format_bytes(free).into(),
            }
            .into());
        }
        if count > 0 {
            let (commit, folder) = (&self.commit[..self.commit.len().min(12)], folder.display());
            let bytes = format_bytes(needed);
            notice::emit(&format!(
                "{repository} at commit {commit}: fetching {bytes} ({}) into {folder}",
                counted(count, "file")
            ));
        }
        for (file, remote, content, has_content) in remotes {
            if !has_content {
                let tell = &mut *self.tell;
                let total_bytes = remote.size;
                let mut tell = |bytes| tell(FetchProgress { file, bytes, total_bytes });
                let (repository, client, commit) = (self.repository, self.client, self.commit);
                FileDownload { client, repository, commit, file, tell: &mut tell }.download_to(&remote, &content)?;
            }
            self.snapshot.link(file, &content)?;
        }
        Ok(())
    }

    /// Locks the repository's folder against other candle-zero processes.
    fn lock(&self) -> Result<FolderLock> {
        let folder = &self.snapshot.repository;
        let wrong = |action| move |source| Error::Io { action, path: folder.clone(), source };
        fs::create_dir_all(folder).map_err(wrong("create"))?;
        let mut is_reported = false;
        loop {
            match FolderLock::acquire(folder, Duration::from_secs(1)).map_err(wrong("lock"))? {
                FolderLockOutcome::Held(lock) => return Ok(lock),
                FolderLockOutcome::Busy(owner) if !is_reported => {
                    is_reported = true;
                    let owner = owner.map_or("another process".into(), |owner| format!("process {owner}"));
                    notice::emit(&format!("{owner} is fetching {}; waiting for it to finish", self.repository));
                }
                FolderLockOutcome::Busy(_) => {}
            }
        }
    }

    fn no_file(&self, file: &str, reason: String) -> Error {
        HubError::NoFile { repository: self.repository.to_string(), file: file.into(), reason }.into()
    }
}
