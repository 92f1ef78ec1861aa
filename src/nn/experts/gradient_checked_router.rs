//! A router whose choices stay the same while a gradient is compared with finite differences.

use super::routing::{Routing, choose, routing_from_choices};
use super::{ExpertAssignment, RouterOptions};
use crate::graph::rng_position;
use crate::util::lock;
use crate::zero::gather::unit::link_under_construction;
use crate::zero::rank_core::EngineLink;
use candle_core::{Result, Tensor};
use std::sync::{Arc, Mutex};

/// A router of a model. It works like [`route`](super::route()), except in a gradient check: forward passes in which
/// parameters are perturbed use the choices of the pass in which none is perturbed. For the gradient, a choice is a
/// constant, but a small perturbation would change the choices of some rows, and the loss would jump.
#[derive(Debug, Clone)]
pub(crate) struct GradientCheckedRouter {
    options: RouterOptions,
    link: EngineLink,
    held: Arc<Mutex<Option<HeldChoices>>>,
}

/// The choices of a gradient check's forward pass in which no parameter is perturbed.
#[derive(Debug)]
struct HeldChoices {
    /// The random stream of the forward pass that the check repeats.
    stream: u64,
    /// The shape of the logits.
    dims: Vec<usize>,
    choices: Arc<Vec<u32>>,
    assignment: Arc<ExpertAssignment>,
}

impl GradientCheckedRouter {
    /// Creates a router of the model that is being built.
    pub fn new(options: RouterOptions) -> Self {
        Self { options, link: link_under_construction(), held: Arc::default() }
    }

    /// Chooses experts for each row of `logits` `[.., experts]`.
    ///
    /// # Errors
    /// The errors of [`route`](super::route()).
    pub fn route(&self, logits: &Tensor) -> Result<Routing> {
        let mut held = lock(&self.held);
        let Some(core) = self.link.core().filter(|core| core.is_checking()) else {
            *held = None;
            drop(held);
            return super::route(logits, self.options);
        };
        let is_perturbed = core.report_held_choices();
        let stream = rng_position().stream;
        let is_same = |held: &HeldChoices| held.stream == stream && held.dims == logits.dims();
        let (choices, assignment) = match held.as_ref().filter(|held| is_perturbed && is_same(held)) {
            Some(held) => (held.choices.clone(), held.assignment.clone()),
            None => choose(logits, self.options)?,
        };
        let dims = logits.dims().to_vec();
        *held = Some(HeldChoices { stream, dims, choices: choices.clone(), assignment: assignment.clone() });
        drop(held);
        routing_from_choices(logits, self.options, choices, assignment)
    }
}
