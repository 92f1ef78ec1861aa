//! Vectors of eight f32, with AVX2, FMA and F16C.

use super::{SimdVector, TransposeBlock, add_each_product, exp2_of_rest, load_padded};
use crate::kernels::element::{Element, ElementDtype};
use std::arch::asm;
use std::arch::x86_64::*;

/// Eight f32.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Avx2(__m256);

#[target_feature(enable = "avx2,fma,f16c")]
fn with_avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}

impl SimdVector for Avx2 {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn with<R>(f: impl FnOnce() -> R) -> R {
        // SAFETY: the caller promises that the processor has the instructions.
        unsafe { with_avx2(f) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm256_set1_ps(x)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm256_loadu_ps(from)) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { _mm256_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    unsafe fn store_halves(self, first: *mut f32, second: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe {
            _mm_storeu_ps(first, _mm256_castps256_ps128(self.0));
            _mm_storeu_ps(second, _mm256_extractf128_ps::<1>(self.0));
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm256_add_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm256_sub_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm256_mul_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm256_div_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm256_fmadd_ps(self.0, factor.0, addend.0)) }
    }

    #[inline(always)]
    unsafe fn mul_sub(self, factor: Self, subtrahend: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm256_fmsub_ps(self.0, factor.0, subtrahend.0)) }
    }

    #[inline(always)]
    unsafe fn add_products<const N: usize>(sums: &mut [Self; N], a: *const f32, b: &[Self; N]) {
        // SAFETY: as the caller promises.
        unsafe {
            let a = Self::splat(a.read_unaligned());
            if let ([x, y, z], [p, q, r]) = (&mut sums[..], &b[..]) {
                return add_three_products([&mut x.0, &mut y.0, &mut z.0], a.0, [p.0, q.0, r.0]);
            }
            add_each_product(sums, a, b);
        }
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(_mm256_max_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: as the caller promises.
        unsafe {
            // The bounds are the first operands, so NaN passes through. The lower one yields 2^-127, whose exponent
            // bits are those of 0.
            let x = _mm256_max_ps(_mm256_set1_ps(-127.0), self.0);
            let x = _mm256_min_ps(_mm256_set1_ps(128.0), x);
            let integer = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            let p = exp2_of_rest(Self(_mm256_sub_ps(x, integer)));
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(integer), _mm256_set1_epi32(127));
            let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent));
            Self(_mm256_mul_ps(p.0, power))
        }
    }

    #[inline(always)]
    unsafe fn blend_from_lane(self, lane: usize, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe {
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let before = _mm256_cmpgt_epi32(_mm256_set1_epi32(lane.min(8) as i32), lanes);
            Self(_mm256_blendv_ps(self.0, other.0, _mm256_castsi256_ps(before)))
        }
    }

    #[inline(always)]
    unsafe fn transpose(rows: &mut TransposeBlock<Self>) {
        // SAFETY: as the caller promises.
        unsafe {
            // Transposes 4 x 4 numbers within each half of the vectors, and then the halves.
            let mut quads = *rows;
            for i in [0, 4] {
                let [a, b, c, d] = [rows[i].0, rows[i + 1].0, rows[i + 2].0, rows[i + 3].0];
                let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                quads[i].0 = _mm256_shuffle_ps::<0b01_00_01_00>(ab_low, cd_low);
                quads[i + 1].0 = _mm256_shuffle_ps::<0b11_10_11_10>(ab_low, cd_low);
                quads[i + 2].0 = _mm256_shuffle_ps::<0b01_00_01_00>(ab_high, cd_high);
                quads[i + 3].0 = _mm256_shuffle_ps::<0b11_10_11_10>(ab_high, cd_high);
            }
            for i in 0..4 {
                rows[i].0 = _mm256_permute2f128_ps::<0x20>(quads[i].0, quads[4 + i].0);
                rows[4 + i].0 = _mm256_permute2f128_ps::<0x31>(quads[i].0, quads[4 + i].0);
            }
        }
    }

    #[inline(always)]
    unsafe fn widen<E: Element>(from: *const E, n: usize) -> Self {
        // SAFETY: as the caller promises; the copy has the elements of a full vector.
        unsafe {
            if n < Self::LANES {
                let padded: [E; Self::LANES] = load_padded(from, n);
                return load_full(padded.as_ptr());
            }
            load_full(from)
        }
    }

    #[inline(always)]
    unsafe fn split_bf16(self) -> [Self; 2] {
        // SAFETY: as the caller promises.
        unsafe {
            let bits = _mm256_castps_si256(self.0);
            let high = _mm256_and_si256(bits, _mm256_set1_epi32(!0xFFFF));
            [_mm256_slli_epi32::<16>(bits), high].map(|bits| Self(_mm256_castsi256_ps(bits)))
        }
    }

    #[inline(always)]
    unsafe fn narrow<E: Element>(self, to: *mut E, n: usize) {
        // SAFETY: as the caller promises; at most a vector's elements are copied.
        unsafe {
            if n < Self::LANES {
                let mut padded = [E::default(); Self::LANES];
                store_full(self.0, padded.as_mut_ptr());
                return std::ptr::copy_nonoverlapping(padded.as_ptr(), to, n);
            }
            store_full(self.0, to);
        }
    }
}

/// Adds three products in a fixed order. Four rows of three sums, a row of three vectors and one number use all
/// sixteen registers. In the order that the compiler chooses, the next number would be loaded before the last use of
/// this one, and sums would be moved to free a register. This assembly keeps the order.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_three_products([x, y, z]: [&mut __m256; 3], number: __m256, [p, q, r]: [__m256; 3]) {
    // SAFETY: only these registers are read and written.
    unsafe {
        asm!(
            "vfmadd231ps {x}, {number}, {p}",
            "vfmadd231ps {y}, {number}, {q}",
            "vfmadd231ps {z}, {number}, {r}",
            number = in(ymm_reg) number,
            x = inout(ymm_reg) *x,
            y = inout(ymm_reg) *y,
            z = inout(ymm_reg) *z,
            p = in(ymm_reg) p,
            q = in(ymm_reg) q,
            r = in(ymm_reg) r,
            options(nostack, preserves_flags),
        );
    }
}

/// Loads eight elements as f32.
#[inline(always)]
unsafe fn load_full<E: Element>(from: *const E) -> Avx2 {
    // SAFETY: the caller promises that the processor has the instructions and that the elements exist.
    unsafe {
        Avx2(match E::KIND {
            ElementDtype::F32 => _mm256_loadu_ps(from.cast()),
            ElementDtype::BF16 => {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            }
            ElementDtype::F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
        })
    }
}

/// Writes eight elements, rounded to nearest even.
#[inline(always)]
unsafe fn store_full<E: Element>(values: __m256, to: *mut E) {
    // SAFETY: the caller promises that the processor has the instructions and that the elements exist.
    unsafe {
        match E::KIND {
            ElementDtype::F32 => _mm256_storeu_ps(to.cast(), values),
            ElementDtype::BF16 => _mm_storeu_si128(to.cast(), to_bf16(values)),
            ElementDtype::F16 => {
                let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
                _mm_storeu_si128(to.cast(), rounded);
            }
        }
    }
}

/// Rounds the numbers to bf16, to nearest even.
#[inline(always)]
unsafe fn to_bf16(values: __m256) -> __m128i {
    // SAFETY: the caller promises that the processor has the instructions.
    unsafe {
        let bits = _mm256_castps_si256(values);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
        // A NaN stays a NaN and becomes quiet.
        let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(values, values);
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
        let rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan));
        let high = _mm256_srli_epi32::<16>(rounded);
        _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256::<1>(high))
    }
}
