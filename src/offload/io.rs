//! Requests to files, carried out by threads.
//!
//! ```text
//!   read / write  -> cut into blocks -> queue -> thread: pread, pwrite or copy -> last block done -> wait returns
//! ```
//!
//! Threads that block in the system are as fast here as asynchronous system calls at the block sizes that disks like
//! (measured), and work on every file system. A transfer owns its buffer until it is waited for, so nobody can touch
//! memory that the system is filling. A place in a file takes part in one transfer at a time; whoever wants to read
//! what was written waits for the writing first.

use super::ALIGN;
use super::access::{Chosen, DiskAccess};
use super::arena::{Arena, Bounce};
use super::report::{Meter, OffloadReport};
use crate::config::Aio;
use crate::error::{Error, Result};
use crate::memory::Tracked;
use crate::precision::Flat;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

/// Threads at most, whatever `aio` says.
const MAX_THREADS: usize = 64;

/// Bytes of [`Io::write_and_drop`] that may be waiting to be written, unless one transfer alone is larger.
const UNWRITTEN: usize = 256 << 20;

/// Memory that a transfer can own.
///
/// # Safety
/// The bytes lie on the heap and stay there when the value moves.
pub(crate) unsafe trait Buffer: Send + 'static {
    /// All of it.
    fn bytes(&mut self) -> &mut [u8];
}

// SAFETY: the bytes are those of a vector.
unsafe impl Buffer for Flat {
    fn bytes(&mut self) -> &mut [u8] {
        self.as_bytes_mut()
    }
}

// SAFETY: the bytes are those of a vector.
unsafe impl Buffer for Tracked {
    fn bytes(&mut self) -> &mut [u8] {
        self.as_bytes_mut()
    }
}

/// A place in a file and the bytes of a buffer that belong there.
pub(crate) struct Piece {
    pub arena: Arc<Arena>,
    /// Offset in the file, a multiple of [`ALIGN`].
    pub at: u64,
    pub memory: Range<usize>,
}

/// The threads of one rank.
pub(crate) struct Io {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    block_size: usize,
}

struct Shared {
    queue: Mutex<Queue>,
    /// There is a request, or there will be none any more.
    wanted: Condvar,
    /// Fewer bytes are unwritten.
    written: Condvar,
    chosen: Chosen,
    meter: Meter,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<Request>,
    unwritten: usize,
    is_closed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

/// One block of a transfer.
struct Request {
    batch: Arc<dyn Block>,
    arena: Arc<Arena>,
    direction: Direction,
    at: u64,
    memory: *mut u8,
    len: usize,
}

// SAFETY: `memory` points into the buffer that `batch` owns and keeps until its last request is over. Blocks of one
// transfer are disjoint, so each is touched by the one thread that has the request.
unsafe impl Send for Request {}

/// What a request tells its transfer.
trait Block: Send + Sync {
    fn is_over(&self, result: std::result::Result<(), Error>, shared: &Shared);
}

/// A transfer under way. Dropping it does not stop it.
pub(crate) struct Transfer<B> {
    batch: Arc<Batch<B>>,
    shared: Arc<Shared>,
}

struct Batch<B> {
    state: Mutex<State<B>>,
    over: Condvar,
}

struct State<B> {
    left: usize,
    buffer: Option<B>,
    /// Bytes that count as unwritten until this is over; the buffer is then dropped.
    unwritten: usize,
    error: Option<Error>,
}

impl Io {
    /// Starts the threads that `aio` asks for.
    pub fn start(aio: &Aio, access: DiskAccess) -> Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            wanted: Condvar::new(),
            written: Condvar::new(),
            chosen: Chosen::new(access),
            meter: Meter::default(),
        });
        let block_size = aio.block_size.clamp(ALIGN, 1 << 30) / ALIGN * ALIGN;
        let mut io = Self { shared, threads: Vec::new(), block_size };
        for i in 0..aio.queue_depth.saturating_mul(aio.intra_op_parallelism).clamp(1, MAX_THREADS) {
            let shared = io.shared.clone();
            let thread = std::thread::Builder::new().name(format!("offload-{i}")).stack_size(256 << 10);
            io.threads.push(thread.spawn(move || shared.work()).map_err(Error::OffloadThread)?);
        }
        Ok(io)
    }

    pub fn choose(&self, access: DiskAccess) {
        self.shared.chosen.set(access);
    }

    pub fn report(&self) -> OffloadReport {
        self.shared.meter.report()
    }

    /// Fills parts of `buffer` from files.
    pub fn read<B: Buffer>(&self, buffer: B, pieces: Vec<Piece>) -> Transfer<B> {
        self.submit(buffer, pieces, Direction::Read, 0)
    }

    /// Writes parts of `buffer` to files; `wait` returns the buffer.
    pub fn write<B: Buffer>(&self, buffer: B, pieces: Vec<Piece>) -> Transfer<B> {
        self.submit(buffer, pieces, Direction::Write, 0)
    }

    /// Writes parts of `buffer` to files, and drops it when that is done. Waits first where much is unwritten yet.
    pub fn write_and_drop<B: Buffer>(&self, mut buffer: B, pieces: Vec<Piece>) -> Transfer<B> {
        let bytes = buffer.bytes().len().max(1);
        let mut queue = self.shared.lock();
        let start = Instant::now();
        while queue.unwritten > 0 && queue.unwritten + bytes > UNWRITTEN {
            queue = self.shared.written.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        queue.unwritten += bytes;
        drop(queue);
        self.shared.meter.waited(start.elapsed());
        self.submit(buffer, pieces, Direction::Write, bytes)
    }

    fn submit<B: Buffer>(&self, buffer: B, pieces: Vec<Piece>, direction: Direction, unwritten: usize) -> Transfer<B> {
        let blocks: usize = pieces.iter().map(|p| p.memory.len().div_ceil(self.block_size)).sum();
        let state = State { left: blocks, buffer: Some(buffer), unwritten, error: None };
        let batch = Arc::new(Batch { state: Mutex::new(state), over: Condvar::new() });
        let mut queue = self.shared.lock();
        let mut state = crate::param::lock(&batch.state);
        if let Some(buffer) = &mut state.buffer {
            let bytes = buffer.bytes();
            for Piece { arena, at, memory } in pieces {
                for (i, block) in bytes[memory].chunks_mut(self.block_size).enumerate() {
                    queue.requests.push_back(Request {
                        batch: batch.clone(),
                        arena: arena.clone(),
                        direction,
                        at: at + (i * self.block_size) as u64,
                        memory: block.as_mut_ptr(),
                        len: block.len(),
                    });
                }
            }
        }
        if blocks == 0 {
            state.finish(&mut queue);
        }
        drop((state, queue));
        self.shared.wanted.notify_all();
        Transfer { batch, shared: self.shared.clone() }
    }
}

impl Drop for Io {
    /// Carries out what has been asked for, and stops the threads.
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.wanted.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so itself.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        crate::param::lock(&self.queue)
    }

    /// What one thread does.
    fn work(&self) {
        let mut bounce = Bounce::default();
        loop {
            let mut queue = self.lock();
            let request = loop {
                if let Some(request) = queue.requests.pop_front() {
                    break request;
                }
                if queue.is_closed {
                    return;
                }
                queue = self.wanted.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner());
            };
            drop(queue);
            self.carry_out(request, &mut bounce);
        }
    }

    fn carry_out(&self, Request { batch, arena, direction, at, memory, len }: Request, bounce: &mut Bounce) {
        let access = self.chosen.of(&arena);
        // SAFETY: see the `Send` of requests: these bytes are inside of a live buffer, and nobody else's meanwhile.
        let memory = unsafe { std::slice::from_raw_parts_mut(memory, len) };
        self.meter.begin();
        let (result, moved) = match direction {
            Direction::Read => (arena.read(access, at, memory, bounce).map_err(|e| arena.error("read", e)), [len, 0]),
            Direction::Write => {
                (arena.write(access, at, memory, bounce).map_err(|e| arena.error("write", e)), [0, len])
            }
        };
        self.meter.end(moved);
        batch.is_over(result, self);
    }
}

impl<B: Buffer> Block for Batch<B> {
    fn is_over(&self, result: std::result::Result<(), Error>, shared: &Shared) {
        // Both locks are taken in the order of `submit`.
        let mut queue = shared.lock();
        let mut state = crate::param::lock(&self.state);
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        state.left -= 1;
        if state.left == 0 {
            let dropped = state.finish(&mut queue);
            drop(queue);
            // Before anybody learns that the transfer is over: its memory counts until it is gone.
            drop(dropped);
            drop(state);
            self.over.notify_all();
            shared.written.notify_all();
        }
    }
}

impl<B> State<B> {
    /// The last block is over; gives what is to be dropped.
    fn finish(&mut self, queue: &mut Queue) -> Option<B> {
        queue.unwritten -= self.unwritten;
        if self.unwritten > 0 { self.buffer.take() } else { None }
    }
}

impl<B> Transfer<B> {
    /// Waits for the last block.
    ///
    /// # Errors
    /// The first request that failed.
    fn finish(self) -> Result<Option<B>> {
        let start = Instant::now();
        let mut state = crate::param::lock(&self.batch.state);
        while state.left > 0 {
            state = self.batch.over.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        self.shared.meter.waited(start.elapsed());
        match state.error.take() {
            Some(error) => Err(error),
            None => Ok(state.buffer.take()),
        }
    }

    /// Waits until everything is read or written, and gives the buffer back.
    ///
    /// # Errors
    /// The first request that failed.
    ///
    /// # Panics
    /// If the buffer was to be dropped.
    pub fn wait(self) -> Result<B> {
        Ok(self.finish()?.expect("the buffer is there until it is taken"))
    }

    /// Waits until everything is written.
    ///
    /// # Errors
    /// The first request that failed.
    pub fn written(self) -> Result<()> {
        self.finish().map(drop)
    }
}
