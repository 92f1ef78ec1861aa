//! Vectors of four f32 for any machine. A product and a sum are never fused, so that the bits are the same everywhere.

use super::{SimdVector, TransposeBlock, load_padded};
use crate::kernels::element::Element;
use crate::kernels::f32_access::{get, put};
use crate::kernels::math::exp;
use four::F32x4;

/// Four f32.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct PortableVector(F32x4);

const LANES: usize = 4;

impl PortableVector {
    #[inline(always)]
    fn of(numbers: [f32; LANES]) -> Self {
        Self(four::of(numbers))
    }

    #[inline(always)]
    fn numbers(self) -> [f32; LANES] {
        four::numbers(self.0)
    }
}

/// The registers that every x86-64 processor has. With arrays, the compiler would vectorize in places other than those
/// where the kernels need it.
#[cfg(target_arch = "x86_64")]
mod four {
    use std::arch::x86_64::*;

    pub(super) type F32x4 = __m128;

    #[inline(always)]
    pub(super) fn of(numbers: [f32; 4]) -> F32x4 {
        bytemuck::cast(numbers)
    }

    #[inline(always)]
    pub(super) fn numbers(four: F32x4) -> [f32; 4] {
        bytemuck::cast(four)
    }

    #[inline(always)]
    pub(super) fn splat(x: f32) -> F32x4 {
        // SAFETY: every x86-64 processor has the instruction.
        unsafe { _mm_set1_ps(x) }
    }

    #[inline(always)]
    pub(super) fn add(a: F32x4, b: F32x4) -> F32x4 {
        // SAFETY: every x86-64 processor has the instruction.
        unsafe { _mm_add_ps(a, b) }
    }

    #[inline(always)]
    pub(super) fn sub(a: F32x4, b: F32x4) -> F32x4 {
        // SAFETY: every x86-64 processor has the instruction.
        unsafe { _mm_sub_ps(a, b) }
    }

    #[inline(always)]
    pub(super) fn mul(a: F32x4, b: F32x4) -> F32x4 {
        // SAFETY: every x86-64 processor has the instruction.
        unsafe { _mm_mul_ps(a, b) }
    }

    #[inline(always)]
    pub(super) fn div(a: F32x4, b: F32x4) -> F32x4 {
        // SAFETY: every x86-64 processor has the instruction.
        unsafe { _mm_div_ps(a, b) }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod four {
    pub(super) type F32x4 = [f32; 4];

    #[inline(always)]
    pub(super) fn of(numbers: [f32; 4]) -> F32x4 {
        numbers
    }

    #[inline(always)]
    pub(super) fn numbers(four: F32x4) -> [f32; 4] {
        four
    }

    #[inline(always)]
    pub(super) fn splat(x: f32) -> F32x4 {
        [x; 4]
    }

    #[inline(always)]
    pub(super) fn add(a: F32x4, b: F32x4) -> F32x4 {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    pub(super) fn sub(a: F32x4, b: F32x4) -> F32x4 {
        std::array::from_fn(|i| a[i] - b[i])
    }

    #[inline(always)]
    pub(super) fn mul(a: F32x4, b: F32x4) -> F32x4 {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    pub(super) fn div(a: F32x4, b: F32x4) -> F32x4 {
        std::array::from_fn(|i| a[i] / b[i])
    }
}

impl SimdVector for PortableVector {
    const LANES: usize = LANES;

    #[inline(always)]
    unsafe fn with<R>(f: impl FnOnce() -> R) -> R {
        f()
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self(four::splat(x))
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller guarantees that the numbers exist. Pairs of 16-bit numbers can have any alignment.
        Self::of(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller guarantees room for the numbers.
        unsafe { to.cast::<[f32; LANES]>().write(self.numbers()) }
    }

    #[inline(always)]
    unsafe fn store_halves(self, first: *mut f32, second: *mut f32) {
        let [a, b, c, d] = self.numbers();
        // SAFETY: the caller guarantees room for half of the numbers at each address.
        unsafe {
            first.cast::<[f32; LANES / 2]>().write([a, b]);
            second.cast::<[f32; LANES / 2]>().write([c, d]);
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Self(four::add(self.0, other.0))
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Self(four::sub(self.0, other.0))
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Self(four::mul(self.0, other.0))
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        Self(four::div(self.0, other.0))
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        Self(four::add(four::mul(self.0, factor.0), addend.0))
    }

    #[inline(always)]
    unsafe fn mul_sub(self, factor: Self, subtrahend: Self) -> Self {
        Self(four::sub(four::mul(self.0, factor.0), subtrahend.0))
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        let (a, b) = (self.numbers(), other.numbers());
        Self::of(std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] }))
    }

    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        Self::of(self.numbers().map(|x| exp(x * std::f32::consts::LN_2)))
    }

    #[inline(always)]
    unsafe fn blend_from_lane(self, lane: usize, other: Self) -> Self {
        let (values, others) = (self.numbers(), other.numbers());
        Self::of(std::array::from_fn(|i| if i < lane { others[i] } else { values[i] }))
    }

    #[inline(always)]
    unsafe fn transpose(rows: &mut TransposeBlock<Self>) {
        let original: [_; LANES] = std::array::from_fn(|i| rows[i].numbers());
        for (i, row) in rows[..LANES].iter_mut().enumerate() {
            *row = Self::of(original.map(|numbers| numbers[i]));
        }
    }

    #[inline(always)]
    unsafe fn widen<E: Element>(from: *const E, n: usize) -> Self {
        // SAFETY: the caller guarantees that the elements exist.
        let loaded: [E; LANES] =
            unsafe { if n < LANES { load_padded(from, n) } else { from.cast::<[E; LANES]>().read() } };
        Self::of(loaded.map(get))
    }

    #[inline(always)]
    unsafe fn split_bf16(self) -> [Self; 2] {
        let bits = self.numbers().map(f32::to_bits);
        [bits.map(|word| word << 16), bits.map(|word| word & !0xFFFF)].map(|bits| Self::of(bits.map(f32::from_bits)))
    }

    #[inline(always)]
    unsafe fn narrow<E: Element>(self, to: *mut E, n: usize) {
        let elements: [E; LANES] = self.numbers().map(put);
        // SAFETY: the caller guarantees room for the elements.
        unsafe { std::ptr::copy_nonoverlapping(elements.as_ptr(), to, n.min(LANES)) };
    }
}
