//! The loops around the microkernels: blocks for the caches, tasks for the threads.
//!
//! The product is cut into *regions* of rows, columns and steps whose packed operands fit a budget. In a region, the
//! first tasks pack `b` (and `a` where its words cannot be read in place), each part once for all threads; the tasks
//! after them each compute a tile of the result, once everything is packed. Tasks start in order, so that whoever waits
//! for packed operands waits for tasks that are already running.
//!
//! How the inner dimension is cut depends on its length alone, and so does the order in which the products of an
//! element are summed.

use super::finish::{Place, finish};
use super::kernel::{self, COLS, Kernels, LANES, ROWS, VECTORS, Words};
use super::pack::{Operand, Word};
use crate::kernels::element::Element;
use crate::kernels::gemm::epilogue::Sink;
use crate::kernels::gemm::matrix::Matrix;
use crate::kernels::gemm::scratch::with_words;
use crate::kernels::par;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most steps that are summed in registers: a panel of `b` and the rows of `a` of a tile stay in the L2 cache.
const BLOCK_STEPS: usize = 512;
/// The most blocks of steps in a region.
const REGION_BLOCKS: usize = 8;
/// The most words of a packed operand in a region (8 MiB), as long as it has [`REGION_MIN`] rows or columns.
const REGION_WORDS: usize = 1 << 21;
const REGION_MIN: usize = 512;
/// The most rows of a region.
const REGION_ROWS: usize = 4096;
/// Rows of a tile of the result.
const TILE_ROWS: usize = 128;
/// Panels of `b` in a tile of the result.
const TILE_PANELS: usize = 4;
/// Rows or columns that one packing task takes, where these are contiguous along the inner dimension.
const PACK_OUTER: usize = COLS;
/// Panels between which one packing task alternates.
const PACK_PANELS: usize = 8;
/// Steps that one packing task takes of all rows or columns, where these are not contiguous along it.
const PACK_STEPS: usize = 32;

/// The number of pieces, and their length but for the last, when `n` is cut into pieces of at most about `most`, which
/// are a multiple of `unit`.
fn cut(n: usize, most: usize, unit: usize) -> (usize, usize) {
    let length = n.div_ceil(n.div_ceil(most).max(1)).next_multiple_of(unit).max(unit);
    (n.div_ceil(length).max(1), length)
}

/// The steps of the inner dimension in blocks of `length`.
#[derive(Clone, Copy)]
struct Steps {
    total: usize,
    length: usize,
    blocks: usize,
}

/// A part of the product.
struct Region {
    row: usize,
    rows: usize,
    col: usize,
    cols: usize,
    first_block: usize,
    blocks: usize,
}

/// `c = epilogue(a b)`. The processor must have AVX-512 F, BW, DQ and VL, and what the words' kernels need.
pub(super) fn gemm<W: Word<E>, E: Element, C: Element>(sink: &Sink<'_, C>, a: Matrix<'_, E>, b: Matrix<'_, E>) {
    let (m, n, k) = (a.rows(), b.cols(), a.cols());
    let a =
        Operand { data: a.as_ptr(), outer: m, inner: k, outer_stride: a.row_stride(), inner_stride: a.col_stride() };
    let b =
        Operand { data: b.as_ptr(), outer: n, inner: k, outer_stride: b.col_stride(), inner_stride: b.row_stride() };
    let total = k.div_ceil(W::DEPTH);
    let (blocks, length) = cut(total, BLOCK_STEPS, LANES);
    let steps = Steps { total, length, blocks };
    let region_blocks = blocks.min(REGION_BLOCKS);
    let widest = (REGION_WORDS / (region_blocks * length)).max(REGION_MIN);
    let (row_regions, region_rows) = cut(m, widest.min(REGION_ROWS), TILE_ROWS);
    let (col_regions, region_cols) = cut(n, widest, COLS);
    for c in 0..col_regions {
        for r in 0..row_regions {
            let (row, col) = (r * region_rows, c * region_cols);
            let (rows, cols) = (region_rows.min(m - row), region_cols.min(n - col));
            let parts = blocks.div_ceil(region_blocks);
            let tiles = Tiles::new(rows, cols);
            // Sums wait in memory for the next region only if there is one.
            let waiting = if parts > 1 { tiles.count() * tiles.words() } else { 0 };
            with_words(waiting, |sums| {
                for first_block in (0..blocks).step_by(region_blocks) {
                    let blocks = region_blocks.min(blocks - first_block);
                    let region = Region { row, rows, col, cols, first_block, blocks };
                    let sums = (parts > 1).then_some(Shared(sums.cast()));
                    compute_region::<W, E, C>(sink, &a, &b, steps, &region, &tiles, sums);
                }
            });
        }
    }
}

/// How a region of the result is cut into tiles of whole panels.
struct Tiles {
    panels: Panels,
    down: usize,
    rows: usize,
    across: usize,
    panels_across: usize,
}

impl Tiles {
    fn new(rows: usize, cols: usize) -> Self {
        let panels = Panels::new(cols);
        let (down, rows) = cut(rows, TILE_ROWS, ROWS);
        let (across, panels_across) = cut(panels.count, TILE_PANELS, 1);
        Self { panels, down, rows, across, panels_across }
    }

    fn count(&self) -> usize {
        self.down * self.across
    }

    /// Room for the sums of a tile.
    fn words(&self) -> usize {
        self.rows * self.panels_across * COLS
    }
}

/// The columns of a region in panels of at most [`VECTORS`] vectors.
#[derive(Clone, Copy)]
struct Panels {
    vectors: usize,
    count: usize,
    /// Panels of [`VECTORS`] vectors; of those after them, each has `rest`.
    full: usize,
    rest: usize,
}

impl Panels {
    fn new(cols: usize) -> Self {
        let vectors = cols.div_ceil(LANES);
        let count = vectors.div_ceil(VECTORS);
        // A lone vector would leave most of the kernel's registers idle: two panels of two are better than 3 + 1.
        let (full, rest) = match vectors % VECTORS {
            0 => (count, 0),
            1 if count > 1 => (count - 2, 2),
            rest => (count - 1, rest),
        };
        Self { vectors, count, full, rest }
    }

    /// The first vector of a panel, and the number of its vectors.
    fn get(&self, panel: usize) -> (usize, usize) {
        if panel < self.full {
            (panel * VECTORS, VECTORS)
        } else {
            (self.full * VECTORS + (panel - self.full) * self.rest, self.rest)
        }
    }
}

/// Memory that tasks share.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);

// SAFETY: it is only a place; the tasks write disjoint parts, and read what others have written only after they have
// seen, through an atomic counter, that it is complete.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn at(&self, i: usize) -> *mut T {
        self.0.wrapping_add(i)
    }
}

/// The number of packing tasks that are done.
struct Progress(AtomicUsize);

impl Progress {
    fn advance(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    /// Returns when `n` tasks are done. They have all begun, so that this is soon.
    fn wait_for(&self, n: usize) {
        let mut spins = 0u32;
        while self.0.load(Ordering::Acquire) < n {
            spins += 1;
            if spins < 10_000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

fn compute_region<W: Word<E>, E: Element, C: Element>(
    sink: &Sink<'_, C>,
    a: &Operand<E>,
    b: &Operand<E>,
    steps: Steps,
    region: &Region,
    tiles: &Tiles,
    waiting: Option<Shared<f32>>,
) {
    let first_step = region.first_block * steps.length;
    let n_steps = (region.blocks * steps.length).min(steps.total - first_step);
    let in_place = a.is_words::<W>();
    // Rows that are contiguous along the inner dimension stay so, whole vectors each.
    let row_words = n_steps.next_multiple_of(LANES);
    let a_words = if in_place { 0 } else { region.rows.next_multiple_of(LANES) * row_words };
    let b_words = tiles.panels.vectors * LANES * n_steps;
    let tasks = |operand: &Operand<E>, outer: usize| {
        if operand.inner_stride == 1 { outer.div_ceil(PACK_OUTER) } else { n_steps.div_ceil(PACK_STEPS) }
    };
    let packs_a = if in_place { 0 } else { tasks(a, region.rows) };
    let packs = packs_a + if b.inner_stride == 1 { tiles.panels.count } else { tasks(b, region.cols) };
    with_words(b_words, |packed_b| {
        with_words(a_words, |packed_a| {
            let (packed_a, packed_b) = (Shared(packed_a), Shared(packed_b));
            let progress = Progress(AtomicUsize::new(0));
            let words_of_a = |row: usize, step: usize| {
                if in_place {
                    let first = a.at(region.row + row, (first_step + step) * W::DEPTH).cast();
                    Words { first, row: a.outer_stride / W::DEPTH, step: 1 }
                } else if a.inner_stride == 1 {
                    Words { first: packed_a.at(row * row_words + step), row: row_words, step: 1 }
                } else {
                    let group = row / ROWS * ROWS;
                    Words { first: packed_a.at(group * n_steps + step * ROWS + row % ROWS), row: 1, step: ROWS }
                }
            };
            par::for_each(packs + tiles.count(), |task| {
                if task < packs_a {
                    pack_rows::<W, E>(a, region, task, (first_step, n_steps), &packed_a);
                    progress.advance();
                } else if task < packs {
                    pack_columns::<W, E>(b, region, &tiles.panels, task - packs_a, (first_step, n_steps), &packed_b);
                    progress.advance();
                } else {
                    progress.wait_for(packs);
                    let tile = task - packs;
                    let compute = |sums| {
                        let tile = Tile { region, tiles, steps, n_steps, tile };
                        // SAFETY: the processor has the features; the operands are packed; `sums` has room for the
                        // tile and is this task's alone, as is the tile of the result.
                        unsafe { tile.compute(sink, W::kernels(), W::DEPTH > 1, &words_of_a, packed_b.at(0), sums) }
                    };
                    match &waiting {
                        Some(sums) => compute(sums.at(tile * tiles.words())),
                        None if steps.blocks > 1 => with_words(tiles.words(), |sums| compute(sums.cast())),
                        None => compute(std::ptr::null_mut()),
                    }
                }
            });
        });
    });
}

/// One task of packing the rows of `a`.
fn pack_rows<W: Word<E>, E: Element>(
    a: &Operand<E>,
    region: &Region,
    task: usize,
    (first_step, n_steps): (usize, usize),
    to: &Shared<u32>,
) {
    if a.inner_stride == 1 {
        let row_words = n_steps.next_multiple_of(LANES);
        for row in task * PACK_OUTER..region.rows.min((task + 1) * PACK_OUTER) {
            // SAFETY: the processor has the features; there is room for `row_words` words of each row.
            unsafe { a.copy_row::<W>(region.row + row, first_step, n_steps, to.at(row * row_words)) };
        }
        return;
    }
    let step = task * PACK_STEPS;
    let steps = PACK_STEPS.min(n_steps - step);
    for row in (0..region.rows).step_by(LANES) {
        let to = to.at(row * n_steps + step * ROWS);
        // SAFETY: the processor has the features; there is room for whole groups of 16 rows.
        unsafe { a.pack_rows::<W>(region.row + row, first_step + step, steps, to, n_steps * ROWS) };
    }
}

/// One task of packing the columns of `b`.
fn pack_columns<W: Word<E>, E: Element>(
    b: &Operand<E>,
    region: &Region,
    panels: &Panels,
    task: usize,
    (first_step, n_steps): (usize, usize),
    to: &Shared<u32>,
) {
    let pack = |panel: usize, step: usize, steps: usize| {
        let (vector, vectors) = panels.get(panel);
        let to = to.at(vector * LANES * n_steps + step * vectors * LANES);
        // SAFETY: the processor has the features; every panel has its own part of the packed words.
        unsafe { b.pack_columns::<W>(region.col + vector * LANES, vectors, first_step + step, steps, to) };
    };
    if b.inner_stride == 1 {
        pack(task, 0, n_steps);
    } else {
        // A few panels at a time, step by step: what is read lies side by side.
        let end = n_steps.min((task + 1) * PACK_STEPS);
        for group in (0..panels.count).step_by(PACK_PANELS) {
            for step in task * PACK_STEPS..end {
                for panel in group..panels.count.min(group + PACK_PANELS) {
                    pack(panel, step, 1);
                }
            }
        }
    }
}

/// A tile of the result in a region.
struct Tile<'a> {
    region: &'a Region,
    tiles: &'a Tiles,
    steps: Steps,
    n_steps: usize,
    tile: usize,
}

/// Sums of one call of a microkernel, on the stack.
#[repr(align(64))]
struct Registers([f32; ROWS * COLS]);

impl Tile<'_> {
    /// Adds the products of the region's steps to the sums of this tile, and finishes them after the last step. With a
    /// single block of steps there is nothing to add to, and `sums` is not used.
    ///
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ and VL, with `native` BF16, and what the kernels need; `words_of_a` and `b`
    /// are the region's packed operands; `sums` and the elements of the tile are the caller's alone.
    unsafe fn compute<C: Element>(
        &self,
        sink: &Sink<'_, C>,
        kernels: &Kernels,
        native: bool,
        words_of_a: &impl Fn(usize, usize) -> Words,
        b: *const u32,
        sums: *mut f32,
    ) {
        let Self { region, tiles, steps, .. } = *self;
        let first_row = self.tile % tiles.down * tiles.rows;
        let end_row = region.rows.min(first_row + tiles.rows);
        let first_panel = self.tile / tiles.down * tiles.panels_across;
        let end_panel = tiles.panels.count.min(first_panel + tiles.panels_across);
        let first_vector = tiles.panels.get(first_panel).0;
        let mut registers = Registers([0.0; ROWS * COLS]);
        for block in 0..region.blocks {
            let step = block * steps.length;
            let n_steps = steps.length.min(self.n_steps - step);
            let index = region.first_block + block;
            let last = index + 1 == steps.blocks;
            for panel in first_panel..end_panel {
                let (vector, vectors) = tiles.panels.get(panel);
                let col = vector * LANES;
                // SAFETY: a panel's words lie together, those of a step after those of the step before.
                let b = unsafe { b.add(vector * LANES * self.n_steps + step * vectors * LANES) };
                let mut row = first_row;
                while row < end_row {
                    // Groups of rows are packed together, so that a kernel must not reach from one into the next.
                    let (kernel, rows) = kernel::index(end_row - row, vectors);
                    let cols = (vectors * LANES).min(region.cols - col);
                    let place = Place { row: region.row + row, rows, col: region.col + col, cols };
                    if last {
                        sink.prefetch((place.row, rows), (place.col, cols));
                    }
                    let direct = steps.blocks == 1 && cols == vectors * LANES && sink.takes_sums();
                    let (sums, stride) = if direct {
                        // SAFETY: an element of the result, which is in f32.
                        (unsafe { sink.result.at(place.row, place.col) }.cast(), sink.result.row_stride())
                    } else if steps.blocks == 1 {
                        (registers.0.as_mut_ptr(), COLS)
                    } else {
                        let stride = tiles.panels_across * COLS;
                        let offset = (row - first_row) * stride + (vector - first_vector) * LANES;
                        (sums.wrapping_add(offset), stride)
                    };
                    let add = if direct { sink.accumulate } else { index > 0 };
                    // SAFETY: as the caller promises; the kernel reads `rows` rows of `a` and `vectors` vectors of `b`
                    // for `n_steps` steps, and the sums have room for these rows and vectors.
                    unsafe {
                        kernels[kernel](n_steps, words_of_a(row, step), b, sums, stride, add);
                        if last && !direct {
                            finish(sink, native, place, sums, stride);
                        }
                    }
                    row += rows;
                }
            }
        }
    }
}
