//! Whether a unit that recomputes gives the second time what it gave the first time.
//!
//! If not, the gradients of its second run are those of another function than the one whose loss was computed. A digest
//! of the first output is kept, and the second one is compared with it, in every backward: one more pass over the
//! unit's output, beside products that read it many times.

use crate::kernels::digest::digest;
use crate::tensor::residency::with_view;
use candle_core::{D, DType, Result, Shape, Tensor};

/// What a unit's output was, without its values.
pub(super) struct OutputDigest {
    shape: Shape,
    values: ValuesDigest,
}

/// The values.
enum ValuesDigest {
    /// Of the bits.
    Bits(u64),
    /// Of a tensor on a GPU, and still there: its sum and that of its squares, in f32. A kernel that forms them in a
    /// fixed order makes the same bits of the same values.
    Sums(Tensor),
}

impl OutputDigest {
    pub fn of(output: &Tensor) -> Result<Self> {
        let values = if output.device().is_cpu() {
            ValuesDigest::Bits(with_view(output, |values| digest(values.as_bytes()))?)
        } else {
            let values = output.detach().to_dtype(DType::F32)?;
            // Row by row: one sum of everything would be the work of one of the GPU's many processors.
            let sum = |values: Tensor| match values.rank() {
                0 => Ok(values),
                _ => values.sum(D::Minus1)?.sum_all(),
            };
            ValuesDigest::Sums(Tensor::stack(&[sum(values.clone())?, sum(values.sqr()?)?], 0)?)
        };
        Ok(Self { shape: output.shape().clone(), values })
    }

    /// Whether `output` is the same.
    pub fn is_again(&self, output: &Tensor) -> Result<bool> {
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
