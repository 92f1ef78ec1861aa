//! A file that only grows, in the folder of a run.

use crate::error::{Error, Result};
use crate::monitor::end_last_line;
use serde_json::{Map, Value};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// A file that only grows, and the lines that have not been written to it yet.
#[derive(Debug)]
pub(super) struct LineAppender {
    pub file: File,
    path: PathBuf,
    pub pending: Vec<u8>,
    /// The number of bytes, including those that are pending.
    pub len: u64,
}

impl LineAppender {
    /// Opens or creates the file in the folder of a run.
    pub fn open(folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(name);
        let open = || {
            // A link may lead anywhere and is not followed. A pipe must not block.
            let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
            let mut open = OpenOptions::new();
            let file =
                open.create(true).append(true).read(true).custom_flags(flags.bits().cast_signed()).open(&path)?;
            crate::files::check_regular_file(&file.metadata()?)?;
            // The last line may be incomplete, because the process was killed or the disk was full.
            end_last_line(&file)?;
            Ok((file.metadata()?.len(), file))
        };
        let (len, file) = open().map_err(|source| Error::Io { action: "open", path: path.clone(), source })?;
        Ok(Self { file, path, pending: Vec::new(), len })
    }

    /// Collects an object as a line.
    pub fn push(&mut self, line: &Map<String, Value>) {
        self.push_text(&serde_json::to_string(line).expect("text and numbers are JSON"));
    }

    /// Collects a line of text.
    pub fn push_text(&mut self, line: &str) {
        self.pending.extend_from_slice(line.as_bytes());
        self.pending.push(b'\n');
        self.len += line.len() as u64 + 1;
    }

    /// Passes the lines to the system.
    pub fn flush(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let result = self.file.write_all(&self.pending).inspect_err(|_| {
            // If the disk is full, an incomplete line at the end is removed.
            _ = end_last_line(&self.file);
            self.len = self.file.metadata().map_or(self.len, |metadata| metadata.len());
        });
        self.pending.clear();
        result.map_err(|source| Error::Io { action: "write", path: self.path.clone(), source })
    }
}
