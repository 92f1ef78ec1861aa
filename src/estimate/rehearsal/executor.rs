//! The operations of a step, as a rehearsal carries them out: it holds buffers of the same size, and counts what would
//! be moved.

use super::Rehearsal;
use crate::comm::{CollectiveKind as CommKind, WireFormat};
use crate::config::Config;
use crate::error::Result;
use crate::estimate::meta_buffer::MetaBuffer;
use crate::estimate::rehearsed_files::{RehearsedExtent, RehearsedFileBuilder, RehearsedFiles};
use crate::estimate::step_trace::{self, LaunchedCollectiveId, StepPhase};
use crate::memory::{MemoryKind, MemoryLedger, MemoryLedgerEntry, MemoryTier, TrackedBuffer};
use crate::offload::{StateWindow, WindowSettings};
use crate::optim::SubGroupKey;
use crate::param::{Param, ParamId};
use crate::precision::ElementBuffer;
use crate::util::lock;
use crate::zero::gather::coalesced_layout::CoalescedLayout;
use crate::zero::reduce::gradient_reducer::{self, ArrivedGradient, ReducePlan};
use crate::zero::share::share_storage::ShareStorage;
use crate::zero::share::state_storage::weights_are_on_gpu;
use crate::zero::share::sub_group::{SubGroup, SubGroupPosition, SweepMode};
use crate::zero::share::sub_group_builder::{self, SubGroupStateKind};
use crate::zero::step::pipeline_vote::PipelineVote;
use crate::zero::step::state_sweep::{self, ParamSlice};
use crate::zero::step_executor::{RankInfo, StepExecutor};
use crate::zero::transfer::device_copy::{CopyPayloadKind, UPDATE_CHUNK, WINDOWS_BYTES, windows_tier};
use crate::zero::transfer::pending_collective::CollectiveOp;
use candle_core::DType;
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::MutexGuard;

/// A collective in flight, with its result.
pub(in crate::estimate) struct RehearsedCollective {
    result: MetaBuffer,
    launched: Option<LaunchedCollectiveId>,
    _copy: Option<MemoryLedgerEntry>,
}

impl<'a> sub_group_builder::StateFileBuilder<Rehearsal<'a>> for RehearsedFileBuilder {
    fn begin(&self, state: SubGroupStateKind, _: SubGroupKey, dtype: DType) -> Result<RehearsedExtent> {
        Ok(RehearsedExtent { dtype, memory: Rc::new(RefCell::new(self.0.hold_in(MemoryTier::File, state.kind(), 0))) })
    }

    fn grow(&mut self, space: &RehearsedExtent, count: usize) -> Result<()> {
        let mut memory = space.memory.borrow_mut();
        let bytes = memory.bytes() + count * space.dtype.size_in_bytes();
        memory.resize(bytes);
        Ok(())
    }

    fn take_back(
        &mut self,
        space: &RehearsedExtent,
        _: usize,
        allocate: impl FnOnce() -> Result<TrackedBuffer<MetaBuffer>>,
    ) -> Result<Option<TrackedBuffer<MetaBuffer>>> {
        let memory = allocate()?;
        space.memory.borrow_mut().resize(0);
        Ok(Some(memory))
    }
}

impl ShareStorage for Rehearsal<'_> {
    type Buffer = MetaBuffer;
    type Files = RehearsedFiles;

    fn share_location(&self) -> &MemoryTier {
        &self.share_location
    }

    fn model_location(&self) -> &MemoryTier {
        &self.tier
    }

    fn files(&self) -> Option<&RehearsedFiles> {
        Some(&self.files)
    }

    fn ledger(&self) -> &MemoryLedger {
        &self.ledger
    }
}

impl StepExecutor for Rehearsal<'_> {
    type Pending = RehearsedCollective;
    type PendingCopy = (MetaBuffer, [MemoryLedgerEntry; 2]);

    fn info(&self) -> RankInfo<'_> {
        let Self { params, config: Config { world_size, zero, precision, .. }, tier, .. } = self;
        RankInfo {
            rank: 0,
            mesh: zero.mesh(*world_size),
            second_group: self.second_group,
            params,
            zero,
            dtype: precision.dtype(),
            tier: *tier,
        }
    }

    fn is_evaluating(&self) -> bool {
        false
    }

    fn groups(&self) -> MutexGuard<'_, Vec<SubGroup<Self>>> {
        lock(&self.groups)
    }

    fn slot_of(&self, param: ParamId) -> (usize, usize) {
        self.param_slots[param]
    }

    fn windows(&self) -> WindowSettings {
        WindowSettings::new(self.config.zero.optimizer_files(), self.files.access)
    }

    fn launch(
        &self,
        collective: CollectiveOp,
        wire: WireFormat,
        mut buffer: MetaBuffer,
        params: &[ParamId],
    ) -> Result<RehearsedCollective> {
        let (len, dtype, world) = (buffer.len(), buffer.dtype(), self.mesh_of(params).world_size());
        // Data that leaves a GPU is sent from a copy on the host.
        let needs_copy = MetaBuffer::is_device(&buffer.location()) && world > 1;
        let result = collective.result_len(len, world);
        buffer.truncate(result);
        buffer.extend_zeros(result - buffer.len())?;
        let launched = match collective {
            CollectiveOp::AllReduce => Some(self.count(CommKind::AllReduce, len, dtype, (wire, world))),
            CollectiveOp::ReduceScatter => Some(self.count(CommKind::ReduceScatter, len, dtype, (wire, world))),
            CollectiveOp::AllGather => Some(self.count(CommKind::AllGather, len, dtype, (wire, world))),
            CollectiveOp::GatherWithin(ranks) => {
                self.traffic.borrow_mut().collective(CommKind::AllGather, len, dtype, wire, ranks);
                None
            }
            CollectiveOp::ReduceToGroups(ranks) => {
                let mut traffic = self.traffic.borrow_mut();
                traffic.collective(CommKind::ReduceScatter, len, dtype, wire, world);
                traffic.sums_across(len / world, dtype, world / ranks);
                // Between hosts, this is an all-reduce.
                let kind = CommKind::AllReduce;
                Some(self.step_trace.borrow_mut().launch(step_trace::CollectiveCall {
                    kind,
                    wire,
                    dtype,
                    elements: len,
                }))
            }
        };
        let bytes = len.max(buffer.len()) * dtype.size_in_bytes();
        let copy = needs_copy.then(|| self.ledger.hold(MemoryKind::Buckets, bytes));
        Ok(RehearsedCollective { result: buffer, launched, _copy: copy })
    }

    fn wait(&self, RehearsedCollective { result, launched, .. }: RehearsedCollective) -> Result<MetaBuffer> {
        if let Some(launched) = launched {
            self.step_trace.borrow_mut().wait(launched);
        }
        Ok(result)
    }

    fn send(
        &self,
        kind: CopyPayloadKind,
        buffer: MetaBuffer,
        to: &MemoryTier,
        capacity: usize,
    ) -> Result<(MetaBuffer, [MemoryLedgerEntry; 2])> {
        let size = buffer.dtype().size_in_bytes();
        let target_len = if MetaBuffer::is_device(to) { capacity.max(buffer.len()) } else { buffer.len() };
        self.windows.borrow_mut()[kind as usize].get_or_insert_with(|| {
            self.ledger.hold_in(windows_tier(self.zero(), kind), MemoryKind::Staging, WINDOWS_BYTES)
        });
        let hold = |tier, bytes| self.ledger.hold_in(tier, kind.memory_kind(), bytes);
        let entries = [hold(buffer.location(), buffer.capacity_in_bytes()), hold(*to, target_len * size)];
        let mut target = MetaBuffer::with_capacity(to, buffer.dtype(), target_len)?;
        target.extend_zeros(buffer.len())?;
        Ok((target, entries))
    }

    fn wait_for_copy(&self, (buffer, _held): (MetaBuffer, [MemoryLedgerEntry; 2])) -> Result<MetaBuffer> {
        Ok(buffer)
    }

    fn gather_f64(&self, values: Vec<f64>) -> Result<Vec<Vec<f64>>> {
        self.control(values.len(), self.world_size());
        Ok(vec![values])
    }

    fn vote_of_all_stages(&self, vote: PipelineVote) -> Result<PipelineVote> {
        Ok(vote)
    }

    fn copy(&self, _: &Param, range: Range<usize>, to: &mut MetaBuffer) -> Result<()> {
        to.extend_zeros(range.len())
    }

    fn put(&self, _: &Param, _: MetaBuffer) -> Result<()> {
        Ok(())
    }
}

impl gradient_reducer::GradientBackend for Rehearsal<'_> {
    type Grad = MetaBuffer;

    fn bytes(grad: &MetaBuffer) -> usize {
        grad.capacity_in_bytes()
    }

    fn tier_of(grad: &MetaBuffer) -> MemoryTier {
        grad.location()
    }

    fn zeros(&self, param: &Param) -> MetaBuffer {
        MetaBuffer::with_len(self.tier, param.weights.dtype(self.dtype()), param.numel)
    }

    fn sum(a: MetaBuffer, _: MetaBuffer) -> Result<MetaBuffer> {
        Ok(a)
    }

    fn pack(
        &self,
        plan: &ReducePlan,
        layout: &CoalescedLayout,
        _: Vec<ArrivedGradient<MetaBuffer>>,
    ) -> Result<MetaBuffer> {
        Ok(MetaBuffer::with_len(self.tier, plan.dtype, layout.chunk * layout.mesh.world_size()))
    }
}

impl state_sweep::StepBackend for Rehearsal<'_> {
    fn parts(
        &self,
        group: &mut SubGroup<Self>,
        range: &Range<usize>,
        mode: SweepMode,
        _: Option<&mut StateWindow<usize>>,
        _: &mut impl FnMut(&SubGroupPosition, Range<usize>, ParamSlice<'_, '_>),
    ) -> Result<()> {
        self.compute(StepPhase::Update, range.len());
        let crosses_devices =
            weights_are_on_gpu(self, group.weights.as_ref()) && !MetaBuffer::is_device(&self.share_location);
        if crosses_devices && mode.has_weights() && mode.changes() {
            // The largest piece is in memory, as is the piece before it, which is still being transferred.
            let len = group.slots.iter().map(|slot| slot.owned.len().min(UPDATE_CHUNK)).max().unwrap_or(0);
            let piece = || MetaBuffer::with_len(MemoryTier::Host, group.class.weights.dtype(self.dtype()), len);
            let pending_copy = self.send(CopyPayloadKind::Updates, piece(), &self.tier, len)?;
            let _next = self.ledger.hold(MemoryKind::Buckets, piece().capacity_in_bytes());
            self.wait_for_copy(pending_copy)?;
        }
        Ok(())
    }
}
