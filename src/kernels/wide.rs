//! Elements as f32 inside of loops: conversions without branches or calls, so that a loop over them vectorizes, and the
//! dispatch that compiles such a loop for the widest vectors at hand.

use crate::kernels::element::{Element, Kind};
use crate::kernels::simd::{Loop, level};

/// The value of an expression, compiled for the widest vector instructions of this machine: it and what is inlined into
/// it (functions and closures that are called in it should be `#[inline(always)]`).
macro_rules! vectorized {
    ($body:expr $(,)?) => {
        $crate::kernels::wide::dispatch(
            #[inline(always)]
            || $body,
        )
    };
}
pub(crate) use vectorized;

/// Calls `f` as compiled for the widest vector instructions of this machine.
#[inline(always)]
pub(crate) fn dispatch<R>(f: impl FnOnce() -> R) -> R {
    struct Call<F>(F);
    impl<R, F: FnOnce() -> R> Loop for Call<F> {
        type Output = R;
        #[inline(always)]
        fn run(self) -> R {
            (self.0)()
        }
    }
    level().run(Call(f))
}

/// The element as f32.
#[inline(always)]
pub(crate) fn get<E: Element>(x: E) -> f32 {
    match E::KIND {
        Kind::F32 => bytemuck::cast(x),
        Kind::BF16 => f32::from_bits(u32::from(bytemuck::cast::<E, u16>(x)) << 16),
        Kind::F16 => f32_from_f16(bytemuck::cast(x)),
    }
}

/// The nearest element; of two equally near the even one.
#[inline(always)]
pub(crate) fn put<E: Element>(x: f32) -> E {
    match E::KIND {
        Kind::F32 => bytemuck::cast(x),
        Kind::BF16 => bytemuck::cast(bf16_from_f32(x)),
        Kind::F16 => bytemuck::cast(f16_from_f32(x)),
    }
}

/// `get` for a row.
#[inline(always)]
pub(crate) fn widen<E: Element>(src: &[E], dst: &mut [f32]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = get(*s);
    }
}

/// `put` for a row.
#[inline(always)]
pub(crate) fn narrow<E: Element>(src: &[f32], dst: &mut [E]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = put(*s);
    }
}

#[inline(always)]
fn bf16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    // Half a unit in the last place of the result, less one bit if that is even: ties go to even.
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let nan = (bits >> 16) as u16 | 0x40;
    if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }
}

#[inline(always)]
fn f32_from_f16(x: u16) -> f32 {
    let (sign, rest) = (u32::from(x & 0x8000) << 16, u32::from(x & 0x7fff) << 13);
    // The exponent's bias differs by 112; the product also normalizes what is subnormal in f16.
    let scaled = (f32::from_bits(rest) * f32::from_bits((127 + 112) << 23)).to_bits();
    let special = if rest >= 0x7c00 << 13 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled | special | sign)
}

#[inline(always)]
fn f16_from_f32(x: f32) -> u16 {
    let sign = x.to_bits() & 0x8000_0000;
    let bits = x.to_bits() ^ sign;
    // Adding this number shifts a subnormal result's digits to the end, rounded.
    const SUBNORMAL: u32 = (127 - 15 + 23 - 10 + 1) << 23;
    let subnormal = (f32::from_bits(bits) + f32::from_bits(SUBNORMAL)).to_bits().wrapping_sub(SUBNORMAL);
    let odd = (bits >> 13) & 1;
    let normal = bits.wrapping_add((15u32.wrapping_sub(127) << 23).wrapping_add(0xfff)).wrapping_add(odd) >> 13;
    let special = if bits > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
    let finite = if bits < 113 << 23 { subnormal } else { normal };
    let magnitude = if bits >= (127 + 16) << 23 { special } else { finite };
    (magnitude | (sign >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_half_widens_as_the_half_crate_widens_it() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            for (got, want) in [(get(b), b.to_f32()), (get(h), h.to_f32())] {
                assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{bits:x}");
            }
        }
    }

    #[test]
    fn f32_rounds_as_the_half_crate_rounds_it() {
        for bits in (0..=u32::MAX).step_by(1009).chain((0..=u32::MAX).step_by(1 << 12)) {
            let x = f32::from_bits(bits);
            let (b, h): (bf16, f16) = (put(x), put(x));
            assert!(b.to_bits() == bf16::from_f32(x).to_bits(), "{bits:x}");
            assert!(h.to_bits() == f16::from_f32(x).to_bits() || (h.is_nan() && x.is_nan()), "{bits:x}");
        }
    }
}
