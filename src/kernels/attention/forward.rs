//! The forward pass of one head: a block of queries at a time, with a running softmax over blocks of keys.

use super::pack;
use super::rule::AttentionRule;
use super::score_products::{ScoreTiles, gather, scores};
use super::scratch::AttentionScratch;
use super::shape::{AttentionShape, BAND, BLOCK, LOG2_E, TILE};
use super::softmax::{OnlineSoftmax, bound, softmax};
use super::strided::{HeadRows, HeadRowsMut};
use super::tile_product::ProductInit;
use crate::kernels::element::Element;
use crate::kernels::vector::PackElementsToWords;

/// Computes the rows of `out` and `lse` for one head and a sequence of `h.time` positions. `sink` is the score of the
/// head's sink, if it has one.
///
/// # Safety
/// The processor must have the instructions of `T`.
pub(super) unsafe fn one_head<T: ScoreTiles + PackElementsToWords<E>, E: Element>(
    (h, rule): (&AttentionShape, &AttentionRule<'_>),
    sink: Option<f32>,
    [q, k, v]: [HeadRows<'_, E>; 3],
    (mut out, mut lse): (HeadRowsMut<'_, E>, HeadRowsMut<'_, f32>),
    scratch: &mut AttentionScratch,
) {
    let HeadBufferLayout { words, width, columns, depth, time } = HeadBufferLayout::new::<T>(h);
    let len = time * words;
    let [keys, values, queries, tile, sums] = scratch.pieces([len, len, BLOCK * words, TILE, BLOCK * width]);
    let (scale, cap) = rule.to_powers();
    // SAFETY: as the caller promises.
    unsafe {
        pack::by_rows::<T, E>(k, 0..h.time, words, keys);
        pack::by_columns::<T, E>(v, 0..h.time, width, values);
        for start in (0..h.time).step_by(BLOCK) {
            let n = BLOCK.min(h.time - start);
            let padded = n.next_multiple_of(BAND);
            pack::transposed::<T, E>(q, start..start + n, words, padded, queries);
            let mut state = OnlineSoftmax::new(sink);
            let mut is_first = true;
            for (first, shape) in rule.tiles(h.time, start, n) {
                scores::<T>(tile, (&keys[first * words..], words), queries, depth, shape);
                if let Some(cap) = cap {
                    bound::<T::V>(tile, shape, cap);
                }
                softmax::<T::V>(tile, shape, scale, &mut state);
                T::to_words_along_keys(tile, shape);
                let init = if is_first { ProductInit::Zero } else { ProductInit::Times(&state.shrink) };
                gather::<T>((sums, width), init, tile, &values[first * words..], columns, shape);
                is_first = false;
            }
            let factors = state.sum.iter().take(n).map(|sum| 1.0 / sum);
            pack::write::<T::V, E>((sums, width), factors, &mut out, (start, 0..h.head));
            for i in 0..n {
                lse.row(start + i)[0] = (state.max[i] + state.sum[i].log2()) / LOG2_E;
            }
        }
    }
}

/// The layout of one head's vectors in working memory.
pub(super) struct HeadBufferLayout {
    /// The distance between rows, in words, if words run along the rows.
    pub words: usize,
    /// The distance between rows, in words, for the other layouts.
    pub width: usize,
    /// The number of computed columns in a row: the head's elements, padded to full vectors.
    pub columns: usize,
    /// The number of words in a row, without padding.
    pub depth: usize,
    /// The number of rows, padded to full bands.
    pub time: usize,
}

impl HeadBufferLayout {
    pub(super) fn new<T: ScoreTiles>(h: &AttentionShape) -> Self {
        let width = h.head.next_multiple_of(BAND * T::DEPTH);
        Self {
            words: width / T::DEPTH,
            width,
            columns: h.head.next_multiple_of(BAND),
            depth: h.head.div_ceil(T::DEPTH),
            time: h.time.next_multiple_of(BAND),
        }
    }
}
