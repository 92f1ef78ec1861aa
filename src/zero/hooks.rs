//! The core's part in a micro step: the methods that the engine calls, and those that units and parameters call to
//! report their progress.
//!
//! ```text
//!   engine    forward | backward ....................... | (vote, update: step/) | end_step
//!   graph     enter, leave_forward | begin_backward, gradient_arrived
//! ```
//!
//! A backward pass other than the engine's may run through the model: Candle's own `loss.backward()`, or that of
//! another engine. Such a pass may run at any time, and nothing reports its end. Gradients of parameters do not count
//! in such a pass. The parameters that it needs are gathered for it, and released once it no longer needs them, or at
//! the engine's next call.

use super::check::gradient_check_state::count_collective_step;
use super::gather::unit_trace::UnitEvent;
use super::model_buffers::{ModelBuffers, SavedBuffers};
use super::rank_core::RankCore;
use super::reduce::divided_backward::WaitingGradients;
use crate::error::Result;
use crate::graph::precomputed_op::{apply_precomputed, copy_storage};
use crate::graph::{Grad, abandon, node_of, with_deferred_weight_gradients, with_single_backward, without_gradients};
use crate::param::{ParamId, ROOT, UnitId};
use crate::precision::Flat;
use crate::tensor::residency;
use crate::timeline::{self, TimelineSpan};
use crate::util::lock;
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

/// The size, in bytes, of a new stack for Candle's recursive backward pass.
const BACKWARD_STACK: usize = 64 << 20;
/// The remaining size of the current stack, in bytes, below which a new stack is used.
const RED_ZONE: usize = 16 << 20;

/// Methods for the engine.
impl RankCore {
    /// Runs a model. Parameters outside units stay in memory while the model runs.
    pub fn forward(self: &Arc<Self>, run: impl FnOnce() -> candle_core::Result<Tensor>) -> Result<Tensor> {
        self.begin_call()?;
        if !self.is_evaluating() {
            if self.buffers.are_exchanged_before_forward() {
                count_collective_step();
            }
            self.buffers.before_forward(self.comm())?;
            self.look_for_writes()?;
        }
        let run = || {
            self.enter(UnitEvent::Forward(ROOT))?;
            let running = FlagGuard::raise(&self.in_forward);
            let output = run()?;
            drop(running);
            self.look_for_writes().map_err(|e| self.stash(e))?;
            self.leave_forward(ROOT)?;
            let output = self.mark_output(output)?;
            match self.is_evaluating() || self.is_checking() {
                true => Ok(output),
                false => self.watch_output(output),
            }
        };
        run().map_err(|e| self.explain(e))
    }

    /// Begins a call of the engine: forgets an earlier failure, and releases the remaining parameters of backward
    /// passes other than the engine's.
    fn begin_call(&self) -> Result<()> {
        self.forget_failure();
        lock(&self.gather).release_after_other_backward(self)
    }

    /// Makes a backward pass other than the engine's gather the root's parameters first. The engine's own backward pass
    /// gathers these parameters itself.
    fn mark_output(self: &Arc<Self>, output: Tensor) -> candle_core::Result<Tensor> {
        let is_needed = output.track_op() && output.dtype().is_float() && !self.is_evaluating();
        if !is_needed || !self.shards_params() || !lock(&self.gather).has_params(ROOT) {
            return Ok(output);
        }
        let core = Arc::downgrade(self);
        before_backward(output, "model-output", move || match core.upgrade() {
            Some(core) if !core.is_in_backward() => core.begin_backward(ROOT),
            _ => Ok(()),
        })
    }

    /// Runs a model without a graph. Afterwards, all parameters except the persistent ones are released.
    pub fn evaluate(self: &Arc<Self>, run: impl FnOnce() -> candle_core::Result<Tensor>) -> Result<Tensor> {
        self.evaluating.store(true, Ordering::Relaxed);
        let output = without_gradients(|| self.forward(run));
        let released = self.release_all();
        self.evaluating.store(false, Ordering::Relaxed);
        released?;
        Ok(output?.detach())
    }

    /// Differentiates `loss`. On return, all gradients are reduced and added to this rank's share, or kept unreduced in
    /// `no_sync`, and all parameters except the persistent ones are released. Returns the gradients of variables that
    /// are not parameters. A pipeline stage, unlike a complete model (`is_complete`), may have no parameters.
    pub fn backward(&self, loss: &Tensor, is_complete: bool) -> Result<GradStore> {
        self.begin_call()?;
        // Failed backward passes may have left gradients in the parameters' slots.
        abandon();
        self.begin_counting();
        #[cfg(feature = "cuda")]
        let gpu_span = super::gpu::gpu_timeline::GpuTimelineSpan::begin(self)?;
        let variable_grads = self.differentiate(loss).map_err(|e| self.explain(e))?;
        if is_complete {
            self.check_reached(loss)?;
        }
        #[cfg(feature = "cuda")]
        let gpu_span = gpu_span.map(super::gpu::gpu_timeline::GpuTimelineSpan::end).transpose()?;
        self.end_backward()?;
        #[cfg(feature = "cuda")]
        gpu_span.map_or(Ok(()), |span| span.record("backward"))?;
        Ok(variable_grads)
    }

    /// Runs the backward pass of a graph, in which parameters' gradients count, on this thread.
    fn differentiate(&self, scalar: &Tensor) -> candle_core::Result<GradStore> {
        let _sections = timeline::sections();
        let _guard = ThreadIdGuard::with(&self.backward_on, Some(thread::current().id()));
        self.begin_backward(ROOT)?;
        with_single_backward(|| on_big_stack(|| scalar.backward()))
    }

    /// Reduces the remaining gradients, unless they are kept unreduced, and releases all parameters except the
    /// persistent ones.
    fn end_backward(&self) -> Result<()> {
        let end = || {
            if self.holds_unreduced() {
                self.keep_unreduced();
            } else {
                self.release_unreduced()?;
                lock(&self.gradients).end_backward(self)?;
            }
            self.release_all()
        };
        end().map_err(|error| self.explain_out_of_memory(error))
    }

    /// Differentiates a part of a model like [`backward`](Self::backward), and also returns the gradient of `param`
    /// instead of reducing it.
    pub fn backward_diverting(&self, scalar: &Tensor, param: ParamId) -> Result<(GradStore, Option<Grad>)> {
        let (grads, diverted) = self.diverted.during(param, || self.backward(scalar, false));
        Ok((grads?, diverted))
    }

    /// Differentiates a part of a model up to its input, and returns the gradients of variables that are not
    /// parameters. The gradients of parameters wait in memory for [`backward_weights`](Self::backward_weights).
    pub fn backward_inputs(&self, scalar: &Tensor) -> Result<(GradStore, WaitingGradients)> {
        self.begin_call()?;
        abandon();
        let (variable_grads, waiting) =
            self.divided.during(|| with_deferred_weight_gradients(|| self.differentiate(scalar)));
        let variable_grads = variable_grads.map_err(|e| self.explain(e))?;
        self.release_all()?;
        Ok((variable_grads, waiting))
    }

    /// Computes the gradients that [`backward_inputs`](Self::backward_inputs) has left for later, and reduces them.
    /// Returns the gradient of parameter `diverted` instead of reducing it.
    pub fn backward_weights(&self, waiting: WaitingGradients, diverted: Option<ParamId>) -> Result<Option<Grad>> {
        self.begin_call()?;
        let run = || {
            let _sections = timeline::sections();
            timeline::section(timeline::EventCategory::Unit, "backward of weights", || self.unit_name(ROOT));
            waiting.into_iter().try_for_each(|(param, grad)| self.gradient_arrived(param, grad.compute()?))
        };
        let (result, grad) = match diverted {
            Some(param) => self.diverted.during(param, run),
            None => (run(), None),
        };
        result.map_err(|e| self.explain(e))?;
        self.end_backward()?;
        Ok(grad)
    }

    /// Returns the index of the parameter with this name.
    pub fn param_named(&self, name: &str) -> Option<ParamId> {
        self.params.iter().position(|param| param.name == name)
    }

    /// Replaces the values of a parameter that this rank keeps in full and does not train.
    pub fn replace_frozen(&self, param: ParamId, values: Flat) -> Result<()> {
        let param = &self.params[param];
        assert!(!param.is_trained() && !self.shards_params(), "{} is trained or sharded", param.name);
        let storage = residency::storage_on(param.tensor.device(), residency::to_storage(values))?;
        residency::fill(&param.tensor, storage)?;
        self.remember_weights()
    }

    /// Ends an optimizer step: drops gradients, synchronizes buffers, and gathers persistent parameters again if
    /// weights changed.
    pub fn end_step(&self, weights_changed: bool) -> Result<()> {
        lock(&self.gradients).clear(self);
        self.buffers.after_step(self.comm())?;
        lock(&self.gather).release_after_other_backward(self)?;
        if weights_changed { self.refresh() } else { Ok(()) }
    }

    /// Gathers the persistent parameters again after weights have changed.
    pub fn refresh(&self) -> Result<()> {
        let mut gather = lock(&self.gather);
        gather.release_after_other_backward(self)?;
        gather.refresh_persistent(self).map_err(|error| self.explain_out_of_memory(error))?;
        drop(gather);
        self.remember_weights()
    }

    /// Releases all parameters except the persistent ones.
    pub fn release_all(&self) -> Result<()> {
        lock(&self.gather).end(self)
    }
}

/// Runs work that recurses through a graph, on a new stack if little is left of the current one.
pub(super) fn on_big_stack<T>(run: impl FnOnce() -> T) -> T {
    stacker::maybe_grow(RED_ZONE, BACKWARD_STACK, run)
}

/// Methods for units and parameters.
impl RankCore {
    /// Handles a parameter's gradient once nothing later in this backward pass can add to it.
    pub(super) fn gradient_arrived(&self, param: ParamId, grad: Grad) -> candle_core::Result<()> {
        // Candle's operations compute gradients of frozen parameters too.
        let grad = Some(grad).filter(|_| self.params[param].is_trained());
        if let Some(grad) = &grad {
            self.count_reached();
            if self.check.is_measuring() {
                self.measure(param, grad)?;
            }
        }
        let grad = grad.and_then(|grad| self.diverted.pass(param, grad));
        let result = match grad.map_or(Ok(None), |grad| self.to_reduce(param, grad))? {
            Some(grad) => lock(&self.gradients).arrive(self, param, grad),
            None => Ok(()),
        };
        result.and_then(|()| self.release_param(param)).map_err(|e| self.stash(e))
    }

    /// Reports that a backward pass other than the engine's no longer needs a parameter.
    pub(super) fn no_longer_needed(&self, param: ParamId) -> candle_core::Result<()> {
        if !self.shards_params() {
            return Ok(());
        }
        let release = || lock(&self.gather).release_param_after_other_backward(self, param);
        self.unshift_passed(param).and_then(|()| release()).map_err(|e| self.stash(e))
    }

    fn release_param(&self, param: ParamId) -> Result<()> {
        if self.shards_params() { lock(&self.gather).release_param(self, param) } else { Ok(()) }
    }

    /// Returns whether this thread runs the engine's own backward pass.
    pub(super) fn is_in_backward(&self) -> bool {
        lock(&self.backward_on).is_some_and(|thread| thread == thread::current().id())
    }

    /// Reports that a unit is about to run its forward or backward pass.
    pub(super) fn enter(&self, event: UnitEvent) -> candle_core::Result<()> {
        if self.shards_params() {
            count_collective_step();
            lock(&self.gather).enter(self, event).map_err(|e| self.stash(e))?;
        }
        match event {
            UnitEvent::Forward(unit) => self.shift_unit(unit).map_err(|e| self.stash(e)),
            UnitEvent::Backward(_) => Ok(()),
        }
    }

    /// Reports that the backward pass of a unit, or of the root, is about to begin.
    pub(super) fn begin_backward(&self, unit: UnitId) -> candle_core::Result<()> {
        if !self.is_in_backward() {
            // If this backward pass is part of a forward pass that runs for a check, the unit's parameters are moved.
            let pass = || lock(&self.gather).enter_other_backward(self, unit).and_then(|()| self.shift_unit(unit));
            return if self.shards_params() { pass().map_err(|e| self.stash(e)) } else { Ok(()) };
        }
        timeline::end_section();
        self.enter(UnitEvent::Backward(unit))?;
        timeline::section(timeline::EventCategory::Unit, "backward", || self.unit_name(unit));
        Ok(())
    }

    /// Opens a span in the timeline for a unit's forward pass, which begins now.
    pub(super) fn forward_span(&self, unit: UnitId) -> TimelineSpan {
        timeline::span(timeline::EventCategory::Unit, "forward").with_subject(|| self.unit_name(unit))
    }

    /// Reports that a unit's forward pass has ended.
    pub(super) fn leave_forward(&self, unit: UnitId) -> candle_core::Result<()> {
        self.unshift_unit(unit).map_err(|e| self.stash(e))?;
        if !self.shards_params() {
            return Ok(());
        }
        lock(&self.gather).leave_forward(self, unit).map_err(|e| self.stash(e))
    }

    /// Reports that a unit will run again in the backward pass.
    pub(super) fn will_recompute(&self) {
        lock(&self.gather).will_recompute();
    }

    /// Runs the backward pass of a unit inside another backward pass: the forward pass again, then `backward`.
    pub(super) fn nested_backward<F, T>(
        &self,
        unit: UnitId,
        forward: impl FnOnce() -> candle_core::Result<F>,
        backward: impl FnOnce(F) -> candle_core::Result<T>,
    ) -> candle_core::Result<T> {
        let inside_other_backward = !self.is_in_backward();
        lock(&self.gather).nest(inside_other_backward);
        let _sections = timeline::sections();
        let forward_again = || {
            // If the model itself differentiates something in its forward pass, that is not the engine's backward pass.
            let _guard = ThreadIdGuard::with(&self.backward_on, None);
            forward()
        };
        let result = self.begin_backward(unit).and_then(|()| forward_again()).and_then(backward);
        let released = lock(&self.gather).unnest(self, unit, inside_other_backward).map_err(|e| self.stash(e));
        result.and_then(|result| released.map(|()| result))
    }

    /// Returns whether the engine's forward pass, or its evaluation, is running on any thread.
    pub(crate) fn is_in_forward(&self) -> bool {
        self.in_forward.load(Ordering::Relaxed)
    }

    /// Returns whether a model is only being evaluated.
    pub(crate) fn is_evaluating(&self) -> bool {
        self.evaluating.load(Ordering::Relaxed)
    }
}

/// A guard for a raised flag, which is lowered when the guard is dropped.
struct FlagGuard<'a>(&'a AtomicBool);

impl<'a> FlagGuard<'a> {
    fn raise(flag: &'a AtomicBool) -> Self {
        flag.store(true, Ordering::Relaxed);
        Self(flag)
    }
}

impl Drop for FlagGuard<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// A guard for a replaced thread id, which is restored when the guard is dropped.
struct ThreadIdGuard<'a>(&'a Mutex<Option<ThreadId>>, Option<ThreadId>);

impl<'a> ThreadIdGuard<'a> {
    fn with(slot: &'a Mutex<Option<ThreadId>>, value: Option<ThreadId>) -> Self {
        Self(slot, std::mem::replace(&mut *lock(slot), value))
    }
}

impl Drop for ThreadIdGuard<'_> {
    fn drop(&mut self) {
        *lock(self.0) = self.1;
    }
}

/// Returns `tensor`, with `hook` running before the operation that computed it is differentiated. If that operation is
/// one of candle-zero's, `hook` becomes its hook. Otherwise it runs in a separate operation, `name`, on a copy.
pub(super) fn before_backward(
    tensor: Tensor,
    name: &'static str,
    hook: impl Fn() -> candle_core::Result<()> + Send + Sync + 'static,
) -> candle_core::Result<Tensor> {
    // A parameter is not the result of an operation that could run hooks.
    if let Some(node) = node_of(&tensor).filter(|node| !node.slot.has_gate()) {
        node.slot.before_backward(Box::new(hook));
        return Ok(tensor);
    }
    apply_precomputed(name, &tensor, copy_storage(&tensor)?, move |_, grad| {
        hook()?;
        Ok(Some(grad.clone()))
    })
}

/// Methods for buffers, and for layers that compute together with those of other ranks.
impl RankCore {
    /// Collective: gathers a few numbers from every rank, in rank order.
    pub fn gather_numbers(&self, numbers: Vec<f64>) -> candle_core::Result<Vec<Vec<f64>>> {
        count_collective_step();
        self.comm().gather_f64(numbers).wait().map_err(|e| self.stash(e))
    }

    /// Returns the model's buffers.
    pub fn buffers(&self) -> &ModelBuffers {
        &self.buffers
    }

    /// Collective: synchronizes the model's buffers between ranks, outside a step.
    pub fn agree_on_buffers(&self) -> Result<()> {
        self.buffers.agree(self.comm())
    }

    /// Runs a unit's forward pass, and saves the previous values of the buffers that it changes.
    pub(super) fn saving_buffers<T>(
        &self,
        unit: UnitId,
        forward: impl FnOnce() -> candle_core::Result<T>,
    ) -> candle_core::Result<(T, SavedBuffers)> {
        let before = self.buffers.of_unit(unit).map_err(|e| self.stash(e))?;
        let result = forward()?;
        let saved = self.buffers.changed_since(before).map_err(|e| self.stash(e))?;
        Ok((result, saved))
    }

    /// Runs a unit's forward pass again with the buffers that the first forward pass found, and restores their current
    /// values afterwards.
    pub(super) fn with_saved_buffers<T>(
        &self,
        saved: &SavedBuffers,
        forward: impl FnOnce() -> candle_core::Result<T>,
    ) -> candle_core::Result<T> {
        let current = self.buffers.exchange(saved).map_err(|e| self.stash(e))?;
        let result = forward();
        self.buffers.exchange(&current).map_err(|e| self.stash(e))?;
        result
    }
}
