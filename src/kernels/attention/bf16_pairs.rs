//! Conversion of f32 tiles to words of two bf16 numbers. Probabilities and the gradients of scores are rounded before
//! they are multiplied.

use super::rule::TileShape;
use super::shape::{BAND, BLOCK, TILE};
use crate::kernels::vector::{Avx512Bf16, SimdVector};

/// Converts the rows of a tile in place to words along the keys.
///
/// # Safety
/// The processor must have the instructions of [`Avx512Bf16`].
pub(super) unsafe fn along_keys_in_place(tile: &mut [f32], s: TileShape) {
    let tile = tile[..TILE].as_mut_ptr();
    // SAFETY: as the caller promises; row `key` has already been read, or is read at the same time.
    unsafe { words_along_keys(tile, tile, s) }
}

/// Converts the rows of `src` to words along the keys in `dst`.
///
/// # Safety
/// The processor must have the instructions of [`Avx512Bf16`].
pub(super) unsafe fn along_keys(src: &[f32], dst: &mut [f32], s: TileShape) {
    // SAFETY: as the caller promises.
    unsafe { words_along_keys(src[..TILE].as_ptr(), dst[..TILE].as_mut_ptr(), s) }
}

/// # Safety
/// The processor must have the instructions of [`Avx512Bf16`], and both pointers must point to tiles.
unsafe fn words_along_keys(src: *const f32, dst: *mut f32, s: TileShape) {
    assert!(s.keys <= BLOCK && s.queries <= BLOCK);
    // SAFETY: keys and queries are within the tiles.
    unsafe {
        Avx512Bf16::with(
            #[inline(always)]
            || {
                for key in 0..s.keys / 2 {
                    for query in (0..s.queries).step_by(BAND) {
                        let first = src.add(2 * key * BLOCK + query);
                        let (low, high) = (Avx512Bf16::load(first), Avx512Bf16::load(first.add(BLOCK)));
                        Avx512Bf16::pair(low, high).store(dst.add(key * BLOCK + query));
                    }
                }
            },
        )
    }
}

/// Converts a tile in place to words along the queries. A last vector without a neighbour is paired with zeros.
///
/// # Safety
/// The processor must have the instructions of [`Avx512Bf16`].
pub(super) unsafe fn along_queries_in_place(tile: &mut [f32], s: TileShape) {
    assert!(s.keys <= BLOCK && s.queries <= BLOCK);
    let tile = tile[..TILE].as_mut_ptr();
    // SAFETY: as the caller promises; keys and queries are within the tile.
    unsafe {
        Avx512Bf16::with(
            #[inline(always)]
            || {
                for key in 0..s.keys {
                    let row = tile.add(key * BLOCK);
                    for query in (0..s.queries).step_by(2 * BAND) {
                        let is_pair = query + BAND < s.queries;
                        let second = if is_pair { Avx512Bf16::load(row.add(query + BAND)) } else { Avx512Bf16::zero() };
                        Avx512Bf16::concat_to_bf16(Avx512Bf16::load(row.add(query)), second).store(row.add(query / 2));
                    }
                }
            },
        )
    }
}
