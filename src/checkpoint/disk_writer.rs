//! Writes a file on a separate thread: one buffer is filled while the other is written.
//!
//! ```text
//!   rank_file    spare | fill | write, spare | fill         | write, spare ...  finish
//!   thread                    | checksums, write to the disk | ...
//! ```

use super::rank_file_layout::{BLOCK, PAGE};
use crate::files::open_direct;
use crate::offload::AlignedBuffer;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Result as IoResult};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};
use twox_hash::XxHash3_64;

/// Bytes to write at a position of the file.
struct WriteRequest {
    buffer: AlignedBuffer,
    len: usize,
    position: u64,
}

/// The thread and its channels.
pub(super) struct DiskWriter {
    requests: Sender<WriteRequest>,
    /// The channel that delivers the buffer that is not being written, or the error of a write.
    spares: Receiver<IoResult<AlignedBuffer>>,
    /// The thread, which returns the checksums of all blocks.
    thread: JoinHandle<Vec<u64>>,
}

impl DiskWriter {
    /// Starts a writer for the existing file at `path`, with a spare buffer of `bytes` bytes in addition to the one
    /// that the caller fills.
    pub fn start(path: &Path, bytes: usize) -> IoResult<Self> {
        let (requests, to_write) = channel();
        let (done, spares) = channel();
        let mut target = WriteTarget::open(path)?;
        let thread = Builder::new().name("checkpoint disk".into()).spawn(move || {
            let mut checksums = Vec::new();
            let mut spare = Ok(AlignedBuffer::new(bytes));
            loop {
                let failed = spare.is_err();
                // If the save was abandoned, no one receives the buffer.
                if done.send(spare).is_err() || failed {
                    return checksums;
                }
                let Ok(WriteRequest { mut buffer, len, position }) = to_write.recv() else { return checksums };
                let bytes = &buffer.bytes_mut()[..len];
                checksums.extend(bytes.chunks(BLOCK).map(XxHash3_64::oneshot));
                spare = target.write(bytes, position).map(|()| buffer);
            }
        })?;
        Ok(Self { requests, spares, thread })
    }

    /// Waits until a buffer is free and returns it.
    pub fn spare(&self) -> IoResult<AlignedBuffer> {
        self.spares.recv().unwrap_or_else(|_| unreachable!("the thread only ends after an error"))
    }

    /// Starts writing the first `len` bytes of `buffer`: full blocks, except that the last block of the file can be
    /// partial.
    pub fn write(&self, buffer: AlignedBuffer, len: usize, position: u64) {
        // A thread that has failed accepts no requests; its error arrives with the next spare buffer.
        _ = self.requests.send(WriteRequest { buffer, len, position });
    }

    /// Waits until everything is written, and returns the checksums of all blocks.
    pub fn finish(self) -> IoResult<Vec<u64>> {
        drop(self.requests);
        self.spares.into_iter().try_for_each(|spare| spare.map(drop))?;
        Ok(self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }
}

/// A file and, if the file system allows it, a second handle that bypasses the page cache. Writing through that handle
/// is several times faster (measured).
struct WriteTarget {
    file: File,
    direct: Option<File>,
}

impl WriteTarget {
    fn open(path: &Path) -> IoResult<Self> {
        Ok(Self { file: OpenOptions::new().write(true).open(path)?, direct: open_direct(path) })
    }

    fn write(&mut self, bytes: &[u8], position: u64) -> IoResult<()> {
        // The partial page at the end goes through the page cache.
        let (pages, partial_page) = bytes.split_at(bytes.len() - bytes.len() % PAGE);
        match self.direct.as_ref().map(|direct| direct.write_all_at(pages, position)) {
            Some(Err(e)) if e.kind() == ErrorKind::InvalidInput => {
                self.direct = None;
                self.file.write_all_at(pages, position)?;
            }
            Some(result) => result?,
            None => self.file.write_all_at(pages, position)?,
        }
        self.file.write_all_at(partial_page, position + pages.len() as u64)
    }
}
