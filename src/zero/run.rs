//! The core's part in a micro step: what the engine calls, and what units and parameters report while they run.
//!
//! ```text
//!   engine    forward | backward ....................... | (vote, update: step.rs) | end_step
//!   graph     enter, leave_forward | enter, gradient_arrived
//! ```

use super::core::Core;
use super::trace::Event;
use crate::error::Result;
use crate::graph::{Grad, once, without_gradients};
use crate::param::{ParamId, ROOT, UnitId};
use crate::timeline::{self, Span};
use crate::util::lock;
use candle_core::Tensor;
use std::sync::atomic::Ordering;

/// Stack that Candle's recursive backward may use, and how much of it must be left before a new one is taken.
const BACKWARD_STACK: usize = 64 << 20;
const RED_ZONE: usize = 16 << 20;

/// Methods for the engine.
impl Core {
    /// Runs a model; parameters outside of units are in memory meanwhile.
    pub fn forward(&self, run: impl FnOnce() -> candle_core::Result<Tensor>) -> Result<Tensor> {
        let run = || {
            self.enter(Event::Forward(ROOT))?;
            let output = run()?;
            self.leave_forward(ROOT)?;
            Ok(output)
        };
        run().map_err(|e| self.explain(e))
    }

    /// Runs a model without a graph. Afterwards nothing is gathered.
    pub fn evaluate(&self, run: impl FnOnce() -> candle_core::Result<Tensor>) -> Result<Tensor> {
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
        let run = || {
            let _sections = timeline::sections();
            self.enter(Event::Backward(ROOT))?;
            once(|| stacker::maybe_grow(RED_ZONE, BACKWARD_STACK, || loss.backward())).map(drop)
        };
        run().map_err(|e| self.explain(e))?;
        if !self.holds_unreduced() {
            self.release_unreduced()?;
            lock(&self.gradients).end_backward(self)?;
        }
        self.release_all()
    }

    /// An optimizer step is over: gradients are gone, and persistent parameters are gathered anew if weights changed.
    pub fn end_step(&self, weights_changed: bool) -> Result<()> {
        lock(&self.gradients).clear(self);
        if weights_changed { self.refresh() } else { Ok(()) }
    }

    /// Gathers the persistent parameters again, after weights have changed.
    pub fn refresh(&self) -> Result<()> {
        lock(&self.gather).refresh_persistent(self)
    }

    /// Releases all parameters but the persistent ones.
    pub fn release_all(&self) -> Result<()> {
        lock(&self.gather).end(self)
    }
}

/// Methods for units and parameters.
impl Core {
    /// A parameter's gradient is complete, as far as this backward goes.
    pub(super) fn gradient_arrived(&self, param: ParamId, grad: Grad) -> candle_core::Result<()> {
        let arrived = match self.to_reduce(param, grad)? {
            Some(grad) => lock(&self.gradients).arrive(self, param, grad),
            None => Ok(()),
        };
        arrived.and_then(|()| self.release_param(param)).map_err(|e| self.stash(e))
    }

    fn release_param(&self, param: ParamId) -> Result<()> {
        if self.shards_params() { lock(&self.gather).release_param(self, param) } else { Ok(()) }
    }

    /// A unit is about to run forward or backward.
    pub(super) fn enter(&self, event: Event) -> candle_core::Result<()> {
        if let Event::Backward(_) = event {
            timeline::end_section();
        }
        if self.shards_params() {
            lock(&self.gather).enter(self, event).map_err(|e| self.stash(e))?;
        }
        if let Event::Backward(unit) = event {
            timeline::section(timeline::Kind::Unit, "backward", || self.unit_name(unit));
        }
        Ok(())
    }

    /// A unit's forward in the timeline, from now on.
    pub(super) fn forward_span(&self, unit: UnitId) -> Span {
        timeline::span(timeline::Kind::Unit, "forward").of(|| self.unit_name(unit))
    }

    /// A unit's forward is over.
    pub(super) fn leave_forward(&self, unit: UnitId) -> candle_core::Result<()> {
        if !self.shards_params() {
            return Ok(());
        }
        lock(&self.gather).leave_forward(self, unit).map_err(|e| self.stash(e))
    }

    /// A unit will run again in backward.
    pub(super) fn will_recompute(&self) {
        lock(&self.gather).will_recompute();
    }

    /// Runs the backward of a unit inside of the engine's.
    pub(super) fn nested_backward<T>(
        &self,
        unit: UnitId,
        backward: impl FnOnce() -> candle_core::Result<T>,
    ) -> candle_core::Result<T> {
        lock(&self.gather).nest();
        let _sections = timeline::sections();
        let result = self.enter(Event::Backward(unit)).and_then(|()| backward());
        lock(&self.gather).unnest();
        result
    }

    /// Whether a model is only evaluated.
    pub(super) fn is_evaluating(&self) -> bool {
        self.evaluating.load(Ordering::Relaxed)
    }
}
