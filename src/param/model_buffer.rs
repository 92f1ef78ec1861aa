//! Buffers: tensors of a model that are not parameters, such as running statistics, position ids and frequencies. Every
//! rank holds them in full. They have no gradient, and the optimizer does not update them.
//!
//! The model gets a variable. `Var::from_tensor` of a variable shares its memory, so values that a layer sets (such as
//! the running statistics of Candle's `BatchNorm`) are saved in checkpoints and synchronized between ranks.

use super::UnitId;
use crate::error::{ParamError, Result};
use crate::memory::MemoryLedgerEntry;
use crate::tensor::bytes;
use crate::util::counted;
use candle_core::{DType, Tensor};

/// The rule for synchronizing buffers between ranks. Each rank changes its buffers according to its own batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BufferSync {
    /// Every training forward pass begins with rank 0's buffers, as in PyTorch's `DistributedDataParallel`
    /// (`broadcast_buffers`). This costs one collective of all buffers' bytes in each forward pass.
    #[default]
    FromRankZero,
    /// At the end of each optimizer step, every floating-point buffer is set to its mean over all ranks, computed in
    /// f64 in rank order. Other buffers stay separate on each rank. This costs one collective of the floating-point
    /// buffers' bytes in each step.
    Mean,
    /// Every rank keeps its own buffers. A checkpoint contains rank 0's.
    None,
}

/// A user-defined rule that selects buffers by name and shape.
pub(crate) type BufferFilter = Box<dyn Fn(&str, &[usize]) -> bool + Send>;

/// A tensor of the model that is not a parameter.
#[derive(Debug)]
pub(crate) struct ModelBuffer {
    pub name: String,
    /// The model's tensor, a variable.
    pub tensor: Tensor,
    /// The units that were under construction when the buffer was requested.
    pub units: Vec<UnitId>,
    /// The buffer's entry in the ledger.
    #[allow(dead_code, reason = "held for its Drop")]
    pub ledger_entry: MemoryLedgerEntry,
}

/// Returns whether a tensor of that name is a buffer in PyTorch's and Hugging Face's models.
pub(crate) fn has_name_of_buffer(name: &str) -> bool {
    const NAMES: [&str; 5] = ["running_mean", "running_var", COUNTER, "position_ids", "inv_freq"];
    NAMES.contains(&last_part(name))
}

/// Returns whether a model can do without a buffer that a file contains: PyTorch's batch counter, which Candle's
/// `BatchNorm` does not request, and the causal mask of GPT-2's attention and the frequencies of Llama, which old files
/// contain.
pub(crate) fn is_dispensable(name: &str, shape: &[usize]) -> bool {
    last_part(name) == COUNTER
        || name.ends_with(".attn.masked_bias")
        || (name.ends_with(".attn.bias") && matches!(shape, [1, 1, a, b] if a == b))
        || name.ends_with(".rotary_emb.inv_freq")
}

const COUNTER: &str = "num_batches_tracked";

/// Returns the dtype of a buffer for which the model requests the dtype `requested`, in a model of dtype `model`.
/// Running statistics of a 16-bit model are f32: Candle's `BatchNorm` computes them in f32, and adds them to the
/// buffer.
pub(crate) fn dtype_of_buffer(name: &str, requested: DType, model: DType) -> DType {
    let is_statistic = matches!(last_part(name), "running_mean" | "running_var");
    if is_statistic && requested == model && model.size_in_bytes() < 4 { DType::F32 } else { requested }
}

fn last_part(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

impl ModelBuffer {
    /// Returns the size in bytes of the buffer's shape.
    pub fn size(&self) -> usize {
        self.tensor.elem_count() * self.tensor.dtype().size_in_bytes()
    }

    /// Returns the buffer's current values.
    ///
    /// # Errors
    /// The errors of [`check`](Self::check).
    pub fn bytes(&self) -> Result<Vec<u8>> {
        self.check()?;
        Ok(bytes::to_bytes(&self.tensor)?)
    }

    /// Checks that the buffer still has the number and the type of elements with which it was requested.
    ///
    /// # Errors
    /// [`ParamError::BufferChanged`] if either has changed.
    pub fn check(&self) -> Result<()> {
        let expected = (self.tensor.elem_count(), self.tensor.dtype());
        match bytes::stored_elements(&self.tensor).filter(|held| *held != expected) {
            None => Ok(()),
            Some(found) => {
                let (name, shape) = (self.name.clone(), self.tensor.dims().to_vec());
                let [found, expected] =
                    [found, expected].map(|(count, dtype)| format!("{} of type {dtype:?}", counted(count, "element")));
                Err(ParamError::BufferChanged { name, shape, found, expected }.into())
            }
        }
    }

    /// Replaces the values, for everything that holds the buffer. Shape and type stay the same.
    pub fn set(&self, bytes: &[u8]) -> Result<()> {
        Ok(bytes::set_bytes(&self.tensor, bytes)?)
    }
}
