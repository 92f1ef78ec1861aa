//! The outputs of forward passes, and which of them a backward pass has reached.

use super::gradient_check_state::OutputProbe;
use crate::util::lock;
use candle_core::TensorId;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

/// The outputs of forward passes.
#[derive(Default)]
pub(crate) struct ForwardOutputs(pub(super) Mutex<ForwardOutputsState>);

/// The state of the outputs of the current step.
#[derive(Default)]
pub(super) struct ForwardOutputsState {
    /// The number of weight updates so far.
    pub(super) updates: u64,
    /// The last output, if it runs a hook.
    pub(super) last: Option<Arc<TrackedForwardOutput>>,
    /// The outputs of the current micro step that do not run a hook.
    pub(super) unmarked: Vec<TensorId>,
    /// Whether there has ever been such an output.
    pub(super) any_unmarked: bool,
    /// The number of outputs, and of parameters, that the current backward pass has reached.
    pub(super) reached_outputs: usize,
    pub(super) reached_params: usize,
}

/// A record of one output of a forward pass.
pub(crate) struct TrackedForwardOutput {
    /// The number of weight updates before this output.
    pub(super) updates: u64,
    pub(super) is_differentiated: AtomicBool,
    pub(super) probe: Mutex<Option<OutputProbe>>,
}

impl TrackedForwardOutput {
    /// Sets the probe: how the output changes along directions.
    pub fn set_probe(&self, probe: OutputProbe) {
        *lock(&self.probe) = Some(probe);
    }
}
