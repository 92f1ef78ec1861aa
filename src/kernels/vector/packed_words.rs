//! 32-bit words along the inner dimension of a product: one f32, or two neighbouring bf16. Elements of f16, and of bf16
//! on processors without fast bf16 instructions, are widened to f32.

#[cfg(target_arch = "x86_64")]
use super::Avx512Bf16;
use super::SimdVector;
use crate::kernels::element::Element;
#[cfg(target_arch = "x86_64")]
use crate::kernels::element::ElementDtype;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Vectors of words, and their multiplication.
///
/// # Safety
/// As for [`SimdVector`], the functions may be called only inside [`SimdVector::with`].
pub(crate) trait PackedWords {
    /// The type of the vectors.
    type V: SimdVector;

    /// The number of elements of a word.
    const DEPTH: usize;

    /// Adds to each sum the product of the word at `a` and the corresponding vector of `b`.
    unsafe fn add_products<const N: usize>(sums: &mut [Self::V; N], a: *const f32, b: &[Self::V; N]);
}

/// Conversion of elements to words.
///
/// # Safety
/// Same as for [`PackedWords`].
pub(crate) trait PackElementsToWords<E: Element>: PackedWords {
    /// Returns a vector of consecutive words along the inner dimension: as many of the `n` elements that start at
    /// `from` as fit into it, padded with zeros.
    ///
    /// # Safety
    /// `n` elements must be readable.
    unsafe fn load_along_row(from: *const E, n: usize) -> Self::V;

    /// Returns one word for each of `n` neighbours across the inner dimension, for at most as many as there are lanes,
    /// and zeros in the other lanes. The elements of a word are `stride` apart. Those after the first `depth` do not
    /// exist and count as 0.
    ///
    /// # Safety
    /// `n` elements must be readable at each of `depth` addresses.
    unsafe fn load_across_rows(from: *const E, stride: usize, depth: usize, n: usize) -> Self::V;
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

impl<V: SimdVector, E: Element> PackElementsToWords<E> for F32Words<V> {
    #[inline(always)]
    unsafe fn load_along_row(from: *const E, n: usize) -> V {
        // SAFETY: as the caller promises.
        unsafe { V::widen(from, n) }
    }

    #[inline(always)]
    unsafe fn load_across_rows(from: *const E, _stride: usize, _depth: usize, n: usize) -> V {
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
impl<E: Element> PackElementsToWords<E> for Bf16PairWords {
    #[inline(always)]
    unsafe fn load_along_row(from: *const E, n: usize) -> Self::V {
        debug_assert!(E::KIND == ElementDtype::BF16);
        let mask = if n >= 32 { !0 } else { (1 << n) - 1 };
        // SAFETY: as the caller promises; elements that the mask excludes are not read.
        unsafe { Avx512Bf16::of_bits(_mm512_maskz_loadu_epi16(mask, from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_across_rows(from: *const E, stride: usize, depth: usize, n: usize) -> Self::V {
        debug_assert!(E::KIND == ElementDtype::BF16);
        // SAFETY: as the caller promises; elements that the mask excludes are not read.
        unsafe {
            let mask = Avx512Bf16::first_lanes_mask(n);
            let low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
            let mask = if depth > 1 { mask } else { 0 };
            let high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.wrapping_add(stride).cast()));
            Avx512Bf16::of_bits(_mm512_or_si512(low, _mm512_slli_epi32::<16>(high)))
        }
    }
}
