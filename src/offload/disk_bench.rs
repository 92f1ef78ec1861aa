//! Measures the speed of a folder: the engine's own transfers, and the optimizer step over files, compared with plain
//! loops. `zerorun bench disk` prints the results.
//!
//! ```text
//!   reserve, fill -> 3 rounds of [write, read] with every kind of access        sequential
//!                 -> 3 rounds of [plain loops, pipeline with 4 pairs of flags]  optimizer step
//!                 -> the update without files, in memory
//!                 -> 3 rounds of the pipeline with neither and with both flags; the update is as slow as the disk
//!                 -> 3 rounds of the pipeline with 15 pairs of block size and queue depth (sweep)
//! ```
//!
//! Before every pass, its files are removed from the page cache. A pass ends when everything that it wrote is on the
//! disk. Passes that are compared take turns, because the bandwidth of a shared disk changes from minute to minute. The
//! reported times are medians.

use super::aligned_buffer::AlignedBuffer;
use super::disk_access::DiskAccess;
use super::file_arena::TransferPiece;
use super::file_arena::{BounceBuffer, FileArena, FileExtent};
use super::file_io::{FileIo, FileTransfer, threads};
use super::offload_folder::OffloadFolder;
use super::window_pipeline::{PlannedWindow, STEP, StateStream, WindowPipeline, WindowSettings};
use crate::config::{AdamConfig, Aio, OptimizerConfig};
use crate::error::Result;
use crate::memory::{MemoryKind, MemoryLedger};
use crate::optim::{Optimizer, StepContext, from_config};
use crate::precision::FlatMut;
use crate::util::{counted, pieces};
use candle_core::DType;
use serde::Serialize;
use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// The number of times that every pass runs.
const ROUNDS: usize = 3;

/// The number of bytes that one system call of the plain loops transfers.
const PLAIN_BLOCK: usize = 1 << 20;

/// The size in bytes of one transfer of the sequential passes: as many bytes as one f32 stream of a window has in a
/// step with direct access.
const CHUNK: usize = 16 << 20;

/// The step's kinds of state, in the order of its streams: kind, name, dtype, whether it is read, whether it is
/// written. The streams are those of Adam with bf16 parameters.
const STREAMS: [(MemoryKind, &str, DType, bool, bool); 5] = [
    (MemoryKind::Parameters, "parameters", DType::BF16, false, true),
    (MemoryKind::MasterWeights, "master weights", DType::F32, true, true),
    (MemoryKind::Moments, "exp_avg", DType::F32, true, true),
    (MemoryKind::Moments, "exp_avg_sq", DType::F32, true, true),
    (MemoryKind::Gradients, "gradients", DType::BF16, true, false),
];

/// The block sizes and queue depths that a sweep tries.
const SWEEP_BLOCKS: [usize; 3] = [256 << 10, 1 << 20, 4 << 20];
const SWEEP_DEPTHS: [usize; 5] = [1, 4, 8, 16, 32];

/// The settings of a measurement.
#[derive(Debug, Clone)]
pub struct DiskBenchSettings {
    /// The folder, as given in `nvme_path`.
    pub folder: PathBuf,
    /// The total size of all files in bytes. Every file has at least one page.
    pub bytes: u64,
    /// The request settings.
    pub aio: Aio,
    /// Whether other block sizes and queue depths are also tried.
    pub sweep: bool,
}

/// The measured speed of a folder. It serializes to the object that `zerorun bench disk --json` prints.
#[derive(Debug, Clone, Serialize)]
pub struct DiskBenchReport {
    /// The folder.
    pub folder: PathBuf,
    /// The total size of all files in bytes.
    pub bytes: u64,
    /// The request settings of all passes except the sweep's.
    pub aio: IoRequestSettings,
    /// Whether the file system allows access without the page cache.
    pub direct_is_possible: bool,
    /// The largest fraction of a file that was in the page cache at the beginning of a pass, estimated from samples.
    /// `None` if the system does not report it.
    pub cached_at_start: Option<f64>,
    /// The sequential passes, one entry for each kind of access.
    pub sequential: Vec<SequentialBench>,
    /// The optimizer step.
    pub step: StepBench,
    /// The step with each pair of block size and queue depth, fastest first. The list is empty unless
    /// [`DiskBenchSettings::sweep`] is set.
    pub sweep: Vec<RequestSweepRow>,
}

/// The block size and the number of pending requests, as in the `aio` section of a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct IoRequestSettings {
    /// The size of a request in bytes.
    pub block_size: usize,
    /// The number of pending requests per unit of `intra_op_parallelism`.
    pub queue_depth: usize,
    /// The factor by which `queue_depth` is multiplied.
    pub intra_op_parallelism: usize,
}

/// The times of a pass.
#[derive(Debug, Clone, Serialize)]
pub struct DiskPassTiming {
    /// The median of the rounds.
    pub seconds: f64,
    /// The number of bytes read and written per second, by the median.
    pub bytes_per_s: f64,
    /// The seconds of every round.
    pub rounds: Vec<f64>,
}

/// Passes over all files from beginning to end, 16 MiB per transfer.
#[derive(Debug, Clone, Serialize)]
pub struct SequentialBench {
    /// The access that was measured.
    pub access: DiskAccess,
    /// The write pass, with a sync at the end.
    pub write: DiskPassTiming,
    /// The read pass.
    pub read: DiskPassTiming,
}

/// The optimizer step over files: Adam with bf16 parameters. Master weights and two moments are read and written,
/// gradients are read, and parameters are written.
#[derive(Debug, Clone, Serialize)]
pub struct StepBench {
    /// The access to the files.
    pub access: DiskAccess,
    /// The number of elements.
    pub elements: usize,
    /// The number of elements in a window.
    pub window: usize,
    /// The number of bytes that a step reads and writes.
    pub bytes: u64,
    /// The plain loops: one thread reads the streams of a window that a step reads, and writes those that a step
    /// changes, in blocks of 1 MiB and without the update. The faster loop is the reference.
    pub plain: Vec<PlainLoopBench>,
    /// The engine's pipeline, with the update.
    pub pipeline: Vec<PipelineBench>,
    /// The update of the same number of elements, in memory.
    pub update: DiskPassTiming,
    /// The pipeline with an update that takes as long as the disk access.
    pub balanced: DiskOverlapResult,
}

/// The maximum gain from overlapping: the step with its update repeated until computing takes as long as the disk needs
/// for a step with neither flag.
#[derive(Debug, Clone, Serialize)]
pub struct DiskOverlapResult {
    /// The number of times that each window is updated.
    pub updates: usize,
    /// The step with neither flag.
    pub one_after_the_other: DiskPassTiming,
    /// The step with both flags.
    pub overlapped: DiskPassTiming,
    /// The speedup of the overlapped step.
    pub speedup: f64,
}

/// A plain loop.
#[derive(Debug, Clone, Serialize)]
pub struct PlainLoopBench {
    /// The access to the files.
    pub access: DiskAccess,
    /// The times of the loop.
    #[serde(flatten)]
    pub timing: DiskPassTiming,
}

/// The pipeline with one pair of flags.
#[derive(Debug, Clone, Serialize)]
pub struct PipelineBench {
    /// Whether windows are read ahead.
    pub pipeline_read: bool,
    /// Whether windows are written behind.
    pub pipeline_write: bool,
    /// The times of the pipeline.
    #[serde(flatten)]
    pub timing: DiskPassTiming,
    /// The speed divided by that of the faster plain loop.
    pub of_plain: f64,
}

/// The step with both flags and other request settings.
#[derive(Debug, Clone, Serialize)]
pub struct RequestSweepRow {
    /// The request settings.
    pub aio: IoRequestSettings,
    /// The times of the step.
    #[serde(flatten)]
    pub timing: DiskPassTiming,
}

impl From<&Aio> for IoRequestSettings {
    fn from(aio: &Aio) -> Self {
        let Aio { block_size, queue_depth, intra_op_parallelism } = *aio;
        Self { block_size, queue_depth, intra_op_parallelism }
    }
}

impl DiskPassTiming {
    fn new(bytes: u64, rounds: Vec<f64>) -> Self {
        let mut sorted = rounds.clone();
        sorted.sort_by(f64::total_cmp);
        // A clock that is too coarse for a tiny file must not produce an infinite speed.
        let seconds = sorted[sorted.len() / 2].max(1e-9);
        Self { seconds, bytes_per_s: bytes as f64 / seconds, rounds }
    }
}

/// Measures a folder, which is locked while this function runs, as it is during a job. `progress` is called with the
/// number of finished passes, the total number of passes and a description of the pass that begins or has ended. The
/// files have no names, and are gone when this function returns or the process ends.
///
/// # Errors
/// The folder is unusable or in use, its disk is too small (before anything is written), a thread cannot be started, or
/// a file operation fails.
pub fn measure(settings: &DiskBenchSettings, progress: &mut dyn FnMut(u64, u64, &str)) -> Result<DiskBenchReport> {
    let folder = OffloadFolder::open(&settings.folder, true)?;
    let files = BenchFiles::create(&folder, settings.bytes)?;
    let access = files.access;
    let direct_is_possible = access == DiskAccess::Direct;
    let accesses: Vec<DiskAccess> =
        DiskAccess::ALL.into_iter().filter(|a| direct_is_possible || *a != DiskAccess::Direct).collect();
    let plain: &[DiskAccess] =
        if direct_is_possible { &[DiskAccess::Direct, DiskAccess::Cached] } else { &[DiskAccess::Cached] };
    let sweep = if settings.sweep { sweep_of(&settings.aio) } else { Vec::new() };
    let passes = 1 + ROUNDS * (2 * accesses.len() + plain.len() + FLAGS.len() + 1 + 2 + sweep.len());
    let mut bench = DiskBenchRun { files, progress, finished: 0, passes: passes as u64, max_cached: None };

    let io = FileIo::start(&settings.aio, access)?;
    let sequential = bench.sequential(&io, &settings.aio, &accesses)?;
    io.set_access(access);
    let step = bench.step(&io, access, plain)?;
    drop(io);
    let sweep = bench.sweep(access, &sweep)?;
    Ok(DiskBenchReport {
        folder: folder.path().to_owned(),
        bytes: bench.files.bytes(),
        aio: (&settings.aio).into(),
        direct_is_possible,
        cached_at_start: bench.max_cached,
        sequential,
        step,
        sweep,
    })
}

/// The pairs of `pipeline_read` and `pipeline_write`.
const FLAGS: [(bool, bool); 4] = [(false, false), (true, false), (false, true), (true, true)];

fn sweep_of(aio: &Aio) -> Vec<Aio> {
    let with_depths = |block_size| SWEEP_DEPTHS.map(|queue_depth| Aio { block_size, queue_depth, ..*aio });
    SWEEP_BLOCKS.into_iter().flat_map(with_depths).collect()
}

struct DiskBenchRun<'a> {
    files: BenchFiles,
    progress: &'a mut dyn FnMut(u64, u64, &str),
    finished: u64,
    passes: u64,
    max_cached: Option<f64>,
}

impl DiskBenchRun<'_> {
    /// Returns the duration of one pass in seconds, from an empty page cache until everything is on the disk.
    fn time(&mut self, description: &str, pass: impl FnOnce(&BenchFiles) -> Result<()>) -> Result<f64> {
        self.files.sync()?;
        self.max_cached = match (self.max_cached, self.files.evict()?) {
            (Some(earlier), Some(now)) => Some(earlier.max(now)),
            (earlier, now) => earlier.or(now),
        };
        (self.progress)(self.finished, self.passes, description);
        let start = Instant::now();
        pass(&self.files)?;
        self.files.sync()?;
        let seconds = start.elapsed().as_secs_f64();
        self.finished += 1;
        (self.progress)(self.finished, self.passes, description);
        Ok(seconds)
    }

    fn sequential(&mut self, io: &FileIo, aio: &Aio, accesses: &[DiskAccess]) -> Result<Vec<SequentialBench>> {
        // There are enough buffers for every thread to have a block, plus one that is being handed to the next thread.
        let in_flight = threads(aio) * aio.block_size.min(CHUNK);
        let mut buffers: Vec<AlignedBuffer> = (0..in_flight.div_ceil(CHUNK) + 1).map(|_| pattern(CHUNK)).collect();
        // Reserved space must be written once before it can be read from the disk. Writing it before the measurement
        // also makes the measured writes like those of a step, which overwrite data.
        io.set_access(if accesses.contains(&DiskAccess::Direct) { DiskAccess::Direct } else { DiskAccess::Cached });
        self.time("filling the files", |files| files.pass(io, true, &mut buffers))?;
        // Space that was never written is not read from the disk, so the fraction that this pass found in the page
        // cache does not count.
        self.max_cached = None;
        let mut rounds = vec![[Vec::new(), Vec::new()]; accesses.len()];
        for _ in 0..ROUNDS {
            for (access, [write, read]) in accesses.iter().zip(&mut rounds) {
                io.set_access(*access);
                write.push(self.time(&format!("writing {access}"), |f| f.pass(io, true, &mut buffers))?);
                read.push(self.time(&format!("reading {access}"), |f| f.pass(io, false, &mut buffers))?);
            }
        }
        let bytes = self.files.bytes();
        let speeds = accesses.iter().zip(rounds).map(|(access, [write, read])| SequentialBench {
            access: *access,
            write: DiskPassTiming::new(bytes, write),
            read: DiskPassTiming::new(bytes, read),
        });
        Ok(speeds.collect())
    }

    fn step(&mut self, io: &FileIo, access: DiskAccess, plain: &[DiskAccess]) -> Result<StepBench> {
        let mut adam = DiskBenchAdam::new();
        let mut windows = self.files.windows(1);
        let mut loops = vec![Vec::new(); plain.len()];
        let mut pipes = vec![Vec::new(); FLAGS.len()];
        let mut updates = Vec::new();
        for _ in 0..ROUNDS {
            for (access, seconds) in plain.iter().zip(&mut loops) {
                let description = format!("plain loop {access}");
                seconds.push(self.time(&description, |files| files.plain(*access, &mut windows[0]))?);
            }
            for ((read, write), seconds) in FLAGS.into_iter().zip(&mut pipes) {
                let description = format!("step with pipeline_read {read}, pipeline_write {write}");
                seconds.push(self.time(&description, |files| files.step(io, (read, write), &mut adam, 1))?);
            }
        }
        let mut windows = self.files.windows(WindowSettings::default().windows_in_memory());
        for _ in 0..ROUNDS {
            updates.push(self.time("the update without file access", |files| {
                for (i, range) in files.ranges().enumerate() {
                    let n = windows.len();
                    adam.update(windows[i % n].iter_mut().zip(STREAMS).map(|(b, s)| b.elements(s.2, 0..range.len())));
                }
                Ok(())
            })?);
        }
        drop(windows);
        let bytes = self.files.bytes_of_step();
        let update = DiskPassTiming::new(bytes, updates);
        let disk = DiskPassTiming::new(bytes, pipes[0].clone()).seconds - update.seconds;
        let balanced = self.balanced(io, &mut adam, (disk / update.seconds).round().max(1.0) as usize)?;
        let plain: Vec<PlainLoopBench> = plain
            .iter()
            .zip(loops)
            .map(|(access, rounds)| PlainLoopBench { access: *access, timing: DiskPassTiming::new(bytes, rounds) })
            .collect();
        let fastest_plain = plain.iter().map(|p| p.timing.bytes_per_s).fold(0.0, f64::max);
        let pipeline = FLAGS.into_iter().zip(pipes).map(|((pipeline_read, pipeline_write), rounds)| {
            let timing = DiskPassTiming::new(bytes, rounds);
            let of_plain = timing.bytes_per_s / fastest_plain;
            PipelineBench { pipeline_read, pipeline_write, timing, of_plain }
        });
        Ok(StepBench {
            access,
            elements: self.files.elements,
            window: self.files.window,
            bytes,
            pipeline: pipeline.collect(),
            plain,
            update,
            balanced,
        })
    }

    fn balanced(&mut self, io: &FileIo, adam: &mut DiskBenchAdam, updates: usize) -> Result<DiskOverlapResult> {
        let flags = [false, true];
        let mut rounds = flags.map(|_| Vec::new());
        for _ in 0..ROUNDS {
            for (flag, seconds) in flags.iter().zip(&mut rounds) {
                let description = format!("step with {}, both flags {flag}", counted(updates, "update"));
                seconds.push(self.time(&description, |files| files.step(io, (*flag, *flag), adam, updates))?);
            }
        }
        let [one_after_the_other, overlapped] = rounds.map(|r| DiskPassTiming::new(self.files.bytes_of_step(), r));
        let speedup = one_after_the_other.seconds / overlapped.seconds;
        Ok(DiskOverlapResult { updates, one_after_the_other, overlapped, speedup })
    }

    fn sweep(&mut self, access: DiskAccess, settings: &[Aio]) -> Result<Vec<RequestSweepRow>> {
        let mut adam = DiskBenchAdam::new();
        let mut rounds = vec![Vec::new(); settings.len()];
        for _ in 0..ROUNDS {
            for (aio, seconds) in settings.iter().zip(&mut rounds) {
                let io = FileIo::start(aio, access)?;
                let description = format!("step with block_size {}, queue_depth {}", aio.block_size, aio.queue_depth);
                seconds.push(self.time(&description, |files| files.step(&io, (true, true), &mut adam, 1))?);
            }
        }
        let bytes = self.files.bytes_of_step();
        let mut rows: Vec<RequestSweepRow> = settings
            .iter()
            .zip(rounds)
            .map(|(aio, rounds)| RequestSweepRow { aio: aio.into(), timing: DiskPassTiming::new(bytes, rounds) })
            .collect();
        rows.sort_by(|a, b| a.timing.seconds.total_cmp(&b.timing.seconds));
        Ok(rows)
    }
}

/// The files of [`STREAMS`].
struct BenchFiles {
    arenas: Vec<Arc<FileArena>>,
    streams: Vec<StateStream<FileExtent>>,
    /// The access that the engine chooses for files that the page cache cannot hold.
    access: DiskAccess,
    elements: usize,
    /// The number of elements of a window of the step.
    window: usize,
    ledger: MemoryLedger,
}

impl BenchFiles {
    /// Reserves about `bytes` bytes, which contain no data yet.
    fn create(folder: &Arc<OffloadFolder>, bytes: u64) -> Result<Self> {
        let per_element: usize = STREAMS.iter().map(|s| s.2.size_in_bytes()).sum();
        let per_step = (per_element * STEP) as u64;
        let steps = (bytes / per_step).max(1);
        // The available space is checked before any is reserved: a file system may hand out all of its space before it
        // reports that there is not enough.
        if folder.available() < steps.saturating_mul(per_step) {
            folder.ask_for(bytes);
            return Err(folder.refused());
        }
        let too_large = |arena: &Arc<FileArena>| arena.error("reserve", std::io::ErrorKind::FileTooLarge.into());
        let ledger = MemoryLedger::default();
        let (mut arenas, mut streams, mut elements) = (Vec::new(), Vec::new(), 0);
        for (kind, name, dtype, reads, writes) in STREAMS {
            let arena = FileArena::create(folder, kind, name, &ledger)?;
            elements = usize::try_from(steps * STEP as u64).map_err(|_| too_large(&arena))?;
            let extent = FileExtent::at_end_of(&arena, dtype);
            extent.grow(elements)?;
            streams.push(StateStream { extent, reads, writes });
            arenas.push(arena);
        }
        let is_direct = arenas.iter().all(|arena| arena.allows_direct());
        let access = if is_direct { DiskAccess::Direct } else { DiskAccess::Mapped };
        // There is one buffer for each of the 5 streams, although the default of `offload_optimizer.buffer_count` is 4.
        let windows = WindowSettings { buffer_count: Some(STREAMS.len()), access, ..WindowSettings::default() };
        let window = windows.len(elements, STREAMS.len());
        Ok(Self { arenas, streams, access, elements, window, ledger })
    }

    fn arenas(&self) -> impl Iterator<Item = &FileArena> {
        self.arenas.iter().map(|a| &**a)
    }

    fn bytes(&self) -> u64 {
        self.elements as u64 * STREAMS.iter().map(|s| s.2.size_in_bytes() as u64).sum::<u64>()
    }

    fn bytes_of_step(&self) -> u64 {
        let times = |s: &(_, _, DType, bool, bool)| s.2.size_in_bytes() as u64 * (u64::from(s.3) + u64::from(s.4));
        self.elements as u64 * STREAMS.iter().map(times).sum::<u64>()
    }

    fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        pieces(self.elements, self.window)
    }

    /// Creates buffers for `count` windows of the step.
    fn windows(&self, count: usize) -> Vec<Vec<AlignedBuffer>> {
        let window = || STREAMS.iter().map(|s| pattern(self.window * s.2.size_in_bytes())).collect();
        (0..count).map(|_| window()).collect()
    }

    fn sync(&self) -> Result<()> {
        self.arenas().try_for_each(FileArena::sync)
    }

    /// Removes these files from the page cache, and returns the largest fraction of a file that it still holds.
    fn evict(&self) -> Result<Option<f64>> {
        let cached: Vec<Option<f64>> = self.arenas().map(FileArena::evict).collect::<Result<_>>()?;
        Ok(cached.into_iter().flatten().reduce(f64::max))
    }

    /// Reads or writes all files, one after the other, through `buffers` (at least one).
    fn pass(&self, io: &FileIo, write: bool, buffers: &mut Vec<AlignedBuffer>) -> Result<()> {
        let mut in_flight: VecDeque<FileTransfer<AlignedBuffer>> = VecDeque::new();
        for StateStream { extent, .. } in &self.streams {
            for range in pieces(self.elements, CHUNK / extent.dtype().size_in_bytes()) {
                let buffer = match buffers.pop() {
                    Some(buffer) => buffer,
                    None => in_flight.pop_front().expect("there is a buffer").wait()?,
                };
                let pieces = vec![extent.piece(range, 0)];
                in_flight.push_back(if write { io.write(buffer, pieces) } else { io.read(buffer, pieces) });
            }
        }
        for transfer in in_flight {
            buffers.push(transfer.wait()?);
        }
        Ok(())
    }

    /// Runs the plain loop.
    fn plain(&self, access: DiskAccess, buffers: &mut [AlignedBuffer]) -> Result<()> {
        let mut bounce = BounceBuffer::default();
        for range in self.ranges() {
            for (buffer, StateStream { extent, .. }) in buffers.iter_mut().zip(&self.streams).filter(|(_, s)| s.reads) {
                let TransferPiece { arena, offset, memory } = extent.piece(range.clone(), 0);
                for (i, block) in buffer.bytes_mut()[memory].chunks_mut(PLAIN_BLOCK).enumerate() {
                    let at = offset + (i * PLAIN_BLOCK) as u64;
                    arena.read(access, at, block, &mut bounce).map_err(|e| arena.error("read", e))?;
                }
            }
            for (buffer, StateStream { extent, .. }) in buffers.iter_mut().zip(&self.streams).filter(|(_, s)| s.writes)
            {
                let TransferPiece { arena, offset, memory } = extent.piece(range.clone(), 0);
                for (i, block) in buffer.bytes_mut()[memory].chunks(PLAIN_BLOCK).enumerate() {
                    let at = offset + (i * PLAIN_BLOCK) as u64;
                    arena.write(access, at, block, &mut bounce).map_err(|e| arena.error("write", e))?;
                }
            }
        }
        Ok(())
    }

    /// Runs the engine's step, which updates every window `updates` times.
    fn step(
        &self,
        io: &FileIo,
        (read_ahead, write_behind): (bool, bool),
        adam: &mut DiskBenchAdam,
        updates: usize,
    ) -> Result<()> {
        let plan = self.ranges().map(|range| PlannedWindow { range, streams: self.streams.clone() }).collect();
        let windows = WindowSettings { read_ahead, write_behind, ..WindowSettings::default() };
        let mut pipeline = WindowPipeline::new(io, &self.ledger, plan, windows);
        for range in self.ranges() {
            let mut window = pipeline.next()?;
            for _ in 0..updates {
                adam.update(window.staged.iter_mut().map(|staged| staged.part(range.clone())));
            }
            pipeline.done(window)?;
        }
        pipeline.finish()
    }
}

/// The Adam update of a window.
struct DiskBenchAdam {
    optimizer: Box<dyn Optimizer>,
    step: u64,
}

impl DiskBenchAdam {
    fn new() -> Self {
        let config = AdamConfig {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            bias_correction: true,
            decoupled: true,
        };
        Self { optimizer: from_config(&OptimizerConfig::Adam(config)), step: 0 }
    }

    /// Updates the data of a window's streams, which come in the order of [`STREAMS`].
    fn update<'a>(&mut self, mut streams: impl Iterator<Item = FlatMut<'a>>) {
        let mut next = || streams.next().expect("a window has all streams");
        let half = next();
        let mut f32s = || match next() {
            FlatMut::F32(values) => values,
            _ => unreachable!("master weights and moments are f32"),
        };
        let (master, mut moments) = (f32s(), [f32s(), f32s()]);
        let grad = next();
        // The step number only scales the result; it must be above 0.
        self.step += 1;
        let ctx = StepContext::new(1e-3, self.step);
        self.optimizer.update(&ctx, master, grad.as_ref(), &mut moments, Some(half));
    }
}

/// Creates bytes that no disk can compress and that, read as bf16 or f32, are numbers between 0.007 and 1.
fn pattern(len: usize) -> AlignedBuffer {
    let mut buffer = AlignedBuffer::new(len);
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for half in bytemuck::cast_slice_mut::<u8, u16>(buffer.bytes_mut()) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *half = 0x3c00 + (state % 0x380) as u16;
    }
    buffer
}
