//! Buffers: tensors of a model that are no parameters. They are whole on every rank, have no gradient, and the
//! optimizer does not know them: running statistics, position ids, frequencies.
//!
//! The model gets a variable. `Var::from_tensor` of a variable is the same memory, so what a layer sets (Candle's
//! `BatchNorm` its running statistics) is what is saved and brought to the other ranks.

use super::UnitId;
use crate::error::{ParamError, Result};
use crate::memory::LedgerEntry;
use crate::tensor::bytes;
use candle_core::{DType, Tensor};

/// Which values the running statistics of ranks have in common. Each rank changes buffers by its own batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BufferSync {
    /// Every training forward begins with rank 0's buffers, as in PyTorch's `DistributedDataParallel`
    /// (`broadcast_buffers`). Costs one collective of all buffers' bytes in each forward.
    #[default]
    FromRankZero,
    /// The mean over ranks of all floating-point buffers, in rank order in f64, at the end of each optimizer step.
    /// Others stay each rank's own. Costs one collective of their bytes in each step.
    Mean,
    /// Every rank keeps its own. A checkpoint has rank 0's.
    None,
}

/// A rule of the user's own: of which names and shapes a tensor is a buffer.
pub(crate) type BufferFilter = Box<dyn Fn(&str, &[usize]) -> bool + Send>;

/// A tensor of the model that is no parameter.
#[derive(Debug)]
pub(crate) struct ModelBuffer {
    pub name: String,
    /// The model's tensor, a variable.
    pub tensor: Tensor,
    /// The units under construction when it was asked for.
    pub units: Vec<UnitId>,
    /// Its entry in the ledger.
    #[allow(dead_code, reason = "held for its Drop")]
    pub held: LedgerEntry,
}

/// Whether a tensor of that name is a buffer in PyTorch's and Hugging Face's models.
pub(crate) fn has_name_of_buffer(name: &str) -> bool {
    const NAMES: [&str; 5] = ["running_mean", "running_var", COUNTER, "position_ids", "inv_freq"];
    NAMES.contains(&last_part(name))
}

/// Whether a model does as well without a buffer that a file has: PyTorch's count of batches, which Candle's `BatchNorm`
/// does not ask for, and the causal mask of a GPT-2's attention and the frequencies of a Llama's, which old files hold.
pub(crate) fn is_needless(name: &str, shape: &[usize]) -> bool {
    last_part(name) == COUNTER
        || name.ends_with(".attn.masked_bias")
        || (name.ends_with(".attn.bias") && matches!(shape, [1, 1, a, b] if a == b))
        || name.ends_with(".rotary_emb.inv_freq")
}

const COUNTER: &str = "num_batches_tracked";

/// The dtype of a buffer that the model asks for as `asked`, in a model of `model`. Running statistics of a 16-bit
/// model are f32: Candle's `BatchNorm` computes them so, and adds them to what it was given.
pub(crate) fn dtype_of_buffer(name: &str, asked: DType, model: DType) -> DType {
    let is_statistic = matches!(last_part(name), "running_mean" | "running_var");
    if is_statistic && asked == model && model.size_in_bytes() < 4 { DType::F32 } else { asked }
}

fn last_part(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

impl ModelBuffer {
    /// Bytes of its shape.
    pub fn size(&self) -> usize {
        self.tensor.elem_count() * self.tensor.dtype().size_in_bytes()
    }

    /// Its values now.
    ///
    /// # Errors
    /// As [`check`](Self::check)'s.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        self.check()?;
        Ok(bytes::to_bytes(&self.tensor)?)
    }

    /// Whether it still has the elements that it was asked for with.
    ///
    /// # Errors
    /// [`ParamError::BufferChanged`] if something has put others there.
    pub fn check(&self) -> Result<()> {
        let expected = (self.tensor.elem_count(), self.tensor.dtype());
        match bytes::held(&self.tensor).filter(|held| *held != expected) {
            None => Ok(()),
            Some(found) => {
                let (name, shape) = (self.name.clone(), self.tensor.dims().to_vec());
                let [found, expected] = [found, expected].map(|(count, dtype)| format!("{count} of {dtype:?}"));
                Err(ParamError::BufferChanged { name, shape, found, expected }.into())
            }
        }
    }

    /// Other values for everybody who holds it, of its shape and type.
    pub fn set(&self, bytes: &[u8]) -> Result<()> {
        Ok(bytes::set_bytes(&self.tensor, bytes)?)
    }
}
