//! Optimizers on slices of flat f32 buffers, and learning-rate schedules.
//!
//! An optimizer here knows no tensors and no parameters: it updates elements. A share of the flat space may be cut
//! anywhere (by rank, by sub-group, by chunk) and every element still gets the same bits, because no step looks at
//! a neighbour and no code path treats the end of a slice in a different way.
//!
//! | file | what |
//! | --- | --- |
//! | `adam.rs` | Adam and AdamW |
//! | `sgd.rs` | SGD |
//! | `lion.rs` | Lion |
//! | `adagrad.rs` | Adagrad |
//! | `chunks.rs` | how one pass over all the buffers runs in parallel |
//! | `schedule.rs` | learning rate by step |

mod adagrad;
mod adam;
mod chunks;
mod lion;
mod schedule;
mod sgd;

pub use schedule::{Schedule, validate};

use crate::config::OptimizerConfig;
use crate::precision::{FlatMut, FlatRef};

/// What one optimizer step needs besides the buffers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepContext {
    /// Learning rate in force.
    pub lr: f64,
    /// Number of this step, from 1. Skipped steps are not counted.
    pub step: u64,
    /// Every gradient element is multiplied by this first: 1 / (loss scale x clip factor). See
    /// [`gradient_multiplier`](crate::precision::gradient_multiplier).
    pub grad_scale: f32,
}

/// An elementwise optimizer.
pub trait Optimizer: Send + Sync {
    /// Names of the state buffers that [`update`](Self::update) expects, in order, as DeepSpeed's checkpoints call
    /// them. Each is f32, as long as the parameter, and starts with zeros.
    fn state_names(&self) -> &'static [&'static str];

    /// One step on one slice, in one pass over memory.
    ///
    /// `param` holds the f32 master weights, `grad` the gradient in any flat dtype, `state` one buffer for each of
    /// [`state_names`](Self::state_names), `half` the copy of the weights in the model's dtype, if there is one.
    /// Slices of a parameter may be updated in any order; each gives the bits that the whole would give.
    ///
    /// # Panics
    ///
    /// If the buffers differ in length, if their number is wrong, or if `ctx.step` is 0.
    fn update(
        &self,
        ctx: &StepContext,
        param: &mut [f32],
        grad: FlatRef<'_>,
        state: &mut [&mut [f32]],
        half: Option<FlatMut<'_>>,
    );
}

/// The optimizer that the configuration names. Its learning rate comes with each [`StepContext`].
pub fn from_config(config: &OptimizerConfig) -> Box<dyn Optimizer> {
    match config {
        OptimizerConfig::Adam(config) => Box::new(adam::Adam::new(*config)),
        OptimizerConfig::Sgd(config) => Box::new(sgd::Sgd::new(*config)),
        OptimizerConfig::Lion(config) => Box::new(lion::Lion::new(*config)),
        OptimizerConfig::Adagrad(config) => Box::new(adagrad::Adagrad::new(*config)),
    }
}

/// The learning rate that the optimizer section names: the base of a [`Schedule`], and the rate without one.
pub fn base_lr(config: &OptimizerConfig) -> f64 {
    match config {
        OptimizerConfig::Adam(config) => config.lr,
        OptimizerConfig::Sgd(config) => config.lr,
        OptimizerConfig::Lion(config) => config.lr,
        OptimizerConfig::Adagrad(config) => config.lr,
    }
}
