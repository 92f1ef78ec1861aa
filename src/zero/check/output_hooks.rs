//! Hooks on the outputs of forward passes: a backward pass uses them to determine whether its loss belongs to this
//! step, and a check gets the output's gradient from them.
//!
//! An output runs a hook when its gradient is complete. If the operation that computed the output is one of
//! candle-zero's, the hook belongs to that operation. Otherwise it belongs to a separate operation, which copies the
//! output. If the copy would be large, or if the output is not f32, bf16 or f16, a backward pass that has reached no
//! output searches the loss's graph for the output instead.

use super::forward_outputs::TrackedForwardOutput;
use crate::error::{EngineError, Result};
use crate::graph::precomputed_op::{apply_precomputed, copy_storage};
use crate::graph::{Grad, node_of};
use crate::util::lock;
use crate::zero::hooks::on_big_stack;
use crate::zero::rank_core::RankCore;
use candle_core::{DType, Tensor, TensorId};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The largest number of elements of an output whose copy has no noticeable cost.
const MAX_COPIED_ELEMENTS: usize = 1 << 12;

impl RankCore {
    /// Returns the output of the engine's last forward pass, if the output runs a hook.
    pub fn last_output(&self) -> Option<Arc<TrackedForwardOutput>> {
        lock(&self.outputs.0).last.clone()
    }

    /// Makes `output` report when its gradient is complete.
    pub(in crate::zero) fn watch_output(self: &Arc<Self>, output: Tensor) -> candle_core::Result<Tensor> {
        let mut outputs = lock(&self.outputs.0);
        outputs.last = None;
        if !output.track_op() {
            return Ok(output);
        }
        if !matches!(output.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            outputs.unmarked.push(output.id());
            outputs.any_unmarked = true;
            return Ok(output);
        }
        let tracked = Arc::new(TrackedForwardOutput {
            updates: outputs.updates,
            is_differentiated: AtomicBool::new(false),
            probe: Mutex::default(),
        });
        let core = Arc::downgrade(self);
        let reported = tracked.clone();
        let report = move |grad: &Grad| core.upgrade().map_or(Ok(()), |core| core.output_arrived(&reported, grad));
        // A parameter is not the result of an operation that could run hooks.
        let node = node_of(&output).filter(|node| !node.slot.has_gate());
        if let Some(node) = node {
            let slot = Arc::downgrade(&node.slot);
            node.slot.before_backward(Box::new(move || match slot.upgrade() {
                Some(slot) => slot.with_grad(&report).unwrap_or(Ok(())),
                None => Ok(()),
            }));
            outputs.last = Some(tracked);
            return Ok(output);
        }
        if output.elem_count() > MAX_COPIED_ELEMENTS && !self.check.is_armed() {
            outputs.unmarked.push(output.id());
            outputs.any_unmarked = true;
            return Ok(output);
        }
        outputs.last = Some(tracked);
        apply_precomputed("forward-output", &output, copy_storage(&output)?, move |_, grad| {
            report(&Grad::Shared(grad.clone()))?;
            Ok(Some(grad.clone()))
        })
    }

    fn output_arrived(&self, output: &TrackedForwardOutput, grad: &Grad) -> candle_core::Result<()> {
        if !self.is_in_backward() {
            return Ok(());
        }
        let mut outputs = lock(&self.outputs.0);
        outputs.reached_outputs += 1;
        let is_old = output.updates != outputs.updates;
        drop(outputs);
        if is_old || output.is_differentiated.swap(true, Ordering::Relaxed) {
            return Err(self.stash(EngineError::OldLoss { is_old }.into()));
        }
        if self.check.is_measuring() {
            let probe = lock(&output.probe).take();
            self.check.output_arrived(probe.as_ref(), grad)?;
        }
        Ok(())
    }

    /// Starts counting the outputs and parameters that a backward pass reaches.
    pub(in crate::zero) fn begin_counting(&self) {
        let mut outputs = lock(&self.outputs.0);
        (outputs.reached_outputs, outputs.reached_params) = (0, 0);
    }

    /// Counts a parameter that the backward pass has reached.
    pub(in crate::zero) fn count_reached(&self) {
        lock(&self.outputs.0).reached_params += 1;
    }

    /// Checks that the finished backward pass of `loss` has reached a parameter (unless `ignore_unused_parameters` is
    /// set) and, if some outputs run no hook, an output of this step.
    ///
    /// # Errors
    /// [`EngineError::LossReachesNothing`]; [`EngineError::OldLoss`].
    pub(in crate::zero) fn check_reached(&self, loss: &Tensor) -> Result<()> {
        let outputs = lock(&self.outputs.0);
        if outputs.reached_params == 0 && !self.zero.ignore_unused_parameters {
            return Err(EngineError::LossReachesNothing.into());
        }
        if outputs.reached_outputs > 0 || !outputs.any_unmarked {
            return Ok(());
        }
        let unmarked: HashSet<TensorId> = outputs.unmarked.iter().copied().collect();
        drop(outputs);
        let is_reached = on_big_stack(|| loss.sorted_nodes().iter().any(|node| unmarked.contains(&node.id())));
        if is_reached { Ok(()) } else { Err(EngineError::OldLoss { is_old: true }.into()) }
    }

    /// Forgets the outputs at the end of a micro step. `updated` means that the micro step ended with a weight update.
    pub fn forget_outputs(&self, updated: bool) {
        let mut outputs = lock(&self.outputs.0);
        outputs.updates += u64::from(updated);
        outputs.unmarked.clear();
        outputs.last = None;
    }
}
