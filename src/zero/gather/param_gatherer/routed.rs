//! Gathers routed units in groups: while the layer computes with one group, the next one is gathered.
//!
//! Routed units are not part of the recorded order, because their set differs in each micro step. The other units are
//! prefetched as if there were no routed units. A routed unit is always released after its use; otherwise, the chosen
//! units of all layers would be in memory together between the forward pass and the backward pass.

use super::{AfterGather, GatherState, ParamGatherer};
use crate::error::Result;
use crate::param::UnitId;
use crate::zero::step_executor::StepExecutor;

impl<R: StepExecutor> ParamGatherer<R> {
    /// Divides routed units into groups of consecutive units, each as large as `stage3_prefetch_bucket_size` and
    /// `stage3_max_live_parameters` allow, but with at least one unit. Returns the sizes of the groups.
    pub fn routed_groups(&self, core: &R, units: &[UnitId]) -> Vec<usize> {
        let max_elements = self.max_in_flight.min(core.zero().max_live_parameters);
        let mut groups: Vec<usize> = Vec::new();
        let mut elements = 0usize;
        for unit in units {
            let numel = self.units[*unit].group.numel;
            match groups.last_mut() {
                Some(size) if elements.saturating_add(numel) <= max_elements => {
                    *size += 1;
                    elements += numel;
                }
                _ => {
                    groups.push(1);
                    elements = numel;
                }
            }
        }
        groups
    }

    /// Gathers a group of routed units, which is about to be used, and begins to gather the `next` group.
    pub fn enter_routed(&mut self, core: &R, group: &[UnitId], next: &[UnitId]) -> Result<()> {
        // All gathers and reads of the group begin before the wait for the first of them.
        self.launch_routed(core, group)?;
        let keeps = core.second_group() > 1 && !core.is_evaluating();
        let after = if keeps { AfterGather::KeepSecondCopy } else { AfterGather::Use };
        for unit in group {
            self.ensure_gathered(core, *unit, after)?;
        }
        let numel: usize = next.iter().map(|unit| self.units[*unit].group.numel).sum();
        let is_local = self.unpacks_in_place && next.iter().any(|unit| self.units[*unit].is_packed);
        let fits = numel <= self.max_in_flight && self.live + self.in_flight + numel <= core.zero().max_live_parameters;
        if core.zero().overlap_comm && !is_local && fits {
            self.launch_routed(core, next)?;
        }
        Ok(())
    }

    fn launch_routed(&mut self, core: &R, group: &[UnitId]) -> Result<()> {
        for unit in group {
            if matches!(self.units[*unit].state, GatherState::Released) {
                self.launch(core, *unit)?;
            }
        }
        Ok(())
    }

    /// Releases a group of routed units, which has been used.
    pub fn leave_routed(&mut self, core: &R, group: &[UnitId]) -> Result<()> {
        group.iter().try_for_each(|unit| self.release_unit(core, *unit))
    }
}
