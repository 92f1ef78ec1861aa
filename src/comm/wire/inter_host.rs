//! The encoding of elements that are sent between hosts.

use crate::precision::{BLOCK, Flat, FlatMut, FlatRef, IntFormat};
use candle_core::DType;

/// The encoding of elements that are sent between hosts: see
/// [`WireFormat::BetweenHosts`](crate::comm::WireFormat::BetweenHosts).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InterHostFormat {
    /// Integers with a scale per [`BLOCK`] elements, as in ZeRO++.
    Blocks(IntFormat),
    /// The nearest bf16 value.
    Bf16,
    /// The nearest f16 value; infinity for values beyond the largest one.
    F16,
}

impl InterHostFormat {
    /// Returns the number of elements that are encoded together.
    pub(crate) fn alignment(self) -> usize {
        match self {
            Self::Blocks(_) => BLOCK,
            Self::Bf16 | Self::F16 => 1,
        }
    }

    /// Returns the number of bytes of the codes of `elements` elements.
    pub(crate) fn encoded_len(self, elements: usize) -> usize {
        match self {
            Self::Blocks(ints) => ints.encoded_len(elements),
            Self::Bf16 | Self::F16 => 2 * elements,
        }
    }

    /// Returns the number of elements that fit into `bytes`, in complete blocks.
    pub(in crate::comm) fn elements_in(self, bytes: usize) -> usize {
        match self {
            Self::Blocks(ints) => ints.whole_blocks_in(bytes),
            Self::Bf16 | Self::F16 => bytes / 2,
        }
    }

    /// Writes the encoded `values` to `to`, which has [`encoded_len`](Self::encoded_len) bytes.
    pub(in crate::comm) fn encode(self, values: FlatRef<'_>, to: &mut [u8]) {
        match self.ints_or_dtype() {
            Ok(ints) => ints.encode(values, to),
            Err(dtype) => {
                let mut rounded = Flat::zeros(dtype, values.len());
                rounded.as_mut().copy_cast(values);
                to.copy_from_slice(rounded.as_bytes());
            }
        }
    }

    /// Decodes `codes`, which must be aligned like elements, and writes the values to `to`, rounded to its dtype.
    pub(in crate::comm) fn decode(self, codes: &[u8], to: FlatMut<'_>) {
        match self.ints_or_dtype() {
            Ok(ints) => ints.decode(codes, to),
            Err(dtype) => to.copy_cast(FlatRef::of_bytes(dtype, codes)),
        }
    }

    /// Returns the integer format, or the dtype of rounded elements.
    pub(in crate::comm) fn ints_or_dtype(self) -> std::result::Result<IntFormat, DType> {
        match self {
            Self::Blocks(ints) => Ok(ints),
            Self::Bf16 => Err(DType::BF16),
            Self::F16 => Err(DType::F16),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_as_long_as_they_say_and_stand_for_the_nearest_values() {
        let values: Vec<f32> = (0..300).map(|i| (i as f32 - 150.0) * 0.37).collect();
        for code in [
            InterHostFormat::Blocks(IntFormat::Int4),
            InterHostFormat::Blocks(IntFormat::Int8),
            InterHostFormat::Bf16,
            InterHostFormat::F16,
        ] {
            let mut codes = vec![0; code.encoded_len(values.len())];
            code.encode(FlatRef::F32(&values), &mut codes);
            let mut decoded = vec![0f32; values.len()];
            code.decode(&codes, FlatMut::F32(&mut decoded));
            let step = match code.ints_or_dtype() {
                Ok(ints) => 150.0 * 0.37 / ints.largest_code(),
                Err(_) => 0.25,
            };
            assert!(values.iter().zip(&decoded).all(|(a, b)| (a - b).abs() <= 0.51 * step), "{code:?}");
            let fit = code.elements_in(codes.len());
            assert!(code.encoded_len(fit) <= codes.len() && fit.is_multiple_of(code.alignment()), "{code:?}");
        }
    }
}
