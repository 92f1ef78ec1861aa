//! Requests from the user to a running program: files in the folder of the run, which rank 0 looks for about once a
//! second.

use crate::error::{Error, Result};
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// A request to the program that records a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunRequest {
    /// Save a checkpoint after this step.
    Save,
    /// End after this step.
    Stop,
}

impl RunRequest {
    /// All requests.
    pub const ALL: [Self; 2] = [Self::Save, Self::Stop];

    /// Returns the name of the request.
    pub fn name(self) -> &'static str {
        match self {
            Self::Save => "save",
            Self::Stop => "stop",
        }
    }

    /// Returns the name of the file.
    pub(super) fn file_name(self) -> &'static str {
        match self {
            Self::Save => "save.request",
            Self::Stop => "stop.request",
        }
    }
}

/// Leaves a request in the folder of a run.
pub(super) fn leave_request(folder: &Path, request: RunRequest) -> Result<()> {
    let path = folder.join(request.file_name());
    let flags = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    let created = OpenOptions::new().write(true).create(true).custom_flags(flags).open(&path);
    created.map(|_| ()).map_err(|source| Error::Io { action: "create", path, source })
}

/// Removes the requests in the folder of a run and returns them. A request that cannot be removed is ignored, because
/// it would otherwise be answered repeatedly.
pub(super) fn take_requests(folder: &Path) -> Vec<RunRequest> {
    let is_taken = |request: &RunRequest| std::fs::remove_file(folder.join(request.file_name())).is_ok();
    RunRequest::ALL.into_iter().filter(is_taken).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_taken_once() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(take_requests(dir.path()), []);
        for _ in 0..2 {
            leave_request(dir.path(), RunRequest::Stop).unwrap();
        }
        assert_eq!(take_requests(dir.path()), [RunRequest::Stop]);
        assert_eq!(take_requests(dir.path()), []);
        leave_request(dir.path(), RunRequest::Save).unwrap();
        leave_request(dir.path(), RunRequest::Stop).unwrap();
        assert_eq!(take_requests(dir.path()), [RunRequest::Save, RunRequest::Stop]);
        std::os::unix::fs::symlink("/dev/null", dir.path().join("save.request")).unwrap();
        assert!(leave_request(dir.path(), RunRequest::Save).is_err());
    }
}
