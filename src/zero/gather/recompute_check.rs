//! Checks that a recomputing unit returns the same output the second time.
//!
//! If it does not, the gradients of its second run are those of a different function from the one whose loss was
//! computed. A digest of the first output is kept, and every backward pass compares the second output with it. This
//! costs one more pass over the unit's output, which is little compared with matrix products that read it many times.

use crate::kernels::digest::digest;
use crate::tensor::residency::with_view;
use candle_core::{D, DType, Result, Shape, Tensor};

/// The digest of a unit's output, without its values.
pub(super) struct OutputDigest {
    shape: Shape,
    values: ValuesDigest,
}

/// The digest of the values.
enum ValuesDigest {
    /// A digest of the bits.
    Bits(u64),
    /// The sum and the sum of squares, in f32, of a tensor on a GPU. The sums stay there too. A kernel that computes
    /// them in a fixed order produces the same bits from the same values.
    Sums(Tensor),
}

impl OutputDigest {
    pub fn of(output: &Tensor) -> Result<Self> {
        let values = if output.device().is_cpu() {
            ValuesDigest::Bits(with_view(output, |values| digest(values.as_bytes()))?)
        } else {
            let values = output.detach().to_dtype(DType::F32)?;
            // The sum is computed row by row, because a single sum of all values would run on only one of the GPU's
            // many processors.
            let sum = |values: Tensor| match values.rank() {
                0 => Ok(values),
                _ => values.sum(D::Minus1)?.sum_all(),
            };
            ValuesDigest::Sums(Tensor::stack(&[sum(values.clone())?, sum(values.sqr()?)?], 0)?)
        };
        Ok(Self { shape: output.shape().clone(), values })
    }

    /// Returns whether `output` has the same digest.
    pub fn matches(&self, output: &Tensor) -> Result<bool> {
        if *output.shape() != self.shape {
            return Ok(false);
        }
        Ok(match (&self.values, Self::of(output)?.values) {
            (ValuesDigest::Bits(first), ValuesDigest::Bits(second)) => *first == second,
            (ValuesDigest::Sums(first), ValuesDigest::Sums(second)) => bits(first)? == bits(&second)?,
            _ => false,
        })
    }
}

fn bits(sums: &Tensor) -> Result<Vec<u32>> {
    Ok(sums.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
}
