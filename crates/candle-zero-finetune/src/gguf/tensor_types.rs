//! The formats of tensors in GGUF files, and their decoding.

use crate::error::Result;
use crate::model::mxfp4;
use candle_core::quantized::{GgmlDType, ggml_file::qtensor_from_ggml};
use candle_core::{Device, Tensor};
use half::{bf16, f16};

/// The format of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TensorFormat {
    /// A format that Candle decodes.
    Candle(GgmlDType),
    /// Blocks of 32 codes of 4 bits, with a power of two as their common factor.
    Mxfp4,
    /// A format that is not supported, with its number in files.
    Other(u32),
}

/// The supported formats, for messages.
pub(super) const SUPPORTED_FORMATS: &str =
    "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K and MXFP4";

/// The number of bytes of a block in MXFP4: a scale, and two codes per byte.
const MXFP4_BYTES: usize = 1 + mxfp4::BLOCK / 2;

impl TensorFormat {
    /// Returns the format with this number in files.
    pub fn of_id(id: u32) -> Self {
        use GgmlDType::{BF16, F16, F32, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
        Self::Candle(match id {
            0 => F32,
            1 => F16,
            2 => Q4_0,
            3 => Q4_1,
            6 => Q5_0,
            7 => Q5_1,
            8 => Q8_0,
            10 => Q2K,
            11 => Q3K,
            12 => Q4K,
            13 => Q5K,
            14 => Q6K,
            30 => BF16,
            39 => return Self::Mxfp4,
            other => return Self::Other(other),
        })
    }

    /// Returns whether elements can be decoded.
    pub fn is_supported(self) -> bool {
        !matches!(self, Self::Other(_))
    }

    /// Returns the number of elements in a block.
    pub fn block(self) -> usize {
        match self {
            Self::Candle(dtype) => dtype.block_size(),
            Self::Mxfp4 => mxfp4::BLOCK,
            Self::Other(_) => 1,
        }
    }

    /// Returns the number of bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::Candle(dtype) => dtype.type_size(),
            Self::Mxfp4 => MXFP4_BYTES,
            Self::Other(_) => 0,
        }
    }

    /// Appends the elements of complete blocks to `values`.
    pub fn decode(self, bytes: &[u8], values: &mut Vec<f32>) -> Result<()> {
        match self {
            Self::Candle(GgmlDType::F32) => extend(values, bytes, f32::from_le_bytes),
            Self::Candle(GgmlDType::F16) => extend(values, bytes, |b| f16::from_le_bytes(b).to_f32()),
            Self::Candle(GgmlDType::BF16) => extend(values, bytes, |b| bf16::from_le_bytes(b).to_f32()),
            Self::Candle(dtype) => {
                // The copy is aligned, as any allocation is.
                let copy = bytes.to_vec();
                let elements = bytes.len() / self.block_bytes() * self.block();
                let tensor = qtensor_from_ggml(dtype, &copy, vec![elements], &Device::Cpu)?;
                let tensor: Tensor = tensor.dequantize(&Device::Cpu)?;
                values.extend_from_slice(&tensor.to_vec1::<f32>()?);
            }
            Self::Mxfp4 => {
                for block in bytes.as_chunks::<MXFP4_BYTES>().0 {
                    let (scale, codes) = (mxfp4::factor(block[0]), &block[1..]);
                    values.extend(codes.iter().map(|byte| mxfp4::CODES[usize::from(byte & 15)] * scale));
                    values.extend(codes.iter().map(|byte| mxfp4::CODES[usize::from(byte >> 4)] * scale));
                }
            }
            Self::Other(_) => unreachable!("formats are checked before elements are decoded"),
        }
        Ok(())
    }
}

impl std::fmt::Display for TensorFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        /// The names of ggml's formats that are not supported, by their numbers.
        const OTHERS: [(u32, &str); 20] = [
            (9, "Q8_1"),
            (15, "Q8_K"),
            (16, "IQ2_XXS"),
            (17, "IQ2_XS"),
            (18, "IQ3_XXS"),
            (19, "IQ1_S"),
            (20, "IQ4_NL"),
            (21, "IQ3_S"),
            (22, "IQ2_S"),
            (23, "IQ4_XS"),
            (24, "I8"),
            (25, "I16"),
            (26, "I32"),
            (27, "I64"),
            (28, "F64"),
            (29, "IQ1_M"),
            (34, "TQ1_0"),
            (35, "TQ2_0"),
            (40, "NVFP4"),
            (41, "Q1_0"),
        ];
        match self {
            Self::Candle(dtype) => write!(f, "{dtype:?}"),
            Self::Mxfp4 => f.write_str("MXFP4"),
            Self::Other(id) => match OTHERS.iter().find(|(known, _)| known == id) {
                Some((_, name)) => f.write_str(name),
                None => write!(f, "{id}"),
            },
        }
    }
}

fn extend<const N: usize>(values: &mut Vec<f32>, bytes: &[u8], widen: impl Fn([u8; N]) -> f32) {
    values.extend(bytes.as_chunks::<N>().0.iter().map(|b| widen(*b)));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_mxfp4_has_its_scale_first_and_its_second_half_in_the_high_bits() {
        let mut block = vec![128u8];
        block.extend((0..16u8).map(|i| i | (15 - i) << 4));
        let mut values = Vec::new();
        TensorFormat::Mxfp4.decode(&block, &mut values).unwrap();
        let codes = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];
        let reversed: Vec<f32> = codes.iter().rev().copied().collect();
        assert_eq!(values, [&codes[..], &reversed].concat());
    }
}
