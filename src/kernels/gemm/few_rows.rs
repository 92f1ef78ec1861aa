//! Products with few rows.
//!
//! Packed columns are not kept: a task packs a small piece of `b`, multiplies all rows by it and continues with the
//! next piece. `b` is then read once, and no packed copy of all of it is written. A piece is a part of one panel, which
//! stays in the first-level cache. If columns are adjacent and `b` is too large for the caches, a piece is a part of
//! all panels:
//!
//! ```text
//!   one panel after the other         all panels at once
//!   step 0   | 1 |   | 5 |            step 0   |     1     |    rows are read in long pieces, because memory is read
//!   step 1   | 2 |   | 6 |            step 1   |     2     |    slowly in short pieces of many pages
//! ```
//!
//! The products of an element are summed in the order of [`super::blocked`], so the results have the same bits.

use super::arithmetic::{ElementArithmetic, GemmArithmetic};
use super::blocked::{ColumnPackingMode, GemmPart, split_range};
use super::microkernel::{self, AccumulatorInit, Microkernels};
use super::pack::{PIECE_STEPS, PREFETCH_STEPS};
use super::panels::ColumnPanels;
use super::scratch::with_words;
use super::tile_epilogue::{TilePosition, finish};
use super::unpacked;
use crate::kernels::element::Element;
use std::ops::Range;

impl<E: Element, C: Element> GemmPart<'_, E, C> {
    /// Does the same as [`GemmPart::compute`] for so few rows that packed columns of `b` are not kept. A piece (some
    /// steps of one panel or of all panels) is packed, multiplied by all rows, and overwritten. For the fewest rows,
    /// `b` is not packed at all. The sums of all rows and columns are in memory. Within a block, the sums continue from
    /// one piece to the next, and are then added to the sums of earlier blocks, so that the products of each element
    /// are summed in the order of [`GemmPart::compute`].
    pub(super) fn stream<W: ElementArithmetic<E> + Microkernels>(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        panels: ColumnPanels,
    ) {
        let width = panels.vectors() * W::LANES;
        let packs = rows.len() > unpacked::ROWS;
        let panel_count = panels.count();
        // The number of panels in a group (all steps of a group are processed before the next group begins), and the
        // numbers of panels and steps in a piece.
        let (group, piece_panels, piece_steps) = match self.packed_b {
            ColumnPackingMode::WidePieces => (panel_count, panel_count, PIECE_STEPS),
            _ if self.b.inner_stride == 1 => (1, 1, PIECE_STEPS),
            _ => (panel_count, 1, PREFETCH_STEPS),
        };
        let piece_words = piece_steps * (piece_panels * W::COLS).min(width);
        with_words(if packs { piece_words } else { 0 }, |piece| {
            with_words(2 * rows.len() * width, |sums| {
                let piece = packs.then_some(piece);
                let task = FewRowsTask {
                    rows: rows.clone(),
                    col: cols.start,
                    panels,
                    piece,
                    piece_panels,
                    piece_steps,
                    width,
                };
                let block_sums = sums.wrapping_add(rows.len() * width);
                for group in split_range(0..panel_count, group) {
                    for block in 0..self.blocks.count {
                        let target = if block == 0 { sums } else { block_sums };
                        self.stream_block::<W>(&task, group.clone(), self.blocks.piece(block), target);
                        if block > 0 {
                            task.add_block::<W>(group.clone(), sums, block_sums);
                        }
                    }
                }
                let tile = TilePosition {
                    row: self.rows.start + rows.start,
                    rows: rows.len(),
                    col: cols.start,
                    cols: cols.len(),
                };
                // SAFETY: the processor has the instructions; the sums have full vectors, and only this task accesses
                // these elements of the result.
                unsafe { finish::<W::V, C>(self.output, tile, sums, width) };
            });
        });
    }

    /// Computes the sums of some panels for a block of steps.
    fn stream_block<W: ElementArithmetic<E> + Microkernels>(
        &self,
        task: &FewRowsTask,
        group: Range<usize>,
        steps: Range<usize>,
        sums: *mut f32,
    ) {
        for turn in split_range(steps.clone(), task.piece_steps) {
            let start = if turn.start == steps.start { AccumulatorInit::Zero } else { AccumulatorInit::Continue };
            for piece_panels in split_range(group.clone(), task.piece_panels) {
                if let Some(piece) = task.piece {
                    self.pack_b::<W>(task.col, (task.panels, piece_panels.clone()), turn.clone(), piece);
                }
                let (first, _) = task.panels.get(piece_panels.start);
                for (vector, vectors) in piece_panels.map(|panel| task.panels.get(panel)) {
                    let piece = task.piece.map(|piece| piece.wrapping_add((vector - first) * turn.len() * W::LANES));
                    self.multiply_panel::<W>(task, (vector, vectors), turn.clone(), piece, (sums, start));
                }
            }
        }
    }

    /// Multiplies all rows by some steps of a panel.
    fn multiply_panel<W: ElementArithmetic<E> + Microkernels>(
        &self,
        task: &FewRowsTask,
        (vector, vectors): (usize, usize),
        steps: Range<usize>,
        piece: Option<*mut f32>,
        (sums, start): (*mut f32, AccumulatorInit),
    ) {
        let mut row = task.rows.start;
        while row < task.rows.end {
            let n_rows = microkernel::rows::<W>(task.rows.end - row);
            let a = self.words_of_a::<W>(row, steps.start);
            let sums = sums.wrapping_add((row - task.rows.start) * task.width + vector * W::LANES);
            // SAFETY: the processor has the instructions; the operands exist or are packed; there is room for the sums
            // of all rows and vectors.
            unsafe {
                if let Some(piece) = piece {
                    microkernel::select::<W>(n_rows, vectors)(steps.len(), &a, piece, sums, task.width, start);
                } else {
                    let (columns, steps) = ((task.col + vector * W::LANES, vectors), (steps.start, steps.len()));
                    unpacked::multiply::<W, E>(n_rows, a, &self.b, columns, steps, sums, task.width, start);
                }
            }
            row += n_rows;
        }
    }
}

/// A task with few rows.
struct FewRowsTask {
    rows: Range<usize>,
    /// The first of the task's columns. `panels` are the panels of these columns.
    col: usize,
    panels: ColumnPanels,
    /// Room for a piece of `b`, if it is packed.
    piece: Option<*mut f32>,
    /// The number of panels of a piece.
    piece_panels: usize,
    /// The number of steps of a piece, which are multiplied before the sums are stored.
    piece_steps: usize,
    /// The number of words of a row of sums.
    width: usize,
}

impl FewRowsTask {
    /// Adds the sums of a block to those of earlier blocks, for some panels.
    fn add_block<W: GemmArithmetic>(&self, group: Range<usize>, sums: *mut f32, block_sums: *const f32) {
        let (last, vectors) = self.panels.get(group.end - 1);
        let columns = self.panels.get(group.start).0 * W::LANES..(last + vectors) * W::LANES;
        for row in 0..self.rows.len() {
            for i in columns.clone().map(|column| row * self.width + column) {
                // SAFETY: the sums belong to this task.
                unsafe { *sums.add(i) += *block_sums.add(i) };
            }
        }
    }
}
