//! Weights that are on a GPU while the step that changes them runs on the host (ZeRO-Offload, arXiv 2101.06840).
//!
//! ```text
//!   master weights, states, gradients on the host -> step -> new weights -> GPU -> in place
//!                                                            (while the next piece is updated)
//!   without master weights: weights -> host, before the step
//! ```

use crate::cuda;
use crate::error::Result;
use crate::param::ParamId;
use crate::precision::{ElementBuffer, Flat, FlatMut};
use crate::tensor::device_elements::change;
use crate::tensor::flat_buffer::FlatBuffer;
use crate::tensor::host_slice::with_host_slice;
use crate::zero::rank_core::RankCore;
use crate::zero::share::state_storage::{StateStorage, weights_are_on_gpu};
use crate::zero::share::sub_group::SweepMode;
use crate::zero::step_executor::StepExecutor;
use crate::zero::transfer::device_copy::{CopyPayloadKind, DeviceCopy, UPDATE_CHUNK};
use candle_core::CudaDevice;
use std::collections::VecDeque;
use std::ops::Range;

/// The maximum number of pieces that are still being copied when the next one is visited.
const IN_FLIGHT: usize = 1;

/// A sweep through weights that are on a GPU.
pub(in crate::zero) struct HostStepWeights<'a> {
    core: &'a RankCore,
    /// The storage of shards of weights; `None` if weights are not sharded, but are in the parameters' tensors.
    storage: Option<&'a mut StateStorage<RankCore>>,
    device: &'a CudaDevice,
    mode: SweepMode,
    /// Whether the step recomputes the weights from master weights.
    from_master: bool,
    pending: VecDeque<(WeightRange, DeviceCopy)>,
}

/// Some weights of a parameter.
#[derive(Clone)]
pub(in crate::zero) struct WeightRange {
    pub param: ParamId,
    /// The elements in the parameter's tensor, if the weights are not sharded.
    pub in_tensor: Range<usize>,
    /// The elements in the sub-group.
    pub in_group: Range<usize>,
}

impl<'a> HostStepWeights<'a> {
    /// Creates a sweep for the weights of a sub-group, which are in its `storage` or in the parameters' tensors. If
    /// they are not on a GPU, or the sweep does not need them, returns their storage instead.
    pub fn for_weights(
        core: &'a RankCore,
        storage: &'a mut Option<StateStorage<RankCore>>,
        mode: SweepMode,
        from_master: bool,
    ) -> (Option<Self>, Option<&'a mut StateStorage<RankCore>>) {
        let is_on_gpu = mode.has_weights() && weights_are_on_gpu(core, storage.as_ref());
        let (storage, pending) = (storage.as_mut(), VecDeque::new());
        match core.model_location.gpu() {
            Some(device) if is_on_gpu => (Some(Self { core, storage, device, mode, from_master, pending }), None),
            _ => (None, storage),
        }
    }

    /// Returns the number of elements that are visited together. If the sweep only reads weights, all of them are
    /// visited together.
    pub fn piece(&self) -> usize {
        if self.mode.changes() { UPDATE_CHUNK } else { usize::MAX }
    }

    /// Calls `visit` with weights on the host, or with zeros if the step recomputes the weights from master weights.
    /// Then begins to copy the weights back if the sweep changes them.
    pub fn visit(&mut self, range: WeightRange, visit: impl FnOnce(FlatMut<'_>)) -> Result<()> {
        let mut weights = match self.from_master {
            true => Flat::zeros(self.core.params[range.param].weights.dtype(self.core.dtype), range.in_group.len()),
            false => self.read(&range)?,
        };
        visit(weights.as_mut());
        if !self.mode.changes() {
            return Ok(());
        }
        let (len, weights) = (weights.len(), FlatBuffer::Host(weights));
        let copy = self.core.send(CopyPayloadKind::Updates, weights, &self.core.model_location, len)?;
        self.pending.push_back((range, copy));
        self.settle(IN_FLIGHT)
    }

    /// Waits until all weights are in place.
    pub fn finish(mut self) -> Result<()> {
        self.settle(0)
    }

    /// Waits for the oldest copies until at most `max_pending` are pending, and puts their weights in place.
    fn settle(&mut self, max_pending: usize) -> Result<()> {
        while self.pending.len() > max_pending {
            let Some((range, copy)) = self.pending.pop_front() else { break };
            let weights = copy.wait()?;
            let source = weights.on_device().slice(0..weights.len())?;
            match &mut self.storage {
                Some(StateStorage::Memory(storage)) => {
                    let target = storage.buffer_mut().on_device_mut().slice_mut(range.in_group)?;
                    cuda::copy(self.device, target, &source)?;
                }
                Some(StateStorage::File(_)) => unreachable!("states in files are not on a GPU"),
                None => change(&self.core.params[range.param].tensor, |mut values| {
                    cuda::copy(self.device, values.slice_mut(range.in_tensor)?, &source)
                })?,
            }
        }
        Ok(())
    }

    fn read(&self, range: &WeightRange) -> Result<Flat> {
        match &self.storage {
            Some(StateStorage::Memory(storage)) => {
                storage.buffer().read(range.in_group.clone(), |values| values.to_flat())
            }
            Some(StateStorage::File(_)) => unreachable!("states in files are not on a GPU"),
            None => {
                let tensor = &self.core.params[range.param].tensor;
                Ok(with_host_slice(tensor, range.in_tensor.clone(), |values| values.to_flat())?)
            }
        }
    }
}
