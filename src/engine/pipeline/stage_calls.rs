//! The forward and backward passes of a pipeline stage, as calls to the stage's engine.

use crate::comm::agree::first_to_differ;
use crate::comm::engine_call::during;
use crate::engine::step_clock::MicroStepCall;
use crate::engine::{Engine, MicroStepPhase};
use crate::error::{CommError, EngineError, Error, Result};
use crate::graph::{Grad, RngStreamKey, draw_from, stream_of, stream_position};
use crate::memory::{MemoryKind, MemoryLedger, MemoryLedgerEntry, MemoryTier};
use crate::param::ParamId;
use crate::tensor::residency::with_view;
use crate::zero::reduce::divided_backward::WaitingGradients;
use crate::zero::share::share_storage::ShareStorage;
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use std::time::Instant;

impl<M> Engine<M> {
    /// Runs a part of this rank's model on a micro batch. Random numbers continue at `next_draw` of the micro batch's
    /// stream. Returns the output and the position in the stream after it.
    pub(super) fn forward_stage(
        &mut self,
        micro_batch: usize,
        next_draw: u64,
        run: impl FnOnce(&M) -> candle_core::Result<Tensor>,
    ) -> Result<(Tensor, u64)> {
        let stream = stream_of(RngStreamKey {
            seed: self.seed,
            rank: self.rank() as u64,
            step: self.global_steps,
            micro_step: micro_batch as u64,
            forward: 0,
        });
        let watch = self.watch(MicroStepCall::Forward);
        let mut position = next_draw;
        let output = self.attempt(|engine| {
            let run = || {
                let output = run(&engine.model)?;
                position = stream_position().1;
                Ok(output)
            };
            draw_from((stream, next_draw), || engine.cast(|| engine.core.forward(run)))
        })?;
        self.end_watch(watch);
        Ok((output, position))
    }

    /// Returns the ledger of this rank's memory.
    pub(super) fn ledger(&self) -> &MemoryLedger {
        self.core.ledger()
    }

    /// Records that this rank keeps `bytes` of a micro batch for its backward pass.
    pub(super) fn record_activations(&self, bytes: usize) -> MemoryLedgerEntry {
        self.ledger().hold_in(MemoryTier::of(self.device()), MemoryKind::StageActivations, bytes)
    }

    /// Runs a part of this rank's model without a graph.
    pub(super) fn evaluate_stage(&mut self, run: impl FnOnce(&M) -> candle_core::Result<Tensor>) -> Result<Tensor> {
        let (_call, _span) = (during("eval"), self.span("eval"));
        self.attempt(|engine| engine.cast(|| engine.core.evaluate(|| run(&engine.model))))
    }

    /// Checks that the loss of an evaluation has one element, and returns its value.
    pub(super) fn loss_value(&self, loss: &Tensor) -> Result<f64> {
        match loss.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?[..] {
            [value] => Ok(value),
            _ => Err(EngineError::LossShape { shape: loss.dims().to_vec() }.into()),
        }
    }

    /// Returns the scalar from which the backward pass of the last stage begins.
    pub(super) fn scaled_loss(&mut self, loss: &Tensor) -> Result<Tensor> {
        self.check_loss(loss)?;
        self.attempt(|engine| engine.scaled(loss))
    }

    /// Runs the backward pass of the last stage, and returns the gradients of `input` and of parameter `tied`, which
    /// another stage uses too.
    pub(super) fn backward_diverting(
        &mut self,
        scalar: &Tensor,
        input: Option<&Tensor>,
        tied: ParamId,
    ) -> Result<(Option<Tensor>, Grad)> {
        let watch = self.watch(MicroStepCall::Backward);
        let (grads, tied_gradient) =
            self.attempt(|engine| engine.cast(|| engine.core.backward_diverting(scalar, tied)))?;
        self.end_watch(watch);
        let tied_gradient = tied_gradient.ok_or_else(|| EngineError::Pipeline { why: NOT_USED.into() })?;
        Ok((gradient_of(grads, input)?, tied_gradient))
    }

    /// Differentiates a scalar of this rank's graph, and returns the gradient of `input`.
    pub(super) fn backward_stage(&mut self, scalar: &Tensor, input: Option<&Tensor>) -> Result<Option<Tensor>> {
        let watch = self.watch(MicroStepCall::Backward);
        let grads = self.attempt(|engine| engine.cast(|| engine.core.backward(scalar, false)))?;
        self.end_watch(watch);
        gradient_of(grads, input)
    }

    /// Runs the first part of a divided backward pass. Returns the gradient of `input`, and what the second part needs
    /// to compute the gradients of the parameters.
    pub(super) fn backward_stage_inputs(
        &mut self,
        scalar: &Tensor,
        input: Option<&Tensor>,
    ) -> Result<(Option<Tensor>, WaitingGradients)> {
        let watch = self.watch(MicroStepCall::Backward);
        let (grads, waiting) = self.attempt(|engine| engine.cast(|| engine.core.backward_inputs(scalar)))?;
        self.end_watch(watch);
        Ok((gradient_of(grads, input)?, waiting))
    }

    /// Runs the second part of a divided backward pass. Returns the gradient of parameter `tied`, which another stage
    /// uses too.
    pub(super) fn backward_stage_weights(
        &mut self,
        waiting: WaitingGradients,
        tied: Option<ParamId>,
    ) -> Result<Option<Grad>> {
        let watch = self.watch(MicroStepCall::Backward);
        let tied_gradient = self.attempt(|engine| engine.cast(|| engine.core.backward_weights(waiting, tied)))?;
        self.end_watch(watch);
        match tied_gradient {
            None if tied.is_some() => Err(EngineError::Pipeline { why: NOT_USED.into() }.into()),
            tied_gradient => Ok(tied_gradient),
        }
    }

    /// Passes on the result of a part of a step that involves other ranks. If it is an error, which leaves this rank
    /// out of step, the others are notified, and further calls are refused.
    pub(super) fn in_step<T>(&mut self, result: Result<T>) -> Result<T> {
        result.map_err(|error| if self.stopped.is_some() { error } else { self.stop(error) })
    }

    /// Returns an error if this rank is out of step.
    pub(super) fn check_in_step(&self) -> Result<()> {
        self.not_stopped()
    }

    /// Counts the micro batches of a step after their backward passes have run, so that the next call to
    /// [`step`](Engine::step) updates the weights. The step began at `start`.
    pub(super) fn end_micro_batches(&mut self, micro_batches: usize, start: Instant) {
        let earlier = micro_batches as u64 - 1;
        self.reporter.micro_step = Some(start);
        self.accumulation.micro_steps = earlier;
        self.micro_steps += earlier;
        self.phase = MicroStepPhase::AfterBackward;
    }

    /// Returns parameter `param`, which this rank keeps in full.
    pub(super) fn weight(&self, param: ParamId) -> Tensor {
        self.core.params()[param].tensor.clone()
    }

    /// Replaces the values of a parameter that this rank does not train.
    pub(super) fn replace_weight(&mut self, param: ParamId, values: &Tensor) -> Result<()> {
        let values = with_view(values, |values| values.to_flat())?;
        self.attempt(|engine| engine.core.replace_frozen(param, values))
    }

    /// Returns the index of the parameter with that name on this rank, and whether it is trained here.
    pub(super) fn param_named(&self, name: &str) -> Option<(ParamId, bool)> {
        let param = self.core.param_named(name)?;
        Some((param, self.core.params()[param].is_trained()))
    }

    /// Collective: returns the mean of a value that only the ranks of the last stage have.
    pub(super) fn mean_of_last_stage(&mut self, value: f64) -> Result<f64> {
        let values = self.values_of_last_stage(value)?;
        Ok(values.iter().sum::<f64>() / values.len().max(1) as f64)
    }

    /// Collective: returns the sum of a value that only the ranks of the last stage have.
    pub(super) fn sum_of_last_stage(&mut self, value: f64) -> Result<f64> {
        Ok(self.values_of_last_stage(value)?.iter().sum())
    }

    /// Collective: returns the values of the ranks of the last stage.
    fn values_of_last_stage(&mut self, value: f64) -> Result<Vec<f64>> {
        self.attempt(|engine| {
            let Some(position) = engine.core.pipeline() else { unreachable!("this engine is part of a pipeline") };
            let all = position.job.gather_f64(vec![f64::from(u8::from(position.is_last)), value]).wait()?;
            Ok::<_, Error>(all.iter().filter(|rank| rank[0] != 0.0).map(|rank| rank[1]).collect())
        })
    }

    /// Collective along the pipeline: returns the token that only the rank of the last stage has.
    pub(super) fn token_of_last_stage(&mut self, own_token: Option<u32>) -> Result<u32> {
        self.attempt(|engine| {
            let Some(position) = engine.core.pipeline() else { unreachable!("this engine is part of a pipeline") };
            let all = position.comm.gather_f64(vec![own_token.map_or(-1.0, f64::from)]).wait()?;
            let token = all.iter().map(|rank| rank[0]).find(|token| *token >= 0.0);
            let missing = || CommError::other("the rank of the last stage has sent no token");
            token.map(|token| token as u32).ok_or_else(missing).map_err(Error::from)
        })
    }

    /// Collective along the pipeline: returns the first position at which `text` differs from that at position 0.
    pub(super) fn first_stage_to_differ(&mut self, text: &str) -> Result<Option<usize>> {
        self.attempt(|engine| {
            let Some(position) = engine.core.pipeline() else { unreachable!("this engine is part of a pipeline") };
            first_to_differ(&*position.comm, text)
        })
    }

    /// Returns the mean loss of the last optimizer step, over ranks and micro batches.
    pub(super) fn mean_loss(&self) -> f64 {
        self.reporter.loss
    }
}

/// The message about a tied weight that has no gradient.
const NOT_USED: &str = "the last layer shares a parameter with the first one, but the loss does not depend on it; use the \
                        parameter in the last layer, or give that layer its own";

/// Returns the gradient of a stage's input. An input that the stage does not use has a gradient of zeros.
fn gradient_of(mut grads: GradStore, input: Option<&Tensor>) -> Result<Option<Tensor>> {
    match input {
        Some(input) => Ok(Some(grads.remove(input).map_or_else(|| input.zeros_like(), Ok)?)),
        None => Ok(None),
    }
}
