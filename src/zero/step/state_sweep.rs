//! A sweep through this rank's share: visits the parts of parameters in order, in any storage.
//!
//! State in memory is updated in place. State in files passes through memory one window after the other, and is written
//! back if the sweep changes it.

use super::hyperparameters::Hyperparameters;
pub(crate) use super::stored_states::ParamSlice;
use super::stored_states::{StateRounding, StoredStates, room};
use crate::error::Result;
use crate::memory::{MemoryKind, MemoryLedgerEntry};
use crate::offload::{ALIGN, PlannedWindow, STEP, StateWindow, WindowPipeline};
use crate::precision::{FlatMut, FlatRef};
use crate::tensor::residency;
use crate::timeline;
use crate::util::pieces;
#[cfg(feature = "cuda")]
use crate::zero::gpu::host_step_weights::{HostStepWeights, WeightRange};
use crate::zero::rank_core::RankCore;
use crate::zero::share::optim_state::OptimStateView;
use crate::zero::share::share_storage::StagingBufferOf;
use crate::zero::share::sub_group::{GradientShare, SubGroup, SubGroupPosition, SweepMode};
use crate::zero::step_executor::StepExecutor;
use std::ops::Range;

/// The executor of a [`StateSweep`]: the engine's core, or a rehearsal that only counts.
pub(crate) trait StepBackend: StepExecutor {
    /// Updates a sub-group that is in a GPU's memory. Returns false if a sweep must go through it instead.
    fn update_on_device(&self, group: &mut SubGroup<Self>, hyperparameters: &Hyperparameters<'_>) -> Result<bool> {
        _ = (group, hyperparameters);
        Ok(false)
    }
    /// Calls `work` with the parts of parameters that are in elements `range` of a sub-group, unless the parameters have
    /// no values, as in an estimate.
    fn parts(
        &self,
        group: &mut SubGroup<Self>,
        range: &Range<usize>,
        mode: SweepMode,
        window: Option<&mut StateWindow<StagingBufferOf<Self>>>,
        work: &mut impl FnMut(&SubGroupPosition, Range<usize>, ParamSlice<'_, '_>),
    ) -> Result<()>;
}

/// Some elements of a sub-group, and those of their states that a sweep needs in memory.
#[derive(Debug, Clone)]
pub(super) struct SweepSpan {
    pub group: usize,
    pub range: Range<usize>,
    pub mode: SweepMode,
}

impl SweepSpan {
    /// Creates a span of an entire slot; if it is in files, the span is extended to an offset at which a request to a
    /// file may end.
    pub fn of_slot<R: StepExecutor>(groups: &[SubGroup<R>], group: usize, slot: usize, mode: SweepMode) -> Self {
        let SubGroupPosition { offset, len, .. } = groups[group].slots[slot];
        let is_in_files = !groups[group].streams(mode).is_empty();
        let len = if is_in_files { len.next_multiple_of(STEP) } else { len };
        Self { group, range: offset..offset + len, mode }
    }
}

/// A sweep through spans, whose order is known from the beginning.
pub(super) struct StateSweep<'a, C: StepBackend> {
    core: &'a C,
    window_len: usize,
    pipeline: Option<WindowPipeline<'a, C::Files>>,
    /// The ledger's entry for the f32 copies of states in other formats, while a step works on them.
    _room: MemoryLedgerEntry,
}

impl<'a, C: StepBackend> StateSweep<'a, C> {
    /// Plans a sweep through `spans`.
    pub fn new(core: &'a C, groups: &[SubGroup<C>], spans: &[SweepSpan]) -> Self {
        let room = spans.iter().map(|span| room(&groups[span.group], span.mode, core.dtype(), span.range.len())).max();
        let _room = core.ledger().hold(MemoryKind::Staging, room.unwrap_or(0));
        let Some(files) = core.files() else { return Self { core, window_len: usize::MAX, pipeline: None, _room } };
        let largest = spans.iter().map(|span| span.range.len()).max().unwrap_or(0);
        let streams = |span: &SweepSpan| groups[span.group].streams(span.mode);
        let window_len = core.windows().len(largest, spans.iter().map(|s| streams(s).len()).max().unwrap_or(0));
        // If 8-bit codes are in a file, windows must also begin at its page boundaries.
        let has_codes = groups.iter().flat_map(|g| &g.moments).any(|moment| moment.format.map().is_some());
        let window_len = if has_codes { window_len.next_multiple_of(ALIGN) } else { window_len };
        let plan = spans.iter().flat_map(|span| {
            let streams = streams(span);
            let in_files = if streams.is_empty() { 0..0 } else { span.range.clone() };
            pieces(in_files.len(), window_len).map(move |range| PlannedWindow {
                range: in_files.start + range.start..in_files.start + range.end,
                streams: streams.clone(),
            })
        });
        let pipeline = WindowPipeline::new(files, core.ledger(), plan.collect(), core.windows());
        Self { core, window_len, pipeline: Some(pipeline), _room }
    }

    /// Calls `work` with all parts of the next span, in order, each with its range of the slot's elements, and calls
    /// `complete` when all parts of a slot have been visited.
    pub fn visit(
        &mut self,
        groups: &mut [SubGroup<C>],
        span: &SweepSpan,
        work: &mut impl FnMut(&SubGroupPosition, Range<usize>, ParamSlice<'_, '_>),
        mut complete: impl FnMut(&SubGroupPosition) -> Result<()>,
    ) -> Result<()> {
        let SweepSpan { group, range: all, mode } = span;
        let group = &mut groups[*group];
        let in_files = !group.streams(*mode).is_empty() && !all.is_empty();
        let window_len = if in_files { self.window_len } else { usize::MAX };
        let mut completed = group.slots.iter().take_while(|slot| slot.offset < all.start).count();
        let mut start = all.start;
        loop {
            let range = start..all.end.min(start.saturating_add(window_len));
            let _span =
                timeline::span(timeline::EventCategory::Optimizer, "sub-group").with("elements", range.len() as u64);
            let mut window = match &mut self.pipeline {
                Some(pipeline) if in_files => Some(pipeline.next()?),
                _ => None,
            };
            self.core.parts(group, &range, *mode, window.as_mut(), work)?;
            if let (Some(pipeline), Some(window)) = (&mut self.pipeline, window) {
                pipeline.done(window)?;
            }
            for slot in group.slots[completed..].iter().take_while(|slot| slot.range().end <= range.end) {
                complete(slot)?;
                completed += 1;
            }
            start = range.end;
            if start >= all.end {
                return Ok(());
            }
        }
    }

    /// Waits until all states are back in their storage.
    pub fn finish(self) -> Result<()> {
        self.pipeline.map_or(Ok(()), WindowPipeline::finish)
    }
}

/// Sweeps through the sub-groups `selected` of this rank's share, and visits each as [`StateSweep::visit`] does.
pub(in crate::zero) fn sweep<C: StepBackend>(
    core: &C,
    groups: &mut [SubGroup<C>],
    selected: &[usize],
    mode: SweepMode,
    mut work: impl FnMut(&SubGroupPosition, Range<usize>, ParamSlice<'_, '_>),
    mut complete: impl FnMut(&SubGroupPosition) -> Result<()>,
) -> Result<()> {
    let spans: Vec<SweepSpan> =
        selected.iter().map(|g| SweepSpan { group: *g, range: 0..groups[*g].len, mode }).collect();
    let mut sweep = StateSweep::new(core, groups, &spans);
    for span in &spans {
        sweep.visit(groups, span, &mut work, &mut complete)?;
    }
    sweep.finish()
}

impl StepBackend for RankCore {
    #[cfg(feature = "cuda")]
    fn update_on_device(&self, group: &mut SubGroup<RankCore>, hyperparameters: &Hyperparameters<'_>) -> Result<bool> {
        crate::zero::gpu::device_step::update(self, group, hyperparameters)
    }

    fn parts(
        &self,
        group: &mut SubGroup<RankCore>,
        range: &Range<usize>,
        mode: SweepMode,
        mut window: Option<&mut StateWindow>,
        work: &mut impl FnMut(&SubGroupPosition, Range<usize>, ParamSlice<'_, '_>),
    ) -> Result<()> {
        let SubGroup { slots, weights, master, grads, moments, .. } = group;
        #[cfg(feature = "cuda")]
        let (mut host_step, mut weights) = HostStepWeights::for_weights(self, weights, mode, master.is_some());
        #[cfg(feature = "cuda")]
        let piece = host_step.as_ref().map_or(usize::MAX, HostStepWeights::piece);
        #[cfg(not(feature = "cuda"))]
        let (piece, mut weights) = (usize::MAX, weights.as_mut());
        // A slot of length 0 belongs to a parameter of an expert on other ranks; the parameter's tensor is absent.
        for (slot, grads) in slots.iter().zip(grads).filter(|(slot, _)| slot.len > 0) {
            let overlap = slot.offset.max(range.start)..slot.range().end.min(range.end);
            for part in pieces(overlap.len(), piece).map(|part| shifted(&overlap, part)) {
                let mut staged = window.as_mut().map_or([].iter_mut(), |w| w.staged.iter_mut());
                let shard = weights.as_mut().filter(|_| mode.has_weights());
                let shard = shard.map(|storage| storage.part(&mut staged, part.clone()));
                let master = master.as_mut().filter(|_| mode.has_weights());
                let master = master.map(|storage| as_f32(storage.part(&mut staged, part.clone())));
                let moments = moments.iter_mut().filter(|_| mode.has_moments());
                let moments: Vec<OptimStateView<'_>> =
                    moments.map(|moment| moment.part(&mut staged, part.clone())).collect();
                let in_slot = part.start - slot.offset..part.end - slot.offset;
                let mut from_file;
                let grad = match &*grads {
                    _ if !mode.has_gradients() => FlatRef::F32(&[]),
                    GradientShare::Memory(grads) => grads.buffer().slice(in_slot.clone()),
                    share => {
                        from_file = staged.next().expect("the window contains the gradients").part(part.clone());
                        if matches!(share, GradientShare::Absent) {
                            from_file.fill_zero();
                        }
                        from_file.as_ref()
                    }
                };
                let first = slot.owned.start + in_slot.start;
                let rounding = StateRounding { core: self, param: slot.param, first, changes: mode.changes() };
                if !mode.has_weights() {
                    let states = StoredStates { master: None, weights: None, moments, grad };
                    states.visit(rounding, |range, part| work(slot, shifted(&in_slot, range), part));
                    continue;
                }
                let visit = |weights: FlatMut<'_>| {
                    let states = StoredStates { master, weights: Some(weights), moments, grad };
                    states.visit(rounding, |range, part| work(slot, shifted(&in_slot, range), part));
                };
                let in_tensor = first..first + in_slot.len();
                #[cfg(feature = "cuda")]
                if let Some(host_step) = &mut host_step {
                    host_step.visit(WeightRange { param: slot.param, in_tensor, in_group: part }, visit)?;
                    continue;
                }
                match shard {
                    Some(shard) => visit(shard),
                    None => residency::with_values(&self.params[slot.param].tensor, |weights| {
                        visit(weights.slice_mut(in_tensor));
                    })?,
                }
            }
        }
        #[cfg(feature = "cuda")]
        host_step.map_or(Ok(()), HostStepWeights::finish)?;
        Ok(())
    }
}

/// Converts a range of elements of a part to a range of elements of the slot. `part` is the part's range in the
/// slot.
fn shifted(part: &Range<usize>, range: Range<usize>) -> Range<usize> {
    part.start + range.start..part.start + range.end
}

pub(super) fn as_f32(flat: FlatMut<'_>) -> &mut [f32] {
    match flat {
        FlatMut::F32(v) => v,
        _ => unreachable!("master weights, moments and directions are f32"),
    }
}
