//! Routed units: units of which a layer runs only those that its input chose, such as the experts of a mixture.
//!
//! ```text
//!   all ranks     the units that each rank's input chose -> the union (one small collective for each layer and pass)
//!   in groups     gather group 0 | run group 0, gathering group 1 | release group 0 | run group 1 | ...
//! ```
//!
//! Every rank gathers the union, in the order of the units, so ranks whose inputs chose different units issue the same
//! collectives. A unit that no rank's input chose is neither gathered nor read. Parameters that are never released, and
//! units in leaves, need no agreement.

use super::unit::under_construction;
use crate::comm::{Communicator, agree};
use crate::error::Result;
use crate::graph::{is_without_gradients, precomputed_op};
use crate::param::UnitId;
use crate::util::lock;
use crate::zero::check::gradient_check_state::count_collective_step;
use crate::zero::hooks::before_backward;
use crate::zero::rank_core::{EngineLink, RankCore};
use candle_core::Tensor;
use candle_nn::VarBuilder;
use std::ops::Range;
use std::sync::Arc;

/// The number of units whose flags fit into one number of the collective that forms the union.
pub(crate) const FLAGS_PER_WORD: usize = u64::BITS as usize;

/// The units of one layer. Each input uses only some of them.
#[derive(Debug, Clone)]
pub struct RoutedUnits {
    units: Arc<[UnitId]>,
    count: usize,
    link: EngineLink,
}

/// Builds `count` routed units. Calls `build` for each unit, with a `VarBuilder` whose prefix ends with the unit's
/// number; the parameters that `build` takes from it belong to that unit. Returns the results of `build`, and the
/// units.
///
/// Build all parameters of an expert in its unit, and pass the units to
/// [`ExpertMlp::with_units`](crate::nn::ExpertMlp::with_units):
///
/// ```
/// use candle_core::Result;
/// use candle_nn::VarBuilder;
/// use candle_zero::nn::{ExpertActivation, ExpertMlp, ExpertProjection, ExpertTensors, GateUpOrder, WeightLayout};
/// use candle_zero::zero::routed_units;
///
/// fn experts(count: usize, width: usize, inner: usize, vb: VarBuilder) -> Result<ExpertMlp> {
///     let (tensors, units) = routed_units(vb.pp("experts"), count, |_, vb| {
///         let gate = vb.get((inner, width), "gate_proj.weight")?;
///         let up = vb.get((inner, width), "up_proj.weight")?;
///         Ok([gate, up, vb.get((width, inner), "down_proj.weight")?])
///     })?;
///     let all = |i: usize| ExpertTensors::Separate(tensors.iter().map(|expert| expert[i].clone()).collect());
///     let projection = |weights| ExpertProjection::new(weights, Vec::new(), WeightLayout::OutIn);
///     let (gate_up, down) = (projection(vec![all(0), all(1)])?, projection(vec![all(2)])?);
///     ExpertMlp::new(gate_up, down, ExpertActivation::Silu, GateUpOrder::Halves)?.with_units(units)
/// }
/// ```
///
/// # Errors
/// The first error of `build`; a `count` that cannot be divided among the ranks that share the units.
pub fn routed_units<T>(
    vb: VarBuilder<'_>,
    count: usize,
    mut build: impl FnMut(usize, VarBuilder<'_>) -> candle_core::Result<T>,
) -> candle_core::Result<(Vec<T>, RoutedUnits)> {
    let registrar = under_construction();
    let (mut built, mut units, mut link) = (Vec::with_capacity(count), Vec::new(), EngineLink::default());
    for number in 0..count {
        let vb = vb.pp(number.to_string());
        let Some(registrar) = &registrar else {
            built.push(build(number, vb)?);
            continue;
        };
        let (unit, engine_link) = registrar.open_unit(vb.prefix())?;
        let first = units.first().copied().unwrap_or(unit);
        let marked = registrar.mark_routed(unit, first, (number, count));
        let result = marked.and_then(|()| build(number, vb));
        registrar.close_unit();
        built.push(result?);
        units.push(unit);
        link = engine_link;
    }
    Ok((built, RoutedUnits { units: units.into(), count, link }))
}

impl RoutedUnits {
    /// Returns the number of units.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there are no units.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the units themselves.
    pub(super) fn units(&self) -> &[UnitId] {
        &self.units
    }

    /// Returns the link to the engine.
    pub(super) fn link(&self) -> &EngineLink {
        &self.link
    }

    /// Determines which units are used, given the `choices` of this rank's input. This is a collective operation if
    /// parameters are sharded among ranks.
    pub(crate) fn agree(&self, choices: impl Iterator<Item = usize>) -> candle_core::Result<RoutedPass> {
        let ungathered = || Ok(RoutedPass::all_resident(self.count));
        let Some(core) = self.link.core().filter(|core| core.shards_params()) else { return ungathered() };
        if !core.gathers_any(&self.units) {
            return ungathered();
        }
        let mut is_chosen = vec![false; self.count];
        choices.for_each(|unit| is_chosen[unit] = true);
        // The units of divided experts are gathered among the ranks that hold them.
        let comm = core.experts().map_or(core.comm(), |experts| &*experts.holders);
        if comm.size() > 1 {
            is_chosen = on_any_rank(comm, &is_chosen).map_err(|e| core.stash(e))?;
        }
        let chosen: Vec<usize> = (0..self.count).filter(|unit| is_chosen[*unit]).collect();
        let ids: Vec<UnitId> = chosen.iter().map(|unit| self.units[*unit]).collect();
        let mut groups = Vec::new();
        let (mut start, mut rest) = (0, (&chosen[..], &ids[..]));
        for size in lock(&core.gather).routed_groups(&core, &ids) {
            let (numbers, ids) = (rest.0.split_at(size), rest.1.split_at(size));
            rest = (numbers.1, ids.1);
            let end = rest.0.first().copied().unwrap_or(self.count);
            groups.push(RoutedGroup { numbers: start..end, units: ids.0.to_vec() });
            start = end;
        }
        if groups.is_empty() {
            groups.push(RoutedGroup { numbers: 0..self.count, units: Vec::new() });
        }
        Ok(RoutedPass { count: self.count, gathered: Some((self.link.clone(), groups.into())) })
    }

    /// Declares that the layer's operations depend on the units that this rank's input chose, and that the gradients of
    /// the units' parameters may therefore arrive in a different order on each rank. All ranks declare this for the
    /// same layers.
    pub(crate) fn expect_any_order(&self) {
        let Some(core) = self.link.core().filter(|core| core.comm().size() > 1) else { return };
        let (Some(first), Some(last)) = (self.units.first(), self.units.last()) else { return };
        let params = core.params().iter().enumerate().filter(|(_, param)| (first..=last).contains(&&param.unit));
        lock(&core.gradients).make_optional(params.map(|(id, _)| id));
    }
}

/// The units of a layer that the inputs of any rank chose for one forward pass, and for its backward pass.
#[derive(Debug, Clone)]
pub(crate) struct RoutedPass {
    count: usize,
    /// The groups that are gathered, which together cover all units; `None` if all parameters are in memory.
    gathered: Option<(EngineLink, Arc<[RoutedGroup]>)>,
}

/// Consecutive units. Those that were chosen are in memory together.
#[derive(Debug)]
struct RoutedGroup {
    /// The numbers of all units, chosen or not.
    numbers: Range<usize>,
    /// The units that were chosen.
    units: Vec<UnitId>,
}

impl RoutedPass {
    /// Returns a pass of `count` units whose parameters are all in memory.
    pub fn all_resident(count: usize) -> Self {
        Self { count, gathered: None }
    }

    /// Calls `run` with ranges of consecutive units that together contain all units, in order. The chosen units of a
    /// range are in memory while `run` runs.
    pub fn run(&self, mut run: impl FnMut(Range<usize>) -> candle_core::Result<()>) -> candle_core::Result<()> {
        let Some((link, groups)) = &self.gathered else { return run(0..self.count) };
        let core = connected(link)?;
        for (number, group) in groups.iter().enumerate() {
            let next = groups.get(number + 1).map_or(&[][..], |next| &next.units);
            core.enter_routed(&group.units, next)?;
            run(group.numbers.clone())?;
            core.leave_routed(&group.units)?;
        }
        Ok(())
    }

    /// Runs operations that need all chosen units together: `run` receives `x` and returns the result. In the backward
    /// pass, the units are gathered before the last of these operations is differentiated, and released after `x` has
    /// its gradient.
    pub fn run_together(
        &self,
        x: &Tensor,
        run: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Tensor> {
        let Some((link, groups)) = &self.gathered else { return run(x) };
        let core = connected(link)?;
        let units: Arc<[UnitId]> = groups.iter().flat_map(|group| group.units.iter().copied()).collect();
        let (is_recorded, before, after) = (!is_without_gradients(), (link.clone(), units.clone()), link.clone());
        let x = match x.track_op() && is_recorded {
            true => {
                let units = units.clone();
                precomputed_op::apply_precomputed(
                    "routed-input",
                    x,
                    precomputed_op::copy_storage(x)?,
                    move |_, grad| {
                        connected(&after)?.leave_routed(&units)?;
                        Ok(Some(grad.clone()))
                    },
                )?
            }
            false => x.clone(),
        };
        core.enter_routed(&units, &[])?;
        let y = run(&x)?;
        core.leave_routed(&units)?;
        match y.track_op() && is_recorded {
            true => before_backward(y, "routed-output", move || connected(&before.0)?.enter_routed(&before.1, &[])),
            false => Ok(y),
        }
    }
}

/// Returns the engine's core, or an error if the engine no longer exists.
fn connected(link: &EngineLink) -> candle_core::Result<Arc<RankCore>> {
    match link.core() {
        Some(core) => Ok(core),
        None => candle_core::bail!("routed units were used after their engine was dropped; keep the engine"),
    }
}

impl RankCore {
    /// Returns whether any of these units has parameters that are gathered and released with the unit itself.
    fn gathers_any(&self, units: &[UnitId]) -> bool {
        let gather = lock(&self.gather);
        units.iter().any(|unit| gather.has_params(*unit))
    }

    /// Gathers a group of routed units, and begins to gather the `next` group.
    fn enter_routed(&self, group: &[UnitId], next: &[UnitId]) -> candle_core::Result<()> {
        let enter = || {
            count_collective_step();
            lock(&self.gather).enter_routed(self, group, next)?;
            self.look_for_writes_in_any(group)?;
            group.iter().try_for_each(|unit| self.shift_unit(*unit))
        };
        enter().map_err(|e| self.stash(e))
    }

    /// Releases a group of routed units.
    fn leave_routed(&self, group: &[UnitId]) -> candle_core::Result<()> {
        let leave = || {
            self.look_for_writes_in_any(group)?;
            group.iter().try_for_each(|unit| self.unshift_unit(*unit))?;
            lock(&self.gather).leave_routed(self, group)
        };
        leave().map_err(|e| self.stash(e))
    }
}

/// Collective: returns, for each flag, whether it is set on any rank.
fn on_any_rank(comm: &dyn Communicator, flags: &[bool]) -> Result<Vec<bool>> {
    count_collective_step();
    let mut words = vec![0u64; flags.len().div_ceil(FLAGS_PER_WORD)];
    for (i, _) in flags.iter().enumerate().filter(|(_, flag)| **flag) {
        words[i / FLAGS_PER_WORD] |= 1 << (i % FLAGS_PER_WORD);
    }
    for other in agree::gather_u64(comm, &words)? {
        words.iter_mut().zip(other).for_each(|(word, other)| *word |= other);
    }
    Ok((0..flags.len()).map(|i| words[i / FLAGS_PER_WORD] >> (i % FLAGS_PER_WORD) & 1 == 1).collect())
}
