//! Parameters that are gathered together, from all ranks or from the second copy of this rank's group, and released
//! together.

use super::coalesced_layout::CoalescedLayout;
use crate::comm::WireFormat;
use crate::error::Result;
use crate::layout::ShardMesh;
use crate::memory::{MemoryKind, MemoryLedgerEntry};
use crate::offload::StateFiles;
use crate::param::{Param, ParamId, Residency};
use crate::precision::ElementBuffer;
use crate::tensor::residency;
use crate::timeline;
use crate::util::lock;
use crate::zero::share::share_storage::{BufferLocationOf, ShareStorage};
use crate::zero::share::state_storage::StateStorage;
use crate::zero::step_executor::StepExecutor;
use crate::zero::transfer::device_copy::CopyPayloadKind;
use crate::zero::transfer::pending_collective::CollectiveOp;

/// Parameters that are gathered and released together, with a separate all-gather for each large parameter, and a
/// common one for all small parameters that have the same weight format and are on the same ranks.
pub(super) struct GatherGroup {
    pub params: Vec<ParamId>,
    pub layouts: Vec<CoalescedLayout>,
    pub numel: usize,
    pub wire: WireFormat,
}

/// The pending all-gathers of a group, one for each of its layouts.
pub(super) type PendingGather<R> = Vec<(GatherProgress<R>, MemoryLedgerEntry)>;

/// The progress of an all-gather.
pub(super) enum GatherProgress<R: StepExecutor> {
    /// This rank's shards are being read from a file. The all-gather begins when the parameters are needed, so that all
    /// ranks issue it at the same point.
    Reading(<R::Files as StateFiles>::Reading),
    /// The shards are being copied from the host to the GPU. The all-gather also begins when the parameters are needed.
    Copying(R::PendingCopy),
    /// The all-gather is pending.
    Gathering(R::Pending),
}

/// This rank's secondary shards (`zero_hpz_partition_size`): its part of the second copy that its group of ranks
/// keeps, with one buffer for each layout of a group. `None` until a forward pass has gathered it.
pub(super) type SecondaryShards<R> = Option<Vec<(<R as ShareStorage>::Buffer, MemoryLedgerEntry)>>;

/// The handling of a group after it has been gathered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterGather {
    /// The parameters are used, and gathered in the same way the next time.
    Use,
    /// This rank's group of ranks keeps a copy, from which the parameters are gathered the next time.
    KeepSecondCopy,
}

impl GatherGroup {
    pub fn new(params: Vec<ParamId>, all: &[Param], mesh: ShardMesh, wire: WireFormat) -> Self {
        let numel = params.iter().map(|p| all[*p].numel).sum();
        let layouts = CoalescedLayout::split(&params, all, mesh, wire);
        Self { params, layouts, numel, wire }
    }

    /// Empties the parameters' tensors.
    pub fn release(&self, all: &[Param]) -> Result<()> {
        self.params.iter().try_for_each(|param| release(&all[*param]).map(drop))
    }

    /// Begins the all-gathers within this rank's group.
    ///
    /// # Errors
    /// A GPU that is out of memory.
    pub fn launch_within<R: StepExecutor>(
        &self,
        core: &R,
        second_copy: &[(R::Buffer, MemoryLedgerEntry)],
    ) -> Result<PendingGather<R>> {
        let launch = |(layout, (part, _)): (&CoalescedLayout, &(R::Buffer, MemoryLedgerEntry))| {
            let _subject = timeline::set_subject(|| core.names(&layout.params));
            let _span =
                timeline::span(timeline::EventCategory::Gather, "launch").with_subject(|| core.names(&layout.params));
            let room = layout.chunk * layout.mesh.shards();
            let mut buffer = R::Buffer::with_capacity(&part.location(), part.dtype(), room)?;
            buffer.extend_from(part, 0..part.len())?;
            let held = core.hold(MemoryKind::Gathered, &buffer);
            let op = CollectiveOp::GatherWithin(core.second_group());
            Ok((GatherProgress::Gathering(core.launch(op, WireFormat::Exact, buffer, &layout.params)?), held))
        };
        self.layouts.iter().zip(second_copy).map(launch).collect()
    }

    /// Begins the all-gathers of this rank's shards, or begins to read the shards.
    ///
    /// # Errors
    /// A GPU that is out of memory.
    pub fn launch<R: StepExecutor>(&self, core: &R) -> Result<PendingGather<R>> {
        let groups = core.groups();
        let launch = |layout: &CoalescedLayout| {
            let _subject = timeline::set_subject(|| core.names(&layout.params));
            let _span =
                timeline::span(timeline::EventCategory::Gather, "launch").with_subject(|| core.names(&layout.params));
            // All shards of a layout are in the same memory, because they are of the same kind.
            let location = layout.params.first().and_then(|p| match &groups[core.slot_of(*p).0].weights {
                Some(StateStorage::Memory(weights)) => Some(weights.buffer().location()),
                _ => None,
            });
            let location = location.unwrap_or_else(R::Buffer::host);
            let is_copied = goes_to_gpu(core, layout, &location);
            // If the shards are gathered in this buffer, it has room for the chunks of all shards: those of the other
            // ranks arrive in it.
            let room = if is_copied { layout.chunk } else { layout.chunk * layout.mesh.shards() };
            let mut chunk = R::Buffer::with_capacity(&location, layout.dtype(core.dtype()), room)?;
            let mut pieces = Vec::new();
            for (p, offset) in layout.params.iter().zip(&layout.offsets) {
                chunk.extend_zeros(offset - chunk.len())?;
                let (group, slot) = core.slot_of(*p);
                let share = groups[group].slots[slot].padded();
                match &groups[group].weights {
                    Some(StateStorage::Memory(weights)) => chunk.extend_from(weights.buffer(), share)?,
                    Some(StateStorage::File(weights)) => {
                        pieces.push((weights.clone(), share.clone(), chunk.len()));
                        chunk.extend_zeros(share.len())?;
                    }
                    None => unreachable!("sharded parameters are in their sub-group"),
                }
            }
            let held = core.hold(MemoryKind::Gathered, &chunk);
            let progress = match core.files() {
                Some(files) if !pieces.is_empty() => GatherProgress::Reading(files.fill(chunk, pieces)),
                _ if is_copied => return self.send(core, layout, chunk),
                _ => GatherProgress::Gathering(self.gather(core, layout, chunk)?),
            };
            Ok((progress, held))
        };
        self.layouts.iter().map(launch).collect()
    }

    /// Begins to copy this rank's shards to the GPU. The ledger counts them from the beginning of the copy.
    fn send<R: StepExecutor>(
        &self,
        core: &R,
        layout: &CoalescedLayout,
        chunk: R::Buffer,
    ) -> Result<(GatherProgress<R>, MemoryLedgerEntry)> {
        let room = layout.chunk * layout.mesh.shards();
        let copy = core.send(CopyPayloadKind::Shards, chunk, core.model_location(), room)?;
        Ok((GatherProgress::Copying(copy), core.ledger().hold(MemoryKind::Gathered, 0)))
    }

    fn gather<R: StepExecutor>(&self, core: &R, layout: &CoalescedLayout, chunk: R::Buffer) -> Result<R::Pending> {
        core.gather(layout.wire(self.wire), chunk, &layout.params)
    }

    /// Waits for the all-gathers and puts the complete parameters into their tensors. Returns this rank's part of a
    /// second copy if one is to be kept.
    pub fn install<R: StepExecutor>(
        &self,
        core: &R,
        gathering: PendingGather<R>,
        kind: MemoryKind,
        after: AfterGather,
    ) -> Result<SecondaryShards<R>> {
        // All copies to the GPU and all all-gathers begin before the first is waited for.
        let read = |(layout, (progress, held)): (&CoalescedLayout, (GatherProgress<R>, MemoryLedgerEntry))| {
            let _subject = timeline::set_subject(|| core.names(&layout.params));
            match (progress, core.files()) {
                (GatherProgress::Reading(reading), Some(files)) => {
                    let chunk = files.wait_filled(reading)?;
                    if goes_to_gpu(core, layout, &chunk.location()) {
                        return self.send(core, layout, chunk);
                    }
                    Ok((GatherProgress::Gathering(self.gather(core, layout, chunk)?), held))
                }
                (progress, _) => Ok((progress, held)),
            }
        };
        let read = self.layouts.iter().zip(gathering).map(read).collect::<Result<Vec<_>>>()?;
        let gather = |(layout, (progress, held)): (&CoalescedLayout, (GatherProgress<R>, MemoryLedgerEntry))| {
            let _subject = timeline::set_subject(|| core.names(&layout.params));
            match progress {
                GatherProgress::Copying(copy) => {
                    let chunk = core.wait_for_copy(copy)?;
                    let held = core.hold(MemoryKind::Gathered, &chunk);
                    Ok((self.gather(core, layout, chunk)?, held))
                }
                GatherProgress::Gathering(pending) => Ok((pending, held)),
                GatherProgress::Reading(_) => unreachable!("states that are read are in files"),
            }
        };
        let gathering = self.layouts.iter().zip(read).map(gather).collect::<Result<Vec<_>>>()?;
        let mut second_copy = Vec::new();
        for (layout, (pending, held)) in self.layouts.iter().zip(gathering) {
            let chunks = core.wait(pending)?;
            drop(held);
            if after == AfterGather::KeepSecondCopy {
                second_copy.push(part_of_group(core, &chunks)?);
            }
            let _span =
                timeline::span(timeline::EventCategory::Gather, "install").with_subject(|| core.names(&layout.params));
            // Copying small parameters out of the buffer needs additional GPU memory for a short time.
            let is_copied = layout.params.len() > 1 && R::Buffer::is_device(&chunks.location());
            let _copied = is_copied.then(|| core.hold(MemoryKind::Buckets, &chunks));
            layout.unpack(core, chunks, |param, values| {
                let held = core.ledger().hold_in(core.tier(), kind, values.capacity_in_bytes());
                core.put(param, values)?;
                *lock(&param.residency) = Residency::Whole(held);
                Ok(())
            })?;
        }
        Ok((after == AfterGather::KeepSecondCopy).then_some(second_copy))
    }
}

/// Returns whether the shards of a layout, which are in `location`, are gathered on the GPU, to which they must be
/// copied. Packed shards are unpacked on the host.
fn goes_to_gpu<R: StepExecutor>(core: &R, layout: &CoalescedLayout, location: &BufferLocationOf<R>) -> bool {
    R::Buffer::is_device(core.model_location()) && !R::Buffer::is_device(location) && !layout.is_packed()
}

/// Returns the part of a layout's chunks that this rank keeps: the ranks of its group divide the chunks equally.
fn part_of_group<R: StepExecutor>(core: &R, chunks: &R::Buffer) -> Result<(R::Buffer, MemoryLedgerEntry)> {
    let ranks = core.second_group();
    let (len, index) = (chunks.len() / ranks, core.rank() % ranks);
    let mut part = R::Buffer::with_capacity(&chunks.location(), chunks.dtype(), len)?;
    part.extend_from(chunks, index * len..(index + 1) * len)?;
    let held = core.hold(MemoryKind::SecondCopy, &part);
    Ok((part, held))
}

/// Waits for all-gathers whose results are not used, and for pending reads too, because the step may write to the same
/// parts of the files.
pub(super) fn forget<R: StepExecutor>(core: &R, gathering: PendingGather<R>) -> Result<()> {
    gathering.into_iter().try_for_each(|(progress, _)| match (progress, core.files()) {
        (GatherProgress::Gathering(pending), _) => core.wait(pending).map(drop),
        (GatherProgress::Copying(copy), _) => core.wait_for_copy(copy).map(drop),
        (GatherProgress::Reading(reading), Some(files)) => files.wait_filled(reading).map(drop),
        (GatherProgress::Reading(_), None) => unreachable!("states that are read are in files"),
    })
}

/// Empties a parameter's tensor. Returns false if it was already empty.
pub(in crate::zero) fn release(param: &Param) -> Result<bool> {
    if !param.is_whole() {
        return Ok(false);
    }
    residency::clear(&param.tensor)?;
    *lock(&param.residency) = Residency::Absent;
    Ok(true)
}
