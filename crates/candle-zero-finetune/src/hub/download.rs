//! Downloads one file. Its bytes are written to a file next to the final path, and an interrupted download resumes
//! at the end of that file.

use super::client::{FileStream, HubClient, MAX_ATTEMPTS, RemoteFile, RequestFailure, pause};
use super::error::HubError;
use super::repository::Repository;
use crate::error::{Error, Result};
use candle_zero::files::{folder_of, sync_folder};
use candle_zero::notice;
use candle_zero::offload::free_space;
use candle_zero::util::{counted, format_bytes, hex};
use ring::digest::{Context, SHA256};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

/// The number of bytes that are read at a time.
const READ_CHUNK: usize = 1 << 16;

/// The download of one file of a commit. `tell` receives the number of bytes received so far.
pub(super) struct FileDownload<'a> {
    pub client: &'a HubClient<'a>,
    pub repository: &'a Repository,
    pub commit: &'a str,
    pub file: &'a str,
    pub tell: &'a mut dyn FnMut(u64),
}

impl FileDownload<'_> {
    /// Downloads the file to `path`, which must not exist yet.
    pub fn download_to(&mut self, remote: &RemoteFile, path: &Path) -> Result<()> {
        // Two attempts: bytes of an earlier download may belong to different content.
        for _ in 0..2 {
            let part = part_of(path);
            self.fill(remote, &part)?;
            let wrong = |source| self.not_written(path, remote, source);
            if !remote.is_digest || digest(&part).map_err(wrong)? == remote.etag {
                fs::rename(&part, path).and_then(|()| sync_folder(folder_of(path))).map_err(wrong)?;
                return Ok(());
            }
            fs::remove_file(&part).map_err(wrong)?;
            self.report_problem("its checksum is wrong; discarding the download");
        }
        Err(HubError::Damaged { repository: self.repository.to_string(), file: self.file.into() }.into())
    }

    /// Fills the file at `part` up to its full size.
    fn fill(&mut self, remote: &RemoteFile, part: &Path) -> Result<()> {
        let wrong = |source| self.not_written(part, remote, source);
        fs::create_dir_all(folder_of(part)).map_err(wrong)?;
        let mut output = OpenOptions::new().write(true).create(true).truncate(false).open(part).map_err(wrong)?;
        let mut tries = 0;
        loop {
            let before = output.metadata().map_err(|source| self.not_written(part, remote, source))?.len();
            if before == remote.size {
                return output.sync_all().map_err(|source| self.not_written(part, remote, source));
            }
            let reason = match self.add(&mut output, part, before, remote) {
                Ok(()) => continue,
                Err(RequestFailure::Final(error)) => return Err(error),
                Err(RequestFailure::Transient(reason, _)) => reason,
            };
            let done = output.metadata().map_err(|source| self.not_written(part, remote, source))?.len();
            tries = if done > before { 1 } else { tries + 1 };
            if tries == MAX_ATTEMPTS {
                let (repository, file) = (self.repository.to_string(), self.file.to_owned());
                let (done, size) = (format_bytes(done).into(), format_bytes(remote.size).into());
                return Err(HubError::Interrupted { repository, file, done, size, reason }.into());
            }
            self.report_problem(&format!("{reason}; resuming at byte {done} of {size}", size = remote.size));
            pause(tries);
        }
    }

    /// Downloads the bytes after the first `existing` bytes and appends them.
    fn add(
        &mut self,
        output: &mut File,
        part: &Path,
        existing: u64,
        remote: &RemoteFile,
    ) -> Result<(), RequestFailure> {
        let (repository, file) = (self.repository, self.file);
        let wrong = |source| not_written(repository, file, part, remote, source);
        // A file that is too large is not the beginning of this content.
        let existing = if existing > remote.size { 0 } else { existing };
        let FileStream { from, mut reader } = self.client.bytes(self.commit, self.file, existing)?;
        output.set_len(from).and_then(|()| output.seek(SeekFrom::Start(from))).map_err(wrong)?;
        let (mut done, mut buffer) = (from, vec![0; READ_CHUNK]);
        (self.tell)(done);
        loop {
            let read = match reader.read(&mut buffer) {
                Ok(0) if done == remote.size => return Ok(()),
                Ok(0) => return Err(RequestFailure::Transient("the connection ended".into(), None)),
                Ok(read) => read,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(RequestFailure::Transient(e.to_string(), None)),
            };
            done += read as u64;
            if done > remote.size {
                let problem = format!("it should have {}, but more were sent", counted(remote.size, "byte"));
                return Err(self.client.unexpected_answer(self.file, problem).into());
            }
            output.write_all(&buffer[..read]).map_err(wrong)?;
            (self.tell)(done);
        }
    }

    fn report_problem(&self, problem: &str) {
        notice::emit(&format!("{} of {}: {problem}", self.file, self.repository));
    }

    fn not_written(&self, path: &Path, remote: &RemoteFile, source: std::io::Error) -> Error {
        not_written(self.repository, self.file, path, remote, source)
    }
}

/// Returns the path of the partial download of the file at `path`.
pub(super) fn part_of(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".candle-zero.part");
    path.with_file_name(name)
}

/// Returns the error for a file that cannot be written.
fn not_written(repository: &Repository, file: &str, path: &Path, remote: &RemoteFile, source: std::io::Error) -> Error {
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            let folder = folder_of(path).to_owned();
            let existing = path.metadata().map_or(0, |found| found.len());
            let needed = format_bytes(remote.size.saturating_sub(existing)).into();
            let free = format_bytes(free_space(&folder)).into();
            HubError::NoSpace { repository: repository.to_string(), file: file.into(), folder, needed, free }.into()
        }
        _ => Error::Io { action: "write", path: path.to_owned(), source },
    }
}

/// Returns the SHA-256 of a file.
fn digest(path: &Path) -> std::io::Result<String> {
    let (mut file, mut buffer) = (File::open(path)?, vec![0; READ_CHUNK]);
    let mut context = Context::new(&SHA256);
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            read => context.update(&buffer[..read]),
        }
    }
    Ok(hex(context.finish().as_ref()))
}
