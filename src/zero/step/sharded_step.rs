//! The sharded optimizer step.
//!
//! ```text
//!   vote (norm over all ranks, overflow) -> per sub-group: unscale, clip, update -> publish (all-gather; stages 1, 2)
//!                                           (states in files: window by window)
//!
//!   LAMB and LARS, between vote and update: a sweep that changes nothing, and each parameter's norms over all ranks
//!   Muon, after the elementwise updates: whole matrices, each on one rank (`whole_param_step.rs`)
//!   Adafactor, likewise: sums over rows and columns, then norms, then the update (`factored_step.rs`)
//! ```

use super::factored_step::update_factored;
use super::hyperparameters::{Hyperparameters, needs};
use super::pipeline_vote::PipelineVote;
use super::rank_zero_requests::RankZeroRequests;
use super::state_sweep::{ParamSlice, StepBackend, sweep};
use super::weight_publisher::WeightPublisher;
use super::whole_param_step::{trust_ratios, update_whole};
use crate::error::Result;
use crate::offload::StateFiles;
use crate::optim::{GroupStepSettings, OptimizerNeeds, StepContext};
use crate::tensor::flat_buffer::BufferDevice;
use crate::timeline;
use crate::util::lock;
#[cfg(feature = "cuda")]
use crate::zero::rank_core::DelayedUpdate;
use crate::zero::rank_core::RankCore;
use crate::zero::share::sub_group::{GradientShare, SubGroupPosition, SweepMode};
use crate::zero::step_executor::StepExecutor;
use candle_core::DType;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The result of the vote of all ranks before a step.
pub(crate) struct StepVoteResult {
    /// The global L2 norm of the gradients as they are, including the loss scale. The norm is not finite if any
    /// gradient is not finite.
    pub norm: f64,
    /// The ranks with a non-finite value, in their loss or in their pieces of the gradients.
    pub overflowed: Vec<usize>,
    /// The mean of the losses.
    pub loss: f64,
    /// The requests from rank 0 to all ranks.
    pub requests: RankZeroRequests,
}

impl StepVoteResult {
    /// Returns whether any rank had a non-finite value.
    pub fn has_overflow(&self) -> bool {
        !self.overflowed.is_empty()
    }
}

/// Collective: computes the norm and the overflow flag over all ranks. Each rank covers its piece of every gradient,
/// parameter by parameter, even if it holds more. The sum is therefore computed in the same order at every stage, with
/// and without groups of ranks.
pub(crate) fn vote<R: StepExecutor>(
    core: &R,
    loss: f64,
    loss_is_finite: bool,
    requests: RankZeroRequests,
    accumulate: DType,
) -> Result<StepVoteResult> {
    let _span = timeline::span(timeline::EventCategory::Optimizer, "vote");
    let mut squares = Vec::new();
    for group in core.groups().iter_mut().filter(|group| group.class.is_trained()) {
        for slot in 0..group.slots.len() {
            if group.grad_file.is_none() && matches!(group.grads[slot], GradientShare::Absent) {
                group.grads[slot] = GradientShare::Memory(group.zeroed_grads(slot, core, accumulate)?);
            }
            if let (GradientShare::File { writing, .. }, Some(files)) = (&mut group.grads[slot], core.files()) {
                // A failing disk is noticed before any weight has changed.
                writing.take().map_or(Ok(()), |writing| files.wait_written(writing))?;
            }
        }
        squares.extend(group.slots.iter().map(|slot| slot.param).zip(group.squares()?));
    }
    // The squares are added one after the other, in the order of registration, so that neither the boundaries of
    // sub-groups nor those of pipeline stages change the sum.
    squares.sort_by_key(|(param, _)| *param);
    let PipelineVote { squares, loss, loss_is_finite, requests } =
        core.vote_of_all_stages(PipelineVote { squares, loss, loss_is_finite, requests })?;
    let sum: f64 = squares.into_iter().fold(0.0, |sum, (_, squares)| sum + squares);
    let overflow = !loss_is_finite || !sum.is_finite();
    let votes = core.gather_f64(vec![sum, requests.with_flag(overflow), loss])?;
    let flags: Vec<_> = votes.iter().map(|v| RankZeroRequests::of_number(v[1])).collect();
    Ok(StepVoteResult {
        overflowed: flags.iter().enumerate().filter(|(_, (overflow, _))| *overflow).map(|(r, _)| r).collect(),
        loss: votes.iter().map(|v| v[2]).sum::<f64>() / votes.len() as f64,
        requests: flags.iter().fold(RankZeroRequests::default(), |all, (_, requests)| all.or(*requests)),
        norm: core.mesh().by_piece(votes).iter().map(|v| v[0]).sum::<f64>().sqrt(),
    })
}

/// Updates this rank's share, sub-group by sub-group. If ranks update shards of parameters that every rank holds
/// (stages 1 and 2), also publishes the shards.
pub(crate) fn update<C: StepBackend>(core: &C, hyperparameters: &Hyperparameters<'_>) -> Result<()> {
    let mut publisher = WeightPublisher::new(core.zero().allgather_bucket_size);
    let mut publish = |slot: &SubGroupPosition| publisher.push(core, slot.param);
    let mut groups = core.groups();
    let ratios = trust_ratios(core, &mut groups, hyperparameters)?;
    let mut by_elements = Vec::new();
    for (g, group) in groups.iter_mut().enumerate() {
        if !matches!(needs(group, hyperparameters), Some(OptimizerNeeds::Elements | OptimizerNeeds::Norms(_))) {
            continue;
        }
        match core.update_on_device(group, hyperparameters)? {
            true => group.slots.iter().try_for_each(&mut publish)?,
            false => by_elements.push(g),
        }
    }
    let update =
        |slot: &SubGroupPosition, _: Range<usize>, ParamSlice { param, grad, state, half }: ParamSlice<'_, '_>| {
            let GroupStepSettings { optimizer, ctx } = hyperparameters(slot.param);
            let ratio = ratios.get(slot.param).copied().unwrap_or(1.0);
            optimizer.update(&StepContext { lr: ctx.lr * ratio, ..ctx }, param, grad, state, half);
        };
    sweep(core, &mut groups, &by_elements, SweepMode::Update, update, &mut publish)?;
    update_whole(core, &mut groups, hyperparameters, &mut publish)?;
    update_factored(core, &mut groups, hyperparameters, &mut publish)?;
    drop(groups);
    let _span = timeline::span(timeline::EventCategory::Optimizer, "publish");
    publisher.finish(core)
}

impl RankCore {
    /// Runs the [`vote`] for this rank. In the first training step, all ranks first check for parameters that no
    /// backward pass has reached.
    pub fn vote(&self, loss: f64, loss_is_finite: bool, requests: RankZeroRequests) -> Result<StepVoteResult> {
        self.check_unused()?;
        let accumulate = lock(&self.gradients).accumulate_dtype();
        vote(self, loss, loss_is_finite, requests, accumulate).map_err(|error| self.explain_out_of_memory(error))
    }

    /// Runs the [`update`] of this rank's share. `steps` has the settings by parameter group. Returns whether the
    /// weights have changed, which is false if the update is delayed.
    pub fn update(self: &Arc<Self>, steps: &[GroupStepSettings<'_>]) -> Result<bool> {
        self.update.store(steps.first().map_or(0, |group| group.ctx.step), Ordering::Relaxed);
        let hyperparameters = |param: usize| {
            let param = &self.params[param];
            let GroupStepSettings { optimizer, ctx } = steps[param.group];
            let step = ctx.step.saturating_sub(param.updates_before.load(Ordering::Relaxed));
            GroupStepSettings { optimizer, ctx: StepContext { step, ..ctx } }
        };
        #[cfg(feature = "cuda")]
        if self.delays_update(steps) {
            self.begin_update((0..self.params.len()).map(|param| hyperparameters(param).ctx).collect())?;
            return Ok(false);
        }
        update(&**self, &hyperparameters).map_err(|error| self.explain_out_of_memory(error))?;
        Ok(true)
    }

    /// Collective: completes an update that runs while the model computes.
    pub fn settle(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        self.end_update().map_err(|error| self.explain_out_of_memory(error))?;
        Ok(())
    }

    /// Returns whether an update has begun whose weights the model does not have yet: the same on all ranks.
    pub fn has_pending_update(&self) -> bool {
        #[cfg(feature = "cuda")]
        return !matches!(*lock(&self.delayed), DelayedUpdate::None);
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// Waits for the thread of an update that runs while the model computes, unless the calling thread is panicking.
    pub fn wait_for_abandoned_update(&self) {
        #[cfg(feature = "cuda")]
        if !std::thread::panicking()
            && let Err(error) = self.wait_for_update()
        {
            crate::notice::warn(&format!("the last update was not completed: {error}"));
        }
    }

    /// Returns the reason why updates cannot be delayed (`offload_optimizer.delayed_update`), or `None` if they can.
    pub fn reason_not_to_delay(&self) -> Option<&'static str> {
        if matches!(self.model_location, BufferDevice::Host) {
            Some("no GPU runs the model")
        } else if self.share_plan.has_files() {
            Some("states are in files")
        } else if !self.share_plan.grouping.updates_by_elements() {
            Some("the optimizer needs complete parameters, or their norms over all ranks")
        } else if self.averages_weights() {
            Some("the optimizer averages weights")
        } else {
            None
        }
    }

    /// Returns the name of the first parameter whose gradient is not finite in this rank's piece.
    ///
    /// # Errors
    /// An error of the GPU driver.
    pub fn non_finite_gradient(&self) -> Result<Option<&str>> {
        for group in lock(&self.groups).iter() {
            // A sum of squares is finite if and only if all elements are.
            if let Some(slot) = group.squares()?.iter().position(|squares| !squares.is_finite()) {
                return Ok(Some(self.params[group.slots[slot].param].name.as_str()));
            }
        }
        Ok(None)
    }
}
