//! Checkpoints in an object store. A checkpoint is saved to disk and then uploaded; before it is loaded, it is
//! downloaded to disk.
//!
//! ```text
//!   PREFIX/latest                                          the tag of the newest checkpoint; written last
//!   PREFIX/TAG/rank_00000_of_00002-CHECKSUM.safetensors    each rank's file, sent by that rank
//!   PREFIX/TAG/buffers-CHECKSUM.safetensors
//!   PREFIX/TAG/manifest.json                               from rank 0, after all other files of the tag
//! ```
//!
//! CHECKSUM is the file's checksum from the manifest, so that no file replaces a different one. As long as a manifest
//! exists, its files exist, even while a checkpoint of the same name is being uploaded.

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

/// A rank's part in the upload of a checkpoint that is complete on disk.
#[cfg_attr(not(feature = "s3"), expect(dead_code, reason = "nothing is sent"))]
pub(crate) struct UploadRequest {
    /// The address of the object store.
    pub url: String,
    /// The folder of the tag, with its manifest.
    pub folder: PathBuf,
    /// This rank.
    pub rank: usize,
    /// The index of the file that this rank has written. It may differ from the rank in a pipeline, or if ranks form
    /// groups.
    pub piece: usize,
    /// Whether `latest` names the checkpoint afterwards.
    pub is_latest: bool,
}

/// A checkpoint that was downloaded from an object store. While this value exists, no other job on the host downloads
/// into the folder.
pub(crate) struct DownloadedCheckpoint {
    /// The folder that contains the checkpoints.
    pub dir: PathBuf,
    pub tag: String,
    /// The lock, on the rank that has downloaded the checkpoint for its host.
    _lock: Option<FolderLock>,
}

/// Returns `dir` as the address of an object store, or `None` if it is a folder.
pub(crate) fn address(dir: &Path) -> Option<&str> {
    dir.to_str().filter(|dir| ["s3://", "file://"].iter().any(|scheme| dir.starts_with(scheme)))
}
