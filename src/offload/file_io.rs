//! File requests, carried out by threads.
//!
//! ```text
//!   read / write  -> cut into blocks -> queue -> thread: pread, pwrite or copy -> last block done -> wait returns
//! ```
//!
//! At the block sizes that suit disks, blocking threads are as fast as asynchronous system calls (measured), and they
//! work on every file system. A transfer owns its buffer until it is waited for, so nothing else can touch memory that
//! the system is filling. An extent of a file is in only one transfer at a time: a reader of written data must wait
//! for the write first.

use super::aligned_buffer::ALIGN;
use super::disk_access::{AtomicDiskAccess, DiskAccess};
use super::file_arena::{BounceBuffer, FileArena, TransferPiece};
use super::offload_report::{IoMeter, OffloadReport};
use super::transfer_buffer::TransferBuffer;
use crate::config::Aio;
use crate::error::{Error, OffloadError, Result};
use crate::timeline::{self, CarriedContext, TimelineLane};
use crate::util::{lock, unpoisoned};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The upper bound on the number of threads, regardless of `aio`.
const MAX_THREADS: usize = 64;

/// The maximum size of a request in bytes. Every thread may keep this much memory for a copy.
const MAX_BLOCK_BYTES: usize = 16 << 20;

/// The maximum number of bytes that [`FileIo::write_and_drop`] leaves unwritten, unless a single transfer is larger.
pub(crate) const MAX_UNWRITTEN_BYTES: usize = 256 << 20;

/// The file access threads of one rank.
pub(crate) struct FileIo {
    shared: Arc<FileIoShared>,
    threads: Vec<JoinHandle<()>>,
    block_size: usize,
}

/// The maximum time that a change of access waits for threads to free the memory that they keep.
const ACCESS_CHANGE_TIMEOUT: Duration = Duration::from_secs(1);

struct FileIoShared {
    queue: Mutex<IoRequestQueue>,
    /// Signals that there is a request, or that no more will come.
    request_available: Condvar,
    /// Signals that fewer bytes are unwritten.
    written: Condvar,
    /// Signals that a thread has freed the memory that it held.
    idle: Condvar,
    current_access: AtomicDiskAccess,
    meter: IoMeter,
}

#[derive(Default)]
struct IoRequestQueue {
    requests: VecDeque<IoRequest>,
    unwritten: usize,
    /// The number of threads that are carrying out a request, or that still keep the copy buffer of their last one.
    holding_threads: usize,
    is_closed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum IoDirection {
    Read,
    Write,
}

impl IoDirection {
    fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// One block of a transfer.
struct IoRequest {
    batch: Arc<dyn BlockCompletion>,
    arena: Arc<FileArena>,
    direction: IoDirection,
    at: u64,
    memory: *mut u8,
    len: usize,
    context: CarriedContext,
}

// SAFETY: `memory` points into the buffer that `batch` owns and keeps until its last request is over. Blocks of one
// transfer are disjoint, so each is touched only by the thread that has the request.
unsafe impl Send for IoRequest {}

/// A receiver of the results of a transfer's requests.
trait BlockCompletion: Send + Sync {
    fn block_done(&self, result: std::result::Result<(), Error>, shared: &FileIoShared);
}

/// A pending transfer. Dropping this value does not stop the transfer.
pub(crate) struct FileTransfer<B> {
    batch: Arc<FileTransferShared<B>>,
    shared: Arc<FileIoShared>,
}

struct FileTransferShared<B> {
    state: Mutex<FileTransferState<B>>,
    finished: Condvar,
}

struct FileTransferState<B> {
    remaining_blocks: usize,
    buffer: Option<B>,
    /// The bytes that count as unwritten until the transfer is over. If there are any, the buffer is then dropped.
    unwritten: usize,
    error: Option<Error>,
}

/// Returns the number of requests that run at the same time.
pub(crate) fn threads(aio: &Aio) -> usize {
    aio.queue_depth.saturating_mul(aio.intra_op_parallelism).clamp(1, MAX_THREADS)
}

/// Returns the maximum size of a request in bytes.
pub(crate) fn block_size(aio: &Aio) -> usize {
    aio.block_size.clamp(ALIGN, MAX_BLOCK_BYTES) / ALIGN * ALIGN
}

impl FileIo {
    /// Starts the threads that `aio` requests.
    pub fn start(aio: &Aio, access: DiskAccess) -> Result<Self> {
        let shared = Arc::new(FileIoShared {
            queue: Mutex::default(),
            request_available: Condvar::new(),
            written: Condvar::new(),
            idle: Condvar::new(),
            current_access: AtomicDiskAccess::new(access),
            meter: IoMeter::default(),
        });
        let block_size = block_size(aio);
        let mut io = Self { shared, threads: Vec::new(), block_size };
        for i in 0..threads(aio) {
            let shared = io.shared.clone();
            let thread = std::thread::Builder::new().name(format!("offload-{i}")).stack_size(256 << 10);
            io.threads.push(thread.spawn(move || shared.work(i)).map_err(OffloadError::Thread)?);
        }
        Ok(io)
    }

    pub fn set_access(&self, access: DiskAccess) {
        // The access is set under the lock, so that no thread is between its check of the access and its wait.
        let queue = self.shared.lock();
        self.shared.current_access.set(access);
        // Before idle threads receive further requests, they free the memory that the new access does not need.
        self.shared.request_available.notify_all();
        if !self.shared.current_access.is_direct() {
            drop(self.shared.idle.wait_timeout_while(queue, ACCESS_CHANGE_TIMEOUT, |queue| queue.holding_threads > 0));
        }
    }

    /// Returns the current access.
    pub fn access(&self) -> DiskAccess {
        self.shared.current_access.get()
    }

    pub fn report(&self) -> OffloadReport {
        self.shared.meter.report()
    }

    /// Fills parts of `buffer` from files.
    pub fn read<B: TransferBuffer>(&self, buffer: B, pieces: Vec<TransferPiece>) -> FileTransfer<B> {
        self.submit(buffer, pieces, IoDirection::Read, 0)
    }

    /// Writes parts of `buffer` to files; `wait` returns the buffer.
    pub fn write<B: TransferBuffer>(&self, buffer: B, pieces: Vec<TransferPiece>) -> FileTransfer<B> {
        self.submit(buffer, pieces, IoDirection::Write, 0)
    }

    /// Writes parts of `buffer` to files, and drops the buffer when the transfer is over. Waits first if many bytes are
    /// still unwritten.
    pub fn write_and_drop<B: TransferBuffer>(&self, mut buffer: B, pieces: Vec<TransferPiece>) -> FileTransfer<B> {
        let bytes = buffer.bytes().len().max(1);
        let mut queue = self.shared.lock();
        let start = Instant::now();
        while queue.unwritten > 0 && queue.unwritten + bytes > MAX_UNWRITTEN_BYTES {
            queue = unpoisoned(self.shared.written.wait(queue));
        }
        queue.unwritten += bytes;
        drop(queue);
        self.shared.meter.waited(start.elapsed());
        self.submit(buffer, pieces, IoDirection::Write, bytes)
    }

    fn submit<B: TransferBuffer>(
        &self,
        buffer: B,
        pieces: Vec<TransferPiece>,
        direction: IoDirection,
        unwritten: usize,
    ) -> FileTransfer<B> {
        let blocks: usize = pieces.iter().map(|p| p.memory.len().div_ceil(self.block_size)).sum();
        let state = FileTransferState { remaining_blocks: blocks, buffer: Some(buffer), unwritten, error: None };
        let batch = Arc::new(FileTransferShared { state: Mutex::new(state), finished: Condvar::new() });
        let context = timeline::carry();
        let mut queue = self.shared.lock();
        let mut state = lock(&batch.state);
        if let Some(buffer) = &mut state.buffer {
            let bytes = buffer.bytes();
            for TransferPiece { arena, offset, memory } in pieces {
                for (i, block) in bytes[memory].chunks_mut(self.block_size).enumerate() {
                    queue.requests.push_back(IoRequest {
                        batch: batch.clone(),
                        arena: arena.clone(),
                        direction,
                        at: offset + (i * self.block_size) as u64,
                        memory: block.as_mut_ptr(),
                        len: block.len(),
                        context: context.clone(),
                    });
                }
            }
        }
        if blocks == 0 {
            state.finish(&mut queue);
        }
        drop((state, queue));
        self.shared.request_available.notify_all();
        FileTransfer { batch, shared: self.shared.clone() }
    }
}

impl Drop for FileIo {
    /// Carries out all pending requests, and stops the threads.
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.request_available.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has already reported the panic.
            let _ = thread.join();
        }
    }
}

impl FileIoShared {
    fn lock(&self) -> std::sync::MutexGuard<'_, IoRequestQueue> {
        lock(&self.queue)
    }

    /// Runs one thread.
    fn work(&self, thread: usize) {
        let (mut bounce, mut holds) = (BounceBuffer::default(), false);
        loop {
            let mut queue = self.lock();
            let request = loop {
                // The kept memory is freed even if a request is already waiting: memory for the request must not be
                // allocated in addition to the memory that this thread keeps.
                if !self.current_access.is_direct() {
                    bounce = BounceBuffer::default();
                }
                if holds && bounce.is_empty() {
                    holds = false;
                    queue.holding_threads -= 1;
                    self.idle.notify_all();
                }
                if let Some(request) = queue.requests.pop_front() {
                    queue.holding_threads += usize::from(!holds);
                    holds = true;
                    break request;
                }
                if queue.is_closed {
                    return;
                }
                queue = unpoisoned(self.request_available.wait(queue));
            };
            drop(queue);
            let span = request.context.span(
                TimelineLane::File(thread),
                timeline::EventCategory::File,
                request.direction.name(),
            );
            let _span = span.with("bytes", request.len as u64);
            self.carry_out(request, &mut bounce);
        }
    }

    fn carry_out(
        &self,
        IoRequest { batch, arena, direction, at, memory, len, .. }: IoRequest,
        bounce: &mut BounceBuffer,
    ) {
        let access = self.current_access.of_file(arena.allows_direct());
        // SAFETY: see the `Send` of [`IoRequest`]: these bytes are in a live buffer, and only this thread uses them
        // until the request is over.
        let memory = unsafe { std::slice::from_raw_parts_mut(memory, len) };
        self.meter.begin();
        let transferred = match direction {
            IoDirection::Read => [len, 0],
            IoDirection::Write => [0, len],
        };
        // A waiting thread must also be notified of a panic; otherwise it would wait forever.
        let done = catch_unwind(AssertUnwindSafe(|| match direction {
            IoDirection::Read => arena.read(access, at, memory, bounce),
            IoDirection::Write => arena.write(access, at, memory, bounce),
        }));
        let result = done.unwrap_or_else(|_| Err(std::io::Error::other("a file access thread panicked")));
        self.meter.end(transferred);
        batch.block_done(result.map_err(|e| arena.error(direction.name(), e)), self);
    }
}

impl<B: TransferBuffer> BlockCompletion for FileTransferShared<B> {
    fn block_done(&self, result: std::result::Result<(), Error>, shared: &FileIoShared) {
        // Both locks are taken in the same order as in `submit`.
        let mut queue = shared.lock();
        let mut state = lock(&self.state);
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        state.remaining_blocks -= 1;
        if state.remaining_blocks == 0 {
            let dropped = state.finish(&mut queue);
            drop(queue);
            // The buffer is dropped before any thread is notified that the transfer is over, because the ledger counts
            // the buffer's memory until it is freed.
            drop(dropped);
            drop(state);
            self.finished.notify_all();
            shared.written.notify_all();
        }
    }
}

impl<B> FileTransferState<B> {
    /// Ends the transfer after its last block. Returns the buffer if it is to be dropped.
    fn finish(&mut self, queue: &mut IoRequestQueue) -> Option<B> {
        queue.unwritten -= self.unwritten;
        if self.unwritten > 0 { self.buffer.take() } else { None }
    }
}

impl<B> FileTransfer<B> {
    /// Waits for the last block.
    ///
    /// # Errors
    /// The error of the first request that failed.
    fn finish(self) -> Result<Option<B>> {
        let start = Instant::now();
        let mut state = lock(&self.batch.state);
        let _span = timeline::span(timeline::EventCategory::Wait, "wait for file");
        while state.remaining_blocks > 0 {
            state = unpoisoned(self.batch.finished.wait(state));
        }
        self.shared.meter.waited(start.elapsed());
        match state.error.take() {
            Some(error) => Err(error),
            None => Ok(state.buffer.take()),
        }
    }

    /// Waits until everything is read or written, and returns the buffer.
    ///
    /// # Errors
    /// The error of the first request that failed.
    ///
    /// # Panics
    /// Panics if [`FileIo::write_and_drop`] began the transfer, because the buffer has then been dropped.
    pub fn wait(self) -> Result<B> {
        Ok(self.finish()?.expect("the buffer exists until it is taken"))
    }

    /// Waits until everything is written.
    ///
    /// # Errors
    /// The error of the first request that failed.
    pub fn written(self) -> Result<()> {
        self.finish().map(drop)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::memory::{MemoryKind, MemoryLedger};
    use crate::offload::offload_folder::OffloadFolder;
    use crate::precision::Flat;
    use proptest::prelude::*;

    fn arena(path: &std::path::Path, pages: usize) -> Arc<FileArena> {
        let folder = OffloadFolder::open(path, false).unwrap();
        let arena = FileArena::create(&folder, MemoryKind::Moments, "a test", &MemoryLedger::default()).unwrap();
        arena.reserve(pages * ALIGN).unwrap();
        arena
    }

    fn io(block_size: usize, threads: usize, access: DiskAccess) -> FileIo {
        FileIo::start(&Aio { block_size, queue_depth: threads, intra_op_parallelism: 1 }, access).unwrap()
    }

    fn any_access() -> impl Strategy<Value = DiskAccess> {
        proptest::sample::select(vec![DiskAccess::Direct, DiskAccess::Cached, DiskAccess::Mapped])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_is_written_is_read_whatever_the_pieces(
            // A piece is given by the number of pages before it in the file, the number of elements before it in
            // memory, and its own number of elements.
            pieces in proptest::collection::vec((0usize..3, 0usize..50, 1usize..5000), 0..6),
            block_size in 0usize..20_000,
            threads in 0usize..5,
            accesses in (any_access(), any_access()),
            dropped in any::<bool>(),
        ) {
            let path = tempfile::tempdir().unwrap();
            let arena = arena(path.path(), 64);
            let io = io(block_size, threads, accesses.0);
            let (mut at, mut from, mut extents) = (0, 0, vec![]);
            for (pages, before, len) in pieces {
                at += pages * ALIGN;
                let start = from + before;
                from = start + len;
                extents.push((at as u64, start * 4..from * 4));
                at += (len * 4).next_multiple_of(ALIGN);
            }
            prop_assume!(at <= 64 * ALIGN);
            let values: Vec<f32> = (0..from).map(|i| i as f32 + 0.5).collect();
            let pieces = || -> Vec<TransferPiece> {
                let piece = |(at, memory): &(u64, std::ops::Range<usize>)| TransferPiece {
                    arena: arena.clone(),
                    offset: *at,
                    memory: memory.clone(),
                };
                extents.iter().map(piece).collect()
            };
            let flat = Flat::F32(values.clone());
            if dropped {
                io.write_and_drop(flat, pieces()).written().unwrap();
            } else {
                prop_assert_eq!(io.write(flat, pieces()).wait().unwrap(), Flat::F32(values.clone()));
            }
            io.set_access(accesses.1);
            let found = io.read(Flat::F32(vec![-1.0; from]), pieces()).wait().unwrap();
            let is_read = |i: usize| extents.iter().any(|(_, memory)| memory.contains(&(i * 4)));
            let expected = values.iter().enumerate().map(|(i, v)| if is_read(i) { *v } else { -1.0 }).collect();
            prop_assert_eq!(found, Flat::F32(expected));
            let bytes: u64 = extents.iter().map(|(_, memory)| memory.len() as u64).sum();
            prop_assert_eq!((io.report().bytes_written, io.report().bytes_read), (bytes, bytes));
        }

        #[test]
        fn an_error_in_one_block_is_returned_and_the_next_transfer_works(
            pages in 1usize..8, bad in 0usize..8, block_pages in 1usize..3, threads in 1usize..4, direct in any::<bool>(),
        ) {
            let path = tempfile::tempdir().unwrap();
            let arena = arena(path.path(), 8);
            let io = io(block_pages * ALIGN, threads, if direct { DiskAccess::Direct } else { DiskAccess::Cached });
            // Piece `bad`, if it is among the pieces that are read, is beyond the end of the file.
            let piece = |i: usize| {
                let at = if i == bad { 9 } else { i } * ALIGN;
                TransferPiece { arena: arena.clone(), offset: at as u64, memory: i * ALIGN..(i + 1) * ALIGN }
            };
            let read = || io.read(Flat::F32(vec![1.0; pages * ALIGN / 4]), (0..pages).map(piece).collect()).wait();
            for _ in 0..2 {
                match read() {
                    Err(Error::Offload(OffloadError::Io { action: "read", what: "a test", .. })) => prop_assert!(bad < pages),
                    Err(error) => prop_assert!(false, "{}", error),
                    Ok(flat) => prop_assert!(bad >= pages && flat == Flat::F32(vec![0.0; pages * ALIGN / 4])),
                }
            }
        }
    }

    #[test]
    fn what_waits_to_be_written_is_bounded_and_written_when_the_threads_end() {
        let path = tempfile::tempdir().unwrap();
        let arena = arena(path.path(), 64);
        let io = io(ALIGN, 1, DiskAccess::Cached);
        for i in 0..64u64 {
            let piece = TransferPiece { arena: arena.clone(), offset: i * ALIGN as u64, memory: 0..ALIGN };
            // The test does not wait for the result.
            drop(io.write_and_drop(Flat::F32(vec![i as f32; ALIGN / 4]), vec![piece]));
        }
        drop(io);
        let mut found = vec![0u8; 64 * ALIGN];
        arena.read(DiskAccess::Cached, 0, &mut found, &mut BounceBuffer::default()).unwrap();
        for (i, page) in found.chunks(ALIGN).enumerate() {
            assert!(page.chunks(4).all(|v| v == (i as f32).to_le_bytes()), "page {i}");
        }
    }
}
