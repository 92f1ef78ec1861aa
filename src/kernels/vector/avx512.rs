//! Vectors of sixteen f32, with AVX-512 F, BW, DQ and VL.

use super::{SimdVector, TransposeBlock, exp2_of_rest};
use crate::kernels::element::{Element, ElementDtype};
use std::arch::x86_64::*;

/// Sixteen f32. Rounding to bf16 takes integer instructions.
pub(crate) type Avx512 = Avx512Vector<false>;

/// Sixteen f32, on a processor that also has AVX512_BF16.
pub(crate) type Avx512Bf16 = Avx512Vector<true>;

/// Sixteen f32.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Avx512Vector<const BF16: bool>(__m512);

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn with_avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn with_bf16<R>(f: impl FnOnce() -> R) -> R {
    f()
}

impl<const BF16: bool> Avx512Vector<BF16> {
    /// Returns the mask of the first `n` lanes.
    #[inline(always)]
    pub(crate) fn first_lanes_mask(n: usize) -> __mmask16 {
        if n >= 16 { !0 } else { (1 << n) - 1 }
    }

    /// Returns a vector of sixteen words with these bits.
    #[inline(always)]
    pub(crate) unsafe fn of_bits(bits: __m512i) -> Self {
        // SAFETY: the caller is inside `with`.
        unsafe { Self(_mm512_castsi512_ps(bits)) }
    }
}

impl Avx512Bf16 {
    /// Returns words that contain both numbers of each lane in bf16, the number from `low` in the low half.
    #[inline(always)]
    pub(crate) unsafe fn pair(low: Self, high: Self) -> Self {
        const fn lanes() -> [u16; 32] {
            let mut lanes = [0; 32];
            let mut i = 0;
            while i < 16 {
                (lanes[2 * i], lanes[2 * i + 1]) = (i as u16, 16 + i as u16);
                i += 1;
            }
            lanes
        }
        const LANES: [u16; 32] = lanes();
        // SAFETY: the caller is inside `with`; the array is as large as a vector.
        unsafe {
            let both = std::mem::transmute::<__m512, __m512i>(Self::concat_to_bf16(low, high).0);
            Self::of_bits(_mm512_permutexvar_epi16(_mm512_loadu_si512(LANES.as_ptr().cast()), both))
        }
    }

    /// Returns words of two neighbouring numbers in bf16: first the numbers of `first`, then those of `second`.
    #[inline(always)]
    pub(crate) unsafe fn concat_to_bf16(first: Self, second: Self) -> Self {
        // SAFETY: the caller is inside `with`, and both types have 64 bytes.
        unsafe { Self(std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(second.0, first.0))) }
    }

    /// Returns the sum of `self` and, in each lane, the products of the two bf16 numbers of `a` with those of `b`.
    #[inline(always)]
    pub(crate) unsafe fn add_products_of_pairs(self, a: Self, b: Self) -> Self {
        // SAFETY: the caller is inside `with`, and both types have 64 bytes.
        unsafe {
            let [a, b] = [a, b].map(|x| std::mem::transmute::<__m512, __m512bh>(x.0));
            Self(_mm512_dpbf16_ps(self.0, a, b))
        }
    }
}

// In this file, only instructions that `with` enables are used, and elements that a mask excludes are neither read nor
// written.
impl<const BF16: bool> SimdVector for Avx512Vector<BF16> {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn with<R>(f: impl FnOnce() -> R) -> R {
        // SAFETY: the caller guarantees that the processor has these instructions.
        unsafe { if BF16 { with_bf16(f) } else { with_avx512(f) } }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm512_set1_ps(x)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm512_loadu_ps(from)) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    unsafe fn store_halves(self, first: *mut f32, second: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe {
            _mm256_storeu_ps(first, _mm512_castps512_ps256(self.0));
            _mm256_storeu_ps(second, _mm512_extractf32x8_ps::<1>(self.0));
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm512_add_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm512_sub_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm512_div_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm512_fmadd_ps(self.0, factor.0, addend.0)) }
    }

    #[inline(always)]
    unsafe fn mul_sub(self, factor: Self, subtrahend: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm512_fmsub_ps(self.0, factor.0, subtrahend.0)) }
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm512_max_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: as the caller promises.
        unsafe {
            // The bound is the first operand, so NaN passes through.
            let x = _mm512_max_ps(_mm512_set1_ps(-200.0), self.0);
            let integer = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            let p = exp2_of_rest(Self(_mm512_sub_ps(x, integer)));
            Self(_mm512_scalef_ps(p.0, integer))
        }
    }

    #[inline(always)]
    unsafe fn blend_from_lane(self, lane: usize, other: Self) -> Self {
        let mask = (u32::from(__mmask16::MAX) << lane.min(16)) as __mmask16;
        // SAFETY: as the caller promises.
        unsafe { Self(_mm512_mask_mov_ps(other.0, mask, self.0)) }
    }

    #[inline(always)]
    unsafe fn transpose(rows: &mut TransposeBlock<Self>) {
        // SAFETY: as the caller promises.
        unsafe {
            let mut pairs = *rows;
            for i in 0..8 {
                pairs[2 * i].0 = _mm512_unpacklo_ps(rows[2 * i].0, rows[2 * i + 1].0);
                pairs[2 * i + 1].0 = _mm512_unpackhi_ps(rows[2 * i].0, rows[2 * i + 1].0);
            }
            // Combines the rows in groups of four: quads[4 g + c] has column c of every 128-bit block, for rows 4 g to
            // 4 g + 3.
            let mut quads = pairs;
            for g in 0..4 {
                let [a, b, c, d] = [pairs[4 * g].0, pairs[4 * g + 1].0, pairs[4 * g + 2].0, pairs[4 * g + 3].0];
                quads[4 * g].0 = _mm512_shuffle_ps::<0b01_00_01_00>(a, c);
                quads[4 * g + 1].0 = _mm512_shuffle_ps::<0b11_10_11_10>(a, c);
                quads[4 * g + 2].0 = _mm512_shuffle_ps::<0b01_00_01_00>(b, d);
                quads[4 * g + 3].0 = _mm512_shuffle_ps::<0b11_10_11_10>(b, d);
            }
            // The 128-bit blocks are a 4 x 4 matrix, which is also transposed.
            for c in 0..4 {
                let [a, b, x, y] = [quads[c].0, quads[4 + c].0, quads[8 + c].0, quads[12 + c].0];
                let even_low = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                let odd_low = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
                let even_high = _mm512_shuffle_f32x4::<0b10_00_10_00>(x, y);
                let odd_high = _mm512_shuffle_f32x4::<0b11_01_11_01>(x, y);
                rows[c].0 = _mm512_shuffle_f32x4::<0b10_00_10_00>(even_low, even_high);
                rows[8 + c].0 = _mm512_shuffle_f32x4::<0b11_01_11_01>(even_low, even_high);
                rows[4 + c].0 = _mm512_shuffle_f32x4::<0b10_00_10_00>(odd_low, odd_high);
                rows[12 + c].0 = _mm512_shuffle_f32x4::<0b11_01_11_01>(odd_low, odd_high);
            }
        }
    }

    #[inline(always)]
    unsafe fn widen<E: Element>(from: *const E, n: usize) -> Self {
        let mask = Self::first_lanes_mask(n);
        // SAFETY: as the caller promises.
        unsafe {
            Self(match E::KIND {
                ElementDtype::F32 => _mm512_maskz_loadu_ps(mask, from.cast()),
                ElementDtype::BF16 => {
                    let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
                }
                ElementDtype::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast())),
            })
        }
    }

    #[inline(always)]
    unsafe fn split_bf16(self) -> [Self; 2] {
        // SAFETY: as the caller promises.
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let high = _mm512_and_si512(bits, _mm512_set1_epi32(!0xFFFF));
            [Self::of_bits(_mm512_slli_epi32::<16>(bits)), Self::of_bits(high)]
        }
    }

    #[inline(always)]
    unsafe fn narrow<E: Element>(self, to: *mut E, n: usize) {
        let mask = Self::first_lanes_mask(n);
        // SAFETY: as the caller promises. Stores of all lanes use no mask, because masked stores are slow.
        unsafe {
            let half = match E::KIND {
                ElementDtype::F32 if mask == !0 => return _mm512_storeu_ps(to.cast(), self.0),
                ElementDtype::F32 => return _mm512_mask_storeu_ps(to.cast(), mask, self.0),
                ElementDtype::BF16 if BF16 => std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(self.0)),
                ElementDtype::BF16 => to_bf16(self.0),
                ElementDtype::F16 => _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0),
            };
            if mask == !0 {
                _mm256_storeu_si256(to.cast(), half);
            } else {
                _mm256_mask_storeu_epi16(to.cast(), mask, half);
            }
        }
    }
}

/// Rounds the numbers to bf16, to nearest even.
#[inline(always)]
unsafe fn to_bf16(values: __m512) -> __m256i {
    // SAFETY: the caller guarantees that the processor has these instructions.
    unsafe {
        let bits = _mm512_castps_si512(values);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
        // A NaN stays a NaN and becomes quiet.
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
        let rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000));
        _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
    }
}
