//! The division of a product into tasks.

use super::arithmetic::GemmArithmetic;
use std::ops::Range;

/// The minimum number of rows per task at which packing `b` costs little.
const MANY_ROWS: usize = 512;
/// The minimum number of rows per task at which packing `b` costs less than leaving a thread idle.
pub(super) const MIN_ROWS: usize = 64;

/// A length, split into pieces that are as equal as full units allow.
#[derive(Clone, Copy)]
pub(super) struct EvenSplit {
    total: usize,
    unit: usize,
    pub(super) count: usize,
}

impl EvenSplit {
    /// Splits `total` into the fewest pieces of at most `most`, or of one unit if that is more. An empty length is one
    /// piece.
    pub(super) fn new(total: usize, most: usize, unit: usize) -> Self {
        let count = total.div_ceil(unit).div_ceil((most / unit).max(1)).max(1);
        Self { total, unit, count }
    }

    /// Splits `total` into `count` pieces. Some are empty if there are fewer units.
    pub(super) fn with_count(total: usize, count: usize, unit: usize) -> Self {
        Self { total, unit, count }
    }

    pub(super) fn piece(&self, i: usize) -> Range<usize> {
        let bound = |i: usize| self.total.min(self.total.div_ceil(self.unit) * i / self.count * self.unit);
        bound(i)..bound(i + 1)
    }

    /// Returns the length of the longest piece, rounded up to full units.
    pub(super) fn max_len(&self) -> usize {
        self.total.div_ceil(self.unit).div_ceil(self.count) * self.unit
    }
}

/// The tasks of a part of a product.
#[derive(Clone, Copy)]
pub(super) struct TaskGrid {
    pub(super) rows: EvenSplit,
    pub(super) cols: EvenSplit,
}

impl TaskGrid {
    /// Chooses the fewest tasks whose columns fit in the caches, but several per thread, so that threads of unequal
    /// speed finish at about the same time. A task keeps `words` words in the cache for each of its columns.
    pub(super) fn new<A: GemmArithmetic>(rows: usize, cols: usize, words: usize, threads: usize) -> Self {
        let at_least = 2 * A::COLS;
        let widest = (A::WORDS_OF_B / words).max(at_least);
        if threads == 1 {
            return Self { rows: EvenSplit::with_count(rows, 1, A::ROWS), cols: EvenSplit::new(cols, widest, A::COLS) };
        }
        let cols = if rows >= 4 * threads * MANY_ROWS {
            // The rows provide enough tasks, and it is better to write full rows of the result.
            EvenSplit::new(cols, widest, A::COLS)
        } else {
            let fewest = EvenSplit::new(cols, widest.min((cols / (2 * threads)).max(at_least)), A::COLS).count;
            // All threads get the same number of tasks.
            let count = fewest.next_multiple_of(threads);
            EvenSplit::with_count(cols, if count <= cols.div_ceil(A::COLS) { count } else { fewest }, A::COLS)
        };
        let row_pieces =
            |tasks: usize, min_rows: usize| (tasks * threads).div_ceil(cols.count).min(rows / min_rows).max(1);
        let count = row_pieces(4, MANY_ROWS).max(row_pieces(2, MIN_ROWS));
        let even = (count..count + threads).find(|count| (count * cols.count).is_multiple_of(threads));
        Self { rows: EvenSplit::with_count(rows, even.unwrap_or(count), A::ROWS), cols }
    }

    /// Chooses the tasks of one of several products that are computed together: about `task_count`, or more if their
    /// columns would not fit in the caches. Rows are divided only if there are too few columns, because every task
    /// packs its columns. `words` has the same meaning as for [`new`](Self::new).
    pub(super) fn for_grouped<A: GemmArithmetic>(rows: usize, cols: usize, words: usize, task_count: usize) -> Self {
        let at_least = 2 * A::COLS;
        let widest = (A::WORDS_OF_B / words).max(at_least);
        let max_count = (cols / at_least).max(1);
        let count = EvenSplit::new(cols, widest, A::COLS).count.max(task_count.min(max_count));
        let rows = EvenSplit::with_count(rows, task_count.div_ceil(count).min(rows / MIN_ROWS).max(1), A::ROWS);
        Self { rows, cols: EvenSplit::with_count(cols, count, A::COLS) }
    }
}
