//! What a rehearsed step brings in from files and back, window by window, as `offload/pipeline.rs` does.

use super::rehearsal::{Group, Home, Rehearsal};
use crate::memory::{Held, Kind};
use crate::offload::{ALIGN, DiskAccess, Pipeline, STEP, block_size, threads, window_len, windows};
use crate::zero::sub_group::Pass;
use candle_core::DType;
use std::collections::VecDeque;

/// One kind of state of a sub-group on its way through memory.
#[derive(Clone, Copy)]
struct Stream {
    dtype: DType,
    reads: bool,
    writes: bool,
}

/// A buffer of so many bytes.
type Buffer = usize;

/// Elements of a sub-group that are visited together, and what a pass brings in of them and back.
pub(super) struct Stretch {
    len: usize,
    streams: Vec<Stream>,
}

impl Stretch {
    /// All of a sub-group.
    pub fn of_group(rank: &Rehearsal<'_>, group: &Group, pass: Pass) -> Self {
        Self { len: group.len, streams: streams(rank, group, pass) }
    }

    /// All of a parameter's share of `len` elements.
    pub fn of_share(rank: &Rehearsal<'_>, group: &Group, len: usize, pass: Pass) -> Self {
        let streams = streams(rank, group, pass);
        Self { len: if streams.is_empty() { len } else { len.next_multiple_of(STEP) }, streams }
    }
}

/// What a pass brings in of a sub-group, and back.
fn streams(rank: &Rehearsal<'_>, group: &Group, pass: Pass) -> Vec<Stream> {
    let changed = |dtype, reads| Stream { dtype, reads, writes: pass.changes() };
    let in_file = |home| home == Home::File;
    // 16-bit weights are made anew from the master weights.
    let weights = in_file(group.weights).then(|| changed(rank.dtype, group.master == Home::None));
    let master = in_file(group.master).then(|| changed(DType::F32, true));
    let states = if in_file(group.states) { rank.grouping.state_names(group.role).len() } else { 0 };
    let grads = in_file(group.states).then_some(Stream { dtype: rank.plan.accumulate, reads: true, writes: false });
    let moments = (0..states).map(|_| changed(DType::F32, true));
    let weights = weights.into_iter().chain(master).filter(|_| pass.has_weights());
    weights.chain(moments.chain(grads).filter(|_| pass.has_moments())).collect()
}

/// A walk of the step over stretches, in order, and the buffers of its pipeline.
pub(super) struct Walk<'r, 'a> {
    rank: &'r Rehearsal<'a>,
    /// Elements and streams of each window.
    plan: Vec<(usize, Vec<Stream>)>,
    /// Windows of each stretch that has not been visited.
    windows: VecDeque<usize>,
    /// The next window.
    next: usize,
    read_ahead: bool,
    write_behind: bool,
    _copies: Option<Held>,
    /// Elements of the longest window.
    window: usize,
    begun: usize,
    ahead: VecDeque<Vec<Buffer>>,
    behind: VecDeque<Vec<Buffer>>,
    free: Vec<Buffer>,
    held: Vec<Held>,
}

impl<'r, 'a> Walk<'r, 'a> {
    pub fn new(rank: &'r Rehearsal<'a>, stretches: &[Stretch]) -> Self {
        let optimizer = rank.config.zero.offload_optimizer.as_ref();
        // Parameters alone always travel in a pipeline.
        let files = optimizer.filter(|o| o.to.nvme_path().is_some());
        let (read_ahead, write_behind) = files.map_or((true, true), |o| (o.pipeline_read, o.pipeline_write));
        let largest = stretches.iter().map(|s| s.len).max().unwrap_or(0);
        let most = stretches.iter().map(|s| s.streams.len()).max().unwrap_or(0);
        let buffers = most * Pipeline::sets(read_ahead, write_behind);
        let window = window_len(rank.access, largest, files.map_or(buffers, |o| o.buffer_count), buffers);
        let mut plan = Vec::new();
        let mut of_stretches = VecDeque::new();
        for Stretch { len, streams } in stretches {
            let before = plan.len();
            plan.extend(
                windows(if streams.is_empty() { 0 } else { *len }, window).map(|range| (range.len(), streams.clone())),
            );
            of_stretches.push_back(plan.len() - before);
        }
        Self {
            rank,
            window: plan.iter().map(|p| p.0).max().unwrap_or(0),
            plan,
            windows: of_stretches,
            next: 0,
            read_ahead,
            write_behind,
            _copies: (rank.access == DiskAccess::Direct && most > 0).then(|| hold_copies(rank)),
            begun: 0,
            ahead: VecDeque::new(),
            behind: VecDeque::new(),
            free: Vec::new(),
            held: Vec::new(),
        }
    }

    /// Brings the next stretch in and back.
    pub fn visit(&mut self) {
        let sets = Pipeline::sets(self.read_ahead, self.write_behind);
        for _ in 0..self.windows.pop_front().unwrap_or(0) {
            let index = self.next;
            self.next += 1;
            while self.begun < (index + 1 + usize::from(self.read_ahead)).min(self.plan.len()) {
                while self.ahead.len() + self.behind.len() >= sets && !self.behind.is_empty() {
                    self.reclaim();
                }
                self.begin_reading();
            }
            self.done(index);
            if !self.write_behind {
                self.reclaim();
            }
        }
    }

    fn begin_reading(&mut self) {
        let (len, streams) = &self.plan[self.begun];
        self.begun += 1;
        let mut reading = Vec::new();
        for stream in streams {
            let room = self.window * stream.dtype.size_in_bytes();
            match self.free.iter().position(|b| *b == room) {
                Some(i) => _ = self.free.swap_remove(i),
                None => self.held.push(self.rank.ledger.hold(Kind::Staging, room + ALIGN - 1)),
            }
            reading.push(room);
            if stream.reads {
                self.rank.traffic.borrow_mut().read(*len, stream.dtype);
            }
        }
        self.ahead.push_back(reading);
    }

    fn done(&mut self, index: usize) {
        let (len, streams) = &self.plan[index];
        let buffers = self.ahead.pop_front().unwrap_or_default();
        let mut writing = Vec::new();
        for (buffer, stream) in buffers.into_iter().zip(streams) {
            if stream.writes {
                self.rank.traffic.borrow_mut().write(*len, stream.dtype);
                writing.push(buffer);
            } else {
                self.free.push(buffer);
            }
        }
        self.behind.push_back(writing);
    }

    /// Waits for the oldest window that is on its way back.
    fn reclaim(&mut self) {
        self.free.extend(self.behind.pop_front().into_iter().flatten());
    }
}

/// Around the page cache each thread may keep a block that does not lie as it has to.
fn hold_copies(rank: &Rehearsal<'_>) -> Held {
    let largest = rank.params.iter().map(|p| p.numel * 4).max().unwrap_or(0);
    let block = block_size(&rank.config.aio).min(largest).next_multiple_of(ALIGN) + ALIGN - 1;
    rank.ledger.hold(Kind::Staging, threads(&rank.config.aio) * block)
}

/// While the files are filled they are accessed around the page cache, unless the user wants it otherwise.
pub(super) fn hold_copies_of_start(rank: &Rehearsal<'_>) {
    if rank.access == DiskAccess::Direct {
        drop(hold_copies(rank));
    }
}
