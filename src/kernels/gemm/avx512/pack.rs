//! Packing: operands in the order, and as the words, in which the microkernels read them.

use super::kernel::{self, Kernel, LANES, ROWS};
use crate::kernels::element::{Element, Kind};
use std::arch::x86_64::*;

/// How far reading is ahead of packing: what lies side by side is too short, or in too many places, for the processor
/// to see where reading goes. In steps, for columns that are packed in turns of this many steps;
pub(super) const STEPS_AHEAD: usize = 32;
/// in elements side by side, for rows of which a task packs few steps;
const NEIGHBORS_AHEAD: usize = 96;
/// in bytes, for elements that lie side by side along the inner dimension.
const BYTES_AHEAD: usize = 256;

/// The content of a word. The functions need AVX-512 F, BW, DQ and VL, and are meant to be inlined where these are
/// enabled.
pub(super) trait Word<E: Element> {
    /// Elements of a word.
    const DEPTH: usize;

    /// The microkernel for these words that computes `rows` rows, a power of two, of `vectors` vectors.
    fn kernel(rows: usize, vectors: usize) -> Kernel;

    /// Sixteen words, one after the other along the inner dimension, made of the `n` elements from `from`, and zeros.
    ///
    /// # Safety
    /// `n` elements can be read.
    unsafe fn along(from: *const E, n: usize) -> __m512i;

    /// One word for each of sixteen neighbours across the inner dimension, `n` of them and zeros: its elements lie
    /// `stride` apart, and there are `depth` of them, the others being 0.
    ///
    /// # Safety
    /// `n` elements can be read at each of `depth` places.
    unsafe fn across(from: *const E, stride: usize, depth: usize, n: usize) -> __m512i;
}

/// Words of one f32.
pub(super) struct Single;

/// Words of two bf16.
pub(super) struct Pairs;

impl<E: Element> Word<E> for Single {
    const DEPTH: usize = 1;

    #[inline(always)]
    fn kernel(rows: usize, vectors: usize) -> Kernel {
        kernel::select(&kernel::SINGLE, rows, vectors)
    }

    #[inline(always)]
    unsafe fn along(from: *const E, n: usize) -> __m512i {
        // SAFETY: as the caller promises.
        unsafe { _mm512_castps_si512(load(from, first(n))) }
    }

    #[inline(always)]
    unsafe fn across(from: *const E, _stride: usize, _depth: usize, n: usize) -> __m512i {
        // SAFETY: as the caller promises.
        unsafe { _mm512_castps_si512(load(from, first(n))) }
    }
}

impl<E: Element> Word<E> for Pairs {
    const DEPTH: usize = 2;

    #[inline(always)]
    fn kernel(rows: usize, vectors: usize) -> Kernel {
        kernel::select(&kernel::PAIRS, rows, vectors)
    }

    #[inline(always)]
    unsafe fn along(from: *const E, n: usize) -> __m512i {
        debug_assert!(E::KIND == Kind::BF16);
        let mask = if n >= 32 { !0 } else { (1 << n) - 1 };
        // SAFETY: as the caller promises; what the mask excludes is not read.
        unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) }
    }

    #[inline(always)]
    unsafe fn across(from: *const E, stride: usize, depth: usize, n: usize) -> __m512i {
        debug_assert!(E::KIND == Kind::BF16);
        // SAFETY: as the caller promises; what the mask excludes is not read.
        unsafe {
            let mask = first(n);
            let low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
            let mask = if depth > 1 { mask } else { 0 };
            let high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.wrapping_add(stride).cast()));
            _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
        }
    }
}

/// The mask of the first `n` lanes.
#[inline(always)]
pub(super) fn first(n: usize) -> __mmask16 {
    if n >= LANES { !0 } else { (1 << n) - 1 }
}

/// The elements that the mask selects, in f32, and zeros.
///
/// # Safety
/// The processor has AVX-512 F, BW and VL; the elements can be read.
#[inline(always)]
pub(super) unsafe fn load<E: Element>(from: *const E, mask: __mmask16) -> __m512 {
    // SAFETY: as the caller promises; what the mask excludes is not read.
    unsafe {
        match E::KIND {
            Kind::F32 => _mm512_maskz_loadu_ps(mask, from.cast()),
            Kind::BF16 => {
                let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
            Kind::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast())),
        }
    }
}

/// Stores the 16-bit lanes that the mask selects. Stores of all take no mask: those with one are slow.
///
/// # Safety
/// The processor has AVX-512 BW and VL; what the mask selects can be written.
#[inline(always)]
unsafe fn store_16(to: *mut i16, mask: __mmask16, lanes: __m256i) {
    // SAFETY: as the caller promises; what the mask excludes is not written.
    unsafe {
        if mask == !0 { _mm256_storeu_si256(to.cast(), lanes) } else { _mm256_mask_storeu_epi16(to, mask, lanes) }
    }
}

/// An operand: `outer` rows of `a`, or columns of `b`, and `inner` elements in each.
#[derive(Clone, Copy)]
pub(super) struct Operand<E> {
    pub(super) data: *const E,
    pub(super) outer: usize,
    pub(super) inner: usize,
    pub(super) outer_stride: usize,
    pub(super) inner_stride: usize,
}

// SAFETY: a place that is only read, inside a slice that outlives the product.
unsafe impl<E: Sync> Sync for Operand<E> {}

impl<E: Element> Operand<E> {
    #[inline(always)]
    pub(super) fn at(&self, outer: usize, inner: usize) -> *const E {
        self.data.wrapping_add(outer * self.outer_stride + inner * self.inner_stride)
    }

    /// Brings a step's elements near that lie side by side across the inner dimension, if they exist.
    #[inline(always)]
    fn prefetch<W: Word<E>>(&self, from: *const E) {
        for depth in 0..W::DEPTH {
            let place = from.wrapping_add(depth * self.inner_stride);
            // SAFETY: a prefetch does not access the place.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(place.cast()) };
        }
    }

    /// Packs `steps` words from word `step` of the `16 * vectors` columns of `b` from `outer`: for each step the words
    /// of all columns. Columns and elements that do not exist are zeros.
    ///
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ and VL; `to` has room for `16 * vectors * steps` words and is aligned.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn pack_columns<W: Word<E>>(
        &self,
        outer: usize,
        vectors: usize,
        step: usize,
        steps: usize,
        to: *mut u32,
    ) {
        let inner = step * W::DEPTH;
        if self.inner_stride != 1 {
            for s in 0..steps {
                let inner = inner + s * W::DEPTH;
                let depth = self.inner - inner;
                for v in 0..vectors {
                    let outer = outer + v * LANES;
                    // SAFETY: the elements that are read exist; `to` has room.
                    unsafe {
                        let from = self.at(outer, inner);
                        self.prefetch::<W>(from.wrapping_add(STEPS_AHEAD * W::DEPTH * self.inner_stride));
                        let words = W::across(from, self.inner_stride, depth, self.outer.saturating_sub(outer));
                        _mm512_store_si512(to.add((s * vectors + v) * LANES).cast(), words);
                    }
                }
            }
            return;
        }
        for v in 0..vectors {
            let outer = outer + v * LANES;
            for s in (0..steps).step_by(LANES) {
                let inner = inner + s * W::DEPTH;
                let mut rows = [_mm512_setzero_si512(); LANES];
                for (i, row) in rows.iter_mut().enumerate() {
                    if outer + i < self.outer {
                        let ahead = self.at(outer + i, inner).wrapping_add(BYTES_AHEAD / size_of::<E>());
                        _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                        // SAFETY: the elements that are read exist.
                        *row = unsafe { W::along(self.at(outer + i, inner), self.inner - inner) };
                    }
                }
                transpose(&mut rows);
                for (i, row) in rows.iter().enumerate().take(steps - s) {
                    // SAFETY: `to` has room.
                    unsafe { _mm512_store_si512(to.add(((s + i) * vectors + v) * LANES).cast(), *row) };
                }
            }
        }
    }

    /// Packs `steps` words from word `step` of the 16 rows of `a` from `outer`, of which `inner_stride` is not 1, as
    /// two groups of [`ROWS`] rows, `group` words apart: for each step the words of a group's rows.
    ///
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ and VL; `to` has room for `8 * steps` words of each group and is aligned.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn pack_rows<W: Word<E>>(
        &self,
        outer: usize,
        step: usize,
        steps: usize,
        to: *mut u32,
        group: usize,
    ) {
        for s in 0..steps {
            let inner = (step + s) * W::DEPTH;
            // SAFETY: the elements that are read exist; `to` has room.
            unsafe {
                let from = self.at(outer, inner);
                self.prefetch::<W>(from.wrapping_add(NEIGHBORS_AHEAD));
                let words = W::across(from, self.inner_stride, self.inner - inner, self.outer - outer);
                let to = to.add(s * ROWS);
                _mm256_store_si256(to.cast(), _mm512_castsi512_si256(words));
                _mm256_store_si256(to.add(group).cast(), _mm512_extracti64x4_epi64::<1>(words));
            }
        }
    }

    /// Packs `steps` words from word `step` of row `outer` of `a`, of which `inner_stride` is 1, one after the other.
    /// Writes whole vectors.
    ///
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ and VL; `to` has room for `steps` words rounded up to whole vectors, and is
    /// aligned.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn copy_row<W: Word<E>>(&self, outer: usize, step: usize, steps: usize, to: *mut u32) {
        for s in (0..steps).step_by(LANES) {
            let inner = (step + s) * W::DEPTH;
            // SAFETY: the elements that are read exist; `to` has room.
            unsafe {
                let words = W::along(self.at(outer, inner), self.inner - inner);
                _mm512_store_si512(to.add(s).cast(), words);
            }
        }
    }

    /// Whether words can be read where the elements are: rows of whole words, of the words' own dtype.
    pub(super) fn is_words<W: Word<E>>(&self) -> bool {
        self.inner_stride == 1
            && self.inner.is_multiple_of(W::DEPTH)
            && size_of::<E>() * W::DEPTH == size_of::<u32>()
            && (W::DEPTH == 1 || self.outer_stride.is_multiple_of(W::DEPTH))
    }
}

/// Transposes 16 rows of 16 words.
#[target_feature(enable = "avx512f")]
#[inline]
fn transpose(rows: &mut [__m512i; LANES]) {
    let mut pairs = [_mm512_setzero_si512(); LANES];
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // Of four rows each: quads[4 g + c] holds column c of every 128-bit block, for rows 4 g .. 4 g + 4.
    let mut quads = [_mm512_setzero_si512(); LANES];
    for g in 0..4 {
        quads[4 * g] = _mm512_unpacklo_epi64(pairs[4 * g], pairs[4 * g + 2]);
        quads[4 * g + 1] = _mm512_unpackhi_epi64(pairs[4 * g], pairs[4 * g + 2]);
        quads[4 * g + 2] = _mm512_unpacklo_epi64(pairs[4 * g + 1], pairs[4 * g + 3]);
        quads[4 * g + 3] = _mm512_unpackhi_epi64(pairs[4 * g + 1], pairs[4 * g + 3]);
    }
    // The 128-bit blocks are a 4 x 4 matrix, to be transposed too.
    for c in 0..4 {
        let even_low = _mm512_shuffle_i32x4::<0b10_00_10_00>(quads[c], quads[4 + c]);
        let odd_low = _mm512_shuffle_i32x4::<0b11_01_11_01>(quads[c], quads[4 + c]);
        let even_high = _mm512_shuffle_i32x4::<0b10_00_10_00>(quads[8 + c], quads[12 + c]);
        let odd_high = _mm512_shuffle_i32x4::<0b11_01_11_01>(quads[8 + c], quads[12 + c]);
        rows[c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even_low, even_high);
        rows[8 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even_low, even_high);
        rows[4 + c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd_low, odd_high);
        rows[12 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd_low, odd_high);
    }
}

/// Stores the elements that the mask selects, rounded to nearest even.
///
/// # Safety
/// The processor has AVX-512 F, BW and VL, and BF16 with `NATIVE`; the elements can be written.
#[inline(always)]
pub(super) unsafe fn store<E: Element, const NATIVE: bool>(to: *mut E, mask: __mmask16, values: __m512) {
    // SAFETY: as the caller promises; what the mask excludes is not written.
    unsafe {
        match E::KIND {
            Kind::F32 if mask == !0 => _mm512_storeu_ps(to.cast(), values),
            Kind::F32 => _mm512_mask_storeu_ps(to.cast(), mask, values),
            Kind::BF16 => store_16(to.cast(), mask, to_bf16::<NATIVE>(values)),
            Kind::F16 => {
                let rounded = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(values);
                store_16(to.cast(), mask, rounded);
            }
        }
    }
}

/// The numbers in bf16, to nearest even.
///
/// # Safety
/// The processor has AVX-512 F, and BF16 with `NATIVE`.
#[inline(always)]
unsafe fn to_bf16<const NATIVE: bool>(values: __m512) -> __m256i {
    // SAFETY: as the caller promises; two types of the same 32 bytes.
    unsafe {
        if NATIVE {
            return std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(values));
        }
        let bits = _mm512_castps_si512(values);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
        // A nan stays one, and becomes quiet.
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
        let rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000));
        _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
    }
}
