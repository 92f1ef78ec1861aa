//! The input that a recomputing unit keeps from its forward pass to its backward pass, in the storage that
//! `cpu_checkpointing` selects.

use crate::offload::SpilledTensor;
use crate::tensor::residency::{storage_on, to_storage, with_view};
use crate::zero::rank_core::RankCore;
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Shape, Tensor};

/// The input of a recomputing unit.
pub(super) enum RecomputeInput {
    /// The input stays where it was.
    Here(Tensor),
    /// The input is on the host, for a model on a GPU.
    Host(Tensor, Device),
    /// The input is in a file.
    File(SpilledTensor, Shape, Device),
}

impl RankCore {
    /// Keeps `input` in the storage that `cpu_checkpointing` selects, without a graph.
    pub(super) fn keep_input(&self, input: &Tensor) -> Result<RecomputeInput> {
        let input = input.detach();
        if !self.recomputation.cpu_checkpointing || !matches!(input.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            return Ok(RecomputeInput::Here(input));
        }
        let device = input.device().clone();
        if let Some(offload) = &self.offload {
            let values = with_view(&input, |values| values.to_flat())?;
            let spilled = offload.spill(values).map_err(|e| self.stash(e))?;
            return Ok(RecomputeInput::File(spilled, input.shape().clone(), device));
        }
        // On a CPU, the input is already in the host's memory.
        if device.is_cpu() {
            Ok(RecomputeInput::Here(input))
        } else {
            Ok(RecomputeInput::Host(input.to_device(&Device::Cpu)?, device))
        }
    }

    /// Returns the input, on the model's device.
    pub(super) fn kept_input(&self, saved: &RecomputeInput) -> Result<Tensor> {
        match saved {
            RecomputeInput::Here(input) => Ok(input.clone()),
            RecomputeInput::Host(input, device) => input.to_device(device),
            RecomputeInput::File(spilled, shape, device) => {
                let values = spilled.fetch().map_err(|e| self.stash(e))?;
                let storage = storage_on(device, to_storage(values))?;
                Ok(Tensor::from_storage(storage, shape.clone(), BackpropOp::none(), false))
            }
        }
    }
}
