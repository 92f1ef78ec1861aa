//! The windows of the optimizer step.
//!
//! ```text
//!   pipeline_read    read k+1 |
//!                    update k | at the same time
//!   pipeline_write  write k-1 |
//! ```
//!
//! If a flag is off, the step waits for the corresponding transfer. There are as many sets of buffers as there are
//! windows in memory at a time: one, two or three.

use super::aligned_buffer::ALIGN;
use super::aligned_buffer::AlignedBuffer;
use super::disk_access::DiskAccess;
use super::state_files::StateFiles;
use crate::config::OffloadOptimizer;
use crate::error::Result;
use crate::memory::{MemoryKind, MemoryLedger, MemoryLedgerEntry};
use crate::precision::FlatMut;
use candle_core::DType;
use std::collections::VecDeque;
use std::ops::Range;

/// Returns the maximum number of elements of a window: with direct access, 16 MiB of f32, a size at which disks reach
/// their bandwidth; with access through the page cache, a number that is small enough for a window to stay in the
/// processor's cache from its read to its write.
fn max_window_len(access: DiskAccess) -> usize {
    if access == DiskAccess::Direct { 4 << 20 } else { 256 << 10 }
}

/// In files of f32 or 16-bit elements, requests may begin at multiples of this number of elements. In files of 8-bit
/// codes, they may begin at multiples of [`ALIGN`].
pub(crate) const STEP: usize = ALIGN / 2;

/// The settings for a sweep through files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowSettings {
    /// The configuration's `pipeline_read`.
    pub read_ahead: bool,
    /// The configuration's `pipeline_write`.
    pub write_behind: bool,
    /// The configuration's `buffer_count`, if optimizer states are in files.
    pub buffer_count: Option<usize>,
    pub access: DiskAccess,
}

impl Default for WindowSettings {
    /// Returns the settings for a sweep through parameters only. The configuration has no keys for such a sweep, which
    /// always uses a pipeline.
    fn default() -> Self {
        Self { read_ahead: true, write_behind: true, buffer_count: None, access: DiskAccess::Direct }
    }
}

impl WindowSettings {
    /// Creates the settings. `optimizer` has the settings of optimizer states, if these are in files.
    pub fn new(optimizer: Option<&OffloadOptimizer>, access: DiskAccess) -> Self {
        match optimizer {
            Some(OffloadOptimizer { pipeline_read, pipeline_write, buffer_count, .. }) => Self {
                read_ahead: *pipeline_read,
                write_behind: *pipeline_write,
                buffer_count: Some(*buffer_count),
                access,
            },
            None => Self { access, ..Self::default() },
        }
    }

    /// Returns the number of windows that are in memory at a time.
    pub fn windows_in_memory(self) -> usize {
        1 + usize::from(self.read_ahead) + usize::from(self.write_behind)
    }

    /// Returns the number of elements of a window of `streams` kinds of state, in sub-groups of at most `largest`
    /// elements.
    pub fn len(self, largest: usize, streams: usize) -> usize {
        let buffers = streams * self.windows_in_memory();
        window_len(self.access, largest, self.buffer_count.unwrap_or(buffers), buffers)
    }
}

/// One kind of state of a sub-group that passes through memory.
#[derive(Clone)]
pub(crate) struct StateStream<E> {
    pub extent: E,
    pub reads: bool,
    pub writes: bool,
}

/// A window of the plan: elements of a sub-group that are in memory together, and the states to which they belong.
pub(crate) struct PlannedWindow<E> {
    pub range: Range<usize>,
    pub streams: Vec<StateStream<E>>,
}

/// One kind of state in a window.
pub(crate) struct StagedState<S = AlignedBuffer> {
    buffer: S,
    dtype: DType,
    /// The position of the first element in the sub-group.
    start: usize,
}

/// A window whose states are in memory, in the order of its streams.
pub(crate) struct StateWindow<S = AlignedBuffer> {
    pub staged: Vec<StagedState<S>>,
    /// The window's index in the plan.
    index: usize,
}

impl StagedState {
    /// Returns elements `range` of the sub-group, for a state with one byte per element.
    pub fn bytes(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut self.buffer.bytes_mut()[range.start - self.start..range.end - self.start]
    }

    /// Returns elements `range` of the sub-group.
    pub fn part(&mut self, range: Range<usize>) -> FlatMut<'_> {
        self.buffer.elements(self.dtype, range.start - self.start..range.end - self.start)
    }
}

/// Returns the number of elements of a window such that the pipeline's `buffers` buffers fit in the memory of
/// `buffer_count` buffers of `largest` f32 elements.
fn window_len(access: DiskAccess, largest: usize, buffer_count: usize, buffers: usize) -> usize {
    let share = largest as u128 * buffer_count as u128 / buffers.max(1) as u128;
    let len = share.min(max_window_len(access) as u128) as usize;
    len.next_multiple_of(STEP).max(STEP)
}

/// A pipeline that reads windows into memory and writes them back, in order.
pub(crate) struct WindowPipeline<'a, F: StateFiles> {
    files: &'a F,
    ledger: &'a MemoryLedger,
    plan: Vec<PlannedWindow<F::Extent>>,
    /// The number of elements of the longest window.
    max_len: usize,
    settings: WindowSettings,
    /// The number of windows whose read has begun.
    reads_begun: usize,
    pending_reads: VecDeque<Vec<F::Transfer>>,
    pending_writes: VecDeque<Vec<F::Transfer>>,
    free: Vec<F::Staging>,
    ledger_entries: Vec<MemoryLedgerEntry>,
    next_index: usize,
}

impl<'a, F: StateFiles> WindowPipeline<'a, F> {
    pub fn new(
        files: &'a F,
        ledger: &'a MemoryLedger,
        plan: Vec<PlannedWindow<F::Extent>>,
        settings: WindowSettings,
    ) -> Self {
        Self {
            files,
            ledger,
            max_len: plan.iter().map(|p| p.range.len()).max().unwrap_or(0),
            plan,
            settings,
            reads_begun: 0,
            pending_reads: VecDeque::new(),
            pending_writes: VecDeque::new(),
            free: Vec::new(),
            ledger_entries: Vec::new(),
            next_index: 0,
        }
    }

    /// Returns the next window, in memory.
    ///
    /// # Panics
    /// Panics if no window remains.
    pub fn next(&mut self) -> Result<StateWindow<F::Staging>> {
        let index = self.next_index;
        self.next_index += 1;
        // Requests are carried out in the order in which they are made. With `read_ahead`, the read of the following
        // window is requested before this one is updated and written back, so the disk does not wait for the update.
        let reads_due = (index + 1 + usize::from(self.settings.read_ahead)).min(self.plan.len());
        while self.reads_begun < reads_due {
            // A new window gets the buffers of the window whose write began first.
            while self.pending_reads.len() + self.pending_writes.len() >= self.settings.windows_in_memory()
                && !self.pending_writes.is_empty()
            {
                self.reclaim()?;
            }
            self.begin_reading();
        }
        let transfers = self.pending_reads.pop_front().expect("a window is requested at most as often as planned");
        let PlannedWindow { range, streams } = &self.plan[index];
        let start = range.start;
        let staged = transfers.into_iter().zip(streams).map(|(transfer, stream)| {
            Ok(StagedState { buffer: self.files.wait(transfer)?, dtype: F::dtype(&stream.extent), start })
        });
        let staged = staged.collect::<Result<_>>()?;
        Ok(StateWindow { staged, index })
    }

    /// Ends the work on a window: writes back the states that have changed.
    pub fn done(&mut self, window: StateWindow<F::Staging>) -> Result<()> {
        let StateWindow { staged, index, .. } = window;
        let PlannedWindow { range, streams } = &self.plan[index];
        let mut writing = Vec::new();
        for (staged, stream) in staged.into_iter().zip(streams) {
            match stream.writes {
                true => writing.push(self.files.write(staged.buffer, &stream.extent, range.clone())),
                false => self.free.push(staged.buffer),
            }
        }
        self.pending_writes.push_back(writing);
        if !self.settings.write_behind {
            self.reclaim()?;
        }
        Ok(())
    }

    /// Waits until everything is written.
    pub fn finish(mut self) -> Result<()> {
        while !self.pending_writes.is_empty() {
            self.reclaim()?;
        }
        Ok(())
    }

    fn begin_reading(&mut self) {
        let PlannedWindow { range, streams } = &self.plan[self.reads_begun];
        self.reads_begun += 1;
        let mut reading = Vec::new();
        for StateStream { extent, reads, .. } in streams {
            // All buffers of one dtype have equal length, even if a window is shorter.
            let bytes = self.max_len * F::dtype(extent).size_in_bytes();
            let buffer = match self.free.iter().position(|buffer| F::len(buffer) == bytes) {
                Some(i) => self.free.swap_remove(i),
                None => {
                    self.ledger_entries.push(self.ledger.hold(MemoryKind::Staging, bytes + ALIGN - 1));
                    F::staging(bytes)
                }
            };
            // Without a read, the buffer contains zeros: gaps between parameters are written to the file too.
            reading.push(self.files.read(buffer, reads.then(|| (extent, range.clone()))));
        }
        self.pending_reads.push_back(reading);
    }

    /// Waits for the oldest window that is being written back.
    fn reclaim(&mut self) -> Result<()> {
        for transfer in self.pending_writes.pop_front().into_iter().flatten() {
            self.free.push(self.files.wait(transfer)?);
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::Aio;
    use crate::offload::disk_access::DiskAccess;
    use crate::offload::file_arena::{BounceBuffer, FileArena, FileExtent};
    use crate::offload::file_io::FileIo;
    use crate::offload::offload_folder::OffloadFolder;
    use crate::precision::FlatRef;
    use crate::util::pieces;
    use proptest::prelude::*;

    /// Applies the test step's operation to an element. An element that was not read counts as zero.
    fn next(value: f32, stream: usize) -> f32 {
        value * 0.5 + 1.0 + stream as f32
    }

    /// The number of elements of each sub-group, and its streams. The three flags of a stream tell whether its elements
    /// are bf16 rather than f32, whether it is read, and whether it is written.
    type Groups = Vec<(usize, Vec<(bool, bool, bool)>)>;

    fn groups() -> impl Strategy<Value = Groups> {
        let streams = proptest::collection::vec(any::<(bool, bool, bool)>(), 1..4);
        proptest::collection::vec((1..4 * STEP, streams), 1..4)
    }

    proptest! {
        #[test]
        fn windows_cover_a_group_once_and_begin_where_a_file_allows_it(
            len in 0..10 * STEP, largest in 0..10 * STEP, count in 0usize..6, buffers in 0usize..16,
        ) {
            let window = window_len(DiskAccess::Direct, largest.max(len), count, buffers);
            prop_assert!(window.is_multiple_of(STEP) && window >= STEP);
            // The windows' memory is what `buffer_count` allows, except for the rounding up to multiples of `STEP`.
            prop_assert!(window * buffers <= count * largest.max(len) + buffers * STEP);
            let mut end = 0;
            for range in pieces(len, window) {
                prop_assert!(range.start == end && range.start.is_multiple_of(STEP) && !range.is_empty());
                prop_assert!(range.len() <= window);
                end = range.end;
            }
            prop_assert_eq!(end, len);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_pipeline_leaves_files_as_a_plain_loop_does(
            groups in groups(),
            window in 1usize..4,
            flags in any::<[bool; 2]>(),
            access in proptest::sample::select(vec![DiskAccess::Direct, DiskAccess::Cached, DiskAccess::Mapped]),
            block_pages in 1usize..4,
            threads in 1usize..4,
        ) {
            let path = tempfile::tempdir().unwrap();
            let folder = OffloadFolder::open(path.path(), true).unwrap();
            let ledger = MemoryLedger::default();
            let aio = Aio { block_size: block_pages * ALIGN, queue_depth: threads, intra_op_parallelism: 1 };
            let io = FileIo::start(&aio, access).unwrap();
            let arena = FileArena::create(&folder, MemoryKind::Moments, "a test", &ledger).unwrap();
            let mut bounce = BounceBuffer::default();
            let window = window * STEP;
            let mut plan = vec![];
            let mut expected: Vec<(FileExtent, Vec<f32>)> = vec![];
            for (len, streams) in &groups {
                let len = len.next_multiple_of(STEP);
                let mut extents = vec![];
                for (s, (is_half, reads, writes)) in streams.iter().enumerate() {
                    let dtype = if *is_half { DType::BF16 } else { DType::F32 };
                    let extent = FileExtent::at_end_of(&arena, dtype);
                    extent.grow(len).unwrap();
                    let mut values = AlignedBuffer::new(len * dtype.size_in_bytes());
                    // These are small numbers, which bf16 represents exactly.
                    let numbers: Vec<f32> = (0..len).map(|i| ((i * 7 + expected.len()) % 32) as f32).collect();
                    values.elements(dtype, 0..len).copy_scaled(FlatRef::F32(&numbers), 1.0);
                    io.write(values, vec![extent.piece(0..len, 0)]).written().unwrap();
                    let after = |v: &f32| if *writes { next(if *reads { *v } else { 0.0 }, s) } else { *v };
                    expected.push((extent.clone(), numbers.iter().map(after).collect()));
                    extents.push(StateStream { extent, reads: *reads, writes: *writes });
                }
                plan.extend(pieces(len, window).map(|range| PlannedWindow { range, streams: extents.clone() }));
            }
            let ranges: Vec<_> = plan.iter().map(|p| p.range.clone()).collect();
            let max_streams = groups.iter().map(|(_, streams)| streams.len()).max().unwrap();
            let settings = WindowSettings { read_ahead: flags[0], write_behind: flags[1], ..WindowSettings::default() };
            let mut pipeline = WindowPipeline::new(&io, &ledger, plan, settings);
            for range in ranges {
                let mut window = pipeline.next().unwrap();
                for (s, staged) in window.staged.iter_mut().enumerate() {
                    match staged.part(range.clone()) {
                        FlatMut::F32(values) => values.iter_mut().for_each(|v| *v = next(*v, s)),
                        FlatMut::BF16(values) => {
                            values.iter_mut().for_each(|v| *v = half::bf16::from_f32(next(v.to_f32(), s)));
                        }
                        FlatMut::F16(_) => unreachable!(),
                    }
                }
                pipeline.done(window).unwrap();
            }
            pipeline.finish().unwrap();
            for (extent, expected) in expected {
                let size = extent.dtype().size_in_bytes();
                let mut found = AlignedBuffer::new(expected.len() * size);
                let piece = extent.piece(0..expected.len(), 0);
                // Data written through any kind of access can be read through every other kind.
                piece.arena.read(DiskAccess::Cached, piece.offset, found.bytes_mut(), &mut bounce).unwrap();
                let mut expected_buffer = AlignedBuffer::new(expected.len() * size);
                expected_buffer.elements(extent.dtype(), 0..expected.len()).copy_scaled(FlatRef::F32(&expected), 1.0);
                prop_assert!(found.bytes_mut() == expected_buffer.bytes_mut());
            }
            let sets = settings.windows_in_memory();
            // Each dtype may need a buffer for every stream.
            let max_bytes = sets * 2 * max_streams * (window * 4 + ALIGN - 1);
            prop_assert!(ledger.bytes(MemoryKind::Staging).peak <= max_bytes);
            prop_assert_eq!(ledger.bytes(MemoryKind::Staging).held, 0);
        }
    }
}
