//! The storage format of an optimizer's states between two steps.

use crate::kernels::parallel::{ParallelChunks, for_each_part};
use crate::kernels::simd::{SimdLoop, level};
use crate::precision::dynamic_map::{BLOCK, DynamicMap, SIGNED, UNSIGNED};
use std::ops::Range;

/// The storage format of an optimizer state between two steps. A step works on f32 in all formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum StateFormat {
    /// Unchanged f32: 4 bytes per element.
    #[default]
    F32,
    /// Rounded to bfloat16: 2 bytes per element.
    Bf16,
    /// 8-bit codes of the dynamic map (arXiv 2110.02861) with one scale per 256 elements, for numbers of both signs:
    /// 1.02 bytes per element.
    Signed8,
    /// Like [`Signed8`](Self::Signed8), but for non-negative numbers, with steps half as large.
    Unsigned8,
}

impl StateFormat {
    /// Returns the number of consecutive elements of a parameter that must be on the same rank.
    pub fn block(self) -> usize {
        self.map().map_or(1, |_| BLOCK)
    }

    /// Returns the number of bytes that `elements` elements take, including scales.
    pub fn bytes(self, elements: usize) -> usize {
        match self {
            Self::F32 => 4 * elements,
            Self::Bf16 => 2 * elements,
            Self::Signed8 | Self::Unsigned8 => elements + 4 * elements.div_ceil(BLOCK),
        }
    }

    /// Returns the map of the format's codes, if it has one.
    pub(crate) fn map(self) -> Option<&'static DynamicMap> {
        match self {
            Self::F32 | Self::Bf16 => None,
            Self::Signed8 => Some(&SIGNED),
            Self::Unsigned8 => Some(&UNSIGNED),
        }
    }
}

/// The number of elements that one thread encodes or decodes at a time, which is a multiple of the block size.
const CHUNK: usize = 128 * BLOCK;

/// Returns the range of scales for elements `range`, which must begin at a block boundary.
pub(crate) fn scales_of(range: &Range<usize>) -> Range<usize> {
    range.start / BLOCK..range.end.div_ceil(BLOCK)
}

/// The conversion of codes to numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DecodeMode {
    /// Conversion by the map.
    ByMap,
    /// Conversion to numbers that are encoded to the same codes again. In a signed map, the lowest code is converted to
    /// minus the scale, because a negative element of the largest magnitude has this code.
    Restorable,
}

/// Encodes `values` to codes and scales (one per [`BLOCK`] elements).
pub(crate) fn encode(map: &DynamicMap, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
    assert!(codes.len() == values.len() && scales.len() == values.len().div_ceil(BLOCK), "buffers must fit all codes");
    let parts = (ParallelChunks::new(codes, CHUNK), ParallelChunks::new(scales, CHUNK / BLOCK));
    for_each_part(values.len().div_ceil(CHUNK), parts, |i, (codes, scales)| {
        let values = &values[i * CHUNK..][..codes.len()];
        level().run(EncodeState { map, values, codes, scales });
    });
}

/// Decodes codes and scales to values.
pub(crate) fn decode(map: &DynamicMap, mode: DecodeMode, codes: &[u8], scales: &[f32], values: &mut [f32]) {
    assert!(codes.len() == values.len() && scales.len() == values.len().div_ceil(BLOCK), "buffers must fit all codes");
    for_each_part(codes.len().div_ceil(CHUNK), ParallelChunks::new(values, CHUNK), |i, values| {
        let (codes, scales) = (&codes[i * CHUNK..][..values.len()], &scales[i * CHUNK / BLOCK..]);
        level().run(DecodeState { map, mode, codes, scales, values });
    });
}

struct EncodeState<'a> {
    map: &'a DynamicMap,
    values: &'a [f32],
    codes: &'a mut [u8],
    scales: &'a mut [f32],
}

impl SimdLoop for EncodeState<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let blocks = self.values.chunks(BLOCK).zip(self.codes.chunks_mut(BLOCK));
        for ((values, codes), scale) in blocks.zip(self.scales) {
            *scale = self.map.quantize(values, codes);
        }
    }
}

struct DecodeState<'a> {
    map: &'a DynamicMap,
    mode: DecodeMode,
    codes: &'a [u8],
    scales: &'a [f32],
    values: &'a mut [f32],
}

impl SimdLoop for DecodeState<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let blocks = self.values.chunks_mut(BLOCK).zip(self.codes.chunks(BLOCK));
        for ((values, codes), scale) in blocks.zip(self.scales) {
            match self.mode {
                DecodeMode::ByMap => self.map.dequantize(codes, *scale, values),
                DecodeMode::Restorable => self.map.dequantize_restorable(codes, *scale, values),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn coded(map: &DynamicMap, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let (mut codes, mut scales) = (vec![0; values.len()], vec![0.0; values.len().div_ceil(BLOCK)]);
        encode(map, values, &mut codes, &mut scales);
        (codes, scales)
    }

    proptest! {
        #[test]
        fn what_is_restored_from_numbers_has_the_same_codes_and_scales(
            values in prop::collection::vec((-1f32..1.0, -12i32..1).prop_map(|(x, e)| x * 10f32.powi(e)), 1..1200),
            size in -40i32..20,
        ) {
            let values: Vec<f32> = values.into_iter().map(|x| (f64::from(x) * 10f64.powi(size)) as f32).collect();
            let magnitudes: Vec<f32> = values.iter().map(|x| x.abs()).collect();
            for (map, values) in [(&*SIGNED, values), (&*UNSIGNED, magnitudes)] {
                let (codes, scales) = coded(map, &values);
                let mut numbers = vec![0.0; values.len()];
                decode(map, DecodeMode::Restorable, &codes, &scales, &mut numbers);
                prop_assert!(coded(map, &numbers) == (codes, scales));
            }
        }
    }

    #[test]
    fn long_states_get_the_same_codes_with_any_number_of_threads() {
        let values: Vec<f32> = (0..5 * CHUNK + 777).map(|i| ((i * 7919) % 100_003) as f32 / 5e4 - 1.0).collect();
        let results = [1, 3].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            pool.install(|| {
                let (codes, scales) = coded(&SIGNED, &values);
                let mut decoded = vec![0.0; values.len()];
                decode(&SIGNED, DecodeMode::ByMap, &codes, &scales, &mut decoded);
                (codes, scales, decoded)
            })
        });
        assert!(results[0] == results[1]);
    }

    #[test]
    fn two_states_of_eight_bits_take_little_more_than_two_bytes_an_element() {
        let bytes = StateFormat::Signed8.bytes(1 << 20) + StateFormat::Unsigned8.bytes(1 << 20);
        assert!(bytes as f64 <= 2.04 * f64::from(1 << 20), "{bytes}");
        assert_eq!([1, 256, 257].map(|n| StateFormat::Signed8.bytes(n)), [5, 260, 265]);
    }
}
