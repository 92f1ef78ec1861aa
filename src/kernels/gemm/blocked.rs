//! The loops around the microkernels: blocks for the caches, tasks for the threads.
//!
//! The result is split into tasks, each for some of the columns and for all or many of the rows. A task packs its
//! columns of `b`, which then stay in its core's L2 cache, while strips of a few rows of `a` stream past them and are
//! each read once. The cores therefore exchange only `a`, if it must be packed; columns packed by another core would be
//! slow to read. If `a` has few rows, packed columns are not kept ([`super::few_rows`]).
//!
//! The operands of some products are exchanged first ([`super::exchanged`]).
//!
//! If `a` must be packed, the first tasks pack it, once for all threads. The other tasks wait until this is done. Tasks
//! start in order, so the tasks that they wait for are already running.
//!
//! The blocks of the inner dimension, and the order in which the products of an element are summed, depend only on the
//! length of the inner dimension.

use super::arithmetic::{ElementArithmetic, GemmArithmetic};
use super::epilogue::EpilogueOutput;
use super::matrix::Matrix;
use super::microkernel::{self, AccumulatorInit, Microkernels, StridedWords};
use super::pack::{GemmOperand, PIECE_STEPS, PREFETCH_STEPS, STEPS_OF_WIDE_PIECES};
use super::panels::ColumnPanels;
use super::scratch::with_words;
use super::task_grid::{EvenSplit, MIN_ROWS, TaskGrid};
use super::tile_epilogue::{TilePosition, finish};
use super::unpacked;
use crate::kernels::element::Element;
use crate::kernels::parallel;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The maximum number of steps that are summed in registers.
const BLOCK_STEPS: usize = 512;
/// The maximum number of blocks of steps for which operands are packed at a time.
const SPAN_BLOCKS: usize = 4;
/// The maximum number of words of `a` that are packed at a time (4 MiB), unless [`MIN_ROWS`] rows contain more.
pub(super) const WORDS_OF_A: usize = 1 << 20;
/// The number of rows up to which packed columns of `b` are not kept.
const FEW_ROWS: usize = 16;
/// The same for wide pieces: up to this number of rows, the sums of all rows fit in the cache with a piece of `b`.
const FEW_ROWS_OF_WIDE_PIECES: usize = 192;
/// The number of bytes above which `b` is read in wide pieces, because it is unlikely to be in a cache already. It is
/// small in tests, so that their products reach it.
const LARGE_BYTES: usize = match () {
    () if cfg!(miri) => 0,
    () if cfg!(test) => 128 << 10,
    () => 8 << 20,
};
/// The number of rows of `a` that one task packs, if rows are contiguous along the inner dimension.
const PACK_ROWS: usize = 64;
/// The number of steps of `a` that one task packs, if rows are not contiguous along the inner dimension.
const PACK_STEPS: usize = 32;
/// The number of multiplications that take less time than waking another thread.
pub(super) const MIN_PARALLEL_MULTIPLICATIONS: usize = 1 << 20;

/// Computes `c = epilogue(a b)`. The processor must have the instructions of the words' arithmetic.
pub(super) fn gemm<W: ElementArithmetic<E> + Microkernels, E: Element, C: Element>(
    output: &EpilogueOutput<'_, C>,
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
) {
    let plan = GemmPlan::new::<W>(output, (a, b), bytes_of(&b));
    let threads = if plan.multiplications() <= MIN_PARALLEL_MULTIPLICATIONS { 1 } else { rayon::current_num_threads() };
    with_words(plan.words_of_a(), |packed_a| {
        with_words(plan.waiting_sums::<W>(), |sums| {
            for region in 0..plan.regions.count {
                for span in 0..plan.spans.count {
                    let rows = plan.regions.piece(region).len();
                    let grid = TaskGrid::new::<W>(rows, plan.cols(), plan.words_per_column(), threads);
                    let part = plan.part(region, span, grid, packed_a, sums);
                    let tasks = part.pack_task_count() + part.product_task_count();
                    let task = |task| part.run::<W>(task);
                    if threads == 1 { (0..tasks).for_each(task) } else { parallel::for_each(tasks, task) }
                }
            }
        });
    });
}

/// A product, and the division of its operands into blocks and spans of the inner dimension, and into regions of rows.
pub(super) struct GemmPlan<'a, E, C> {
    output: &'a EpilogueOutput<'a, C>,
    a: GemmOperand<E>,
    b: GemmOperand<E>,
    layout: OperandLayout,
    packed_b: ColumnPackingMode,
    /// Whether the operands are exchanged ([`are_exchanged`]).
    exchanged: bool,
    blocks: EvenSplit,
    /// The spans, in blocks.
    pub(super) spans: EvenSplit,
    pub(super) regions: EvenSplit,
    /// The number of steps of the longest span.
    span_steps: usize,
}

impl<'a, E: Element, C: Element> GemmPlan<'a, E, C> {
    /// Plans a product. `bytes_of_b` is the size of the right operands of all products that are computed together.
    pub(super) fn new<W: ElementArithmetic<E>>(
        output: &'a EpilogueOutput<'a, C>,
        (a, b): (Matrix<'a, E>, Matrix<'a, E>),
        bytes_of_b: usize,
    ) -> Self {
        let inner = a.cols();
        let rows_of_a = GemmOperand {
            data: a.as_ptr(),
            outer: a.rows(),
            inner,
            outer_stride: a.row_stride(),
            inner_stride: a.col_stride(),
        };
        let columns_of_b = GemmOperand {
            data: b.as_ptr(),
            outer: b.cols(),
            inner,
            outer_stride: b.col_stride(),
            inner_stride: b.row_stride(),
        };
        let exchanged = are_exchanged::<W, E>(&rows_of_a, &columns_of_b);
        let (a, b) = if exchanged { (columns_of_b, rows_of_a) } else { (rows_of_a, columns_of_b) };
        let rows = a.outer;
        let layout = match () {
            () if a.is_words::<W>() => OperandLayout::InPlace,
            () if a.inner_stride == 1 => OperandLayout::Rows,
            () => OperandLayout::Groups,
        };
        let blocks = EvenSplit::new(inner.div_ceil(W::DEPTH), BLOCK_STEPS, W::LANES);
        let large = !exchanged && b.inner_stride != 1 && bytes_of_b > LARGE_BYTES;
        let packed_b = match () {
            () if inner == 0 => ColumnPackingMode::Kept,
            () if large && rows > unpacked::ROWS && rows <= FEW_ROWS_OF_WIDE_PIECES => ColumnPackingMode::WidePieces,
            () if rows <= FEW_ROWS => ColumnPackingMode::Pieces,
            () => ColumnPackingMode::Kept,
        };
        let max_span_blocks = if packed_b == ColumnPackingMode::Kept { SPAN_BLOCKS } else { usize::MAX };
        let spans = EvenSplit::new(blocks.count, max_span_blocks, 1);
        let span_steps = (blocks.max_len() * spans.max_len()).max(1);
        let max_rows = match layout {
            OperandLayout::InPlace => usize::MAX,
            _ => (WORDS_OF_A / span_steps).max(MIN_ROWS),
        };
        let regions = EvenSplit::new(rows, max_rows, W::LANES.max(W::ROWS));
        Self { output, a, b, layout, packed_b, exchanged, blocks, spans, regions, span_steps }
    }

    /// Returns the number of multiplications.
    pub(super) fn multiplications(&self) -> usize {
        self.a.outer * self.b.outer * self.a.inner
    }

    /// Returns the number of columns of `b`.
    pub(super) fn cols(&self) -> usize {
        self.b.outer
    }

    /// Returns the number of words of `a` that are packed at a time.
    pub(super) fn words_of_a(&self) -> usize {
        if self.layout == OperandLayout::InPlace { 0 } else { self.regions.max_len() * self.span_steps }
    }

    /// Returns the number of sums of a region that wait for the other spans.
    pub(super) fn waiting_sums<W: GemmArithmetic>(&self) -> usize {
        if self.spans.count > 1 { self.regions.max_len() * self.b.outer.next_multiple_of(W::LANES) } else { 0 }
    }

    /// Returns the number of words that a task keeps in the cache for each of its columns.
    pub(super) fn words_per_column(&self) -> usize {
        match self.packed_b {
            ColumnPackingMode::Kept => self.span_steps,
            ColumnPackingMode::Pieces => 1,
            // The packed words, the sums of all rows, and the sums of a block.
            ColumnPackingMode::WidePieces => PIECE_STEPS + 2 * self.a.outer,
        }
    }

    /// Returns a part of the product. `packed_a` must have room for [`GemmPlan::words_of_a`] words, and `sums` for
    /// [`GemmPlan::waiting_sums`] sums.
    pub(super) fn part(
        &self,
        region: usize,
        span: usize,
        grid: TaskGrid,
        packed_a: *mut f32,
        sums: *mut f32,
    ) -> GemmPart<'a, E, C> {
        GemmPart {
            output: self.output,
            a: self.a,
            b: self.b,
            layout: self.layout,
            packed_b: self.packed_b,
            exchanged: self.exchanged,
            rows: self.regions.piece(region),
            blocks: self.blocks,
            span: self.spans.piece(span),
            grid,
            packed_a: SharedPointer(packed_a),
            sums: (self.spans.count > 1).then_some(SharedPointer(sums)),
            packs_done: AtomicUsize::new(0),
        }
    }
}

/// Returns whether a product is computed as the transpose of the product of the transposed operands. This is the case
/// if it saves packing columns of `b`, if there are so few rows of `a` that packing the columns would take long, and if
/// these rows fill most lanes of their vectors.
fn are_exchanged<W: ElementArithmetic<E>, E: Element>(a: &GemmOperand<E>, b: &GemmOperand<E>) -> bool {
    let idle_lanes = a.outer.next_multiple_of(W::LANES) - a.outer;
    b.is_words::<W>()
        && b.outer >= MIN_ROWS
        && a.outer > FEW_ROWS
        && a.outer <= 2 * W::COLS
        && idle_lanes <= W::LANES * 3 / 8
}

/// The layout of the words of `a`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OperandLayout {
    /// The words are read from the matrix itself.
    InPlace,
    /// The words of each row are contiguous.
    Rows,
    /// Rows are stored in groups of [`GemmArithmetic::ROWS`]: for each step in turn, the words of all rows of the
    /// group.
    Groups,
}

/// How a task keeps the packed words of its columns of `b`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ColumnPackingMode {
    /// All steps are packed, and kept for all rows.
    Kept,
    /// There are few rows: a piece of a panel is packed, multiplied by all rows, and overwritten. For the fewest rows,
    /// nothing is packed.
    Pieces,
    /// The same for pieces of all panels of a task: if columns are adjacent, long parts of the rows of `b` are read.
    WidePieces,
}

/// Returns the number of bytes of a matrix.
pub(super) fn bytes_of<E: Element>(matrix: &Matrix<'_, E>) -> usize {
    matrix.rows() * matrix.cols() * size_of::<E>()
}

/// Memory that tasks share.
#[derive(Clone, Copy)]
pub(super) struct SharedPointer<T>(*mut T);

// SAFETY: it is only an address; the tasks write disjoint parts, and read data written by other tasks only after an
// atomic counter shows that it is complete.
unsafe impl<T: Send> Sync for SharedPointer<T> {}

impl<T> SharedPointer<T> {
    pub(super) fn at(&self, i: usize) -> *mut T {
        self.0.wrapping_add(i)
    }
}

/// A part of the product: the rows of a region, summed over a span of the inner dimension.
pub(super) struct GemmPart<'a, E, C> {
    pub(super) output: &'a EpilogueOutput<'a, C>,
    a: GemmOperand<E>,
    pub(super) b: GemmOperand<E>,
    layout: OperandLayout,
    pub(super) packed_b: ColumnPackingMode,
    exchanged: bool,
    pub(super) rows: Range<usize>,
    /// All blocks of steps. `span` selects those of this part.
    pub(super) blocks: EvenSplit,
    pub(super) span: Range<usize>,
    grid: TaskGrid,
    packed_a: SharedPointer<f32>,
    /// Sums to which the other spans are still to be added, row-major, with rows padded to full vectors.
    pub(super) sums: Option<SharedPointer<f32>>,
    /// The number of finished tasks that pack `a`.
    packs_done: AtomicUsize,
}

/// The maximum number of sums of one call of a microkernel, for any arithmetic.
const MAX_SUMS: usize = 8 * 48;

/// The sums of one call of a microkernel, on the stack.
#[repr(align(64))]
struct AccumulatorTile([f32; MAX_SUMS]);

impl<E: Element, C: Element> GemmPart<'_, E, C> {
    /// Returns the steps of this part.
    pub(super) fn steps(&self) -> Range<usize> {
        let start = self.blocks.piece(self.span.start).start;
        start..self.blocks.piece(self.span.end - 1).end
    }

    /// Returns the number of tasks that pack `a`, which come first.
    pub(super) fn pack_task_count(&self) -> usize {
        match self.layout {
            OperandLayout::InPlace => 0,
            OperandLayout::Rows => self.rows.len().div_ceil(PACK_ROWS),
            OperandLayout::Groups => self.steps().len().div_ceil(PACK_STEPS),
        }
    }

    /// Returns the number of tasks that multiply.
    pub(super) fn product_task_count(&self) -> usize {
        self.grid.rows.count * self.grid.cols.count
    }

    pub(super) fn run<W: ElementArithmetic<E> + Microkernels>(&self, task: usize) {
        let packs = self.pack_task_count();
        if task < packs {
            self.pack_a::<W>(task);
            self.packs_done.fetch_add(1, Ordering::Release);
            return;
        }
        let (row, col) = ((task - packs) / self.grid.cols.count, (task - packs) % self.grid.cols.count);
        let (rows, cols) = (self.grid.rows.piece(row), self.grid.cols.piece(col));
        if rows.is_empty() || cols.is_empty() {
            return;
        }
        let panels = ColumnPanels::new(cols.len().div_ceil(W::LANES), W::VECTORS);
        let width = panels.vectors() * W::LANES;
        if self.packed_b != ColumnPackingMode::Kept {
            self.wait_for_a(packs);
            return self.stream::<W>(rows, cols, panels);
        }
        with_words(width * self.steps().len(), |packed_b| {
            self.pack_b::<W>(cols.start, (panels, 0..panels.count()), self.steps(), packed_b);
            self.wait_for_a(packs);
            if self.exchanged {
                with_words(2 * W::LANES * width, |strips| {
                    self.compute_exchanged::<W>(rows, cols, panels, packed_b, strips);
                });
            } else {
                with_words(W::ROWS * width, |strip| self.compute::<W>(rows, cols, panels, packed_b, strip));
            }
        });
    }

    /// Waits until all of `a` is packed.
    fn wait_for_a(&self, packs: usize) {
        let mut spins = 0u32;
        while self.packs_done.load(Ordering::Acquire) < packs {
            spins += 1;
            if spins < 10_000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }

    fn pack_a<W: ElementArithmetic<E> + Microkernels>(&self, task: usize) {
        let steps = self.steps();
        if self.layout == OperandLayout::Rows {
            let length = steps.len().next_multiple_of(W::LANES);
            for row in task * PACK_ROWS..self.rows.len().min((task + 1) * PACK_ROWS) {
                let to = self.packed_a.at(row * length);
                // SAFETY: the processor has the instructions; there is room for the row in full vectors.
                unsafe { self.a.copy_row::<W>(self.rows.start + row, steps.start, steps.len(), to) };
            }
            return;
        }
        let turn = task * PACK_STEPS..steps.len().min((task + 1) * PACK_STEPS);
        for row in (0..self.rows.len()).step_by(W::LANES) {
            let to = self.packed_a.at(row / W::ROWS * W::ROWS * steps.len() + turn.start * W::ROWS + row % W::ROWS);
            let (outer, step) = (self.rows.start + row, steps.start + turn.start);
            // SAFETY: the processor has the instructions; there is room for full vectors of rows.
            unsafe { self.a.pack_rows::<W>(outer, step, turn.len(), to, steps.len() * W::ROWS) };
        }
    }

    /// Packs some steps of some of `panels`, the panels of `b` whose first one starts at column `col`. The words of
    /// each panel are contiguous.
    pub(super) fn pack_b<W: ElementArithmetic<E> + Microkernels>(
        &self,
        col: usize,
        (panels, panel_range): (ColumnPanels, Range<usize>),
        steps: Range<usize>,
        to: *mut f32,
    ) {
        let (start, _) = panels.get(panel_range.start);
        // If columns are contiguous, panels are packed one after the other. Otherwise, a few steps of all panels are
        // packed in turn, so that neighbours in a row are read together.
        let steps_per_turn = match self.packed_b {
            ColumnPackingMode::WidePieces => STEPS_OF_WIDE_PIECES,
            _ if self.b.inner_stride == 1 => usize::MAX,
            _ => PREFETCH_STEPS,
        };
        for turn in split_range(0..steps.len(), steps_per_turn) {
            for (vector, vectors) in panel_range.clone().map(|panel| panels.get(panel)) {
                let to = to.wrapping_add(((vector - start) * steps.len() + vectors * turn.start) * W::LANES);
                let col = col + vector * W::LANES;
                // SAFETY: the processor has the instructions; there is room for these panels.
                unsafe { self.b.pack_columns::<W>(col, vectors, steps.start + turn.start, turn.len(), to) };
            }
        }
    }

    /// Returns the words of `a`, starting at a row and a step of this part.
    pub(super) fn words_of_a<W: ElementArithmetic<E> + Microkernels>(&self, row: usize, step: usize) -> StridedWords {
        let steps = self.steps();
        match self.layout {
            OperandLayout::InPlace => {
                let first = self.a.at(self.rows.start + row, (steps.start + step) * W::DEPTH).cast();
                StridedWords { first, row: self.a.outer_stride / W::DEPTH, step: 1 }
            }
            OperandLayout::Rows => {
                let length = steps.len().next_multiple_of(W::LANES);
                StridedWords { first: self.packed_a.at(row * length + step), row: length, step: 1 }
            }
            OperandLayout::Groups => {
                let group = row / W::ROWS * W::ROWS * steps.len();
                StridedWords { first: self.packed_a.at(group + step * W::ROWS + row % W::ROWS), row: 1, step: W::ROWS }
            }
        }
    }

    /// Computes some rows (counted within the part) and columns, in strips of at most [`GemmArithmetic::ROWS`] rows.
    /// Their sums are kept in `strip` from block to block, unless they must wait for other parts or there is only one
    /// block.
    fn compute<W: ElementArithmetic<E> + Microkernels>(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        panels: ColumnPanels,
        packed_b: *const f32,
        strip: *mut f32,
    ) {
        let output = self.output;
        let steps = self.steps();
        let single_block = self.blocks.count == 1;
        let mut registers = AccumulatorTile([0.0; MAX_SUMS]);
        let mut row = rows.start;
        while row < rows.end {
            let n_rows = microkernel::rows::<W>(rows.end - row);
            for block in self.span.clone() {
                let last = block + 1 == self.blocks.count;
                let block_steps = self.blocks.piece(block);
                let step = block_steps.start - steps.start;
                let a = self.words_of_a::<W>(row, step);
                for panel in 0..panels.count() {
                    let (vector, vectors) = panels.get(panel);
                    let col = cols.start + vector * W::LANES;
                    let n_cols = (vectors * W::LANES).min(cols.end - col);
                    let tile = TilePosition { row: self.rows.start + row, rows: n_rows, col, cols: n_cols };
                    if last {
                        output.prefetch((tile.row, n_rows), (col, n_cols));
                    }
                    let direct = single_block && n_cols == vectors * W::LANES && output.takes_sums();
                    let (sums, stride) = match &self.sums {
                        // SAFETY: an element of the result, which is in f32.
                        _ if direct => (unsafe { output.result.at(tile.row, col) }.cast(), output.result.row_stride()),
                        _ if single_block => (registers.0.as_mut_ptr(), W::COLS),
                        Some(sums) => {
                            let stride = self.b.outer.next_multiple_of(W::LANES);
                            (sums.at(row * stride + col), stride)
                        }
                        None => (strip.wrapping_add(vector * W::LANES), panels.vectors() * W::LANES),
                    };
                    let add = if direct { output.accumulate } else { block > 0 };
                    let start = if add { AccumulatorInit::Add } else { AccumulatorInit::Zero };
                    let b = packed_b.wrapping_add((vector * steps.len() + vectors * step) * W::LANES);
                    // SAFETY: the processor has the instructions; the operands are packed; the kernel reads `n_rows`
                    // rows and `vectors` vectors of them for the block's steps; the sums have room for these rows and
                    // vectors, and only this task accesses them and these elements of the result.
                    unsafe {
                        microkernel::select::<W>(n_rows, vectors)(block_steps.len(), &a, b, sums, stride, start);
                        if last && !direct {
                            finish::<W::V, C>(output, tile, sums, stride);
                        }
                    }
                }
            }
            row += n_rows;
        }
    }
}

/// Splits a range into pieces of length `max_len` or less, in order.
pub(super) fn split_range(range: Range<usize>, max_len: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(max_len).map(move |start| start..range.end.min(start.saturating_add(max_len)))
}
