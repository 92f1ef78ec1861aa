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
//! | `lamb.rs` | LAMB |
//! | `chunks.rs` | how one pass over all the buffers runs in parallel |
//! | `schedule.rs` | learning rate and momentum by step |

mod adagrad;
mod adam;
mod chunks;
mod lamb;
mod lion;
mod schedule;
mod sgd;

pub use schedule::{LrSchedule, Momentum, Schedule, validate};

use crate::config::OptimizerConfig;
use crate::precision::{FlatMut, FlatRef};

/// What one optimizer step needs besides the buffers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepContext {
    /// Learning rate in force.
    pub lr: f64,
    /// Betas in force where a schedule changes them; `None`: the optimizer's own. An optimizer without betas ignores
    /// them.
    pub betas: Option<(f64, f64)>,
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

    /// What comes before the update, if a step depends on norms of whole parameters.
    fn layerwise(&self) -> Option<&dyn Layerwise> {
        None
    }
}

/// Elements whose squares make one term of the sums of [`Layerwise::add_squares`].
pub const SQUARES_BLOCK: usize = 1024;

/// Sums of squares over a parameter or a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Squares {
    /// Of the weights.
    pub weights: f64,
    /// Of the update that they would get, before the learning rate.
    pub update: f64,
}

/// An optimizer whose step in a parameter depends on norms of the whole parameter.
///
/// Its step has two passes: the sums of squares of each parameter, over all ranks; then [`Optimizer::update`], with the
/// learning rate times the parameter's trust ratio.
pub trait Layerwise {
    /// Adds the squares of a slice to those of the elements before it. Weights and states stay as they are.
    ///
    /// The slices of a parameter come in order. Where all but the last have a multiple of [`SQUARES_BLOCK`] elements,
    /// the sums have the bits that the whole would give.
    ///
    /// # Panics
    ///
    /// As [`Optimizer::update`].
    fn add_squares(&self, ctx: &StepContext, param: &[f32], grad: FlatRef<'_>, state: &[&[f32]], squares: &mut Squares);

    /// What the learning rate is multiplied by in a parameter of which these are the squares.
    fn trust_ratio(&self, squares: Squares) -> f64;
}

/// The optimizer that the configuration names. Its learning rate comes with each [`StepContext`].
pub fn from_config(config: &OptimizerConfig) -> Box<dyn Optimizer> {
    match config {
        OptimizerConfig::Adam(config) => Box::new(adam::Adam::new(*config)),
        OptimizerConfig::Sgd(config) => Box::new(sgd::Sgd::new(*config)),
        OptimizerConfig::Lion(config) => Box::new(lion::Lion::new(*config)),
        OptimizerConfig::Adagrad(config) => Box::new(adagrad::Adagrad::new(*config)),
        OptimizerConfig::Lamb(config) => Box::new(lamb::Lamb::new(*config)),
    }
}

/// The learning rate that the optimizer section names: the base of a [`Schedule`], and the rate without one.
pub fn base_lr(config: &OptimizerConfig) -> f64 {
    match config {
        OptimizerConfig::Adam(config) => config.lr,
        OptimizerConfig::Sgd(config) => config.lr,
        OptimizerConfig::Lion(config) => config.lr,
        OptimizerConfig::Adagrad(config) => config.lr,
        OptimizerConfig::Lamb(config) => config.lr,
    }
}

/// The momentum that the optimizer section names: what a [`Schedule`] starts from.
pub fn momentum(config: &OptimizerConfig) -> Momentum {
    match config {
        OptimizerConfig::Adam(config) => Momentum::Betas(config.betas.0, config.betas.1),
        OptimizerConfig::Lion(config) => Momentum::Betas(config.betas.0, config.betas.1),
        OptimizerConfig::Lamb(config) => Momentum::Betas(config.betas.0, config.betas.1),
        OptimizerConfig::Sgd(config) => Momentum::Factor(config.momentum),
        OptimizerConfig::Adagrad(_) => Momentum::Factor(0.0),
    }
}
