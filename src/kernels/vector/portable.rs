//! Arrays of f32 for any machine: a product and a sum are never fused, so that the bits are the same everywhere.

use super::{Square, Vector, copy_in};
use crate::kernels::element::Element;
use crate::kernels::math::exp;
use crate::kernels::wide::{get, put};

/// Eight f32: two registers of the oldest processors.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Portable([f32; LANES]);

const LANES: usize = 8;

impl Portable {
    #[inline(always)]
    fn each(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Vector for Portable {
    const LANES: usize = LANES;

    #[inline(always)]
    unsafe fn with<R>(f: impl FnOnce() -> R) -> R {
        f()
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; LANES])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller promises the numbers.
        Self(unsafe { from.cast::<[f32; LANES]>().read() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller promises room for the numbers.
        unsafe { to.cast::<[f32; LANES]>().write(self.0) }
    }

    #[inline(always)]
    unsafe fn store_halves(self, first: *mut f32, second: *mut f32) {
        // SAFETY: the caller promises room for half of the numbers at each place.
        unsafe {
            std::ptr::copy_nonoverlapping(self.0.as_ptr(), first, LANES / 2);
            std::ptr::copy_nonoverlapping(self.0.as_ptr().add(LANES / 2), second, LANES / 2);
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.each(other, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.each(other, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.each(other, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] * factor.0[i] + addend.0[i]))
    }

    #[inline(always)]
    unsafe fn mul_sub(self, factor: Self, less: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] * factor.0[i] - less.0[i]))
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.each(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        Self(self.0.map(|x| exp(x * std::f32::consts::LN_2)))
    }

    #[inline(always)]
    unsafe fn keep_from_lane(self, lane: usize, other: Self) -> Self {
        Self(std::array::from_fn(|i| if i < lane { other.0[i] } else { self.0[i] }))
    }

    #[inline(always)]
    unsafe fn transpose(rows: &mut Square<Self>) {
        let before = *rows;
        for (i, row) in rows[..LANES].iter_mut().enumerate() {
            *row = Self(std::array::from_fn(|j| before[j].0[i]));
        }
    }

    #[inline(always)]
    unsafe fn widen<E: Element>(from: *const E, n: usize) -> Self {
        // SAFETY: the caller promises the elements.
        let all: [E; LANES] = unsafe { if n < LANES { copy_in(from, n) } else { from.cast::<[E; LANES]>().read() } };
        Self(all.map(get))
    }

    #[inline(always)]
    unsafe fn narrow<E: Element>(self, to: *mut E, n: usize) {
        let all: [E; LANES] = self.0.map(put);
        // SAFETY: the caller promises room for the elements.
        unsafe { std::ptr::copy_nonoverlapping(all.as_ptr(), to, n.min(LANES)) };
    }
}
