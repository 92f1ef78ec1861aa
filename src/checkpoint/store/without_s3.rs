//! A build without the `s3` feature: giving the address of an object store is an error.

use super::{DownloadedCheckpoint, UploadRequest};
use crate::comm::Communicator;
use crate::comm::agree::JointOperationFailure;
use crate::error::{CheckpointError, Result};

/// The type of an upload in progress, which cannot exist in this build.
pub(crate) enum CheckpointUpload {}

impl CheckpointUpload {
    pub fn start(request: UploadRequest) -> Result<Option<Self>> {
        check(&request.url).map(|()| None)
    }

    pub fn wait(self, _: &dyn Communicator) -> Result<(), JointOperationFailure> {
        match self {}
    }
}

/// Returns an error, because this build does not support object stores.
pub(crate) fn check(url: &str) -> Result<()> {
    let problem = "this program was built without support for object stores; build with --features s3, or use a folder";
    let problem = problem.to_owned();
    Err(CheckpointError::Store { url: url.to_owned(), problem }.into())
}

pub(crate) fn fetch(
    _: &dyn Communicator,
    url: &str,
    _: Option<&str>,
) -> Result<Option<DownloadedCheckpoint>, JointOperationFailure> {
    check(url).map(|()| None).map_err(JointOperationFailure::InStep)
}
