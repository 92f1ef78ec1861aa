//! Tiles of scores as words, and their products with causal bounds.
//!
//! Working memory is counted in 32-bit words: one f32, or two bf16 numbers that are neighbours in the direction of
//! summation. A tile of scores has keys as rows and queries as columns, so that a softmax over the keys for a vector of
//! queries needs no horizontal operation.

use super::rule::TileShape;
use super::shape::{BAND, BLOCK};
use super::tile_product::{LeftFactor, ProductInit, StripProducts, product};
#[cfg(target_arch = "x86_64")]
use crate::kernels::vector::Bf16PairWords;
use crate::kernels::vector::{F32Words, SimdVector};

/// The operations on tiles that each type of word provides.
pub(super) trait ScoreTiles: StripProducts {
    /// Converts a tile of f32 to words along the keys: word (key, query) is at `key * BLOCK + query`, where
    /// `key` counts words, not keys.
    ///
    /// # Safety
    /// The processor must have the instructions of `Self`.
    unsafe fn to_words_along_keys(_tile: &mut [f32], _shape: TileShape) {
        const { assert!(Self::DEPTH == 1, "a number is a word") };
    }

    /// Converts `along_queries` in place from f32 to words along the queries, where the query index counts words, not
    /// queries. Converts `both` to words along the keys, written to `keys`, and in place to words along the queries.
    ///
    /// # Safety
    /// The processor must have the instructions of `Self`.
    unsafe fn to_words(_along_queries: &mut [f32], _both: &mut [f32], _keys: &mut [f32], _shape: TileShape) {
        const { assert!(Self::DEPTH == 1, "a number is a word") };
    }
}

impl<V: SimdVector> ScoreTiles for F32Words<V> where Self: StripProducts {}

#[cfg(target_arch = "x86_64")]
impl ScoreTiles for Bf16PairWords {
    unsafe fn to_words_along_keys(tile: &mut [f32], shape: TileShape) {
        // SAFETY: as the caller promises.
        unsafe { super::bf16_pairs::along_keys_in_place(tile, shape) }
    }

    unsafe fn to_words(along_queries: &mut [f32], both: &mut [f32], keys: &mut [f32], shape: TileShape) {
        // SAFETY: as the caller promises.
        unsafe {
            super::bf16_pairs::along_keys(both, keys, shape);
            super::bf16_pairs::along_queries_in_place(both, shape);
            super::bf16_pairs::along_queries_in_place(along_queries, shape);
        }
    }
}

/// Computes tile = keys queries^T for the pairs in which the query may see the key. Each row of `keys` is a key, and
/// each column of `queries`, which is transposed, is a query; both have `depth` words.
///
/// # Safety
/// The processor must have the instructions of `T`.
pub(super) unsafe fn scores<T: ScoreTiles>(
    tile: &mut [f32],
    (keys, words): (&[f32], usize),
    queries: &[f32],
    depth: usize,
    s: TileShape,
) {
    for (first, rows) in bands(s, s.keys) {
        let from = if s.diagonal { first } else { 0 };
        let left = LeftFactor { words: &keys[first * words..], row: words, step: 1 };
        let (to, size) = ((&mut tile[first * BLOCK + from..], BLOCK), [rows, s.queries - from, depth]);
        // SAFETY: as the caller promises.
        unsafe { product::<T>(to, ProductInit::Zero, left, (&queries[from..], BLOCK), size) };
    }
}

/// Computes out = tile^T x, which each query gathers from the rows x of the keys. `start` is the initial value of out.
/// `tile` and x are words along the keys.
///
/// # Safety
/// The processor must have the instructions of `T`.
pub(super) unsafe fn gather<T: ScoreTiles>(
    (out, width): (&mut [f32], usize),
    start: ProductInit<'_>,
    tile: &[f32],
    x: &[f32],
    columns: usize,
    s: TileShape,
) {
    for (first, rows) in bands(s, s.queries) {
        let depth = if s.diagonal { first + rows } else { s.keys } / T::DEPTH;
        let left = LeftFactor { words: &tile[first..], row: 1, step: BLOCK };
        let (to, size) = ((&mut out[first * width..], width), [rows, columns, depth]);
        // SAFETY: as the caller promises.
        unsafe { product::<T>(to, start.skip_rows(first), left, (x, width), size) };
    }
}

/// Computes out += tile x, which each key receives from the rows x of the queries. `tile` and x are words along the
/// queries.
///
/// # Safety
/// The processor must have the instructions of `T`.
pub(super) unsafe fn scatter<T: ScoreTiles>(
    (out, width): (&mut [f32], usize),
    tile: &[f32],
    x: &[f32],
    columns: usize,
    s: TileShape,
) {
    for (first, rows) in bands(s, s.keys) {
        let from = if s.diagonal { first } else { 0 };
        let left = LeftFactor { words: &tile[first * BLOCK + from / T::DEPTH..], row: BLOCK, step: 1 };
        let right = (&x[from / T::DEPTH * width..], width);
        let (to, size) = ((&mut out[first * width..], width), [rows, columns, (s.queries - from) / T::DEPTH]);
        // SAFETY: as the caller promises.
        unsafe { product::<T>(to, ProductInit::Sums, left, right, size) };
    }
}

/// Returns the groups of rows to multiply at a time, each as its first row and the number of its rows: all rows, or on
/// the diagonal the rows with the same bound.
fn bands(s: TileShape, rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let step = if s.diagonal { BAND } else { rows.max(1) };
    (0..rows).step_by(step).map(move |first| (first, step))
}
