//! NF4: sixteen levels derived from a normal distribution, with one scale per block (arXiv 2305.14314, section 3).
//!
//! ```text
//!   scales of 16 bits   | scale (bf16) 32 bytes of codes | ...  one such entry for each block of 64 elements
//!   double-quantized    | offset (f32) scale (f32) | 256 codes of scales | 256 x 32 bytes of codes | ...
//! ```
//!
//! A byte holds two elements, the first in its high half, as in bitsandbytes. A partial block occupies the space of a
//! full one. The scale of a block is its largest magnitude. With double quantization, the mean of the scales of 256
//! blocks is subtracted, and the results become codes of the [dynamic map](super::dynamic_map), as in bitsandbytes.
//! However, bitsandbytes takes the mean over a complete tensor, whereas candle-zero takes a separate mean for each
//! group of 256 blocks, so that the group can be packed independently of the others.

use super::cast::{narrow, widen};
use super::dynamic_map::{MIN_SCALE, SIGNED as SCALES, largest};
use super::{FlatMut, FlatRef};
use crate::kernels::simd::SimdLoop;

/// The number of elements that share a scale.
pub(super) const BLOCK: usize = 64;

/// The size in bytes of a block's codes.
const CODES: usize = BLOCK / 2;

/// The number of blocks whose scales are quantized together.
const NESTED_BLOCKS: usize = 256;

/// The size in bytes of the offset and the scale that precede the codes of nested scales.
const NESTED_HEAD: usize = 2 * size_of::<f32>();

/// The values of the sixteen codes.
pub(crate) const LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The bounds between adjacent levels. A number on a bound belongs to the lower level.
const BOUNDS: [f32; 15] = {
    let mut bounds = [0.0; 15];
    let mut i = 0;
    while i < bounds.len() {
        bounds[i] = (LEVELS[i] + LEVELS[i + 1]) / 2.0;
        i += 1;
    }
    bounds
};

/// The two values of each byte.
static PAIRS: [[f32; 2]; 256] = {
    let mut pairs = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < pairs.len() {
        pairs[byte] = [LEVELS[byte >> 4], LEVELS[byte & 15]];
        byte += 1;
    }
    pairs
};

/// The storage format of the blocks' scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Nf4Scales {
    /// 16 bits per scale, rounded to nearest: 0.531 bytes per element.
    Bf16,
    /// 8 bits per scale, and 8 bytes for every 256 scales: 0.516 bytes per element.
    DoubleQuantized,
}

impl Nf4Scales {
    /// Returns the number of elements that are packed together, independently of all others.
    pub(super) fn unit(self) -> usize {
        match self {
            Self::Bf16 => BLOCK,
            Self::DoubleQuantized => NESTED_BLOCKS * BLOCK,
        }
    }

    pub(super) fn packed_len(self, elements: usize) -> usize {
        let blocks = elements.div_ceil(BLOCK);
        match self {
            Self::Bf16 => blocks * (2 + CODES),
            Self::DoubleQuantized => blocks * (1 + CODES) + blocks.div_ceil(NESTED_BLOCKS) * NESTED_HEAD,
        }
    }
}

pub(super) struct PackNf4<'a> {
    pub scales: Nf4Scales,
    pub src: FlatRef<'a>,
    pub dst: &'a mut [u8],
}

impl SimdLoop for PackNf4<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { scales, src, dst } = self;
        let mut scratch = [0f32; BLOCK];
        match scales {
            Nf4Scales::Bf16 => {
                for (i, record) in dst.chunks_exact_mut(2 + CODES).enumerate() {
                    let values = block(src, i, &mut scratch);
                    let (scale, codes) = record.split_at_mut(2);
                    let largest = largest(values);
                    scale.copy_from_slice(&half::bf16::from_f32(largest).to_le_bytes());
                    pack_block(values, largest, codes);
                }
            }
            Nf4Scales::DoubleQuantized => {
                for (i, record) in dst.chunks_mut(scales.packed_len(scales.unit())).enumerate() {
                    let blocks = (record.len() - NESTED_HEAD) / (1 + CODES);
                    let (head, rest) = record.split_at_mut(NESTED_HEAD);
                    let (nested, codes) = rest.split_at_mut(blocks);
                    let mut block_scales = [0f32; NESTED_BLOCKS];
                    for (b, codes) in codes.chunks_exact_mut(CODES).enumerate() {
                        let values = block(src, i * NESTED_BLOCKS + b, &mut scratch);
                        block_scales[b] = largest(values);
                        pack_block(values, block_scales[b], codes);
                    }
                    let scales = &mut block_scales[..blocks];
                    let mean = (scales.iter().map(|s| f64::from(*s)).sum::<f64>() / blocks.max(1) as f64) as f32;
                    scales.iter_mut().for_each(|s| *s -= mean);
                    let scale = SCALES.quantize(scales, nested);
                    head[..4].copy_from_slice(&mean.to_le_bytes());
                    head[4..].copy_from_slice(&scale.to_le_bytes());
                }
            }
        }
    }
}

pub(super) struct UnpackNf4<'a> {
    pub scales: Nf4Scales,
    pub src: &'a [u8],
    pub dst: FlatMut<'a>,
}

impl SimdLoop for UnpackNf4<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { scales, src, mut dst } = self;
        match scales {
            Nf4Scales::Bf16 => {
                for (i, [low, high, codes @ ..]) in src.as_chunks::<{ 2 + CODES }>().0.iter().enumerate() {
                    let scale = half::bf16::from_le_bytes([*low, *high]).to_f32();
                    unpack_block(codes, scale, &mut dst, i);
                }
            }
            Nf4Scales::DoubleQuantized => {
                for (i, record) in src.chunks(scales.packed_len(scales.unit())).enumerate() {
                    let blocks = (record.len() - NESTED_HEAD) / (1 + CODES);
                    let (head, rest) = record.split_at(NESTED_HEAD);
                    let (nested, codes) = rest.split_at(blocks);
                    let float = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap_or_default());
                    let (mean, scale) = (float(&head[..4]), float(&head[4..]));
                    for (b, codes) in codes.as_chunks::<CODES>().0.iter().enumerate() {
                        let scale = SCALES.value(nested[b]) * scale + mean;
                        unpack_block(codes, scale, &mut dst, i * NESTED_BLOCKS + b);
                    }
                }
            }
        }
    }
}

/// Returns block `i` of the elements, in f32.
#[inline(always)]
fn block<'a>(src: FlatRef<'a>, i: usize, scratch: &'a mut [f32; BLOCK]) -> &'a [f32] {
    let range = i * BLOCK..src.len().min((i + 1) * BLOCK);
    match src.slice(range) {
        FlatRef::F32(values) => values,
        narrow => {
            let values = &mut scratch[..narrow.len()];
            widen(values, narrow);
            values
        }
    }
}

#[inline(always)]
fn pack_block(values: &[f32], largest: f32, codes: &mut [u8]) {
    let inverse = 1.0 / largest.max(MIN_SCALE);
    let mut block_codes = [0u8; BLOCK];
    // Missing elements are zeros.
    block_codes[values.len()..].fill(7);
    for (code, x) in block_codes.iter_mut().zip(values) {
        let x = x * inverse;
        *code = BOUNDS.iter().map(|bound| u8::from(x > *bound)).sum();
    }
    for (byte, pair) in codes.iter_mut().zip(block_codes.as_chunks::<2>().0) {
        *byte = pair[0] << 4 | pair[1];
    }
}

/// Writes block `i` of `dst`.
#[inline(always)]
fn unpack_block(codes: &[u8; CODES], scale: f32, dst: &mut FlatMut<'_>, i: usize) {
    let range = i * BLOCK..dst.len().min((i + 1) * BLOCK);
    let len = range.len();
    let mut scratch = [0f32; BLOCK];
    match dst.reborrow().slice(range) {
        FlatMut::F32(values) if len == BLOCK => {
            scaled_levels(codes, scale, values.first_chunk_mut().unwrap_or(&mut scratch))
        }
        dst => {
            scaled_levels(codes, scale, &mut scratch);
            narrow(dst, &scratch[..len]);
        }
    }
}

/// Computes the elements of a block. With constant lengths, the compiled code looks up all levels before it multiplies
/// them.
#[inline(always)]
fn scaled_levels(codes: &[u8; CODES], scale: f32, values: &mut [f32; BLOCK]) {
    let mut levels = [[0f32; 2]; CODES];
    for (pair, byte) in levels.iter_mut().zip(codes) {
        *pair = PAIRS[usize::from(*byte)];
    }
    for (x, level) in values.iter_mut().zip(levels.as_flattened()) {
        *x = level * scale;
    }
}
