//! Quantization of floats to small integers with one scale per block, for transfers in which the number of bytes
//! matters more than the last digits.
//!
//! ```text
//!   elements   | a block of 128          | a block of 128          | the rest     |
//!   bytes      | scale (f32) 128 codes   | scale (f32) 128 codes   | ...          |      int4: two codes in a byte
//! ```
//!
//! A block's scale is its largest magnitude divided by the largest code, and an element is rounded to the nearest
//! multiple of the scale (ties to even). The error is at most half the scale, and zeros stay zeros. If the scale would
//! be below the smallest normal f32, all elements of the block become zeros. A block that contains an infinity or a NaN
//! is decoded to elements that are all non-finite, so an overflow is still detected. The result depends only on the
//! values: rounding is not stochastic, and every CPU produces the same bytes from finite values.

use super::cast::{narrow, widen};
use super::{FlatMut, FlatRef};
use crate::kernels::simd::{SimdLoop, level};

/// The number of elements that share a scale.
pub const BLOCK: usize = 128;

/// The size of a scale in bytes.
const SCALE: usize = size_of::<f32>();

/// Adding this number to an f32 of small magnitude leaves its nearest integer (ties to even) in the low bits.
const TO_INTEGER: f32 = 12_582_912.0; // 1.5 * 2^23

/// An integer format that represents floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IntFormat {
    /// Codes from -127 to 127.
    Int8,
    /// Codes from -7 to 7.
    Int4,
}

impl IntFormat {
    /// Returns the code of a block's largest magnitude. The scale is that magnitude divided by this code.
    pub fn largest_code(self) -> f32 {
        match self {
            Self::Int8 => 127.0,
            Self::Int4 => 7.0,
        }
    }

    /// Returns the number of bytes that `elements` elements take when encoded, including scales.
    pub fn encoded_len(self, elements: usize) -> usize {
        elements.div_ceil(BLOCK) * SCALE + self.code_bytes(elements)
    }

    /// Returns the number of elements that fit into `bytes` bytes in full blocks.
    pub fn whole_blocks_in(self, bytes: usize) -> usize {
        bytes / self.encoded_len(BLOCK) * BLOCK
    }

    /// Writes the blocks of `src` to `dst`, which has [`encoded_len`](Self::encoded_len) bytes.
    pub fn encode(self, src: FlatRef<'_>, dst: &mut [u8]) {
        assert_eq!(dst.len(), self.encoded_len(src.len()), "dst must fit the codes exactly");
        level().run(EncodeBlocks { ints: self, src, dst });
    }

    /// Decodes the blocks in `src`, and rounds the values to the dtype of `dst`.
    pub fn decode(self, src: &[u8], dst: FlatMut<'_>) {
        assert_eq!(src.len(), self.encoded_len(dst.len()), "src must have the codes of all elements of dst");
        level().run(DecodeBlocks { ints: self, src, dst });
    }

    fn code_bytes(self, elements: usize) -> usize {
        match self {
            Self::Int8 => elements,
            Self::Int4 => elements.div_ceil(2),
        }
    }

    #[inline(always)]
    fn encode_block(self, values: &[f32], record: &mut [u8]) {
        // As integers, magnitudes have the same order as floats, and a NaN is larger than all of them.
        let largest = values.iter().fold(0, |m, x| (x.to_bits() & 0x7fff_ffff).max(m));
        let step = f32::from_bits(largest) / self.largest_code();
        // Below this limit, the inverse might not be finite.
        let (step, inverse) = if step < f32::MIN_POSITIVE { (0.0, 0.0) } else { (step, 1.0 / step) };
        let (scale, codes) = record.split_at_mut(SCALE);
        scale.copy_from_slice(&step.to_ne_bytes());
        let code = |x: f32| (x * inverse + TO_INTEGER).to_bits();
        match self {
            Self::Int8 => codes.iter_mut().zip(values).for_each(|(c, x)| *c = code(*x) as u8),
            Self::Int4 => {
                // A pair has one element from each half of the block, not two neighbours, because this is how vector
                // instructions pack elements.
                let (low, high) = values.split_at(codes.len());
                let pairs = codes.iter_mut().zip(low).zip(high);
                pairs.for_each(|((c, low), high)| *c = (code(*low) & 0xf | code(*high) << 4) as u8);
                if high.len() < low.len()
                    && let (Some(c), Some(low)) = (codes.last_mut(), low.last())
                {
                    *c = (code(*low) & 0xf) as u8;
                }
            }
        }
    }

    /// Decodes the values of one block.
    #[inline(always)]
    fn decode_block(self, record: &[u8], values: &mut [f32]) {
        let (scale, codes) = record.split_at(SCALE);
        let step = f32::from_ne_bytes(scale.try_into().unwrap_or_default());
        match self {
            Self::Int8 => values.iter_mut().zip(codes).for_each(|(x, c)| *x = f32::from(*c as i8) * step),
            Self::Int4 => {
                let (low, high) = values.split_at_mut(codes.len());
                low.iter_mut().zip(codes).for_each(|(x, c)| *x = f32::from((*c << 4) as i8 >> 4) * step);
                high.iter_mut().zip(codes).for_each(|(x, c)| *x = f32::from(*c as i8 >> 4) * step);
            }
        }
    }

    /// Decodes the first values of block `i` of `src`, as many as `values` has room for. This function is inlined into
    /// a [`SimdLoop`].
    #[inline(always)]
    pub(crate) fn decode_nth(self, i: usize, src: &[u8], values: &mut [f32]) {
        let start = i * self.encoded_len(BLOCK);
        self.decode_block(&src[start..start + SCALE + self.code_bytes(values.len())], values);
    }
}

struct EncodeBlocks<'a> {
    ints: IntFormat,
    src: FlatRef<'a>,
    dst: &'a mut [u8],
}

impl SimdLoop for EncodeBlocks<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { ints, src, dst } = self;
        let records = dst.chunks_mut(ints.encoded_len(BLOCK));
        if let FlatRef::F32(src) = src {
            for (record, values) in records.zip(src.chunks(BLOCK)) {
                ints.encode_block(values, record);
            }
            return;
        }
        // Several blocks are widened at a time, so that the loop is long.
        let mut widened = [0f32; 8 * BLOCK];
        for (i, record) in records.enumerate() {
            let (start, offset) = (i * BLOCK, i % 8 * BLOCK);
            if offset == 0 {
                let chunk = src.slice(start..src.len().min(start + widened.len()));
                widen(&mut widened[..chunk.len()], chunk);
            }
            ints.encode_block(&widened[offset..offset + BLOCK.min(src.len() - start)], record);
        }
    }
}

struct DecodeBlocks<'a> {
    ints: IntFormat,
    src: &'a [u8],
    dst: FlatMut<'a>,
}

impl SimdLoop for DecodeBlocks<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { ints, src, mut dst } = self;
        let mut decoded = [0f32; BLOCK];
        for (i, start) in (0..dst.len()).step_by(BLOCK).enumerate() {
            let end = dst.len().min(start + BLOCK);
            match dst.reborrow().slice(start..end) {
                FlatMut::F32(values) => ints.decode_nth(i, src, values),
                block => {
                    let values = &mut decoded[..block.len()];
                    ints.decode_nth(i, src, values);
                    narrow(block, values);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::simd::InstructionSet;
    use crate::precision::Flat;
    use candle_core::DType;
    use proptest::prelude::*;

    const INTS: [IntFormat; 2] = [IntFormat::Int8, IntFormat::Int4];

    fn there_and_back(ints: IntFormat, values: FlatRef<'_>) -> Flat {
        let mut bytes = vec![0xaa; ints.encoded_len(values.len())];
        ints.encode(values, &mut bytes);
        let mut decoded = Flat::zeros(values.dtype(), values.len());
        ints.decode(&bytes, decoded.as_mut());
        decoded
    }

    fn f32s(flat: Flat) -> Vec<f32> {
        (0..flat.len()).map(|i| flat.as_ref().get(i)).collect()
    }

    /// Returns values whose magnitudes differ by at most a few powers of ten, anywhere in the range.
    fn values() -> impl Strategy<Value = Vec<f32>> {
        let value = (-1f32..1.0, -4i32..1).prop_map(|(x, e)| x * 10f32.powi(e));
        (prop::collection::vec(prop_oneof![4 => value, 1 => Just(0.0)], 1..400), -30i32..35)
            .prop_map(|(values, e)| values.into_iter().map(|x| x * 10f32.powi(e)).collect())
    }

    proptest! {
        #[test]
        fn an_element_is_off_by_half_a_step_and_zeros_and_signs_stay(values in values()) {
            for ints in INTS {
                let decoded = f32s(there_and_back(ints, FlatRef::F32(&values)));
                for (block, decoded) in values.chunks(BLOCK).zip(decoded.chunks(BLOCK)) {
                    let step = block.iter().fold(0f32, |m, x| m.max(x.abs())) / ints.largest_code();
                    for (x, y) in block.iter().zip(decoded) {
                        prop_assert!((x - y).abs() <= 0.50001 * step, "{ints:?}: {x} became {y}; the step is {step}");
                        prop_assert!(*x != 0.0 || *y == 0.0);
                        prop_assert!(x * y >= 0.0);
                    }
                }
            }
        }

        #[test]
        fn every_level_makes_the_same_bytes_and_values(values in values()) {
            for ints in INTS {
                let results: Vec<_> = InstructionSet::available().map(|level| {
                    let mut bytes = vec![0; ints.encoded_len(values.len())];
                    level.run(EncodeBlocks { ints, src: FlatRef::F32(&values), dst: &mut bytes });
                    let mut decoded = vec![0f32; values.len()];
                    level.run(DecodeBlocks { ints, src: &bytes, dst: FlatMut::F32(&mut decoded) });
                    (bytes, decoded)
                }).collect();
                prop_assert!(results.iter().all(|r| *r == results[0]));
            }
        }

        #[test]
        fn what_is_not_finite_takes_its_block_with_it(values in values(), at in 0usize..400, kind in 0usize..3) {
            let (mut values, at) = (values.clone(), at % values.len());
            values[at] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][kind];
            for ints in INTS {
                let decoded = f32s(there_and_back(ints, FlatRef::F32(&values)));
                for (i, x) in decoded.iter().enumerate() {
                    prop_assert_eq!(x.is_finite(), i / BLOCK != at / BLOCK, "element {}", i);
                }
            }
        }
    }

    #[test]
    fn multiples_of_the_step_come_back_as_they_are() {
        for (ints, steps) in [(IntFormat::Int8, -127..=127), (IntFormat::Int4, -7..=7)] {
            let values: Vec<f32> = steps.clone().map(|code| code as f32 * 0.25).collect();
            for block in values.chunks(BLOCK) {
                // Each block contains the largest code, whichever part of the range the block covers.
                let block: Vec<f32> =
                    block.iter().copied().take(BLOCK - 1).chain([*steps.end() as f32 * 0.25]).collect();
                for dtype in [DType::F32, DType::BF16, DType::F16] {
                    let flat = Flat::from_f32(block.clone(), dtype);
                    assert_eq!(there_and_back(ints, flat.as_ref()), flat, "{ints:?}, {dtype:?}");
                }
            }
        }
    }

    #[test]
    fn numbers_of_16_bits_are_coded_as_the_same_numbers_in_f32() {
        // There are a few hundred blocks and a partial one, each with a separate scale.
        let values: Vec<f32> = (0..30_001).map(|i| ((i * 7919) % 1009) as f32 - 504.0 + (i / BLOCK) as f32).collect();
        for dtype in [DType::BF16, DType::F16] {
            let flat = Flat::from_f32(values.clone(), dtype);
            let mut wide = Flat::zeros(DType::F32, 0);
            wide.extend_cast(flat.as_ref());
            for ints in INTS {
                let mut bytes = [(); 2].map(|()| vec![0; ints.encoded_len(values.len())]);
                ints.encode(flat.as_ref(), &mut bytes[0]);
                ints.encode(wide.as_ref(), &mut bytes[1]);
                assert!(bytes[0] == bytes[1], "{ints:?}, {dtype:?}");
                let decoded = there_and_back(ints, wide.as_ref());
                let mut rounded = Flat::zeros(dtype, 0);
                rounded.extend_cast(decoded.as_ref());
                assert!(there_and_back(ints, flat.as_ref()) == rounded, "{ints:?}, {dtype:?}");
            }
        }
    }

    #[test]
    fn the_smallest_numbers_become_zeros_and_the_largest_stay_finite() {
        for ints in INTS {
            assert_eq!(f32s(there_and_back(ints, FlatRef::F32(&[1e-40, -1e-39, 0.0]))), [0.0; 3]);
            let large = f32s(there_and_back(ints, FlatRef::F32(&[3e38, -3e38])));
            assert!(large.iter().zip([3e38, -3e38]).all(|(x, y)| (x / y - 1.0).abs() < 1e-6), "{large:?}");
        }
    }

    #[test]
    fn bytes_are_counted_with_their_scales() {
        assert_eq!([0, 1, 2, 128, 129, 300].map(|n| IntFormat::Int8.encoded_len(n)), [0, 5, 6, 132, 137, 312]);
        assert_eq!([0, 1, 2, 128, 129, 300].map(|n| IntFormat::Int4.encoded_len(n)), [0, 5, 5, 68, 73, 162]);
        assert_eq!([0, 131, 132, 395, 396].map(|n| IntFormat::Int8.whole_blocks_in(n)), [0, 0, 128, 256, 384]);
    }
}
