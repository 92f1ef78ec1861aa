//! Vectors of f32 in registers: what products and attention are written with, once for all levels of SIMD.
//!
//! A kernel is a function generic over [`SimdVector`], marked `#[inline(always)]` as every method here is, and called inside
//! of [`SimdVector::with`], which compiles it for the instructions of the vector.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod method;
#[cfg(target_arch = "aarch64")]
mod neon;
mod packed_words;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{Avx512, Avx512Bf16};
pub(crate) use method::{SimdMethod, with_words_of};
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
#[cfg(target_arch = "x86_64")]
pub(crate) use packed_words::Bf16PairWords;
pub(crate) use packed_words::{F32Words, PackElements, PackedWords};
pub(crate) use portable::PortableVector;

use super::element::Element;
use super::math::{TANH_ABOVE, TANH_BELOW, TANH_BOUND};

/// The numbers of the widest vectors; a multiple of those of every other.
pub(crate) const MOST_LANES: usize = 16;

/// As many vectors as [`SimdVector::transpose`] takes, of which it uses the first [`SimdVector::LANES`].
pub(crate) type TransposeBlock<V> = [V; MOST_LANES];

/// A vector of f32, of which a lane may also hold a word of other bits that is only moved.
///
/// # Safety
/// Every method but [`SimdVector::with`] may be called only inside of it, because it inlines the vector's instructions; the
/// processor must have them. What a pointer names must be readable or writable as the method says; pointers to f32 need
/// no alignment beyond that of their type.
pub(crate) trait SimdVector: Copy {
    /// Numbers of a vector: 4, 8 or 16.
    const LANES: usize;

    /// Calls `f` as compiled for the vector's instructions, with what is inlined into it.
    unsafe fn with<R>(f: impl FnOnce() -> R) -> R;

    /// The number in every lane.
    unsafe fn splat(x: f32) -> Self;

    /// The numbers from `from` on.
    unsafe fn load(from: *const f32) -> Self;

    /// Writes all lanes.
    unsafe fn store(self, to: *mut f32);

    /// Writes the first half of the lanes to one place and the second to another.
    unsafe fn store_halves(self, first: *mut f32, second: *mut f32);

    /// The sums.
    unsafe fn add(self, other: Self) -> Self;

    /// The differences.
    unsafe fn sub(self, other: Self) -> Self;

    /// The products.
    unsafe fn mul(self, other: Self) -> Self;

    /// The quotients.
    unsafe fn div(self, other: Self) -> Self;

    /// `self * factor + addend`, rounded once where the level fuses the two.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;

    /// `self * factor - less`, rounded once where the level fuses the two.
    unsafe fn mul_sub(self, factor: Self, less: Self) -> Self;

    /// The larger numbers; those of `other` where one is nan.
    unsafe fn max(self, other: Self) -> Self;

    /// 2 to the power of every number x, to 3e-7 + 1e-7 |x| of the result; nan for nan. Results that are not normal may
    /// be 0, and those from 2^127.5 on infinity.
    unsafe fn exp2(self) -> Self;

    /// The lanes from number `lane` on, and those of `other` before.
    unsafe fn keep_from_lane(self, lane: usize, other: Self) -> Self;

    /// Transposes the square of the first `LANES` lanes of the first `LANES` rows.
    unsafe fn transpose(rows: &mut TransposeBlock<Self>);

    /// The first `n` elements from `from` on, or a whole vector's if that is less, in f32, and zeros. No more than these
    /// are read.
    unsafe fn widen<E: Element>(from: *const E, n: usize) -> Self;

    /// The two bf16 numbers of each lane's bits in f32: those of the low halves and those of the high.
    unsafe fn split_bf16(self) -> [Self; 2];

    /// Writes the first `n` numbers, or all if that is more, each rounded to the nearest element, of two equally near to
    /// the even one.
    unsafe fn narrow<E: Element>(self, to: *mut E, n: usize);

    /// Adds to each sum the product of the number at `a` and of the numbers of `b`, as [`SimdVector::mul_add`] does.
    #[inline(always)]
    unsafe fn add_products<const N: usize>(sums: &mut [Self; N], a: *const f32, b: &[Self; N]) {
        // SAFETY: as the caller promises.
        unsafe { add_each_product(sums, Self::splat(a.read_unaligned()), b) }
    }

    /// Zeros.
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self::splat(0.0) }
    }
}

/// Adds to each sum its product, one after the other.
///
/// # Safety
/// Inside of [`SimdVector::with`].
#[inline(always)]
unsafe fn add_each_product<V: SimdVector, const N: usize>(sums: &mut [V; N], a: V, b: &[V; N]) {
    for (sum, &b) in sums.iter_mut().zip(b) {
        // SAFETY: as the caller promises.
        *sum = unsafe { a.mul_add(b, *sum) };
    }
}

/// The coefficients of a minimax polynomial of 2^x for |x| <= 1/2, highest power first (Cephes).
const EXP2: [f32; 7] =
    [1.535_336_2e-4, 1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, std::f32::consts::LN_2, 1.0];

/// That polynomial.
#[inline(always)]
unsafe fn exp2_of_rest<V: SimdVector>(rest: V) -> V {
    let [first, others @ ..] = EXP2;
    // SAFETY: as the caller promises.
    unsafe { others.into_iter().fold(V::splat(first), |p, c| p.mul_add(rest, V::splat(c))) }
}

/// The hyperbolic tangent, to 6e-7 of the result and 1 far out; nan for nan.
///
/// # Safety
/// Inside of `V::with`.
#[inline(always)]
pub(crate) unsafe fn tanh<V: SimdVector>(x: V) -> V {
    // SAFETY: as the caller promises.
    unsafe {
        // Of a nan and a number the second is taken.
        let x = V::splat(-TANH_BOUND).max(x);
        let x = V::zero().sub(V::splat(-TANH_BOUND).max(V::zero().sub(x)));
        let x2 = x.mul(x);
        let polynomial = |coefficients: &[f32]| {
            let (first, others) = (coefficients[0], &coefficients[1..]);
            others.iter().fold(V::splat(first), |p, c| p.mul_add(x2, V::splat(*c)))
        };
        x.mul(polynomial(&TANH_ABOVE)).div(polynomial(&TANH_BELOW))
    }
}

/// The first `n` elements and zeros in an array of a vector's length, for vectors that cannot be loaded in part.
#[inline(always)]
unsafe fn copy_in<E: Element, const N: usize>(from: *const E, n: usize) -> [E; N] {
    let mut all = [E::default(); N];
    // SAFETY: the caller promises `n` elements, and no more than `N` are copied.
    unsafe { std::ptr::copy_nonoverlapping(from, all.as_mut_ptr(), n.min(N)) };
    all
}

#[cfg(test)]
mod tests;
