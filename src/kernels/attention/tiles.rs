//! Operations of attention on tiles, and the products of tiles with their causal bounds.
//!
//! Working memory is counted in words of 32 bits: one f32, or two bf16 numbers that are neighbors in the direction of
//! summation. A tile of scores has keys as rows and queries as columns, so that a softmax over the keys of sixteen
//! queries needs no operation across a vector.

use super::strided::HeadRows;
use super::{BAND, BLOCK};
use crate::kernels::element::Element;

/// Words of a tile of scores.
pub(super) const TILE: usize = BLOCK * BLOCK;

/// The left factor of a product: element (i, d) is the word `i * row + d * step`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub words: &'a [f32],
    pub row: usize,
    pub step: usize,
}

/// Which part of a tile is in use; keys and queries are multiples of [`BAND`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub keys: usize,
    pub queries: usize,
    /// Query i sees keys 0 to i only; else it sees all.
    pub diagonal: bool,
}

/// The running softmax of a block of queries, in units of powers of 2.
pub(super) struct Softmax {
    /// The largest scaled score so far.
    pub max: [f32; BLOCK],
    /// The sum of 2^(score - max).
    pub sum: [f32; BLOCK],
    /// The factor by which the last tile's new maximum shrinks earlier sums.
    pub shrink: [f32; BLOCK],
}

impl Softmax {
    pub(super) fn new() -> Self {
        Self { max: [f32::NEG_INFINITY; BLOCK], sum: [0.0; BLOCK], shrink: [0.0; BLOCK] }
    }
}

/// The tile operations. `scale` takes scores to powers of 2.
pub(super) trait Tiles: Copy {
    /// Numbers in a word.
    const PAIR: usize;

    /// Rows `first..first + n` with neighbors in a row paired: word (t, w) is `t * words + w`. Zeros fill up both
    /// sides.
    fn pack_rows<E: Element>(self, src: HeadRows<'_, E>, first: usize, n: usize, words: usize, dst: &mut [f32]);

    /// Packed rows with neighbors in a column paired instead: word (t, c) is `t * words * PAIR + c`, t counting words.
    /// Where words are single numbers, they are the packed rows themselves and `dst` is not used.
    fn pair_columns<'a>(self, rows: &'a [f32], words: usize, dst: &'a mut [f32]) -> &'a [f32];

    /// dst `[words][BLOCK]` = the transpose of src `[up to BLOCK][words]`; both sides multiples of 16.
    fn transpose(self, src: &[f32], words: usize, dst: &mut [f32]);

    /// c (+)= a b for c of f32 `[rows][columns]` and `depth` words of summation; columns a multiple of 16, rows of
    /// [`BAND`]. `c` and `b` are (words, elements from row to row).
    fn product(self, c: (&mut [f32], usize), add: bool, a: Left<'_>, b: (&[f32], usize), size: [usize; 3]);

    /// Takes a tile of scores to probabilities relative to the running maximum, paired along the keys: word (key,
    /// query) is `key * BLOCK + query`, key counting words.
    fn softmax(self, tile: &mut [f32], shape: Shape, scale: f32, softmax: &mut Softmax);

    /// Takes a tile of scores to probabilities, in f32; `lse` in powers of 2.
    fn probabilities(self, tile: &mut [f32], shape: Shape, scale: f32, lse: &[f32; BLOCK]);

    /// From probabilities p and their gradients g: the scores' gradients p (g - along).
    ///
    /// After it, `p` and `g` hold the probabilities and the scores' gradients paired along the queries: word (key,
    /// query) is `key * BLOCK + query`, query counting words. Where words are pairs, `g_keys` holds the latter paired
    /// along the keys, as [`Tiles::softmax`] gives them.
    fn score_gradients(self, p: &mut [f32], g: &mut [f32], g_keys: &mut [f32], shape: Shape, along: &[f32; BLOCK]);
}

/// tile = keys queries^T, where a query sees the key: `keys` by rows, `queries` transposed, `depth` words long.
pub(super) fn scores<T: Tiles>(
    tiles: T,
    tile: &mut [f32],
    (keys, words): (&[f32], usize),
    queries: &[f32],
    depth: usize,
    s: Shape,
) {
    for (first, rows) in bands(s, s.keys) {
        let from = if s.diagonal { first } else { 0 };
        let left = Left { words: &keys[first * words..], row: words, step: 1 };
        let size = [rows, s.queries - from, depth];
        tiles.product((&mut tile[first * BLOCK + from..], BLOCK), false, left, (&queries[from..], BLOCK), size);
    }
}

/// out (+)= tile^T x: what each query gathers from the keys' rows x. `tile` and x are paired along the keys.
pub(super) fn gather<T: Tiles>(
    tiles: T,
    (out, width): (&mut [f32], usize),
    add: bool,
    tile: &[f32],
    x: &[f32],
    columns: usize,
    s: Shape,
) {
    for (first, rows) in bands(s, s.queries) {
        let depth = if s.diagonal { first + rows } else { s.keys } / T::PAIR;
        let left = Left { words: &tile[first..], row: 1, step: BLOCK };
        tiles.product((&mut out[first * width..], width), add, left, (x, width), [rows, columns, depth]);
    }
}

/// out += tile x: what each key receives from the queries' rows x. `tile` and x are paired along the queries.
pub(super) fn scatter<T: Tiles>(
    tiles: T,
    (out, width): (&mut [f32], usize),
    tile: &[f32],
    x: &[f32],
    columns: usize,
    s: Shape,
) {
    for (first, rows) in bands(s, s.keys) {
        let from = if s.diagonal { first } else { 0 };
        let left = Left { words: &tile[first * BLOCK + from / T::PAIR..], row: BLOCK, step: 1 };
        let right = (&x[from / T::PAIR * width..], width);
        let size = [rows, columns, (s.queries - from) / T::PAIR];
        tiles.product((&mut out[first * width..], width), true, left, right, size);
    }
}

/// The (first, number) of rows to multiply at a time: all of them, or on the diagonal those with the same bound.
fn bands(s: Shape, rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let step = if s.diagonal { BAND } else { rows.max(1) };
    (0..rows).step_by(step).map(move |first| (first, step))
}
