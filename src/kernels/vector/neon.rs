//! Vectors of four f32, with NEON, which every 64-bit ARM processor has.

use super::{SimdVector, TransposeBlock, exp2_of_rest, load_padded};
use crate::kernels::element::{Element, ElementDtype};
use crate::kernels::f32_access::{get, put};
use std::arch::aarch64::*;

/// Four f32.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Neon(float32x4_t);

const LANES: usize = 4;

impl SimdVector for Neon {
    const LANES: usize = LANES;

    #[inline(always)]
    unsafe fn with<R>(f: impl FnOnce() -> R) -> R {
        f()
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(vdupq_n_f32(x)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(vld1q_f32(from)) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { vst1q_f32(to, self.0) }
    }

    #[inline(always)]
    unsafe fn store_halves(self, first: *mut f32, second: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe {
            vst1_f32(first, vget_low_f32(self.0));
            vst1_f32(second, vget_high_f32(self.0));
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(vaddq_f32(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(vsubq_f32(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(vmulq_f32(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(vdivq_f32(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(vfmaq_f32(addend.0, self.0, factor.0)) }
    }

    #[inline(always)]
    unsafe fn mul_sub(self, factor: Self, subtrahend: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(vfmaq_f32(vnegq_f32(subtrahend.0), self.0, factor.0)) }
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self(vbslq_f32(vcgtq_f32(self.0, other.0), self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: as the caller promises.
        unsafe {
            // These instructions let NaN pass. The lower bound yields 2^-127, whose exponent bits are those of 0.
            let x = vmaxq_f32(vdupq_n_f32(-127.0), self.0);
            let x = vminq_f32(vdupq_n_f32(128.0), x);
            let integer = vrndnq_f32(x);
            let p = exp2_of_rest(Self(vsubq_f32(x, integer)));
            let exponent = vaddq_s32(vcvtq_s32_f32(integer), vdupq_n_s32(127));
            Self(vmulq_f32(p.0, vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))))
        }
    }

    #[inline(always)]
    unsafe fn blend_from_lane(self, lane: usize, other: Self) -> Self {
        const LANE: [u32; LANES] = [0, 1, 2, 3];
        // SAFETY: as the caller promises; the array has as many elements as a vector.
        unsafe {
            let before = vcltq_u32(vld1q_u32(LANE.as_ptr()), vdupq_n_u32(lane.min(LANES) as u32));
            Self(vbslq_f32(before, other.0, self.0))
        }
    }

    #[inline(always)]
    unsafe fn transpose(rows: &mut TransposeBlock<Self>) {
        // SAFETY: as the caller promises.
        unsafe {
            let [a, b, c, d] = [rows[0].0, rows[1].0, rows[2].0, rows[3].0];
            let wide = |x: float32x4_t| vreinterpretq_f64_f32(x);
            let (ab_even, ab_odd) = (wide(vtrn1q_f32(a, b)), wide(vtrn2q_f32(a, b)));
            let (cd_even, cd_odd) = (wide(vtrn1q_f32(c, d)), wide(vtrn2q_f32(c, d)));
            rows[0].0 = vreinterpretq_f32_f64(vtrn1q_f64(ab_even, cd_even));
            rows[1].0 = vreinterpretq_f32_f64(vtrn1q_f64(ab_odd, cd_odd));
            rows[2].0 = vreinterpretq_f32_f64(vtrn2q_f64(ab_even, cd_even));
            rows[3].0 = vreinterpretq_f32_f64(vtrn2q_f64(ab_odd, cd_odd));
        }
    }

    #[inline(always)]
    unsafe fn widen<E: Element>(from: *const E, n: usize) -> Self {
        // SAFETY: as the caller promises; a full vector is read only if there are enough elements.
        unsafe {
            if E::KIND == ElementDtype::F32 && n >= LANES {
                return Self(vld1q_f32(from.cast()));
            }
            let elements: [E; LANES] = if n < LANES { load_padded(from, n) } else { from.cast::<[E; LANES]>().read() };
            Self(vld1q_f32(elements.map(get).as_ptr()))
        }
    }

    #[inline(always)]
    unsafe fn split_bf16(self) -> [Self; 2] {
        // SAFETY: as the caller promises.
        unsafe {
            let bits = vreinterpretq_u32_f32(self.0);
            let high = vandq_u32(bits, vdupq_n_u32(!0xFFFF));
            [Self(vreinterpretq_f32_u32(vshlq_n_u32::<16>(bits))), Self(vreinterpretq_f32_u32(high))]
        }
    }

    #[inline(always)]
    unsafe fn narrow<E: Element>(self, to: *mut E, n: usize) {
        let mut wide = [0.0; LANES];
        // SAFETY: as the caller promises; at most a vector's elements are copied.
        unsafe {
            vst1q_f32(wide.as_mut_ptr(), self.0);
            let elements: [E; LANES] = wide.map(put);
            std::ptr::copy_nonoverlapping(elements.as_ptr(), to, n.min(LANES));
        }
    }
}
