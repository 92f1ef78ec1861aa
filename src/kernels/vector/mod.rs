//! Vectors of f32 in registers, used to write products and attention once for all SIMD levels.
//!
//! A kernel is a function that is generic over [`SimdVector`], is marked `#[inline(always)]` like every method here,
//! and is called inside [`SimdVector::with`], which compiles it for the instructions of the vector.

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
pub(crate) use packed_words::{F32Words, PackElementsToWords, PackedWords};
pub(crate) use portable::PortableVector;

use super::element::Element;
use super::math::{TANH_ABOVE, TANH_BELOW, TANH_BOUND};

/// The number of lanes of the widest vectors, which is a multiple of the number of lanes of every other vector.
pub(crate) const MAX_LANES: usize = 16;

/// The argument of [`SimdVector::transpose`], which uses the first [`SimdVector::LANES`] vectors.
pub(crate) type TransposeBlock<V> = [V; MAX_LANES];

/// A vector of f32. A lane may also hold 32 bits of other data, on which no f32 arithmetic is performed.
///
/// # Safety
/// Every method except [`SimdVector::with`] may be called only inside `with`, because the methods inline the
/// vector's instructions. The processor must have these instructions. Memory behind pointers must be readable or
/// writable as the method describes. Pointers to f32 need no alignment beyond that of their type, and
/// [`SimdVector::load`] and [`SimdVector::add_products`] need no alignment.
pub(crate) trait SimdVector: Copy {
    /// The number of lanes: 4, 8 or 16.
    const LANES: usize;

    /// Calls `f` compiled for the vector's instructions, together with everything that is inlined into it.
    unsafe fn with<R>(f: impl FnOnce() -> R) -> R;

    /// Returns a vector with the same number in every lane.
    unsafe fn splat(x: f32) -> Self;

    /// Loads consecutive numbers, starting at `from`.
    unsafe fn load(from: *const f32) -> Self;

    /// Writes all lanes.
    unsafe fn store(self, to: *mut f32);

    /// Writes the first half of the lanes to one address and the second half to another.
    unsafe fn store_halves(self, first: *mut f32, second: *mut f32);

    /// Returns the sums.
    unsafe fn add(self, other: Self) -> Self;

    /// Returns the differences.
    unsafe fn sub(self, other: Self) -> Self;

    /// Returns the products.
    unsafe fn mul(self, other: Self) -> Self;

    /// Returns the quotients.
    unsafe fn div(self, other: Self) -> Self;

    /// Returns `self * factor + addend`, rounded once if the level fuses the two operations.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;

    /// Returns `self * factor - subtrahend`, rounded once if the level fuses the two operations.
    unsafe fn mul_sub(self, factor: Self, subtrahend: Self) -> Self;

    /// Returns the larger number in each lane, or the number of `other` if either is NaN.
    unsafe fn max(self, other: Self) -> Self;

    /// Returns 2 to the power of every number x, with a relative error of at most 3e-7 + 1e-7 |x|, and NaN for NaN.
    /// Subnormal results may be 0, and results of 2^127.5 and above may be infinity.
    unsafe fn exp2(self) -> Self;

    /// Returns the lanes of `other` below `lane`, and the remaining lanes of `self`.
    unsafe fn blend_from_lane(self, lane: usize, other: Self) -> Self;

    /// Transposes the square of the first `LANES` lanes of the first `LANES` rows.
    unsafe fn transpose(rows: &mut TransposeBlock<Self>);

    /// Loads `n` elements (at most a full vector), starting at `from`, as f32, and fills the rest with zeros. No other
    /// elements are read.
    unsafe fn widen<E: Element>(from: *const E, n: usize) -> Self;

    /// Returns the two bf16 numbers in each lane's bits as f32: first those of the low halves, then those of the high
    /// halves.
    unsafe fn split_bf16(self) -> [Self; 2];

    /// Writes the first `n` numbers (at most all lanes), each rounded to the nearest value of the element type, with
    /// ties to even.
    unsafe fn narrow<E: Element>(self, to: *mut E, n: usize);

    /// Adds to each sum the product of the number at `a` and the corresponding vector of `b`, like
    /// [`SimdVector::mul_add`].
    #[inline(always)]
    unsafe fn add_products<const N: usize>(sums: &mut [Self; N], a: *const f32, b: &[Self; N]) {
        // SAFETY: as the caller promises.
        unsafe { add_each_product(sums, Self::splat(a.read_unaligned()), b) }
    }

    /// Returns a vector of zeros.
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self::splat(0.0) }
    }
}

/// Adds to each sum the product of `a` and the corresponding vector of `b`, one after the other.
///
/// # Safety
/// The call must be inside [`SimdVector::with`].
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

/// Evaluates the polynomial [`EXP2`].
#[inline(always)]
unsafe fn exp2_of_rest<V: SimdVector>(rest: V) -> V {
    let [first, others @ ..] = EXP2;
    // SAFETY: as the caller promises.
    unsafe { others.into_iter().fold(V::splat(first), |p, c| p.mul_add(rest, V::splat(c))) }
}

/// Returns the hyperbolic tangent with a relative error of at most 6e-7, even for numbers of large magnitude and
/// for infinities. The result is NaN for NaN.
///
/// # Safety
/// The call must be inside `V::with`.
#[inline(always)]
pub(crate) unsafe fn tanh<V: SimdVector>(x: V) -> V {
    // SAFETY: as the caller promises.
    unsafe {
        // If one operand of `max` is NaN, the result is the second operand.
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

/// Copies the first `n` elements to an array of a vector's length, padded with zeros, for vectors that cannot be loaded
/// partially.
#[inline(always)]
unsafe fn load_padded<E: Element, const N: usize>(from: *const E, n: usize) -> [E; N] {
    let mut padded = [E::default(); N];
    // SAFETY: the caller guarantees that `n` elements exist, and no more than `N` are copied.
    unsafe { std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), n.min(N)) };
    padded
}

#[cfg(test)]
mod tests;
