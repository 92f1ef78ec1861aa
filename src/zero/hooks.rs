//! The core's part in a micro step: what the engine calls, and what units and parameters report while they run.
//!
//! ```text
//!   engine    forward | backward ....................... | (vote, update: step.rs) | end_step
//!   graph     enter, leave_forward | begin_backward, gradient_arrived
//! ```
//!
//! A backward of somebody else may pass through the model: Candle's own `loss.backward()`, or that of another engine.
//! It may come at any time, and nobody says when it is over. Gradients of parameters do not count there; what it needs
//! is gathered for it, and released when it has passed or at the engine's next call.

use super::check::gradient_check_state::count_collective_step;
use super::gather::unit_trace::UnitEvent;
use super::model_buffers::{ModelBuffers, SavedBuffers};
use super::rank_core::RankCore;
use crate::error::Result;
use crate::graph::prepared_op::{copy_of, prepared};
use crate::graph::{Grad, abandon, node_of, once, without_gradients};
use crate::param::{ParamId, ROOT, UnitId};
use crate::timeline::{self, TimelineSpan};
use crate::util::lock;
use candle_core::Tensor;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

/// Stack that Candle's recursive backward may use, and how much of it must be left before a new one is taken.
const BACKWARD_STACK: usize = 64 << 20;
const RED_ZONE: usize = 16 << 20;

/// Methods for the engine.
impl RankCore {
    /// Runs a model; parameters outside of units are in memory meanwhile.
    pub fn forward(self: &Arc<Self>, run: impl FnOnce() -> candle_core::Result<Tensor>) -> Result<Tensor> {
        self.begin_call()?;
        if !self.is_evaluating() {
            if self.buffers.are_taken_in_forward() {
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

    /// What is left of a backward of somebody else goes.
    fn begin_call(&self) -> Result<()> {
        self.forget_failure();
        lock(&self.gather).release_passed(self)
    }

    /// Lets a backward of somebody else begin with the root's parameters. The engine's own gathers them by itself.
    fn mark_output(self: &Arc<Self>, output: Tensor) -> candle_core::Result<Tensor> {
        let needed = output.track_op() && output.dtype().is_float() && !self.is_evaluating();
        if !needed || !self.shards_params() || !lock(&self.gather).has_params(ROOT) {
            return Ok(output);
        }
        let core = Arc::downgrade(self);
        before_backward(output, "model-output", move || match core.upgrade() {
            Some(core) if !core.is_in_backward() => core.begin_backward(ROOT),
            _ => Ok(()),
        })
    }

    /// Runs a model without a graph. Afterwards nothing is gathered.
    pub fn evaluate(self: &Arc<Self>, run: impl FnOnce() -> candle_core::Result<Tensor>) -> Result<Tensor> {
        self.evaluating.store(true, Ordering::Relaxed);
        let output = without_gradients(|| self.forward(run));
        let released = self.release_all();
        self.evaluating.store(false, Ordering::Relaxed);
        released?;
        Ok(output?.detach())
    }

    /// Differentiates `loss`. When this returns, all gradients are reduced and added to this rank's share, and nothing
    /// is gathered.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        self.begin_call()?;
        // What backwards that failed have left in the parameters' slots.
        abandon();
        self.begin_counting();
        let run = || {
            let _sections = timeline::sections();
            let _own = ThreadIdGuard::with(&self.backward_on, Some(thread::current().id()));
            self.begin_backward(ROOT)?;
            once(|| on_big_stack(|| loss.backward())).map(drop)
        };
        #[cfg(feature = "cuda")]
        let on_gpu = super::gpu::gpu_timeline::GpuTimelineSpan::begin(self)?;
        run().map_err(|e| self.explain(e))?;
        self.judge_reached(loss)?;
        #[cfg(feature = "cuda")]
        let on_gpu = on_gpu.map(super::gpu::gpu_timeline::GpuTimelineSpan::end).transpose()?;
        let end = || {
            if self.holds_unreduced() {
                self.keep_unreduced();
            } else {
                self.release_unreduced()?;
                lock(&self.gradients).end_backward(self)?;
            }
            self.release_all()
        };
        end().map_err(|error| self.naming_what_is_held(error))?;
        #[cfg(feature = "cuda")]
        on_gpu.map_or(Ok(()), |work| work.record("backward"))?;
        Ok(())
    }

    /// An optimizer step is over: gradients are gone, and persistent parameters are gathered anew if weights changed.
    pub fn end_step(&self, weights_changed: bool) -> Result<()> {
        lock(&self.gradients).clear(self);
        self.buffers.after_step(self.comm())?;
        lock(&self.gather).release_passed(self)?;
        if weights_changed { self.refresh() } else { Ok(()) }
    }

    /// Gathers the persistent parameters again, after weights have changed.
    pub fn refresh(&self) -> Result<()> {
        let mut gather = lock(&self.gather);
        gather.release_passed(self)?;
        gather.refresh_persistent(self).map_err(|error| self.naming_what_is_held(error))?;
        drop(gather);
        self.remember_weights()
    }

    /// Releases all parameters but the persistent ones.
    pub fn release_all(&self) -> Result<()> {
        lock(&self.gather).end(self)
    }
}

/// Runs what goes through a graph by recursion.
pub(super) fn on_big_stack<T>(run: impl FnOnce() -> T) -> T {
    stacker::maybe_grow(RED_ZONE, BACKWARD_STACK, run)
}

/// Methods for units and parameters.
impl RankCore {
    /// A parameter's gradient is complete, as far as this backward goes.
    pub(super) fn gradient_arrived(&self, param: ParamId, grad: Grad) -> candle_core::Result<()> {
        // Candle's operations make gradients of frozen parameters too.
        let grad = Some(grad).filter(|_| self.params[param].is_trained());
        if let Some(grad) = &grad {
            self.count_reached();
            if self.check.is_measuring() {
                self.measure(param, grad)?;
            }
        }
        let arrived = match grad.map_or(Ok(None), |grad| self.to_reduce(param, grad))? {
            Some(grad) => lock(&self.gradients).arrive(self, param, grad),
            None => Ok(()),
        };
        arrived.and_then(|()| self.release_param(param)).map_err(|e| self.stash(e))
    }

    /// A backward of somebody else no longer needs a parameter.
    pub(super) fn passed_by(&self, param: ParamId) -> candle_core::Result<()> {
        if !self.shards_params() {
            return Ok(());
        }
        let release = || lock(&self.gather).release_passed_param(self, param);
        self.unshift_passed(param).and_then(|()| release()).map_err(|e| self.stash(e))
    }

    fn release_param(&self, param: ParamId) -> Result<()> {
        if self.shards_params() { lock(&self.gather).release_param(self, param) } else { Ok(()) }
    }

    /// Whether this thread runs the engine's own backward.
    pub(super) fn is_in_backward(&self) -> bool {
        lock(&self.backward_on).is_some_and(|thread| thread == thread::current().id())
    }

    /// A unit is about to run forward.
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

    /// A unit's backward is about to begin, or that of the root.
    pub(super) fn begin_backward(&self, unit: UnitId) -> candle_core::Result<()> {
        if !self.is_in_backward() {
            // Of a forward that runs for a check, with its parameters moved.
            let pass = || lock(&self.gather).pass(self, unit).and_then(|()| self.shift_unit(unit));
            return if self.shards_params() { pass().map_err(|e| self.stash(e)) } else { Ok(()) };
        }
        timeline::end_section();
        self.enter(UnitEvent::Backward(unit))?;
        timeline::section(timeline::EventCategory::Unit, "backward", || self.unit_name(unit));
        Ok(())
    }

    /// A unit's forward in the timeline, from now on.
    pub(super) fn forward_span(&self, unit: UnitId) -> TimelineSpan {
        timeline::span(timeline::EventCategory::Unit, "forward").of(|| self.unit_name(unit))
    }

    /// A unit's forward is over.
    pub(super) fn leave_forward(&self, unit: UnitId) -> candle_core::Result<()> {
        self.unshift_unit(unit).map_err(|e| self.stash(e))?;
        if !self.shards_params() {
            return Ok(());
        }
        lock(&self.gather).leave_forward(self, unit).map_err(|e| self.stash(e))
    }

    /// A unit will run again in backward.
    pub(super) fn will_recompute(&self) {
        lock(&self.gather).will_recompute();
    }

    /// Runs the backward of a unit inside of another one: forward again, then `backward`.
    pub(super) fn nested_backward<F, T>(
        &self,
        unit: UnitId,
        forward: impl FnOnce() -> candle_core::Result<F>,
        backward: impl FnOnce(F) -> candle_core::Result<T>,
    ) -> candle_core::Result<T> {
        let passes = !self.is_in_backward();
        lock(&self.gather).nest(passes);
        let _sections = timeline::sections();
        let again = || {
            // What the model itself may differentiate in its forward is not the engine's backward.
            let _not_own = ThreadIdGuard::with(&self.backward_on, None);
            forward()
        };
        let result = self.begin_backward(unit).and_then(|()| again()).and_then(backward);
        let released = lock(&self.gather).unnest(self, unit, passes).map_err(|e| self.stash(e));
        result.and_then(|result| released.map(|()| result))
    }

    /// Whether the engine's forward, or its evaluation, is running, on whatever thread.
    pub(crate) fn is_in_forward(&self) -> bool {
        self.in_forward.load(Ordering::Relaxed)
    }

    /// Whether a model is only evaluated.
    pub(crate) fn is_evaluating(&self) -> bool {
        self.evaluating.load(Ordering::Relaxed)
    }
}

/// A flag that is raised for a while.
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

/// Another value for a while.
struct ThreadIdGuard<'a>(&'a Mutex<Option<ThreadId>>, Option<ThreadId>);

impl<'a> ThreadIdGuard<'a> {
    fn with(place: &'a Mutex<Option<ThreadId>>, value: Option<ThreadId>) -> Self {
        Self(place, std::mem::replace(&mut *lock(place), value))
    }
}

impl Drop for ThreadIdGuard<'_> {
    fn drop(&mut self) {
        *lock(self.0) = self.1;
    }
}

/// `tensor`, with `hook` running before the operation that made it is differentiated: as a hook of that operation where
/// it is one of this library's, else in an operation of its own, `name`, on a copy.
pub(super) fn before_backward(
    tensor: Tensor,
    name: &'static str,
    hook: impl Fn() -> candle_core::Result<()> + Send + Sync + 'static,
) -> candle_core::Result<Tensor> {
    // A parameter is made by no operation that could run hooks.
    if let Some(node) = node_of(&tensor).filter(|node| !node.slot.is_behind_a_gate()) {
        node.slot.before_backward(Box::new(hook));
        return Ok(tensor);
    }
    prepared(name, &tensor, copy_of(&tensor)?, move |_, grad| {
        hook()?;
        Ok(Some(grad.clone()))
    })
}

/// Methods about buffers, and for layers that compute together with those of other ranks.
impl RankCore {
    /// Collective: a few numbers of every rank, in rank order.
    pub fn numbers_of_all(&self, own: Vec<f64>) -> candle_core::Result<Vec<Vec<f64>>> {
        count_collective_step();
        self.comm().gather_f64(own).wait().map_err(|e| self.stash(e))
    }

    /// The model's buffers.
    pub fn buffers(&self) -> &ModelBuffers {
        &self.buffers
    }

    /// Collective: all ranks have the same buffers afterwards.
    pub fn agree_on_buffers(&self) -> Result<()> {
        self.buffers.agree(self.comm())
    }

    /// Runs a unit's forward, and keeps the values of the buffers that it changes.
    pub(super) fn keeping_buffers<T>(
        &self,
        unit: UnitId,
        forward: impl FnOnce() -> candle_core::Result<T>,
    ) -> candle_core::Result<(T, SavedBuffers)> {
        let before = self.buffers.of_unit(unit).map_err(|e| self.stash(e))?;
        let result = forward()?;
        let kept = self.buffers.that_changed(before).map_err(|e| self.stash(e))?;
        Ok((result, kept))
    }

    /// Runs a unit's forward again with the buffers that the first one found, and leaves them as they are now.
    pub(super) fn with_buffers_of_then<T>(
        &self,
        kept: &SavedBuffers,
        forward: impl FnOnce() -> candle_core::Result<T>,
    ) -> candle_core::Result<T> {
        let now = self.buffers.exchange(kept).map_err(|e| self.stash(e))?;
        let result = forward();
        self.buffers.exchange(&now).map_err(|e| self.stash(e))?;
        result
    }
}
