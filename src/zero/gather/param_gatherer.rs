//! Gathers and releases units at stage 3: when they are needed, and ahead of use in the recorded order.
//!
//! ```text
//!   forward    gather u0 | run u0 | release u0 | gather u1 | run u1 | release u1 | ...
//!   backward   ... gather u1 | run u1, releasing each parameter when its gradient has arrived | gather u0 | ...
//! ```
//!
//! If shards are in a file, a gather begins by reading them. With `zero_quantized_weights`, the gather carries int8:
//! all ranks, the owner of a shard included, compute with the received values, while the owner keeps the exact weights
//! that the optimizer updates.
//!
//! A leaf is gathered with all units inside it. Ranks may use different parameters of a leaf, so each rank releases
//! values when its own gradients arrive. The gatherer's counts and the unit's state depend only on the unit's events,
//! which all ranks have in common. If unused parameters are ignored, this holds for all units.
//!
//! On several hosts, with `zero_hpz_partition_size`, each rank of a group within a host keeps a part of the unit that a
//! forward pass has gathered. The unit is gathered from these parts until weights change, without traffic between
//! hosts.
//!
//! With `overlap_comm`, from the second micro step on, the next units are gathered while one unit runs, within the
//! limits of `stage3_prefetch_bucket_size` and `stage3_max_live_parameters`. Every decision depends only on counts,
//! never on time, so all ranks issue the same collectives in the same order.

mod routed;

use super::gather_group::{AfterGather, GatherGroup, PendingGather, SecondaryShards, forget, release};
use super::leaf_units::{LeafPosition, LeafUnits};
use super::unit_trace::{UnitEvent, UnitTrace};
use crate::comm::{InterHostFormat, WireFormat};
use crate::config::ZeroConfig;
use crate::error::Result;
use crate::memory::MemoryKind;
use crate::param::{Param, ParamId, ROOT, UnitId};
use crate::precision::IntFormat;
use crate::zero::share::share_plan::SharePlan;
use crate::zero::step_executor::StepExecutor;

/// The part of a rank that gathers and releases the sharded parameters of every unit.
pub(crate) struct ParamGatherer<R: StepExecutor> {
    units: Vec<UnitState<R>>,
    /// The unit with which each unit is gathered: itself, or the leaf around it.
    outermost: Vec<UnitId>,
    /// Whether ranks may use different parameters of each unit: true for leaves, or for all units.
    ranks_differ: Vec<bool>,
    /// The units whose backward pass has begun, until the backward pass of another unit begins. Only units of which
    /// ranks may use different parameters are listed.
    spent: Vec<UnitId>,
    persistent: GatherGroup,
    /// Whether each parameter is persistent.
    is_persistent: Vec<bool>,
    /// Whether the persistent parameters were released too, and have not been needed since.
    persistent_is_released: bool,
    /// The traces of training and of evaluation. Evaluation has only forward passes.
    traces: [UnitTrace; 2],
    /// The number of elements of gathered parameters, without the persistent ones.
    live: usize,
    /// The number of elements of pending gathers.
    in_flight: usize,
    /// The maximum number of elements in pending gathers: units are gathered ahead of use only up to this number.
    max_in_flight: usize,
    /// Whether packed shards are unpacked in place. Packed units are then not gathered ahead, because they are local.
    unpacks_in_place: bool,
    /// Whether units of this micro step will run again in the backward pass.
    recomputes: bool,
    /// The number of backward passes that run inside others: a recomputing unit runs a separate one.
    depth: usize,
    /// The last unit that each of these backward passes has entered, beginning with the engine's backward pass.
    entered: Vec<UnitId>,
    /// The number of nested backward passes that run inside one that is not the engine's.
    other_backward_depth: usize,
}

struct UnitState<R: StepExecutor> {
    group: GatherGroup,
    second_copy: SecondaryShards<R>,
    state: GatherState<R>,
    /// The number of the unit's elements that count as live.
    live: usize,
    /// The smallest depth at which a backward pass has entered the unit in this micro step.
    outermost: usize,
    /// The depth of the last backward pass that entered the unit.
    depth: usize,
    /// Whether that backward pass has moved on to another unit.
    is_behind: bool,
    /// Whether the unit is gathered only for a backward pass other than the engine's.
    is_for_other_backward: bool,
    /// Whether the unit has parameters that are packed at rest.
    is_packed: bool,
}

/// The parts of a unit's parameters that are in memory.
enum GatherState<R: StepExecutor> {
    /// Only this rank's shards are in memory.
    Released,
    /// A gather is pending.
    InFlight(PendingGather<R>),
    /// All parameters are in memory.
    Gathered,
    /// Some or all parameters are in memory: the backward pass releases them one after the other.
    Partly,
}

impl<R: StepExecutor> ParamGatherer<R> {
    /// Creates a gatherer for sharded parameters. At stages 0 to 2, there is nothing to gather, and every call does
    /// nothing.
    pub fn new(params: &[Param], leaves: &LeafUnits, zero: &ZeroConfig, plan: &SharePlan) -> Self {
        let mut persistent = Vec::new();
        let outermost = leaves.outermost();
        let mut by_unit = vec![Vec::new(); outermost.len()];
        let mut persistent_elements = 0usize;
        // Parameters that are not sharded are never released either. Experts of other ranks are never gathered.
        let is_elsewhere = |param: &Param| !param.cut().is_on(plan.rank);
        let mut is_persistent: Vec<bool> =
            params.iter().map(|param| !plan.shards(param.weights) || is_elsewhere(param)).collect();
        for (id, param) in params.iter().enumerate() {
            if is_persistent[id] {
                continue;
            }
            let small = param.numel <= zero.param_persistence_threshold && param.packing().is_none();
            if small && persistent_elements + param.numel <= zero.model_persistence_threshold {
                persistent_elements += param.numel;
                persistent.push(id);
                is_persistent[id] = true;
            } else {
                by_unit[outermost[param.unit]].push(id);
            }
        }
        let wire = match (zero.quantized_weights, zero.compress_between_hosts_only) {
            (false, _) => WireFormat::Exact,
            (true, false) => WireFormat::Blocks(IntFormat::Int8),
            (true, true) => WireFormat::BetweenHosts(InterHostFormat::Blocks(IntFormat::Int8)),
        };
        let group = |p| GatherGroup::new(p, params, plan.mesh, wire);
        let unit = |p| UnitState {
            group: group(p),
            second_copy: None,
            state: GatherState::Released,
            live: 0,
            outermost: usize::MAX,
            depth: 0,
            is_behind: false,
            is_for_other_backward: false,
            is_packed: false,
        };
        let differ = |place: &LeafPosition| zero.ignore_unused_parameters || *place == LeafPosition::Leaf;
        Self {
            units: by_unit
                .into_iter()
                .map(|p| {
                    let is_packed = p.iter().any(|p| params[*p].packing().is_some());
                    UnitState { is_packed, ..unit(p) }
                })
                .collect(),
            ranks_differ: leaves.positions().iter().map(differ).collect(),
            outermost,
            spent: Vec::new(),
            persistent: group(persistent),
            is_persistent,
            persistent_is_released: false,
            traces: Default::default(),
            live: 0,
            in_flight: 0,
            max_in_flight: zero
                .param_files()
                .map_or(usize::MAX, |files| files.read_ahead_elements())
                .min(zero.prefetch_bucket_size),
            unpacks_in_place: plan.unpacks_in_place(),
            recomputes: false,
            depth: 0,
            entered: vec![ROOT],
            other_backward_depth: 0,
        }
    }

    /// Gathers the persistent parameters again after the weights have changed. Second copies are then out of date.
    pub fn refresh_persistent(&mut self, core: &R) -> Result<()> {
        self.units.iter_mut().for_each(|unit| unit.second_copy = None);
        if self.persistent.params.is_empty() {
            return Ok(());
        }
        self.persistent_is_released = false;
        let gathering = self.persistent.launch(core)?;
        self.persistent.release(core.params())?;
        self.persistent.install(core, gathering, MemoryKind::Persistent, AfterGather::Use).map(drop)
    }

    /// Prepares a unit that is about to run: gathers it if necessary, and begins to gather the next units. A unit
    /// inside a leaf is already in memory.
    pub fn enter(&mut self, core: &R, event: UnitEvent) -> Result<()> {
        let unit = event.unit();
        if self.outermost[unit] != unit {
            return Ok(());
        }
        if self.other_backward_depth > 0 {
            return self.enter_other_backward(core, unit);
        }
        self.trace(core).advance(event);
        if let UnitEvent::Backward(unit) = event {
            let depth = self.depth;
            let state = &mut self.units[unit];
            (state.depth, state.outermost) = (depth, state.outermost.min(depth));
            state.is_behind = false;
            let previous = std::mem::replace(&mut self.entered[self.depth], unit);
            if previous != unit {
                self.leave_behind(core, previous)?;
            }
            for spent in std::mem::take(&mut self.spent) {
                self.live -= std::mem::take(&mut self.units[spent].live);
            }
        }
        let in_training = matches!(event, UnitEvent::Forward(_)) && !core.is_evaluating();
        self.ensure_gathered(
            core,
            unit,
            if in_training && core.second_group() > 1 { AfterGather::KeepSecondCopy } else { AfterGather::Use },
        )?;
        self.units[unit].is_for_other_backward = false;
        if matches!(event, UnitEvent::Backward(_)) && self.ranks_differ[unit] {
            // From here on, this rank releases the parameters that it has used.
            self.units[unit].state = GatherState::Partly;
            self.spent.push(unit);
        }
        self.prefetch(core)
    }

    /// Prepares a unit that is about to run in a backward pass other than the engine's: gathers it if necessary.
    /// Nothing is gathered ahead, and the record of the engine's own order does not change.
    pub fn enter_other_backward(&mut self, core: &R, unit: UnitId) -> Result<()> {
        if self.outermost[unit] != unit {
            return Ok(());
        }
        let previous = std::mem::replace(&mut self.entered[self.depth], unit);
        if previous != unit && self.units[previous].is_for_other_backward {
            self.leave_behind(core, previous)?;
        }
        let UnitState { state, depth, is_behind, is_for_other_backward, .. } = &mut self.units[unit];
        *is_for_other_backward |= matches!(state, GatherState::Released);
        *depth = self.depth;
        *is_behind = false;
        let is_for_other_backward = *is_for_other_backward;
        // Gathering the unit again first releases those of its parameters that are still in memory.
        self.ensure_gathered(core, unit, AfterGather::Use)?;
        let differs = self.ranks_differ[unit];
        let state = &mut self.units[unit];
        state.is_for_other_backward = is_for_other_backward;
        if differs {
            state.state = GatherState::Partly;
        }
        Ok(())
    }

    /// Releases a parameter that a backward pass other than the engine's no longer needs, if the parameter was gathered
    /// for that pass.
    pub fn release_param_after_other_backward(&mut self, core: &R, param: ParamId) -> Result<()> {
        if self.units[self.outermost[core.params()[param].unit]].is_for_other_backward {
            self.release_param(core, param)
        } else {
            Ok(())
        }
    }

    /// Releases the parameters left in memory by backward passes other than the engine's.
    pub fn release_after_other_backward(&mut self, core: &R) -> Result<()> {
        for unit in 0..self.units.len() {
            if self.units[unit].is_for_other_backward {
                self.release_unit(core, unit)?;
            }
        }
        Ok(())
    }

    /// Returns whether a unit has parameters that are gathered and released.
    pub fn has_params(&self, unit: UnitId) -> bool {
        !self.units[unit].group.params.is_empty()
    }

    /// Reports that a unit of this micro step will run again in the backward pass.
    pub fn will_recompute(&mut self) {
        self.recomputes = true;
    }

    /// Begins a backward pass inside a backward pass. `inside_other_backward` means that the outer backward pass is not
    /// the engine's.
    pub fn nest(&mut self, inside_other_backward: bool) {
        self.depth += 1;
        self.other_backward_depth += usize::from(inside_other_backward);
        self.entered.push(ROOT);
    }

    /// Ends the inner backward pass, that of `unit`, and also releases the parameters that this rank has not used.
    pub fn unnest(&mut self, core: &R, unit: UnitId, inside_other_backward: bool) -> Result<()> {
        let last = self.entered.pop().unwrap_or(ROOT);
        let result = self.leave_behind(core, last);
        let (unit, depth) = (self.outermost[unit], self.depth);
        self.depth -= 1;
        self.other_backward_depth -= usize::from(inside_other_backward);
        // An outer backward pass may have entered the unit too.
        if !inside_other_backward && self.ranks_differ[unit] && self.units[unit].outermost == depth {
            self.release_unit(core, unit)?;
        }
        result
    }

    /// Reports that the current backward pass has moved on from a unit, whose input now has its gradient. The unit's
    /// frozen parameters are no longer needed, unless a trained one is still waiting for its gradient.
    fn leave_behind(&mut self, core: &R, unit: UnitId) -> Result<()> {
        if unit == ROOT || self.units[unit].depth < self.depth {
            return Ok(());
        }
        self.units[unit].is_behind = true;
        self.release_frozen(core, unit)
    }

    fn release_frozen(&mut self, core: &R, unit: UnitId) -> Result<()> {
        let UnitState { group, is_behind, .. } = &self.units[unit];
        let params = || group.params.iter().map(|p| &core.params()[*p]);
        let is_over = *is_behind && !params().any(|p| p.is_trained() && p.is_whole());
        match (is_over, self.ranks_differ[unit]) {
            (false, _) => Ok(()),
            (true, false) => self.release_unit(core, unit),
            (true, true) => group.release(core.params()),
        }
    }

    /// Ends a unit's forward pass: releases the unit, unless it will be used again within `stage3_max_reuse_distance`
    /// and the gathered parameters do not exceed `stage3_max_live_parameters`. A packed unit is released whatever the
    /// distance, because packing would save nothing if everything stayed unpacked between the forward and the backward
    /// pass.
    pub fn leave_forward(&mut self, core: &R, unit: UnitId) -> Result<()> {
        if self.outermost[unit] != unit {
            return Ok(());
        }
        if self.other_backward_depth > 0 {
            return if self.units[unit].is_for_other_backward { self.release_unit(core, unit) } else { Ok(()) };
        }
        let stays = !self.units[unit].is_packed && self.is_needed_soon(core, unit);
        if stays { Ok(()) } else { self.release_unit(core, unit) }
    }

    /// Reports that a parameter's gradient has arrived: the backward pass that computed it no longer needs the
    /// values.
    ///
    /// Another backward pass may need them. A parameter that is used inside and outside a recomputing unit has a
    /// gradient from each use. Therefore a parameter of a unit that an outer backward pass has entered stays in memory,
    /// and the root's parameters also stay while units will recompute.
    pub fn release_param(&mut self, core: &R, param: ParamId) -> Result<()> {
        let params = core.params();
        let id = self.outermost[params[param].unit];
        let unit = &mut self.units[id];
        if self.is_persistent[param] || unit.depth < self.depth || (id == ROOT && self.recomputes) {
            return Ok(());
        }
        if release(&params[param])? && !self.ranks_differ[id] {
            self.live -= params[param].numel;
            unit.live -= params[param].numel;
            let any = unit.group.params.iter().any(|p| params[*p].is_whole());
            unit.state = if any { GatherState::Partly } else { GatherState::Released };
        }
        self.release_frozen(core, id)
    }

    /// Ends the micro step: releases the remaining parameters (unused ones, and those of gathers whose results were not
    /// used).
    pub fn end(&mut self, core: &R) -> Result<()> {
        for unit in 0..self.units.len() {
            self.settle(core, unit)?;
            self.release_unit(core, unit)?;
            self.units[unit].is_behind = false;
            self.units[unit].outermost = usize::MAX;
        }
        self.entered.fill(ROOT);
        self.spent.clear();
        self.trace(core).end();
        self.recomputes &= core.is_evaluating();
        Ok(())
    }

    /// Returns the number of training micro steps so far that used units in a different order from the previous micro
    /// step.
    pub fn order_changes(&self) -> u64 {
        self.traces[0].changes()
    }

    /// Returns the trace for the model's current use.
    fn trace(&mut self, core: &R) -> &mut UnitTrace {
        &mut self.traces[usize::from(core.is_evaluating())]
    }

    /// Replaces the traces, and returns the previous ones.
    pub fn exchange_traces(&mut self, traces: [UnitTrace; 2]) -> [UnitTrace; 2] {
        std::mem::replace(&mut self.traces, traces)
    }

    fn ensure_gathered(&mut self, core: &R, unit: UnitId, after: AfterGather) -> Result<()> {
        if self.persistent_is_released {
            self.refresh_persistent(core)?;
        }
        if matches!(self.units[unit].state, GatherState::Partly) {
            self.release_unit(core, unit)?;
        }
        if matches!(self.units[unit].state, GatherState::Released) {
            self.launch(core, unit)?;
        }
        let UnitState { group, second_copy, state, live, .. } = &mut self.units[unit];
        if let GatherState::InFlight(gathering) = std::mem::replace(state, GatherState::Gathered) {
            self.in_flight -= group.numel;
            self.live += group.numel;
            *live = group.numel;
            let after = if second_copy.is_some() { AfterGather::Use } else { after };
            let new_copy = group.install(core, gathering, MemoryKind::Gathered, after)?;
            *second_copy = second_copy.take().or(new_copy);
        }
        Ok(())
    }

    fn launch(&mut self, core: &R, unit: UnitId) -> Result<()> {
        let UnitState { group, second_copy, state, .. } = &mut self.units[unit];
        if group.params.is_empty() {
            *state = GatherState::Gathered;
            return Ok(());
        }
        *state = GatherState::InFlight(match second_copy {
            Some(second_copy) => group.launch_within(core, second_copy)?,
            None => group.launch(core)?,
        });
        self.in_flight += group.numel;
        Ok(())
    }

    fn prefetch(&mut self, core: &R) -> Result<()> {
        if !core.zero().overlap_comm {
            return Ok(());
        }
        let (bucket, max_live) = (self.max_in_flight, core.zero().max_live_parameters);
        let coming: Vec<UnitId> = self.trace(core).coming().iter().map(|e| e.unit()).collect();
        for unit in coming {
            let state = &self.units[unit];
            if !matches!(state.state, GatherState::Released) || (self.unpacks_in_place && state.is_packed) {
                continue;
            }
            let numel = self.units[unit].group.numel;
            if self.in_flight + numel > bucket || self.live + self.in_flight + numel > max_live {
                break;
            }
            self.launch(core, unit)?;
        }
        Ok(())
    }

    fn is_needed_soon(&self, core: &R, unit: UnitId) -> bool {
        let mut distance = 0usize;
        for event in self.traces[usize::from(core.is_evaluating())].coming() {
            if event.unit() == unit {
                // A distance of 0 elements keeps nothing, not even a unit that is used again immediately.
                let zero = core.zero();
                return distance < zero.max_reuse_distance && self.live <= zero.max_live_parameters;
            }
            distance = distance.saturating_add(self.units[event.unit()].group.numel);
        }
        false
    }

    /// Gathers absent parameters, whatever their units. Returns those that it has gathered.
    pub fn gather_params(&mut self, core: &R, params: &[ParamId]) -> Result<Vec<ParamId>> {
        let absent: Vec<ParamId> =
            params.iter().copied().filter(|p| !core.params()[*p].is_whole() && core.holds(*p)).collect();
        if !absent.is_empty() {
            let group = GatherGroup::new(absent.clone(), core.params(), core.mesh(), self.persistent.wire);
            let gathering = group.launch(core)?;
            group.install(core, gathering, MemoryKind::Gathered, AfterGather::Use)?;
        }
        Ok(absent)
    }

    /// Releases parameters that [`gather_params`](Self::gather_params) has gathered.
    pub fn release_params(&mut self, core: &R, params: &[ParamId]) -> Result<()> {
        params.iter().try_for_each(|param| release(&core.params()[*param]).map(drop))
    }

    /// Releases all parameters, including the persistent ones, which are gathered again when they are needed, and
    /// forgets the recorded order.
    pub fn release_everything(&mut self, core: &R) -> Result<()> {
        self.end(core)?;
        self.release_after_other_backward(core)?;
        self.units.iter_mut().for_each(|unit| unit.second_copy = None);
        self.persistent.release(core.params())?;
        self.persistent_is_released = !self.persistent.params.is_empty();
        self.traces = Default::default();
        Ok(())
    }

    /// Waits for a gather whose result is not used, and forgets it. The other ranks depend on this rank's part in the
    /// gather.
    fn settle(&mut self, core: &R, unit: UnitId) -> Result<()> {
        let UnitState { group, state, .. } = &mut self.units[unit];
        match std::mem::replace(state, GatherState::Released) {
            GatherState::InFlight(gathering) => {
                self.in_flight -= group.numel;
                forget(core, gathering)
            }
            other => {
                *state = other;
                Ok(())
            }
        }
    }

    fn release_unit(&mut self, core: &R, unit: UnitId) -> Result<()> {
        let UnitState { group, state, live, is_for_other_backward, .. } = &mut self.units[unit];
        *is_for_other_backward = false;
        if matches!(state, GatherState::Gathered | GatherState::Partly) {
            group.release(core.params())?;
            self.live -= std::mem::take(live);
            *state = GatherState::Released;
        }
        Ok(())
    }

    /// Returns the first unit that has a layout for whose parameters `carries` returns true.
    pub fn unit_that(&self, carries: impl Fn(&[ParamId]) -> bool) -> Option<UnitId> {
        self.units.iter().position(|unit| unit.group.layouts.iter().any(|layout| carries(&layout.params)))
    }
}
