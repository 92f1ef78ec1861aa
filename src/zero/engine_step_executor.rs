//! The engine's core as a [`StepExecutor`]: the rank that trains.

use super::rank_core::RankCore;
use super::share::share_storage::ShareStorage;
use super::share::sub_group::SubGroup;
use super::step::pipeline_vote::PipelineVote;
use super::step_executor::{RankInfo, StepExecutor};
use super::transfer::device_copy::{CopyPayloadKind, DeviceCopy};
use super::transfer::pending_collective::{CollectiveOp, CollectiveTransport, PendingCollective};
use crate::comm::WireFormat;
use crate::error::Result;
use crate::memory::MemoryLedger;
use crate::offload::{FileIo, WindowSettings};
use crate::param::{Param, ParamId};
use crate::tensor::flat_buffer::{BufferDevice, FlatBuffer};
use crate::tensor::host_slice::with_host_slice;
use crate::tensor::residency;
use crate::util::lock;
use std::ops::Range;
use std::sync::MutexGuard;
#[cfg(feature = "cuda")]
use {crate::tensor::device_elements::with_each, candle_core::Storage};

impl ShareStorage for RankCore {
    type Buffer = FlatBuffer;
    type Files = FileIo;

    fn share_location(&self) -> &BufferDevice {
        &self.share_location
    }

    fn model_location(&self) -> &BufferDevice {
        &self.model_location
    }

    fn files(&self) -> Option<&FileIo> {
        self.offload.as_ref().map(|offload| &*offload.io)
    }

    fn ledger(&self) -> &MemoryLedger {
        &self.ledger
    }
}

impl StepExecutor for RankCore {
    type Pending = PendingCollective;
    type PendingCopy = DeviceCopy;

    fn info(&self) -> RankInfo<'_> {
        RankInfo {
            rank: self.comm.rank(),
            mesh: self.share_plan.mesh,
            second_group: self.second_group,
            params: &self.params,
            zero: &self.zero,
            dtype: self.dtype,
            tier: self.tensor_tier,
        }
    }

    fn is_evaluating(&self) -> bool {
        Self::is_evaluating(self)
    }

    fn groups(&self) -> MutexGuard<'_, Vec<SubGroup<Self>>> {
        lock(&self.groups)
    }

    fn slot_of(&self, param: ParamId) -> (usize, usize) {
        Self::slot_of(self, param)
    }

    fn windows(&self) -> WindowSettings {
        self.offload.as_ref().map_or_else(WindowSettings::default, |offload| offload.windows())
    }

    fn launch(
        &self,
        collective: CollectiveOp,
        wire: WireFormat,
        buffer: FlatBuffer,
        params: &[ParamId],
    ) -> Result<PendingCollective> {
        let transport = CollectiveTransport {
            comm: self.comm_of(params),
            #[cfg(feature = "cuda")]
            gpus: self.gpus.get(),
            #[cfg(feature = "cuda")]
            ledger: &self.ledger,
        };
        PendingCollective::launch(&transport, collective, wire, buffer, self.tag(params))
    }

    fn wait(&self, pending: PendingCollective) -> Result<FlatBuffer> {
        pending.wait()
    }

    fn send(
        &self,
        kind: CopyPayloadKind,
        buffer: FlatBuffer,
        to: &BufferDevice,
        capacity: usize,
    ) -> Result<DeviceCopy> {
        #[cfg(feature = "cuda")]
        if let Some(copies) = &self.copies {
            return copies.send(kind, buffer, to, capacity);
        }
        _ = (kind, to, capacity);
        Ok(DeviceCopy::Complete(buffer))
    }

    fn wait_for_copy(&self, copy: DeviceCopy) -> Result<FlatBuffer> {
        copy.wait()
    }

    fn gather_f64(&self, values: Vec<f64>) -> Result<Vec<Vec<f64>>> {
        self.comm.gather_f64(values).wait()
    }

    fn vote_of_all_stages(&self, vote: PipelineVote) -> Result<PipelineVote> {
        self.pipeline.as_ref().map_or(Ok(vote.clone()), |position| position.vote(vote))
    }

    fn copy(&self, param: &Param, range: Range<usize>, to: &mut FlatBuffer) -> Result<()> {
        match to {
            FlatBuffer::Host(to) => Ok(with_host_slice(&param.tensor, range, |values| to.extend_cast(values))?),
            #[cfg(feature = "cuda")]
            FlatBuffer::Device(to) => {
                Ok(with_each([&param.tensor], "copy", |[values]| to.extend(&values.slice(range)?))?)
            }
        }
    }

    fn put(&self, param: &Param, values: FlatBuffer) -> Result<()> {
        match values {
            FlatBuffer::Host(values) => Ok(residency::put(&param.tensor, values)?),
            #[cfg(feature = "cuda")]
            FlatBuffer::Device(values) => {
                assert_eq!((values.len(), values.dtype()), (param.numel, param.tensor.dtype()));
                Ok(residency::fill(&param.tensor, Storage::Cuda(values.into_storage()))?)
            }
        }
    }
}
