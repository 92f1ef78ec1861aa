//! An 8-bit format with fine steps near zero: the dynamic map of arXiv 2110.02861, section 1.3, as in bitsandbytes.
//!
//! The codes are the indices of 256 sorted values in [-1, 1] or [0, 1]. The values cover seven decades, and higher
//! decades have more values. An element is the value of its code times the largest magnitude of its block.

use std::sync::LazyLock;

/// The upper ends of the map's decades.
const DECADE_ENDS: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];

/// The number of optimizer state elements that share a scale.
pub(crate) const BLOCK: usize = 256;

/// The number of leading mantissa bits of a magnitude that select where the search for its code starts.
const LOOKUP_MANTISSA_BITS: u32 = 7;

/// The exponent of the smallest magnitude that is looked up. Smaller ones are nearer to zero than to any other value.
const MIN_LOOKUP_EXPONENT: u32 = 127 - 24;

/// The number of lookup entries for magnitudes up to 1.
const LOOKUP_ENTRIES: usize = 24 * (1 << LOOKUP_MANTISSA_BITS) + 1;

/// A limit below which the inverse of a scale might not be finite.
pub(super) const MIN_SCALE: f32 = 1e-38;

/// The 256 values, and lookup tables to find the nearest one.
pub(crate) struct DynamicMap {
    values: [f32; 256],
    /// The bound between each value and the next. A number on a bound belongs to the lower value. The last bound is
    /// infinity.
    bounds: [f32; 256],
    /// For each lookup entry, first for positive and then for negative numbers: the lowest code of the numbers that are
    /// looked up there. The numbers of one entry have at most two different codes.
    lowest_code: Box<[[u8; LOOKUP_ENTRIES]; 2]>,
}

impl DynamicMap {
    /// Creates the map of values from -0.993 to 1.
    pub fn signed() -> Self {
        Self::new(true)
    }

    /// Creates the map of values from 0 to 1, twice as fine.
    pub fn unsigned() -> Self {
        Self::new(false)
    }

    fn new(signed: bool) -> Self {
        let mut values = vec![0.0, 1.0];
        for (decade, size) in DECADE_ENDS.into_iter().enumerate() {
            let count: usize = if signed { 1 << decade } else { 2 << decade };
            // The values of a decade are the centres of equal parts of 0.1..1, times the end of the decade.
            let step = (1.0f32 - 0.1) / count as f32;
            let edge = |i: usize| {
                let from_below = i < count.div_ceil(2);
                if from_below { 0.1 + step * i as f32 } else { 1.0 - step * (count - i) as f32 }
            };
            for i in 0..count {
                let value = size * ((edge(i) + edge(i + 1)) / 2.0);
                values.push(value);
                values.extend(signed.then_some(-value));
            }
        }
        values.sort_by(f32::total_cmp);
        let values: [f32; 256] = values.try_into().unwrap_or_else(|_| unreachable!("a map has 256 values"));
        let bounds: [f32; 256] = std::array::from_fn(|i| match values.get(i + 1) {
            Some(next) => (values[i] + next) / 2.0,
            None => f32::INFINITY,
        });
        let code = |x: f32| bounds.iter().take_while(|bound| x > **bound).count() as u8;
        let mut lowest_code = Box::new([[0; LOOKUP_ENTRIES]; 2]);
        for entry in 0..LOOKUP_ENTRIES {
            let magnitude = |entry: usize| {
                f32::from_bits(
                    ((MIN_LOOKUP_EXPONENT << LOOKUP_MANTISSA_BITS) + entry as u32) << (23 - LOOKUP_MANTISSA_BITS),
                )
            };
            lowest_code[0][entry] = if entry == 0 { code(0.0) } else { code(magnitude(entry)) };
            lowest_code[1][entry] = code(-magnitude(entry + 1));
        }
        Self { values, bounds, lowest_code }
    }

    /// Returns the value of a code.
    #[inline(always)]
    pub fn value(&self, code: u8) -> f32 {
        self.values[usize::from(code)]
    }

    /// Returns the code of the value nearest to `x`, which must be in [-1, 1]. Other numbers get an arbitrary code.
    #[inline(always)]
    fn code(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let magnitude = (bits & 0x7fff_ffff) >> (23 - LOOKUP_MANTISSA_BITS);
        let entry = (magnitude.max(MIN_LOOKUP_EXPONENT << LOOKUP_MANTISSA_BITS)
            - (MIN_LOOKUP_EXPONENT << LOOKUP_MANTISSA_BITS)) as usize;
        let lowest_code = self.lowest_code[(bits >> 31) as usize][entry.min(LOOKUP_ENTRIES - 1)];
        lowest_code + u8::from(x > self.bounds[usize::from(lowest_code)])
    }

    /// Writes the codes of a block and returns its scale: the largest magnitude, or zero if that is below 1e-38.
    #[inline(always)]
    pub fn quantize(&self, values: &[f32], codes: &mut [u8]) -> f32 {
        let mut scale = largest(values);
        if scale < MIN_SCALE {
            scale = 0.0;
        }
        // With a scale of zero, all elements become zeros.
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let codes = codes.iter_mut().zip(values);
        codes.for_each(|(code, x)| *code = self.code(x * inverse));
        scale
    }

    /// Writes the values of a block.
    #[inline(always)]
    pub fn dequantize(&self, codes: &[u8], scale: f32, values: &mut [f32]) {
        let values = values.iter_mut().zip(codes);
        // Adding 0 gives all zeros the same sign if the scale is zero.
        values.for_each(|(x, code)| *x = self.values[usize::from(*code)] * scale + 0.0);
    }

    /// Writes the values of a block such that its codes and scale can be restored from them. In a signed map, the
    /// lowest code becomes minus the scale, because a negative element of the largest magnitude has this code.
    #[inline(always)]
    pub fn dequantize_restorable(&self, codes: &[u8], scale: f32, values: &mut [f32]) {
        let lowest = if self.values[0] < 0.0 { -1.0 } else { 0.0 };
        for (x, code) in values.iter_mut().zip(codes) {
            *x = if *code == 0 { lowest } else { self.values[usize::from(*code)] } * scale + 0.0;
        }
    }
}

/// Returns the largest magnitude. A NaN counts as larger than all numbers.
#[inline(always)]
pub(super) fn largest(values: &[f32]) -> f32 {
    f32::from_bits(values.iter().fold(0, |m, x| (x.to_bits() & 0x7fff_ffff).max(m)))
}

/// The process-wide map of signed numbers.
pub(crate) static SIGNED: LazyLock<DynamicMap> = LazyLock::new(DynamicMap::signed);

/// The process-wide map of unsigned numbers.
pub(crate) static UNSIGNED: LazyLock<DynamicMap> = LazyLock::new(DynamicMap::unsigned);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn nearest(map: &DynamicMap, x: f32) -> f32 {
        map.values.iter().copied().min_by(|a, b| (a - x).abs().total_cmp(&(b - x).abs())).expect("256 values")
    }

    fn round_trip(map: &DynamicMap, values: &[f32]) -> Vec<f32> {
        let mut codes = vec![0; values.len()];
        let scale = map.quantize(values, &mut codes);
        let mut decoded = vec![f32::NAN; values.len()];
        map.dequantize(&codes, scale, &mut decoded);
        decoded
    }

    #[test]
    fn every_number_gets_the_code_that_a_search_through_all_bounds_finds() {
        for map in [&*SIGNED, &*UNSIGNED] {
            let edges = map.bounds.iter().chain(&map.values).filter(|x| x.is_finite());
            let close = edges.flat_map(|x| [-1, 0, 1].map(|d| f32::from_bits(x.to_bits().wrapping_add_signed(d))));
            let all = (0..=1 << 16).flat_map(|i| [i as f32 / 65536.0, (i as f32 / 65536.0).powi(6)]);
            for x in close.chain(all).flat_map(|x| [x, -x]).filter(|x| x.abs() <= 1.0) {
                let expect = map.bounds.iter().take_while(|bound| x > **bound).count();
                assert_eq!(usize::from(map.code(x)), expect, "{x:e}");
            }
        }
    }

    #[test]
    fn the_maps_have_the_values_that_were_published() {
        // The decades have the centre of 0.1..1, the centres of its halves, those of its quarters, and so on.
        let close = |x: f32, y: f64| (f64::from(x) / y - 1.0).abs() < 1e-6;
        assert_eq!(
            [SIGNED.values[127], SIGNED.values[255], UNSIGNED.values[0], UNSIGNED.values[255]],
            [0.0, 1.0, 0.0, 1.0]
        );
        assert!(close(SIGNED.values[128], 0.55e-6) && close(SIGNED.values[126], -0.55e-6));
        assert!(close(SIGNED.values[129], 0.325e-5) && close(SIGNED.values[130], 0.775e-5));
        assert!(close(SIGNED.values[0], -(1.0 - 0.45 / 64.0)) && close(SIGNED.values[254], 1.0 - 0.45 / 64.0));
        assert!(close(UNSIGNED.values[1], 0.325e-6) && close(UNSIGNED.values[254], 1.0 - 0.45 / 128.0));
        assert!(SIGNED.values.is_sorted() && UNSIGNED.values.is_sorted());
    }

    proptest! {
        #[test]
        fn an_element_becomes_the_nearest_value_of_its_block(
            values in prop::collection::vec((-1f32..1.0, -7i32..1).prop_map(|(x, e)| x * 10f32.powi(e)), 1..300),
            size in -20i32..20,
        ) {
            let values: Vec<f32> = values.into_iter().map(|x| x * 10f32.powi(size)).collect();
            let scale = values.iter().fold(0f32, |m, x| m.max(x.abs()));
            prop_assume!(scale > 0.0);
            let magnitudes: Vec<f32> = values.iter().map(|x| x.abs()).collect();
            for (map, values) in [(&*SIGNED, &values), (&*UNSIGNED, &magnitudes)] {
                for (x, y) in values.iter().zip(round_trip(map, values)) {
                    // Distances are compared, because two values may be equally near.
                    let x = x / scale;
                    let (found, least) = ((y / scale - x).abs(), (nearest(map, x) - x).abs());
                    prop_assert!((found - least).abs() <= 1e-6 * x.abs() + 1e-12, "{x:e}: {found:e}, not {least:e}");
                }
            }
        }
    }

    #[test]
    fn zeros_stay_zeros_and_what_is_not_finite_is_seen() {
        assert_eq!(round_trip(&SIGNED, &[0.0; 9]), [0.0; 9]);
        assert_eq!(round_trip(&UNSIGNED, &[0.0; 9]), [0.0; 9]);
        assert_eq!(round_trip(&SIGNED, &[-1e-39, 1e-40, 0.0]), [0.0; 3]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(round_trip(&SIGNED, &[1.0, bad, 0.5]).iter().all(|x| !x.is_finite()));
        }
    }
}
