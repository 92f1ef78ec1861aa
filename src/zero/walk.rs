//! A pass through this rank's share: the parts of parameters in their order, wherever they lie.
//!
//! State in memory is worked on in place. Of state in files, one window after the other is in memory, and goes
//! back if the pass changes it.

#[cfg(feature = "cuda")]
use super::away::{Away, Place};
use super::core::Core;
pub(crate) use super::kept::Part;
use super::kept::{Rounding, States, room};
use super::moment::Kept;
use super::rank::{Rank, StagingOf};
use super::recipe::Recipe;
use super::sub_group::{GradShare, Pass, Slot, SubGroup};
use crate::error::Result;
use crate::memory::{Held, Kind};
use crate::offload::{ALIGN, Pipeline, Plan, STEP, Window};
use crate::precision::{FlatMut, FlatRef};
use crate::tensor::residency;
use crate::timeline;
use crate::util::pieces;
use std::ops::Range;

/// The executor of a [`Walk`]: the engine's core, or a rehearsal that only counts.
pub(crate) trait Carrier: Rank {
    /// Updates a sub-group where it lies in a GPU's memory; false: a pass has to go through it.
    fn update_on_device(&self, group: &mut SubGroup<Self>, recipe: &Recipe<'_>) -> Result<bool> {
        _ = (group, recipe);
        Ok(false)
    }
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
    /// States that are not kept in f32, while a step works on them.
    _room: Held,
}

impl<'a, C: Carrier> Walk<'a, C> {
    /// Plans a walk through `spans`.
    pub fn new(core: &'a C, groups: &[SubGroup<C>], spans: &[Span]) -> Self {
        let room = spans.iter().map(|span| room(&groups[span.group], span.pass, core.dtype(), span.range.len())).max();
        let _room = core.ledger().hold(Kind::Staging, room.unwrap_or(0));
        let Some(files) = core.files() else { return Self { core, window_len: usize::MAX, pipeline: None, _room } };
        let largest = spans.iter().map(|span| span.range.len()).max().unwrap_or(0);
        let streams = |span: &Span| groups[span.group].streams(span.pass);
        let window_len = core.windows().len(largest, spans.iter().map(|s| streams(s).len()).max().unwrap_or(0));
        // Where codes of eight bits lie in a file, windows begin at its pages too.
        let has_codes = groups.iter().flat_map(|g| &g.moments).any(|moment| moment.format.map().is_some());
        let window_len = if has_codes { window_len.next_multiple_of(ALIGN) } else { window_len };
        let plan = spans.iter().flat_map(|span| {
            let streams = streams(span);
            let ranges = if streams.is_empty() { 0..0 } else { span.range.clone() };
            pieces(ranges.len(), window_len).map(move |range| Plan {
                range: ranges.start + range.start..ranges.start + range.end,
                streams: streams.clone(),
            })
        });
        let pipeline = Pipeline::new(files, core.ledger(), plan.collect(), core.windows());
        Self { core, window_len, pipeline: Some(pipeline), _room }
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
            let _span =
                timeline::span(timeline::EventCategory::Optimizer, "sub-group").with("elements", range.len() as u64);
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
    #[cfg(feature = "cuda")]
    fn update_on_device(&self, group: &mut SubGroup, recipe: &Recipe<'_>) -> Result<bool> {
        super::device_step::update(self, group, recipe)
    }

    fn parts(
        &self,
        group: &mut SubGroup,
        range: &Range<usize>,
        pass: Pass,
        mut window: Option<&mut Window>,
        work: &mut impl FnMut(&Slot, Range<usize>, Part<'_, '_>),
    ) -> Result<()> {
        let SubGroup { slots, weights, master, grads, moments, .. } = group;
        #[cfg(feature = "cuda")]
        let (mut away, mut weights) = Away::of(self, weights, pass, master.is_some());
        #[cfg(feature = "cuda")]
        let piece = away.as_ref().map_or(usize::MAX, Away::piece);
        #[cfg(not(feature = "cuda"))]
        let (piece, mut weights) = (usize::MAX, weights.as_mut());
        for (slot, grads) in slots.iter().zip(grads) {
            let here = slot.at.max(range.start)..slot.range().end.min(range.end);
            for part in pieces(here.len(), piece).map(|part| within(&here, part)) {
                let mut staged = window.as_mut().map_or([].iter_mut(), |w| w.staged.iter_mut());
                let own = weights.as_mut().filter(|_| pass.has_weights());
                let own = own.map(|home| home.part(&mut staged, part.clone()));
                let master = master.as_mut().filter(|_| pass.has_weights());
                let master = master.map(|home| as_f32(home.part(&mut staged, part.clone())));
                let moments = moments.iter_mut().filter(|_| pass.has_moments());
                let moments: Vec<Kept<'_>> = moments.map(|moment| moment.part(&mut staged, part.clone())).collect();
                let in_slot = part.start - slot.at..part.end - slot.at;
                let mut from_file;
                let grad = match &*grads {
                    _ if !pass.has_moments() => FlatRef::F32(&[]),
                    GradShare::Memory(grads) => grads.buffer().slice(in_slot.clone()),
                    share => {
                        from_file = staged.next().expect("gradients lie in the window").part(part.clone());
                        if matches!(share, GradShare::Absent) {
                            from_file.fill_zero();
                        }
                        from_file.as_ref()
                    }
                };
                let first = slot.owned.start + in_slot.start;
                let rounding = Rounding { core: self, param: slot.param, first, changes: pass.changes() };
                if !pass.has_weights() {
                    let states = States { master: None, weights: None, moments, grad };
                    states.visit(rounding, |range, part| work(slot, within(&in_slot, range), part));
                    continue;
                }
                let visit = |weights: FlatMut<'_>| {
                    let states = States { master, weights: Some(weights), moments, grad };
                    states.visit(rounding, |range, part| work(slot, within(&in_slot, range), part));
                };
                let in_tensor = first..first + in_slot.len();
                #[cfg(feature = "cuda")]
                if let Some(away) = &mut away {
                    away.visit(Place { param: slot.param, in_tensor, in_group: part }, visit)?;
                    continue;
                }
                match own {
                    Some(own) => visit(own),
                    None => residency::with_values(&self.params[slot.param].tensor, |whole| {
                        visit(whole.slice_mut(in_tensor));
                    })?,
                }
            }
        }
        #[cfg(feature = "cuda")]
        away.map_or(Ok(()), Away::finish)?;
        Ok(())
    }
}

/// Elements `range` of a part that is `part` of a slot, in the slot.
fn within(part: &Range<usize>, range: Range<usize>) -> Range<usize> {
    part.start + range.start..part.start + range.end
}

pub(super) fn as_f32(flat: FlatMut<'_>) -> &mut [f32] {
    match flat {
        FlatMut::F32(v) => v,
        _ => unreachable!("master weights, moments and directions are f32"),
    }
}
