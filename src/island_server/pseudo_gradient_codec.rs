//! Pseudo-gradients, the changes in the weights between two exchanges, on the wire, and their mean.

use crate::config::{IslandWireDtype, LocalStepsConfig};
use crate::precision::{Flat, FlatMut, FlatRef, IntFormat};
use candle_core::DType;
use serde::{Deserialize, Serialize};

/// The format in which pseudo-gradients (changes in weights) and their means are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PseudoGradientFormat {
    /// Unchanged.
    Fp32,
    /// Rounded to bfloat16.
    Bf16,
    /// 8-bit integers with a scale per block.
    Int8,
    /// 4-bit integers with a scale per block.
    Int4,
}

impl From<IslandWireDtype> for PseudoGradientFormat {
    fn from(wire: IslandWireDtype) -> Self {
        match wire {
            IslandWireDtype::F32 => Self::Fp32,
            IslandWireDtype::Bf16 => Self::Bf16,
            IslandWireDtype::Int8 => Self::Int8,
            IslandWireDtype::Int4 => Self::Int4,
        }
    }
}

impl LocalStepsConfig {
    /// Returns the number of bytes in which `wire_dtype` represents the change in `elements` weights, or `None` if no
    /// memory could hold that many.
    pub fn change_bytes(&self, elements: u64) -> Option<u64> {
        PseudoGradientFormat::from(self.wire).encoded_len(elements)
    }
}

impl PseudoGradientFormat {
    /// Returns the number of bytes of `elements` elements, or `None` if no memory could hold that many.
    pub fn encoded_len(self, elements: u64) -> Option<u64> {
        /// More elements than any memory could hold.
        const MAX_ELEMENTS: u64 = 1 << 48;
        let elements = usize::try_from(elements).ok().filter(|elements| *elements as u64 <= MAX_ELEMENTS)?;
        Some(match self {
            Self::Fp32 => elements as u64 * 4,
            Self::Bf16 => elements as u64 * 2,
            Self::Int8 => IntFormat::Int8.encoded_len(elements) as u64,
            Self::Int4 => IntFormat::Int4.encoded_len(elements) as u64,
        })
    }

    /// Encodes values.
    pub fn encode(self, values: Vec<f32>) -> Vec<u8> {
        let blocks = |ints: IntFormat, values: Vec<f32>| {
            let mut bytes = vec![0; ints.encoded_len(values.len())];
            ints.encode(FlatRef::F32(&values), &mut bytes);
            bytes
        };
        match self {
            Self::Fp32 => Flat::from(values).as_ref().as_bytes().to_vec(),
            Self::Bf16 => Flat::from_f32(values, DType::BF16).as_ref().as_bytes().to_vec(),
            Self::Int8 => blocks(IntFormat::Int8, values),
            Self::Int4 => blocks(IntFormat::Int4, values),
        }
    }

    /// Decodes `len` values.
    ///
    /// # Panics
    /// Panics unless `bytes` has the encoded length of `len` elements.
    pub fn decode(self, bytes: &[u8], len: usize) -> Vec<f32> {
        assert_eq!(Some(bytes.len() as u64), self.encoded_len(len as u64), "the length was checked on arrival");
        let mut values = vec![0f32; len];
        let decode_floats = |dtype: DType, values: &mut [f32]| {
            let mut flat = Flat::zeros(dtype, len);
            flat.as_bytes_mut().copy_from_slice(bytes);
            FlatMut::F32(values).copy_cast(flat.as_ref());
        };
        match self {
            Self::Fp32 => decode_floats(DType::F32, &mut values),
            Self::Bf16 => decode_floats(DType::BF16, &mut values),
            Self::Int8 => IntFormat::Int8.decode(bytes, FlatMut::F32(&mut values)),
            Self::Int4 => IntFormat::Int4.decode(bytes, FlatMut::F32(&mut values)),
        }
        values
    }

    /// Returns the encoded mean of encoded changes of `len` elements, each weighted by its samples: the sum in the
    /// order of the changes, in f32. In fp32, it has the same bits as in an exchange without a server.
    pub fn mean(self, changes: &[(u64, &[u8])], len: usize) -> Vec<u8> {
        let total: f64 = changes.iter().map(|(samples, _)| *samples as f64).sum();
        let mut sum: Option<Vec<f32>> = None;
        for (samples, bytes) in changes {
            let weight = (*samples as f64 / total) as f32;
            let values = self.decode(bytes, len);
            match &mut sum {
                None => sum = Some(values.into_iter().map(|value| value * weight).collect()),
                Some(sum) => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value * weight),
            }
        }
        self.encode(sum.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [PseudoGradientFormat; 4] = [
        PseudoGradientFormat::Fp32,
        PseudoGradientFormat::Bf16,
        PseudoGradientFormat::Int8,
        PseudoGradientFormat::Int4,
    ];

    #[test]
    fn values_arrive_within_the_precision_of_their_format() {
        let values: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).sin()).collect();
        for (format, tolerance) in ALL.into_iter().zip([0.0, 4e-3, 8e-3, 0.15]) {
            let bytes = format.encode(values.clone());
            assert_eq!(Some(bytes.len() as u64), format.encoded_len(1000));
            let arrived = format.decode(&bytes, 1000);
            assert!(values.iter().zip(&arrived).all(|(a, b)| (a - b).abs() <= tolerance), "{format:?}");
        }
        assert_eq!(PseudoGradientFormat::Int4.encoded_len(u64::MAX), None);
    }

    #[test]
    fn a_mean_is_weighted_by_samples() {
        let [a, b] = [vec![1.0, 2.0], vec![5.0, -2.0]].map(|values| PseudoGradientFormat::Fp32.encode(values));
        let mean = PseudoGradientFormat::Fp32.mean(&[(3, &a), (1, &b), (0, &b)], 2);
        assert_eq!(PseudoGradientFormat::Fp32.decode(&mean, 2), [2.0, 1.0]);
    }
}
