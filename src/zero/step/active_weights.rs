//! The weights that the model computes with, if the optimizer averages weights.
//!
//! Master weights contain the average. The model's tensors, or shards in the model's dtype, contain the weights that
//! are trained, or, for an evaluation, the average. Both are computed from master weights and optimizer states, which
//! do not change, so an evaluation does not change any bit of the training.

use super::state_sweep::{ParamSlice, sweep};
use super::weight_publisher::WeightPublisher;
use crate::error::Result;
use crate::optim::{GroupStepSettings, StepContext};
use crate::precision::FlatRef;
use crate::timeline;
use crate::zero::rank_core::RankCore;
use crate::zero::share::sub_group::{SubGroupPosition, SweepMode};
use crate::zero::step_executor::StepExecutor;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The weights that the model computes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ActiveWeights {
    /// The weights that are trained.
    Trained,
    /// The average over the steps.
    Averaged,
    /// Neither, or not the same for all parameters: weights have been set or loaded.
    Mixed,
}

impl RankCore {
    /// Returns whether an optimizer averages weights.
    pub fn averages_weights(&self) -> bool {
        self.share_plan.averages()
    }

    /// Collective: writes the trained weights, or their average, to the model. `steps` has the settings of the last
    /// step, by parameter group.
    pub fn publish_weights(&self, averaged: bool, steps: &[GroupStepSettings<'_>]) -> Result<()> {
        let _span = timeline::span(timeline::EventCategory::Optimizer, "show weights");
        self.release_all()?;
        let mut publisher = WeightPublisher::new(self.zero.allgather_bucket_size);
        let mut groups = self.groups();
        let averaged_groups: Vec<usize> =
            (0..groups.len()).filter(|group| self.share_plan.averages_class(groups[*group].class)).collect();
        let publish =
            |slot: &SubGroupPosition, _: Range<usize>, ParamSlice { param, state, half, .. }: ParamSlice<'_, '_>| {
                let parameter = &self.params[slot.param];
                let GroupStepSettings { optimizer, ctx } = steps[parameter.group];
                let (Some(averaging), Some(active)) = (optimizer.averaging(), half) else { return };
                if averaged {
                    return active.copy_cast(FlatRef::F32(param));
                }
                let step = ctx.step.saturating_sub(parameter.updates_before.load(Ordering::Relaxed));
                averaging.trained_weights(&StepContext { step, ..ctx }, param, state, active);
            };
        let push = |slot: &SubGroupPosition| publisher.push(self, slot.param);
        sweep(self, &mut groups, &averaged_groups, SweepMode::Publish, publish, push)?;
        drop(groups);
        publisher.finish(self)?;
        self.refresh()
    }
}
