//! What differs from one level of SIMD to another: the vectors, how their words are multiplied, and how many at a time.
//!
//! Everything is laid out in *words* of 32 bits along the inner dimension: one f32, or two neighbouring bf16. A step of
//! a microkernel multiplies one word of each of its rows of `a` with one word of each of its columns of `b`. bf16
//! without the bf16 instructions, and f16, are widened to f32 when they are packed.

use crate::kernels::element::Element;
#[cfg(target_arch = "x86_64")]
use crate::kernels::element::Kind;
#[cfg(target_arch = "aarch64")]
use crate::kernels::vector::Neon;
#[cfg(target_arch = "x86_64")]
use crate::kernels::vector::{Avx2, Avx512, Avx512Bf16};
use crate::kernels::vector::{Portable, Vector};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Vectors of words, and their products.
///
/// # Safety
/// As for [`Vector`]: the functions may be called inside of [`Vector::with`] only.
pub(super) trait Arithmetic {
    /// The vectors.
    type V: Vector;

    /// Elements of a word.
    const DEPTH: usize;
    /// Rows of the largest tile of sums: a power of two.
    const ROWS: usize;
    /// Vectors of the largest tile of sums.
    const VECTORS: usize;
    /// The most words of `b` that a task packs, to be read again and again from its core's second-level cache.
    const WORDS_OF_B: usize;

    /// Adds to each sum the product of the word at `a` and of the words of `b`.
    unsafe fn add_products<const N: usize>(sums: &mut [Self::V; N], a: *const f32, b: &[Self::V; N]);

    /// Columns of a vector.
    const LANES: usize = Self::V::LANES;
    /// Columns of the largest tile of sums.
    const COLS: usize = Self::VECTORS * Self::LANES;
}

/// How elements become words.
///
/// # Safety
/// As for [`Arithmetic`].
pub(super) trait Word<E: Element>: Arithmetic {
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
pub(super) struct Single<V>(PhantomData<V>);

/// The tiles of sums of words of one f32, for vectors of a kind.
macro_rules! single {
    ($vector:ty, $rows:literal rows, $vectors:literal vectors, $words_of_b:expr) => {
        impl Arithmetic for Single<$vector> {
            type V = $vector;

            const DEPTH: usize = 1;
            const ROWS: usize = $rows;
            const VECTORS: usize = $vectors;
            const WORDS_OF_B: usize = $words_of_b;

            #[inline(always)]
            unsafe fn add_products<const N: usize>(sums: &mut [Self::V; N], a: *const f32, b: &[Self::V; N]) {
                // SAFETY: as the caller promises.
                unsafe { Self::V::add_products(sums, a, b) }
            }
        }
    };
}

// Of 32 registers 24 for the sums, 3 for a row of `b`, 1 for an element of `a`;
#[cfg(target_arch = "x86_64")]
single!(Avx512, 8 rows, 3 vectors, 1 << 17);
#[cfg(target_arch = "aarch64")]
single!(Neon, 8 rows, 3 vectors, 1 << 16);
// of 16 registers 12, 3 and 1;
#[cfg(target_arch = "x86_64")]
single!(Avx2, 4 rows, 3 vectors, 1 << 16);
// of 16, of which a vector takes two, 8, 2 and 2, for a product that is not fused needs one more.
single!(Portable, 4 rows, 1 vectors, 1 << 16);

impl<V: Vector, E: Element> Word<E> for Single<V>
where
    Self: Arithmetic<V = V>,
{
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
pub(super) struct Pairs;

#[cfg(target_arch = "x86_64")]
impl Arithmetic for Pairs {
    type V = Avx512Bf16;

    const DEPTH: usize = 2;
    const ROWS: usize = 8;
    const VECTORS: usize = 3;
    const WORDS_OF_B: usize = 1 << 17;

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
impl<E: Element> Word<E> for Pairs {
    #[inline(always)]
    unsafe fn along(from: *const E, n: usize) -> Self::V {
        debug_assert!(E::KIND == Kind::BF16);
        let mask = if n >= 32 { !0 } else { (1 << n) - 1 };
        // SAFETY: as the caller promises; what the mask excludes is not read.
        unsafe { Avx512Bf16::of_bits(_mm512_maskz_loadu_epi16(mask, from.cast())) }
    }

    #[inline(always)]
    unsafe fn across(from: *const E, stride: usize, depth: usize, n: usize) -> Self::V {
        debug_assert!(E::KIND == Kind::BF16);
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
