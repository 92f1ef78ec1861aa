//! Words of 32 bits along the inner dimension of a product: one f32, or two neighbouring bf16. bf16 without the bf16
//! instructions, and f16, are widened to f32.

#[cfg(target_arch = "x86_64")]
use super::Avx512Bf16;
use super::SimdVector;
use crate::kernels::element::Element;
#[cfg(target_arch = "x86_64")]
use crate::kernels::element::ElementDtype;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Vectors of words, and how words are multiplied.
///
/// # Safety
/// As for [`SimdVector`]: the functions may be called inside of [`SimdVector::with`] only.
pub(crate) trait PackedWords {
    /// The vectors.
    type V: SimdVector;

    /// Elements of a word.
    const DEPTH: usize;

    /// Adds to each sum the product of the word at `a` and of the words of `b`.
    unsafe fn add_products<const N: usize>(sums: &mut [Self::V; N], a: *const f32, b: &[Self::V; N]);
}

/// How elements become words.
///
/// # Safety
/// As for [`PackedWords`].
pub(crate) trait PackElements<E: Element>: PackedWords {
    /// A vector of words, one after the other along the inner dimension, made of the `n` elements from `from`, and
    /// zeros.
    ///
    /// # Safety
    /// `n` elements can be read.
    unsafe fn along(from: *const E, n: usize) -> Self::V;

    /// One word for each of as many neighbours across the inner dimension as there are lanes, `n` of them and zeros:
    /// its elements lie `stride` apart, and there are `depth` of them, the others being 0.
    ///
    /// # Safety
    /// `n` elements can be read at each of `depth` places.
    unsafe fn across(from: *const E, stride: usize, depth: usize, n: usize) -> Self::V;
}

/// Words of one f32.
pub(crate) struct F32Words<V>(PhantomData<V>);

impl<V: SimdVector> PackedWords for F32Words<V> {
    type V = V;

    const DEPTH: usize = 1;

    #[inline(always)]
    unsafe fn add_products<const N: usize>(sums: &mut [V; N], a: *const f32, b: &[V; N]) {
        // SAFETY: as the caller promises.
        unsafe { V::add_products(sums, a, b) }
    }
}

impl<V: SimdVector, E: Element> PackElements<E> for F32Words<V> {
    #[inline(always)]
    unsafe fn along(from: *const E, n: usize) -> V {
        // SAFETY: as the caller promises.
        unsafe { V::widen(from, n) }
    }

    #[inline(always)]
    unsafe fn across(from: *const E, _stride: usize, _depth: usize, n: usize) -> V {
        // SAFETY: as the caller promises.
        unsafe { V::widen(from, n) }
    }
}

/// Words of two bf16, for AVX512_BF16.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Bf16PairWords;

#[cfg(target_arch = "x86_64")]
impl PackedWords for Bf16PairWords {
    type V = Avx512Bf16;

    const DEPTH: usize = 2;

    #[inline(always)]
    unsafe fn add_products<const N: usize>(sums: &mut [Self::V; N], a: *const f32, b: &[Self::V; N]) {
        // SAFETY: as the caller promises.
        unsafe {
            let a = Self::V::splat(a.read_unaligned());
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum = sum.add_products_of_pairs(a, b);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl<E: Element> PackElements<E> for Bf16PairWords {
    #[inline(always)]
    unsafe fn along(from: *const E, n: usize) -> Self::V {
        debug_assert!(E::KIND == ElementDtype::BF16);
        let mask = if n >= 32 { !0 } else { (1 << n) - 1 };
        // SAFETY: as the caller promises; what the mask excludes is not read.
        unsafe { Avx512Bf16::of_bits(_mm512_maskz_loadu_epi16(mask, from.cast())) }
    }

    #[inline(always)]
    unsafe fn across(from: *const E, stride: usize, depth: usize, n: usize) -> Self::V {
        debug_assert!(E::KIND == ElementDtype::BF16);
        // SAFETY: as the caller promises; what the mask excludes is not read.
        unsafe {
            let mask = Avx512Bf16::first(n);
            let low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
            let mask = if depth > 1 { mask } else { 0 };
            let high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.wrapping_add(stride).cast()));
            Avx512Bf16::of_bits(_mm512_or_si512(low, _mm512_slli_epi32::<16>(high)))
        }
    }
}
