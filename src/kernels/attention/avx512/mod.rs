//! The tile operations in AVX-512: products in f32 here, of bf16 numbers in [`bf16`]. The two differ in what a word
//! holds and in the instruction that multiplies words.

mod bf16;
mod product;

pub(super) use bf16::Bf16Tiles;

use super::portable::pack;
use super::strided::HeadRows;
use super::tiles::{Left, Shape, Softmax, TILE, Tiles};
use super::{BAND, BLOCK};
use crate::kernels::element::Element;
use product::{check_product, in_f32};
use std::arch::x86_64::*;

/// Products in f32. A value is the proof that this machine has AVX-512.
#[derive(Debug, Clone, Copy)]
pub(super) struct F32Tiles(());

impl F32Tiles {
    /// None on a machine without AVX-512.
    pub(super) fn new() -> Option<Self> {
        is_x86_feature_detected!("avx512f").then_some(Self(()))
    }
}

/// 2^x, to 2e-7 of the result; 0 below f32's range, nan for nan.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp2(x: __m512) -> __m512 {
    // The smaller operand comes first, so that nan passes.
    let x = _mm512_max_ps(_mm512_set1_ps(-200.0), x);
    let whole = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let rest = _mm512_sub_ps(x, whole);
    // A minimax polynomial for |rest| <= 1/2 (Cephes).
    let mut p = _mm512_set1_ps(1.535_336_2e-4);
    for c in [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, std::f32::consts::LN_2, 1.0] {
        p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(c));
    }
    _mm512_scalef_ps(p, whole)
}

/// The queries of vector `v` that see a key.
#[inline(always)]
fn seen(s: Shape, key: usize, v: usize) -> __mmask16 {
    let hidden = if s.diagonal { key.saturating_sub(v * BAND).min(BAND) } else { 0 };
    (u32::from(__mmask16::MAX) << hidden) as __mmask16
}

/// A tile of scores, column of vectors by column of vectors; every access is bounds-checked once per key.
struct Tile<'a>(&'a mut [f32]);

impl Tile<'_> {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(&self, at: usize) -> __m512 {
        let words = &self.0[at..at + BAND];
        // SAFETY: sixteen words.
        unsafe { _mm512_loadu_ps(words.as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store(&mut self, at: usize, x: __m512) {
        let words = &mut self.0[at..at + BAND];
        // SAFETY: sixteen words.
        unsafe { _mm512_storeu_ps(words.as_mut_ptr(), x) }
    }
}

/// Vector `v` of a block's numbers.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(x: &[f32; BLOCK], v: usize) -> __m512 {
    // SAFETY: sixteen numbers.
    unsafe { _mm512_loadu_ps(x[v * BAND..][..BAND].as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(x: &mut [f32; BLOCK], v: usize, y: __m512) {
    // SAFETY: sixteen numbers.
    unsafe { _mm512_storeu_ps(x[v * BAND..][..BAND].as_mut_ptr(), y) }
}

/// Keys that a running softmax takes at a time, each with its own maximum and sum so that they need not wait for one
/// another.
const KEYS: usize = 4;

/// The softmax of a tile of f32; the probabilities stay f32.
#[target_feature(enable = "avx512f")]
fn softmax(tile: &mut [f32], s: Shape, scale: f32, softmax: &mut Softmax) {
    let mut tile = Tile(&mut tile[..TILE]);
    let scale = _mm512_set1_ps(scale);
    for v in 0..s.queries / BAND {
        let before = load(&softmax.max, v);
        let mut max = [_mm512_set1_ps(f32::NEG_INFINITY); KEYS];
        for key in (0..s.keys).step_by(KEYS) {
            for (i, max) in max.iter_mut().enumerate() {
                let x = tile.load((key + i) * BLOCK + v * BAND);
                // Nan passes over.
                *max = _mm512_mask_max_ps(*max, seen(s, key + i, v), x, *max);
            }
        }
        let max = _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]));
        let max = _mm512_max_ps(before, _mm512_mul_ps(max, scale));
        let shrink = exp2(_mm512_sub_ps(before, max));
        let mut sum = [_mm512_setzero_ps(); KEYS];
        for key in (0..s.keys).step_by(KEYS) {
            for (i, sum) in sum.iter_mut().enumerate() {
                let at = (key + i) * BLOCK + v * BAND;
                let p = exp2(_mm512_fmsub_ps(tile.load(at), scale, max));
                let p = _mm512_maskz_mov_ps(seen(s, key + i, v), p);
                *sum = _mm512_add_ps(*sum, p);
                tile.store(at, p);
            }
        }
        let sum = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
        store(&mut softmax.max, v, max);
        store(&mut softmax.shrink, v, shrink);
        let sum = _mm512_fmadd_ps(load(&softmax.sum, v), shrink, sum);
        store(&mut softmax.sum, v, sum);
    }
}

#[target_feature(enable = "avx512f")]
fn probabilities(tile: &mut [f32], s: Shape, scale: f32, lse: &[f32; BLOCK]) {
    let mut tile = Tile(&mut tile[..TILE]);
    let scale = _mm512_set1_ps(scale);
    for v in 0..s.queries / BAND {
        let lse = load(lse, v);
        for key in 0..s.keys {
            let at = key * BLOCK + v * BAND;
            let p = exp2(_mm512_fmsub_ps(tile.load(at), scale, lse));
            tile.store(at, _mm512_maskz_mov_ps(seen(s, key, v), p));
        }
    }
}

/// p (g - along), 0 where p is.
#[target_feature(enable = "avx512f")]
fn score_gradients(p: &[f32], g: &mut [f32], s: Shape, along: &[f32; BLOCK]) {
    let mut g = Tile(&mut g[..TILE]);
    for v in 0..s.queries / BAND {
        let along = load(along, v);
        for key in 0..s.keys {
            let at = key * BLOCK + v * BAND;
            // SAFETY: sixteen words.
            let p = unsafe { _mm512_loadu_ps(p[at..at + BAND].as_ptr()) };
            let d = _mm512_mul_ps(p, _mm512_sub_ps(g.load(at), along));
            g.store(at, _mm512_maskz_mov_ps(seen(s, key, v), d));
        }
    }
}

/// Transposes blocks of 16 x 16 words; see [`Tiles::transpose`].
#[target_feature(enable = "avx512f")]
fn transpose(src: &[f32], words: usize, dst: &mut [f32]) {
    let mut dst = Tile(&mut dst[..words * BLOCK]);
    for t in (0..src.len() / words).step_by(BAND) {
        for w in (0..words).step_by(BAND) {
            let mut x = [_mm512_setzero_ps(); BAND];
            for (i, x) in x.iter_mut().enumerate() {
                let row = &src[(t + i) * words + w..][..BAND];
                // SAFETY: sixteen words.
                *x = unsafe { _mm512_loadu_ps(row.as_ptr()) };
            }
            for (i, x) in transposed(x).into_iter().enumerate() {
                dst.store((w + i) * BLOCK + t, x);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(r: [__m512; BAND]) -> [__m512; BAND] {
    // Transposes 4 x 4 words within each quarter of the vectors, then the quarters.
    let mut t = r;
    for i in (0..BAND).step_by(4) {
        let (ab_low, ab_high) = (_mm512_unpacklo_ps(r[i], r[i + 1]), _mm512_unpackhi_ps(r[i], r[i + 1]));
        let (cd_low, cd_high) = (_mm512_unpacklo_ps(r[i + 2], r[i + 3]), _mm512_unpackhi_ps(r[i + 2], r[i + 3]));
        t[i] = _mm512_shuffle_ps::<0x44>(ab_low, cd_low);
        t[i + 1] = _mm512_shuffle_ps::<0xee>(ab_low, cd_low);
        t[i + 2] = _mm512_shuffle_ps::<0x44>(ab_high, cd_high);
        t[i + 3] = _mm512_shuffle_ps::<0xee>(ab_high, cd_high);
    }
    // t[4 i + j], quarter q: words 4 i.. of column 4 q + j.
    let mut out = t;
    for j in 0..4 {
        let (a, b, c, d) = (t[j], t[4 + j], t[8 + j], t[12 + j]);
        let (ab_low, ab_high) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
        let (cd_low, cd_high) = (_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
        out[j] = _mm512_shuffle_f32x4::<0x88>(ab_low, cd_low);
        out[4 + j] = _mm512_shuffle_f32x4::<0xdd>(ab_low, cd_low);
        out[8 + j] = _mm512_shuffle_f32x4::<0x88>(ab_high, cd_high);
        out[12 + j] = _mm512_shuffle_f32x4::<0xdd>(ab_high, cd_high);
    }
    out
}

impl Tiles for F32Tiles {
    const PAIR: usize = 1;

    fn pack_rows<E: Element>(self, src: HeadRows<'_, E>, first: usize, n: usize, words: usize, dst: &mut [f32]) {
        pack(src, first, n, words, dst);
    }

    fn pair_columns<'a>(self, rows: &'a [f32], _: usize, _: &'a mut [f32]) -> &'a [f32] {
        rows
    }

    fn transpose(self, src: &[f32], words: usize, dst: &mut [f32]) {
        // SAFETY: `self` is the proof of AVX-512.
        unsafe { transpose(src, words, dst) }
    }

    fn product(self, c: (&mut [f32], usize), add: bool, a: Left<'_>, b: (&[f32], usize), size: [usize; 3]) {
        check_product((c.0.len(), c.1), a, (b.0.len(), b.1), size);
        // SAFETY: `self` is the proof of AVX-512, and the sizes were checked.
        unsafe { in_f32::product(c, add, a, b, size) }
    }

    fn softmax(self, tile: &mut [f32], s: Shape, scale: f32, state: &mut Softmax) {
        // SAFETY: `self` is the proof of AVX-512.
        unsafe { softmax(tile, s, scale, state) }
    }

    fn probabilities(self, tile: &mut [f32], s: Shape, scale: f32, lse: &[f32; BLOCK]) {
        // SAFETY: `self` is the proof of AVX-512.
        unsafe { probabilities(tile, s, scale, lse) }
    }

    fn score_gradients(self, p: &mut [f32], g: &mut [f32], _: &mut [f32], s: Shape, along: &[f32; BLOCK]) {
        // SAFETY: `self` is the proof of AVX-512.
        unsafe { score_gradients(p, g, s, along) }
    }
}
