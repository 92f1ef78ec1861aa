//! The outputs of forwards: which of them a backward has met.

use super::gradient_check_state::OutputProbe;
use crate::util::lock;
use candle_core::TensorId;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

/// The outputs of forwards.
#[derive(Default)]
pub(crate) struct ForwardOutputs(pub(super) Mutex<ForwardOutputsState>);

/// What is known of the outputs of the step under way.
#[derive(Default)]
pub(super) struct ForwardOutputsState {
    /// Updates of the weights so far.
    pub(super) updates: u64,
    /// The last one.
    pub(super) last: Option<Arc<ForwardOutput>>,
    /// Outputs since the last step that run no function.
    pub(super) unmarked: Vec<TensorId>,
    /// Any ever has been so.
    pub(super) any_unmarked: bool,
    /// Outputs, and parameters, that the backward under way has met.
    pub(super) met: usize,
    pub(super) reached: usize,
}

/// One output.
pub(crate) struct ForwardOutput {
    /// Updates of the weights before it.
    pub(super) updates: u64,
    pub(super) is_differentiated: AtomicBool,
    pub(super) probe: Mutex<Option<OutputProbe>>,
}

impl ForwardOutput {
    /// How it changes along directions.
    pub fn set_probe(&self, probe: OutputProbe) {
        *lock(&self.probe) = Some(probe);
    }
}
