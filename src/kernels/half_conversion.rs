//! Conversions of 16-bit numbers to f32 and back, rounded to nearest even. Single numbers are converted without
//! branches or calls, so that a loop over them vectorizes. Slices of f16 use the instructions that the AVX2 and AVX-512
//! levels have for them. Both produce the same bits.

#[cfg(target_arch = "x86_64")]
use super::simd::InstructionSet;
use super::simd::level;

/// Converts a bf16 to f32.
#[inline(always)]
pub(super) fn f32_from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Returns the nearest bf16.
#[inline(always)]
pub(super) fn bf16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    // Half a unit in the last place of the result, less one bit if that place is even: ties go to even.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let quiet_nan = bits | 0x0040_0000;
    // The shift comes after the choice, so that vectors of 32-bit lanes are narrowed to 16 bits only once.
    ((if x.is_nan() { quiet_nan } else { rounded }) >> 16) as u16
}

/// Converts an f16 to f32. A NaN becomes quiet.
#[inline(always)]
pub(super) fn f32_from_f16(x: u16) -> f32 {
    const INFINITE: u32 = 0x7c00 << 13;
    let (sign, rest) = (u32::from(x & 0x8000) << 16, u32::from(x & 0x7fff) << 13);
    // The exponent's bias differs by 112. The product also normalizes numbers that are subnormal in f16.
    let scaled = (f32::from_bits(rest) * f32::from_bits((127 + 112) << 23)).to_bits();
    let infinite = if rest >= INFINITE { 0x7f80_0000 } else { 0 };
    let quiet = if rest > INFINITE { 0x0040_0000 } else { 0 };
    f32::from_bits(scaled | infinite | quiet | sign)
}

/// Returns the nearest f16. A NaN keeps its leading digits and becomes quiet.
#[inline(always)]
pub(super) fn f16_from_f32(x: f32) -> u16 {
    let sign = x.to_bits() & 0x8000_0000;
    let bits = x.to_bits() ^ sign;
    // Adding this number shifts the digits of a subnormal result to the end and rounds them.
    const SUBNORMAL: u32 = (127 - 15 + 23 - 10 + 1) << 23;
    let subnormal = (f32::from_bits(bits) + f32::from_bits(SUBNORMAL)).to_bits().wrapping_sub(SUBNORMAL);
    let odd = (bits >> 13) & 1;
    let normal = bits.wrapping_add((15u32.wrapping_sub(127) << 23).wrapping_add(0xfff)).wrapping_add(odd) >> 13;
    let special = if bits > 0x7f80_0000 { 0x7e00 | (bits >> 13 & 0x3ff) } else { 0x7c00 };
    let finite = if bits < 113 << 23 { subnormal } else { normal };
    let magnitude = if bits >= (127 + 16) << 23 { special } else { finite };
    (magnitude | (sign >> 16)) as u16
}

/// Converts bf16 to f32, inside a [`SimdLoop`](super::simd::SimdLoop).
#[inline(always)]
pub(super) fn widen_bf16(src: &[u16], dst: &mut [f32]) {
    dst.iter_mut().zip(src).for_each(|(d, s)| *d = f32_from_bf16(*s));
}

/// Rounds to the nearest bf16, inside a [`SimdLoop`](super::simd::SimdLoop).
#[inline(always)]
pub(super) fn narrow_bf16(src: &[f32], dst: &mut [u16]) {
    dst.iter_mut().zip(src).for_each(|(d, s)| *d = bf16_from_f32(*s));
}

/// Converts f16 to f32, inside a [`SimdLoop`](super::simd::SimdLoop) that must run at the level of this process.
#[inline(always)]
pub(super) fn widen_f16(src: &[u16], dst: &mut [f32]) {
    match level() {
        // SAFETY: this level has the instructions.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => unsafe { f16c::widen(src, dst) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => unsafe { f16c::widen_16(src, dst) },
        _ => dst.iter_mut().zip(src).for_each(|(d, s)| *d = f32_from_f16(*s)),
    }
}

/// Rounds to the nearest f16. It has the same requirements as [`widen_f16`].
#[inline(always)]
pub(super) fn narrow_f16(src: &[f32], dst: &mut [u16]) {
    match level() {
        // SAFETY: these levels have the instructions.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 | InstructionSet::Avx512 => unsafe { f16c::narrow(src, dst) },
        _ => dst.iter_mut().zip(src).for_each(|(d, s)| *d = f16_from_f32(*s)),
    }
}

/// The processor's own conversions of f16.
#[cfg(target_arch = "x86_64")]
mod f16c {
    use super::{f16_from_f32, f32_from_f16};
    use std::arch::x86_64::{
        _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph,
        _mm256_loadu_ps, _mm256_loadu_si256, _mm256_storeu_ps, _mm512_cvtph_ps, _mm512_storeu_ps,
    };

    #[target_feature(enable = "avx2,f16c")]
    pub fn widen(src: &[u16], dst: &mut [f32]) {
        let ((from, from_rest), (to, to_rest)) = (src.as_chunks::<8>(), dst.as_chunks_mut::<8>());
        for (d, s) in to.iter_mut().zip(from) {
            // SAFETY: eight numbers are read, and eight written.
            unsafe { _mm256_storeu_ps(d.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(s.as_ptr().cast()))) }
        }
        to_rest.iter_mut().zip(from_rest).for_each(|(d, s)| *d = f32_from_f16(*s));
    }

    /// Does the same as [`widen`] in vectors of sixteen: a load of a full vector stalls if its halves have just been
    /// stored.
    #[target_feature(enable = "avx512f")]
    pub fn widen_16(src: &[u16], dst: &mut [f32]) {
        let ((from, from_rest), (to, to_rest)) = (src.as_chunks::<16>(), dst.as_chunks_mut::<16>());
        for (d, s) in to.iter_mut().zip(from) {
            // SAFETY: sixteen numbers are read, and sixteen written.
            unsafe { _mm512_storeu_ps(d.as_mut_ptr(), _mm512_cvtph_ps(_mm256_loadu_si256(s.as_ptr().cast()))) }
        }
        to_rest.iter_mut().zip(from_rest).for_each(|(d, s)| *d = f32_from_f16(*s));
    }

    #[target_feature(enable = "avx2,f16c")]
    pub fn narrow(src: &[f32], dst: &mut [u16]) {
        let ((from, from_rest), (to, to_rest)) = (src.as_chunks::<8>(), dst.as_chunks_mut::<8>());
        for (d, s) in to.iter_mut().zip(from) {
            // SAFETY: eight numbers are read, and eight written.
            unsafe {
                let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(s.as_ptr()));
                _mm_storeu_si128(d.as_mut_ptr().cast(), rounded);
            }
        }
        to_rest.iter_mut().zip(from_rest).for_each(|(d, s)| *d = f16_from_f32(*s));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_number_of_16_bits_widens_as_the_half_crate_widens_it() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits).to_f32(), f16::from_bits(bits).to_f32());
            assert!(f32_from_bf16(bits).to_bits() == b.to_bits() || (f32_from_bf16(bits).is_nan() && b.is_nan()));
            assert!(f32_from_f16(bits).to_bits() == h.to_bits(), "{bits:x}");
        }
    }

    /// Returns every 1009th f32, and the ties of both formats.
    fn samples() -> Vec<f32> {
        let [step, ties] = if cfg!(miri) { [0x80_0009, 0x100_1000] } else { [1009, 1 << 12] };
        (0..=u32::MAX).step_by(step).chain((0..=u32::MAX).step_by(ties)).map(f32::from_bits).collect()
    }

    #[test]
    fn f32_rounds_as_the_half_crate_rounds_it() {
        for x in samples() {
            assert!(bf16_from_f32(x) == bf16::from_f32(x).to_bits(), "{:x}", x.to_bits());
            assert!(f16_from_f32(x) == f16::from_f32(x).to_bits(), "{:x}", x.to_bits());
        }
    }

    #[test]
    fn slices_hold_the_conversions_of_their_elements_at_the_level_of_the_process() {
        let narrow: Vec<u16> = (0..=u16::MAX).step_by(if cfg!(miri) { 100 } else { 1 }).chain([1, 2, 3]).collect();
        let mut wide = vec![0f32; narrow.len()];
        widen_f16(&narrow, &mut wide);
        assert!(wide.iter().zip(&narrow).all(|(x, h)| x.to_bits() == f32_from_f16(*h).to_bits()));
        widen_bf16(&narrow, &mut wide);
        assert!(wide.iter().zip(&narrow).all(|(x, b)| x.to_bits() == u32::from(*b) << 16));
        let wide = samples();
        let mut narrow = vec![0u16; wide.len()];
        narrow_f16(&wide, &mut narrow);
        assert!(wide.iter().zip(&narrow).all(|(x, h)| *h == f16_from_f32(*x)));
        narrow_bf16(&wide, &mut narrow);
        assert!(wide.iter().zip(&narrow).all(|(x, b)| *b == bf16_from_f32(*x)));
    }
}
