//! A commit of a repository in the cache: contents named by ETag, and links to them under the names of the files.

use super::error::HubError;
use super::repository::{FileSelection, Repository};
use super::settings::HubSettings;
use crate::COMPANION_FILES;
use crate::error::{Error, Result};
use candle_zero::files::folder_of;
use candle_zero::param::{FILE_OF_FOLDER, INDEX_OF_FOLDER, weight_map};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The cached part of a commit of a repository.
pub(super) struct Snapshot {
    cached: CacheRepo,
    /// The folder of the repository.
    pub repository: PathBuf,
    /// The folder of the commit.
    pub folder: PathBuf,
}

pub(super) const CONFIG: &str = "config.json";

impl Snapshot {
    /// Returns the snapshot of a commit.
    pub fn of_commit(repository: &Repository, settings: &HubSettings, commit: &str) -> Self {
        let (cached, folder) = cached(repository, settings);
        Self { folder: cached.pointer_path(commit), repository: folder, cached }
    }

    /// Returns the snapshot to which the revision pointed at the last fetch.
    pub fn newest(repository: &Repository, settings: &HubSettings) -> Result<Self> {
        let (cached, folder) = cached(repository, settings);
        let by_name = cached.get(CONFIG).map(|config| folder_of(&config).to_owned());
        let by_commit = || Some(cached.pointer_path(repository.revision())).filter(|folder| folder.is_dir());
        match by_name.or_else(by_commit) {
            Some(snapshot) => Ok(Self { cached, repository: folder, folder: snapshot }),
            None => {
                let (repository, cache) = (repository.to_string(), settings.cache.clone());
                Err(HubError::NotCached { repository, file: CONFIG.into(), cache }.into())
            }
        }
    }

    /// Returns whether a file is in the cache.
    pub fn has(&self, file: &str) -> bool {
        self.folder.join(file).is_file()
    }

    /// Returns the path of the content with this ETag, which need not exist.
    pub fn content(&self, etag: &str) -> PathBuf {
        self.cached.blob_path(etag)
    }

    /// Links existing content under the name of a file.
    pub fn link(&self, file: &str, content: &Path) -> Result<()> {
        let path = self.folder.join(file);
        let wrong = |source| Error::Io { action: "create", path: path.clone(), source };
        fs::create_dir_all(path.parent().unwrap_or(&self.folder)).map_err(wrong)?;
        // The path may be a link whose content was removed.
        if path.symlink_metadata().is_ok() {
            fs::remove_file(&path).map_err(wrong)?;
        }
        let up = "../".repeat(Path::new(file).components().count() + 1);
        let target = Path::new(&up).join("blobs").join(content.file_name().unwrap_or_default());
        // On a file system without links, the file itself is moved.
        symlink(target, &path).or_else(|_| fs::rename(content, &path)).map_err(wrong)
    }

    /// Records the commit that the revision points to.
    pub fn remember(&self, repository: &Repository, commit: &str) -> Result<()> {
        let path = self.repository.join("refs").join(repository.revision());
        if commit == repository.revision() || fs::read_to_string(&path).is_ok_and(|before| before.trim() == commit) {
            return Ok(());
        }
        self.cached.create_ref(commit).map_err(|source| Error::Io { action: "write", path, source })
    }

    /// Returns the first required file that is missing.
    pub fn missing(&self, parts: FileSelection) -> Result<Option<String>> {
        let mut needed: Vec<String> = vec![CONFIG.into()];
        // A repository has a tokenizer in one of several forms. The first, which is the most common, is required unless
        // another form is complete.
        if !TOKENIZERS[1..].iter().any(|files| files.iter().all(|file| self.has(file))) {
            needed.extend(TOKENIZERS[0].iter().map(ToString::to_string));
        }
        if parts == FileSelection::All && self.has(INDEX_OF_FOLDER) && !self.has(FILE_OF_FOLDER) {
            needed.extend(self.shards()?);
        } else if parts == FileSelection::All {
            needed.push(FILE_OF_FOLDER.into());
        }
        Ok(needed.into_iter().find(|file| !self.has(file)))
    }

    /// Returns the files that the index names. The index must be in the cache.
    pub fn shards(&self) -> Result<BTreeSet<String>> {
        Ok(weight_map(&self.folder.join(INDEX_OF_FOLDER))?.into_values().collect())
    }
}

/// The files of a tokenizer, in each of the forms that can be read.
const TOKENIZERS: [&[&str]; 3] = [&["tokenizer.json"], &["vocab.txt"], &["vocab.json", "merges.txt"]];

/// Returns the names of the files other than weights that are fetched if a repository has them.
pub(super) fn non_weight_files() -> impl Iterator<Item = &'static str> {
    [CONFIG].into_iter().chain(COMPANION_FILES)
}

fn cached(repository: &Repository, settings: &HubSettings) -> (CacheRepo, PathBuf) {
    let name = repository.name().to_owned();
    let repo = Repo::with_revision(name, RepoType::Model, repository.revision().into());
    let folder = settings.cache.join(repo.folder_name());
    (Cache::new(settings.cache.clone()).repo(repo), folder)
}
