//! One head's forward: a block of queries at a time, with a running softmax over blocks of keys.

use super::strided::{HeadMut, HeadRows};
use super::tiles::{Shape, Softmax, TILE, Tiles, gather, scores};
use super::{BAND, BLOCK, Heads, LOG2_E, Scratch};
use crate::kernels::element::Element;
use crate::kernels::wide::{put, vectorized};

/// Computes the rows of `out` and of `lse` of one head.
pub(super) fn one_head<T: Tiles, E: Element>(
    tiles: T,
    h: &Heads,
    [q, k, v]: [HeadRows<'_, E>; 3],
    mut out: HeadMut<'_, E>,
    lse: &mut [f32],
    scratch: &mut Scratch,
) {
    let Layout { words, width, columns, depth, time } = Layout::new::<T>(h);
    let all = time * words;
    let [keys, values, paired, rows, queries, tile, sums] =
        scratch.pieces([all, all, all, BLOCK * words, BLOCK * words, TILE, BLOCK * width]);
    tiles.pack_rows(k, 0, h.time, words, keys);
    tiles.pack_rows(v, 0, h.time, words, values);
    let values = tiles.pair_columns(values, words, paired);
    let scale = h.scale() * LOG2_E;
    for start in (0..h.time).step_by(BLOCK) {
        let n = BLOCK.min(h.time - start);
        let padded = n.next_multiple_of(BAND);
        let rows = &mut rows[..padded * words];
        tiles.pack_rows(q, start, n, words, rows);
        tiles.transpose(rows, words, queries);
        let mut softmax = Softmax::new();
        for first in (0..=start).step_by(BLOCK) {
            let shape = Shape::at(first, start, padded);
            scores(tiles, tile, (&keys[first * words..], words), queries, depth, shape);
            tiles.softmax(tile, shape, scale, &mut softmax);
            let add = first > 0;
            if add {
                multiply_rows(sums, width, &softmax.shrink[..padded]);
            }
            gather(tiles, (sums, width), add, tile, &values[first * words..], columns, shape);
        }
        for (i, row) in sums.chunks_exact(width).take(n).enumerate() {
            scaled(row, 1.0 / softmax.sum[i], out.row(start + i));
            lse[start + i] = (softmax.max[i] + softmax.sum[i].log2()) / LOG2_E;
        }
    }
}

/// How one head's vectors lie in working memory.
pub(super) struct Layout {
    /// Words from row to row where neighbors in a row are paired.
    pub words: usize,
    /// Words from row to row otherwise.
    pub width: usize,
    /// Numbers of a row that are computed: the head's, filled up to whole vectors.
    pub columns: usize,
    /// Words of a row that hold something else than filling.
    pub depth: usize,
    /// Rows, filled up to whole bands.
    pub time: usize,
}

impl Layout {
    pub(super) fn new<T: Tiles>(h: &Heads) -> Self {
        let width = h.head.next_multiple_of(BAND * T::PAIR);
        Self {
            words: width / T::PAIR,
            width,
            columns: h.head.next_multiple_of(BAND),
            depth: h.head.div_ceil(T::PAIR),
            time: h.time.next_multiple_of(BAND),
        }
    }
}

impl Shape {
    /// The tile of the keys from `first` on and the `queries` queries from `start` on.
    pub(super) fn at(first: usize, start: usize, queries: usize) -> Self {
        let diagonal = first == start;
        Self { keys: if diagonal { queries } else { BLOCK }, queries, diagonal }
    }
}

/// dst = the sums, times a factor, rounded once.
pub(super) fn scaled<E: Element>(sums: &[f32], factor: f32, dst: &mut [E]) {
    vectorized!({
        for (y, x) in dst.iter_mut().zip(sums) {
            *y = put(x * factor);
        }
    });
}

/// Multiplies each row by its own factor.
fn multiply_rows(x: &mut [f32], width: usize, factors: &[f32]) {
    vectorized!({
        for (row, factor) in x.chunks_exact_mut(width).zip(factors) {
            for x in row {
                *x *= factor;
            }
        }
    });
}
