//! A pass through this rank's share: the parts of parameters in their order, wherever they lie.
//!
//! State in memory is worked on in place. Of state in files, one window after the other is in memory, and goes
//! back if the pass changes it.

use super::core::Core;
use super::rank::{Rank, StagingOf};
use super::sub_group::{GradShare, Pass, Slot, SubGroup};
use crate::error::Result;
use crate::offload::{Pipeline, Plan, STEP, Window, windows};
use crate::precision::{FlatMut, FlatRef};
use crate::tensor::residency;
use crate::timeline;
use std::ops::Range;

/// The executor of a [`Walk`]: the engine's core, or a rehearsal that only counts.
pub(crate) trait Carrier: Rank {
    /// Calls `work` with the parts of a sub-group that lie in its elements `range`, where there are values.
    fn parts(
        &self,
        group: &mut SubGroup<Self>,
        range: &Range<usize>,
        pass: Pass,
        window: Option<&mut Window<StagingOf<Self>>>,
        work: &mut impl FnMut(&Slot, Range<usize>, Part<'_, '_>),
    ) -> Result<()>;
}

/// The part of a parameter that a pass works on at a time. Of what a pass does not have there are no elements.
pub(crate) struct Part<'a, 's> {
    /// Weights in f32.
    pub param: &'a mut [f32],
    pub grad: FlatRef<'a>,
    pub state: &'a mut [&'s mut [f32]],
    /// Weights in the model's dtype, where `param` holds the master weights.
    pub half: Option<FlatMut<'a>>,
}

/// Elements of a sub-group, and what is to be in memory of them.
#[derive(Debug, Clone)]
pub(super) struct Span {
    pub group: usize,
    pub range: Range<usize>,
    pub pass: Pass,
}

impl Span {
    /// All of a slot, up to where a request to a file may end.
    pub fn of_slot<R: Rank>(groups: &[SubGroup<R>], group: usize, slot: usize, pass: Pass) -> Self {
        let Slot { at, len, .. } = groups[group].slots[slot];
        let is_in_files = !groups[group].streams(pass).is_empty();
        let len = if is_in_files { len.next_multiple_of(STEP) } else { len };
        Self { group, range: at..at + len, pass }
    }
}

/// Spans on their way through memory, in an order that is known from the beginning.
pub(super) struct Walk<'a, C: Carrier> {
    core: &'a C,
    window_len: usize,
    pipeline: Option<Pipeline<'a, C::Files>>,
}

impl<'a, C: Carrier> Walk<'a, C> {
    /// Plans a walk through `spans`.
    pub fn new(core: &'a C, groups: &[SubGroup<C>], spans: &[Span]) -> Self {
        let Some(files) = core.files() else { return Self { core, window_len: usize::MAX, pipeline: None } };
        let largest = spans.iter().map(|span| span.range.len()).max().unwrap_or(0);
        let streams = |span: &Span| groups[span.group].streams(span.pass);
        let window_len = core.windows().len(largest, spans.iter().map(|s| streams(s).len()).max().unwrap_or(0));
        let plan = spans.iter().flat_map(|span| {
            let streams = streams(span);
            let ranges = if streams.is_empty() { 0..0 } else { span.range.clone() };
            windows(ranges.len(), window_len).map(move |range| Plan {
                range: ranges.start + range.start..ranges.start + range.end,
                streams: streams.clone(),
            })
        });
        let pipeline = Pipeline::new(files, core.ledger(), plan.collect(), core.windows());
        Self { core, window_len, pipeline: Some(pipeline) }
    }

    /// Calls `work` with all parts of the next span, in order, with the elements of the slot that each is, and
    /// `complete` when all parts of a slot have been worked on.
    pub fn visit(
        &mut self,
        groups: &mut [SubGroup<C>],
        span: &Span,
        work: &mut impl FnMut(&Slot, Range<usize>, Part<'_, '_>),
        mut complete: impl FnMut(&Slot) -> Result<()>,
    ) -> Result<()> {
        let Span { group, range: all, pass } = span;
        let group = &mut groups[*group];
        let in_files = !group.streams(*pass).is_empty() && !all.is_empty();
        let window_len = if in_files { self.window_len } else { usize::MAX };
        let mut completed = group.slots.iter().take_while(|slot| slot.at < all.start).count();
        let mut start = all.start;
        loop {
            let range = start..all.end.min(start.saturating_add(window_len));
            let _span = timeline::span(timeline::Kind::Optimizer, "sub-group").with("elements", range.len() as u64);
            let mut window = match &mut self.pipeline {
                Some(pipeline) if in_files => Some(pipeline.next()?),
                _ => None,
            };
            self.core.parts(group, &range, *pass, window.as_mut(), work)?;
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

    /// Waits until everything is where it belongs.
    pub fn finish(self) -> Result<()> {
        self.pipeline.map_or(Ok(()), Pipeline::finish)
    }
}

/// Walks through the sub-groups `which` of this rank's share, as [`Walk::visit`] does through each.
pub(super) fn pass<C: Carrier>(
    core: &C,
    groups: &mut [SubGroup<C>],
    which: &[usize],
    pass: Pass,
    mut work: impl FnMut(&Slot, Range<usize>, Part<'_, '_>),
    mut complete: impl FnMut(&Slot) -> Result<()>,
) -> Result<()> {
    let spans: Vec<Span> = which.iter().map(|g| Span { group: *g, range: 0..groups[*g].len, pass }).collect();
    let mut walk = Walk::new(core, groups, &spans);
    for span in &spans {
        walk.visit(groups, span, &mut work, &mut complete)?;
    }
    walk.finish()
}

impl Carrier for Core {
    fn parts(
        &self,
        group: &mut SubGroup,
        range: &Range<usize>,
        pass: Pass,
        mut window: Option<&mut Window>,
        work: &mut impl FnMut(&Slot, Range<usize>, Part<'_, '_>),
    ) -> Result<()> {
        let SubGroup { slots, weights, master, grads, moments, .. } = group;
        for (slot, grads) in slots.iter().zip(grads) {
            let part = slot.at.max(range.start)..slot.range().end.min(range.end);
            if part.is_empty() {
                continue;
            }
            let mut staged = window.as_mut().map_or([].iter_mut(), |w| w.staged.iter_mut());
            let weights = weights.as_mut().filter(|_| pass.has_weights());
            let weights = weights.map(|home| home.part(&mut staged, part.clone()));
            let master = master.as_mut().filter(|_| pass.has_weights());
            let master = master.map(|home| as_f32(home.part(&mut staged, part.clone())));
            let moments = moments.iter_mut().filter(|_| pass.has_moments());
            let mut state: Vec<&mut [f32]> = moments.map(|home| as_f32(home.part(&mut staged, part.clone()))).collect();
            let in_slot = part.start - slot.at..part.end - slot.at;
            let mut from_file;
            let grad = match grads {
                _ if !pass.has_moments() => FlatRef::F32(&[]),
                GradShare::Memory(grads) => grads.slice(in_slot.clone()),
                share => {
                    from_file = staged.next().expect("gradients lie in the window").part(part.clone());
                    if matches!(share, GradShare::Absent) {
                        from_file.fill_zero();
                    }
                    from_file.as_ref()
                }
            };
            let state = &mut state;
            if !pass.has_weights() {
                work(slot, in_slot, Part { param: &mut [], grad, state, half: None });
                continue;
            }
            let work = |weights: FlatMut<'_>| {
                let (param, half) = match (master, weights) {
                    (Some(master), half) => (master, Some(half)),
                    (None, FlatMut::F32(weights)) => (weights, None),
                    (None, _) => unreachable!("16-bit parameters have master weights"),
                };
                work(slot, in_slot.clone(), Part { param, grad, state, half });
            };
            match weights {
                Some(weights) => work(weights),
                None => residency::with_values(&self.params[slot.param].tensor, |whole| {
                    let start = slot.owned.start + in_slot.start;
                    work(whole.slice_mut(start..start + in_slot.len()));
                })?,
            }
        }
        Ok(())
    }
}

pub(super) fn as_f32(flat: FlatMut<'_>) -> &mut [f32] {
    match flat {
        FlatMut::F32(v) => v,
        _ => unreachable!("master weights, moments and directions are f32"),
    }
}
