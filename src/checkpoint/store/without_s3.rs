//! A build without feature `s3`: addresses of object stores are errors.

use super::{DownloadedCheckpoint, UploadRequest};
use crate::comm::Communicator;
use crate::comm::agree::CollectiveFailure;
use crate::error::{CheckpointError, Result};

/// A copy on its way: there is none.
pub(crate) enum CheckpointUpload {}

impl CheckpointUpload {
    pub fn start(sending: UploadRequest) -> Result<Option<Self>> {
        check(&sending.url).map(|()| None)
    }

    pub fn wait(self, _: &dyn Communicator) -> Result<(), CollectiveFailure> {
        match self {}
    }
}

/// The error that this build knows no object stores.
pub(crate) fn check(url: &str) -> Result<()> {
    let problem = "this program was built without it; build with --features s3, or give a folder".into();
    Err(CheckpointError::Store { url: url.to_owned(), problem }.into())
}

pub(crate) fn fetch(
    _: &dyn Communicator,
    url: &str,
    _: Option<&str>,
) -> Result<Option<DownloadedCheckpoint>, CollectiveFailure> {
    check(url).map(|()| None).map_err(CollectiveFailure::InStep)
}
