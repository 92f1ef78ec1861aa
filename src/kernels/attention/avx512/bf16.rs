//! The tile operations with products of bf16 numbers and sums in f32: twice the f32 products' speed. Probabilities and
//! the scores' gradients are rounded to bf16 before they are multiplied; everything else is as in f32.

use super::product::{check_product, in_bf16};
use super::{Tile, probabilities, score_gradients, softmax, transpose};
use crate::kernels::attention::strided::HeadRows;
use crate::kernels::attention::tiles::{Left, Shape, Softmax, TILE, Tiles};
use crate::kernels::attention::{BAND, BLOCK};
use crate::kernels::element::Element;
use crate::kernels::wide::{get, put, vectorized};
use half::bf16;
use std::arch::x86_64::*;

/// Products of bf16 numbers. A value is the proof that this machine has AVX-512 with them.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernels::attention) struct Bf16Tiles(());

impl Bf16Tiles {
    /// None on a machine without AVX-512 or its bf16 instructions.
    pub(in crate::kernels::attention) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")).then_some(Self(()))
    }
}

/// A word of two bf16 numbers: the one that comes first in the low half.
#[inline(always)]
fn pair<E: Element>(low: E, high: E) -> f32 {
    let [low, high] = [low, high].map(|x| u32::from(put::<bf16>(get(x)).to_bits()));
    f32::from_bits(high << 16 | low)
}

/// Words of vectors of f32 `low` and `high`, each rounded to bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn interleaved(low: __m512, high: __m512) -> __m512 {
    // SAFETY: 64 bytes of which every pattern is a value.
    let both = unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) };
    let (low, high) = (_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64::<1>(both));
    let (low, high) = (_mm512_cvtepu16_epi32(low), _mm512_cvtepu16_epi32(high));
    _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32::<16>(high)))
}

/// Pairs the rows of a tile of f32 along the keys, into `dst` or over itself.
#[target_feature(enable = "avx512f,avx512bf16")]
fn pair_keys(src: &[f32], dst: &mut [f32], s: Shape) {
    let mut dst = Tile(&mut dst[..TILE]);
    for key in 0..s.keys / 2 {
        for v in 0..s.queries / BAND {
            let at = 2 * key * BLOCK + v * BAND;
            let (low, high) = (&src[at..at + BAND], &src[at + BLOCK..at + BLOCK + BAND]);
            // SAFETY: sixteen words each.
            let (low, high) = unsafe { (_mm512_loadu_ps(low.as_ptr()), _mm512_loadu_ps(high.as_ptr())) };
            dst.store(key * BLOCK + v * BAND, interleaved(low, high));
        }
    }
}

/// Pairs the rows of a tile of f32 along the keys, in place.
#[target_feature(enable = "avx512f,avx512bf16")]
fn pair_keys_in_place(tile: &mut [f32], s: Shape) {
    let mut tile = Tile(&mut tile[..TILE]);
    for key in 0..s.keys / 2 {
        for v in 0..s.queries / BAND {
            let at = 2 * key * BLOCK + v * BAND;
            let both = interleaved(tile.load(at), tile.load(at + BLOCK));
            // Row `key` was read before, or just now.
            tile.store(key * BLOCK + v * BAND, both);
        }
    }
}

/// Pairs a tile of f32 along the queries, in place; a last vector without a neighbor is paired with zeros.
#[target_feature(enable = "avx512f,avx512bf16")]
fn pair_queries_in_place(tile: &mut [f32], s: Shape) {
    let mut tile = Tile(&mut tile[..TILE]);
    for key in 0..s.keys {
        for v in (0..s.queries / BAND).step_by(2) {
            let at = key * BLOCK + v * BAND;
            let second = if (v + 1) * BAND < s.queries { tile.load(at + BAND) } else { _mm512_setzero_ps() };
            let both = _mm512_cvtne2ps_pbh(second, tile.load(at));
            // SAFETY: 64 bytes of which every pattern is a value.
            tile.store(key * BLOCK + v / 2 * BAND, unsafe { std::mem::transmute::<__m512bh, __m512>(both) });
        }
    }
}

impl Tiles for Bf16Tiles {
    const PAIR: usize = 2;

    fn pack_rows<E: Element>(self, src: HeadRows<'_, E>, first: usize, n: usize, words: usize, dst: &mut [f32]) {
        vectorized!({
            let (used, filling) = dst.split_at_mut(n * words);
            for (i, dst) in used.chunks_exact_mut(words).enumerate() {
                let src = src.row(first + i).chunks_exact(2);
                let last = src.remainder().first().map(|x| pair(*x, E::default()));
                let (dst, filling) = dst.split_at_mut(src.len());
                for (word, x) in dst.iter_mut().zip(src) {
                    *word = pair(x[0], x[1]);
                }
                filling.fill(0.0);
                filling.iter_mut().zip(last).for_each(|(word, x)| *word = x);
            }
            filling.fill(0.0);
        });
    }

    fn pair_columns<'a>(self, rows: &'a [f32], words: usize, dst: &'a mut [f32]) -> &'a [f32] {
        let dst = &mut dst[..rows.len()];
        vectorized!({
            for (two, dst) in rows.chunks_exact(2 * words).zip(dst.chunks_exact_mut(2 * words)) {
                let (low, high) = two.split_at(words);
                let (low, high): (&[u16], &[u16]) = (bytemuck::cast_slice(low), bytemuck::cast_slice(high));
                for ((word, low), high) in dst.iter_mut().zip(low).zip(high) {
                    *word = f32::from_bits(u32::from(*high) << 16 | u32::from(*low));
                }
            }
        });
        dst
    }

    fn transpose(self, src: &[f32], words: usize, dst: &mut [f32]) {
        // SAFETY: `self` is the proof of AVX-512.
        unsafe { transpose(src, words, dst) }
    }

    fn product(self, c: (&mut [f32], usize), add: bool, a: Left<'_>, b: (&[f32], usize), size: [usize; 3]) {
        check_product((c.0.len(), c.1), a, (b.0.len(), b.1), size);
        // SAFETY: `self` is the proof of AVX-512 with bf16, and the sizes were checked.
        unsafe { in_bf16::product(c, add, a, b, size) }
    }

    fn softmax(self, tile: &mut [f32], s: Shape, scale: f32, state: &mut Softmax) {
        // SAFETY: `self` is the proof of AVX-512 with bf16.
        unsafe {
            softmax(tile, s, scale, state);
            pair_keys_in_place(tile, s);
        }
    }

    fn probabilities(self, tile: &mut [f32], s: Shape, scale: f32, lse: &[f32; BLOCK]) {
        // SAFETY: `self` is the proof of AVX-512.
        unsafe { probabilities(tile, s, scale, lse) }
    }

    fn score_gradients(self, p: &mut [f32], g: &mut [f32], g_keys: &mut [f32], s: Shape, along: &[f32; BLOCK]) {
        // SAFETY: `self` is the proof of AVX-512 with bf16.
        unsafe {
            score_gradients(p, g, s, along);
            pair_keys(g, g_keys, s);
            pair_queries_in_place(g, s);
            pair_queries_in_place(p, s);
        }
    }
}
