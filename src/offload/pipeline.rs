//! The windows of the optimizer step.
//!
//! ```text
//!   pipeline_read    read k+1 |
//!                    update k | at the same time
//!   pipeline_write  write k-1 |
//! ```
//!
//! Without a flag, its part is waited for. There are as many sets of buffers as windows at a time: one, two or three.

use super::aligned::Aligned;
use super::arena::{ALIGN, Extent};
use super::io::{Io, Transfer};
use crate::error::Result;
use crate::memory::{Held, Kind, Ledger};
use crate::precision::FlatMut;
use candle_core::DType;
use std::collections::VecDeque;
use std::ops::Range;

/// Elements of a window at most: 16 MiB of f32, at which disks have reached their bandwidth.
const WINDOW: usize = 4 << 20;

/// Elements after which the position in every file is one that requests may begin at.
pub(crate) const STEP: usize = ALIGN / 2;

/// One kind of state of a sub-group on its way through memory.
#[derive(Clone)]
pub(crate) struct Stream {
    pub extent: Extent,
    pub reads: bool,
    pub writes: bool,
}

/// Elements of a sub-group that are in memory together.
pub(crate) struct Plan {
    pub range: Range<usize>,
    pub streams: Vec<Stream>,
}

/// One kind of state in a window.
pub(crate) struct Staged {
    buffer: Aligned,
    dtype: DType,
    /// Place of the first element in the sub-group.
    start: usize,
}

/// A window whose states are in memory, in the order of its streams.
pub(crate) struct Window {
    pub staged: Vec<Staged>,
    /// Its place in the plan.
    index: usize,
}

impl Staged {
    /// Elements `range` of the sub-group.
    pub fn part(&mut self, range: Range<usize>) -> FlatMut<'_> {
        self.buffer.elements(self.dtype, range.start - self.start..range.end - self.start)
    }
}

/// Elements of a window so that `buffer_count` buffers of `largest` elements, f32, hold all `buffers` of the pipeline.
pub(crate) fn window_len(largest: usize, buffer_count: usize, buffers: usize) -> usize {
    let room = (largest as u128 * buffer_count as u128 / buffers.max(1) as u128).min(WINDOW as u128) as usize;
    room.next_multiple_of(STEP).max(STEP)
}

/// Cuts `len` elements into windows.
pub(crate) fn windows(len: usize, window: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(window).map(move |start| start..len.min(start + window))
}

/// Brings windows into memory and back, in order.
pub(crate) struct Pipeline<'a> {
    io: &'a Io,
    ledger: &'a Ledger,
    plan: Vec<Plan>,
    /// Elements of the longest window.
    window: usize,
    read_ahead: bool,
    write_behind: bool,
    /// Windows whose reading has begun.
    begun: usize,
    ahead: VecDeque<Vec<Transfer<Aligned>>>,
    behind: VecDeque<Vec<Transfer<Aligned>>>,
    free: Vec<Aligned>,
    held: Vec<Held>,
    at: usize,
}

impl<'a> Pipeline<'a> {
    pub fn new(io: &'a Io, ledger: &'a Ledger, plan: Vec<Plan>, read_ahead: bool, write_behind: bool) -> Self {
        Self {
            io,
            ledger,
            window: plan.iter().map(|p| p.range.len()).max().unwrap_or(0),
            plan,
            read_ahead,
            write_behind,
            begun: 0,
            ahead: VecDeque::new(),
            behind: VecDeque::new(),
            free: Vec::new(),
            held: Vec::new(),
            at: 0,
        }
    }

    /// Windows at a time.
    pub fn sets(read_ahead: bool, write_behind: bool) -> usize {
        1 + usize::from(read_ahead) + usize::from(write_behind)
    }

    /// The next window, in memory.
    ///
    /// # Panics
    /// If there is none.
    pub fn next(&mut self) -> Result<Window> {
        let index = self.at;
        self.at += 1;
        // What is asked for first is carried out first, so that the disk never waits for the update.
        let wanted = (index + 1 + usize::from(self.read_ahead)).min(self.plan.len());
        while self.begun < wanted {
            // A new window gets the buffers of the one that has been on its way back for longest.
            let sets = Self::sets(self.read_ahead, self.write_behind);
            while self.ahead.len() + self.behind.len() >= sets && !self.behind.is_empty() {
                self.reclaim()?;
            }
            self.begin_reading()?;
        }
        let transfers = self.ahead.pop_front().expect("a window is asked for no more often than planned");
        let Plan { range, streams } = &self.plan[index];
        let start = range.start;
        let staged = transfers.into_iter().zip(streams).map(|(transfer, stream)| {
            let mut staged = Staged { buffer: transfer.wait()?, dtype: stream.extent.dtype(), start };
            if !stream.reads {
                // What lies between parameters goes to the file too.
                staged.buffer.bytes_mut().fill(0);
            }
            Ok(staged)
        });
        let staged = staged.collect::<Result<_>>()?;
        Ok(Window { staged, index })
    }

    /// A window is up to date: brings back what has changed.
    pub fn done(&mut self, window: Window) -> Result<()> {
        let Window { staged, index, .. } = window;
        let Plan { range, streams } = &self.plan[index];
        let mut writing = Vec::new();
        for (staged, stream) in staged.into_iter().zip(streams) {
            match stream.writes {
                true => writing.push(self.io.write(staged.buffer, vec![stream.extent.piece(range.clone(), 0)])),
                false => self.free.push(staged.buffer),
            }
        }
        self.behind.push_back(writing);
        if !self.write_behind {
            self.reclaim()?;
        }
        Ok(())
    }

    /// Waits until everything is written.
    pub fn finish(mut self) -> Result<()> {
        while !self.behind.is_empty() {
            self.reclaim()?;
        }
        Ok(())
    }

    fn begin_reading(&mut self) -> Result<()> {
        let Plan { range, streams } = &self.plan[self.begun];
        self.begun += 1;
        let mut reading = Vec::new();
        for Stream { extent, reads, .. } in streams {
            // All of one dtype are equally long, also where a window is not.
            let room = self.window * extent.dtype().size_in_bytes();
            let buffer = match self.free.iter().position(|b| b.len() == room) {
                Some(i) => self.free.swap_remove(i),
                None => {
                    self.held.push(self.ledger.hold(Kind::Staging, room + ALIGN - 1));
                    Aligned::new(room)
                }
            };
            let pieces = if *reads { vec![extent.piece(range.clone(), 0)] } else { vec![] };
            reading.push(self.io.read(buffer, pieces));
        }
        self.ahead.push_back(reading);
        Ok(())
    }

    /// Waits for the oldest window that is on its way back.
    fn reclaim(&mut self) -> Result<()> {
        for transfer in self.behind.pop_front().into_iter().flatten() {
            self.free.push(transfer.wait()?);
        }
        Ok(())
    }
}
