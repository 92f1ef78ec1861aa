//! Tiles of a result, each a task of its own.

use crate::kernels::par;
use std::ops::Range;

/// Calls `work` with the rows and the columns of each tile of an `m` by `n` result, in parallel. Tiles of at most
/// `tile_rows` by `tile_cols` are disjoint and cover the result.
pub(super) fn for_each_tile(
    (m, n): (usize, usize),
    (tile_rows, tile_cols): (usize, usize),
    work: impl Fn(Range<usize>, Range<usize>) + Sync,
) {
    let tiles_across = n.div_ceil(tile_cols);
    par::for_each(m.div_ceil(tile_rows) * tiles_across, |t| {
        let (row, col) = (t / tiles_across * tile_rows, t % tiles_across * tile_cols);
        work(row..m.min(row + tile_rows), col..n.min(col + tile_cols));
    });
}
