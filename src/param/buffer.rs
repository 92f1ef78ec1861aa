//! Buffers: tensors of a model that are no parameters. They are whole on every rank, have no gradient, and the
//! optimizer does not know them: running statistics, position ids, frequencies.
//!
//! The model gets a variable. `Var::from_tensor` of a variable is the same memory, so what a layer sets (Candle's
//! `BatchNorm` its running statistics) is what is saved and brought to the other ranks.

use super::UnitId;
use crate::error::{ParamError, Result};
use crate::memory::Held;
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
pub(crate) type BufferRule = Box<dyn Fn(&str, &[usize]) -> bool + Send>;

/// A tensor of the model that is no parameter.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub name: String,
    /// The model's tensor, a variable.
    pub tensor: Tensor,
    /// The units under construction when it was asked for.
    pub units: Vec<UnitId>,
    /// Its entry in the ledger.
    #[allow(dead_code, reason = "held for its Drop")]
    pub held: Held,
}

/// Whether a tensor of that name is a buffer in PyTorch's and Hugging Face's models.
pub(crate) fn has_name_of_buffer(name: &str) -> bool {
    const NAMES: [&str; 5] = ["running_mean", "running_var", COUNTER, "position_ids", "inv_freq"];
    NAMES.contains(&last_part(name))
}

/// Whether a tensor of that name is PyTorch's count of batches, which Candle's `BatchNorm` does not ask for.
pub(crate) fn is_batch_counter(name: &str) -> bool {
    last_part(name) == COUNTER
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

impl Buffer {
    /// Bytes of its shape.
    pub fn size(&self) -> usize {
        self.tensor.elem_count() * self.tensor.dtype().size_in_bytes()
    }

    /// Its values now.
    ///
    /// # Errors
    /// [`ParamError::BufferChanged`] if it has no longer the size of its shape.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let bytes = bytes::to_bytes(&self.tensor)?;
        match bytes.len() == self.size() {
            true => Ok(bytes),
            false => Err(self.changed(bytes.len())),
        }
    }

    /// Other values for everybody who holds it.
    pub fn set(&self, bytes: &[u8]) -> Result<()> {
        match bytes.len() == self.size() {
            true => Ok(bytes::set_bytes(&self.tensor, bytes)?),
            false => Err(self.changed(bytes.len())),
        }
    }

    fn changed(&self, found: usize) -> crate::Error {
        let (name, shape) = (self.name.clone(), self.tensor.dims().to_vec());
        ParamError::BufferChanged { name, shape, found, expected: self.size() }.into()
    }
}
