//! The tile operations in AVX-512: products in f32, or of bf16 numbers with sums in f32.
//!
//! The two differ in what a word holds and in the instruction that multiplies words; the product's loops are the same.

use super::portable::pack;
use super::strided::HeadRows;
use super::tiles::{Left, Shape, Softmax, TILE, Tiles};
use super::{BAND, BLOCK};
use crate::kernels::element::Element;
use crate::kernels::wide::{get, put, vectorized};
use half::bf16;
use std::arch::x86_64::*;

/// Products in f32. A value is the proof that this machine has AVX-512.
#[derive(Debug, Clone, Copy)]
pub(super) struct F32Tiles(());

/// Products of bf16 numbers. A value is the proof that this machine has AVX-512 with them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bf16Tiles(());

impl F32Tiles {
    /// None on a machine without AVX-512.
    pub(super) fn new() -> Option<Self> {
        is_x86_feature_detected!("avx512f").then_some(Self(()))
    }
}

impl Bf16Tiles {
    /// None on a machine without AVX-512 or its bf16 instructions.
    pub(super) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")).then_some(Self(()))
    }
}

/// Panics unless a product stays within its slices.
fn check_product(c: (usize, usize), a: Left<'_>, b: (usize, usize), [rows, columns, depth]: [usize; 3]) {
    assert!(rows > 0 && rows.is_multiple_of(BAND) && columns > 0 && columns.is_multiple_of(BAND) && depth > 0);
    assert!((rows - 1) * c.1 + columns <= c.0, "the result's rows");
    assert!((rows - 1) * a.row + (depth - 1) * a.step < a.words.len(), "the left factor's words");
    assert!((depth - 1) * b.1 + columns <= b.0, "the right factor's rows");
}

/// Defines `product` in a module, for an instruction that adds the product of two vectors of words to sums of f32.
macro_rules! define_product {
    ($name:ident, $features:literal, |$sum:ident, $a:ident, $b:ident| $step:expr) => {
        mod $name {
            use super::*;

            /// A left factor without its bounds.
            #[derive(Clone, Copy)]
            struct Words {
                first: *const f32,
                row: usize,
                step: usize,
            }

            /// `ROWS` rows and `VECTORS` vectors of columns of c (+)= a b.
            ///
            /// # Safety
            ///
            /// All that it names lies within the factors and the result, and the machine has the instructions.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn tile<const ROWS: usize, const VECTORS: usize>(
                (c, c_stride): (*mut f32, usize),
                add: bool,
                a: Words,
                (b, b_stride): (*const f32, usize),
                depth: usize,
            ) {
                // SAFETY: the caller's promise.
                unsafe {
                    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
                    if add {
                        for i in 0..ROWS {
                            for j in 0..VECTORS {
                                sums[i][j] = _mm512_loadu_ps(c.add(i * c_stride + j * BAND));
                            }
                        }
                    }
                    for d in 0..depth {
                        let mut right = [_mm512_setzero_ps(); VECTORS];
                        for j in 0..VECTORS {
                            right[j] = _mm512_loadu_ps(b.add(d * b_stride + j * BAND));
                        }
                        for i in 0..ROWS {
                            let $a = _mm512_set1_ps(*a.first.add(i * a.row + d * a.step));
                            for j in 0..VECTORS {
                                let ($sum, $b) = (sums[i][j], right[j]);
                                sums[i][j] = $step;
                            }
                        }
                    }
                    for i in 0..ROWS {
                        for j in 0..VECTORS {
                            _mm512_storeu_ps(c.add(i * c_stride + j * BAND), sums[i][j]);
                        }
                    }
                }
            }

            /// All rows, a multiple of [`BAND`], of `VECTORS` vectors of columns.
            ///
            /// # Safety
            ///
            /// As for `tile`.
            #[target_feature(enable = $features)]
            unsafe fn strip<const VECTORS: usize>(
                (c, c_stride): (*mut f32, usize),
                add: bool,
                a: Words,
                b: (*const f32, usize),
                rows: usize,
                depth: usize,
            ) {
                let mut i = 0;
                while i < rows {
                    // SAFETY: the caller's promise; i + the tile's rows <= rows.
                    unsafe {
                        let c = (c.add(i * c_stride), c_stride);
                        let a = Words { first: a.first.add(i * a.row), ..a };
                        // As many rows as registers hold the sums of; what remains of a multiple of 16 is 2 or 4.
                        i += match rows - i {
                            2 => {
                                tile::<2, VECTORS>(c, add, a, b, depth);
                                2
                            }
                            4 => {
                                tile::<4, VECTORS>(c, add, a, b, depth);
                                4
                            }
                            _ if VECTORS < 4 => {
                                tile::<8, VECTORS>(c, add, a, b, depth);
                                8
                            }
                            _ => {
                                tile::<6, VECTORS>(c, add, a, b, depth);
                                6
                            }
                        };
                    }
                }
            }

            /// c (+)= a b.
            ///
            /// # Safety
            ///
            /// The factors and the result have the rows, columns and depth, and the machine has the instructions.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn product(
                (c, c_stride): (&mut [f32], usize),
                add: bool,
                a: Left<'_>,
                (b, b_stride): (&[f32], usize),
                [rows, columns, depth]: [usize; 3],
            ) {
                let a = Words { first: a.words.as_ptr(), row: a.row, step: a.step };
                let (c, b) = (c.as_mut_ptr(), b.as_ptr());
                let mut column = 0;
                while column < columns {
                    // SAFETY: the caller's promise; column + the strip's columns <= columns.
                    unsafe {
                        let c = (c.add(column), c_stride);
                        let b = (b.add(column), b_stride);
                        // Five vectors are cheaper as three and two than as four and one.
                        let vectors = match (columns - column) / BAND {
                            1 => {
                                strip::<1>(c, add, a, b, rows, depth);
                                1
                            }
                            2 => {
                                strip::<2>(c, add, a, b, rows, depth);
                                2
                            }
                            3 | 5 => {
                                strip::<3>(c, add, a, b, rows, depth);
                                3
                            }
                            _ => {
                                strip::<4>(c, add, a, b, rows, depth);
                                4
                            }
                        };
                        column += vectors * BAND;
                    }
                }
            }
        }
    };
}

define_product!(in_f32, "avx512f", |sum, a, b| _mm512_fmadd_ps(a, b, sum));
define_product!(in_bf16, "avx512f,avx512bf16", |sum, a, b| {
    // Within the tile's unsafe block: both are 64 bytes of which every pattern is a value.
    let [a, b] = [a, b].map(|x| std::mem::transmute::<__m512, __m512bh>(x));
    _mm512_dpbf16_ps(sum, a, b)
});

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

    fn pack_columns<E: Element>(self, src: HeadRows<'_, E>, first: usize, n: usize, words: usize, dst: &mut [f32]) {
        pack(src, first, n, words, dst);
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

    fn pack_columns<E: Element>(self, src: HeadRows<'_, E>, first: usize, n: usize, words: usize, dst: &mut [f32]) {
        vectorized!({
            for (i, dst) in dst.chunks_exact_mut(2 * words).enumerate() {
                let low: &[E] = if 2 * i < n { src.row(first + 2 * i) } else { &[] };
                let (dst, filling) = dst.split_at_mut(low.len());
                if 2 * i + 1 < n {
                    let high = src.row(first + 2 * i + 1);
                    for ((word, low), high) in dst.iter_mut().zip(low).zip(high) {
                        *word = pair(*low, *high);
                    }
                } else {
                    for (word, low) in dst.iter_mut().zip(low) {
                        *word = pair(*low, E::default());
                    }
                }
                filling.fill(0.0);
            }
        });
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
