//! Checkpoints in an object store: what is saved on disk is copied there, and what is loaded from there comes to disk first.
//!
//! ```text
//!   PREFIX/latest                                          the tag of the newest checkpoint: last
//!   PREFIX/TAG/rank_00000_of_00002-CHECKSUM.safetensors    the file of each rank, which sends it
//!   PREFIX/TAG/buffers-CHECKSUM.safetensors
//!   PREFIX/TAG/manifest.json                               after all of them, from rank 0
//! ```
//!
//! The checksums are those that the manifest has of the files, so that no file takes the place of another one: as long as a
//! manifest is there, so are its files, also while a checkpoint of the same name is being sent.

#[cfg(feature = "s3")]
mod bucket;
#[cfg(feature = "s3")]
mod download;
#[cfg(all(test, feature = "s3"))]
#[allow(clippy::unwrap_used)]
mod tests;
#[cfg(feature = "s3")]
mod upload;
#[cfg(not(feature = "s3"))]
mod without_s3;

#[cfg(not(feature = "s3"))]
pub(crate) use without_s3::{CheckpointUpload, check, fetch};
#[cfg(feature = "s3")]
pub(crate) use {bucket::check, download::fetch, upload::CheckpointUpload};

use crate::files::FolderLock;
use std::path::{Path, PathBuf};

/// What a rank sends of a checkpoint that is whole on disk.
#[cfg_attr(not(feature = "s3"), expect(dead_code, reason = "nothing is sent"))]
pub(crate) struct UploadRequest {
    /// The address of the object store.
    pub url: String,
    /// The folder of the tag, with its manifest.
    pub folder: PathBuf,
    /// This rank.
    pub rank: usize,
    /// The number of the file that it has written, which is another one where ranks form groups.
    pub piece: usize,
    /// Whether `latest` names it then.
    pub is_latest: bool,
}

/// A checkpoint that came from an object store. While this is there, no other job of the host brings another one into the folder.
pub(crate) struct DownloadedCheckpoint {
    /// The folder of checkpoints.
    pub dir: PathBuf,
    pub tag: String,
    /// On the rank of each host that has brought it.
    _lock: Option<FolderLock>,
}

/// The address that `dir` is, in place of a folder.
pub(crate) fn address(dir: &Path) -> Option<&str> {
    dir.to_str().filter(|dir| ["s3://", "file://"].iter().any(|scheme| dir.starts_with(scheme)))
}
