//! The optimizer that a configuration names.

use super::{Momentum, Optimizer, adagrad, adam, eight_bit, lamb, lion, muon, sgd};
use crate::config::OptimizerConfig;

/// The optimizer that the configuration names. Its learning rate comes with each [`StepContext`](super::StepContext).
pub fn from_config(config: &OptimizerConfig) -> Box<dyn Optimizer> {
    match config {
        OptimizerConfig::Adam(config) => Box::new(adam::Adam::new(*config)),
        OptimizerConfig::Sgd(config) => Box::new(sgd::Sgd::new(*config)),
        OptimizerConfig::Lion(config) => Box::new(lion::Lion::new(*config)),
        OptimizerConfig::Adagrad(config) => Box::new(adagrad::Adagrad::new(*config)),
        OptimizerConfig::Lamb(config) => Box::new(lamb::Lamb::new(*config)),
        OptimizerConfig::EightBit(config) => Box::new(eight_bit::EightBitOptimizer::new(*config)),
        OptimizerConfig::Muon(config) => Box::new(muon::Muon::new(*config)),
    }
}

/// The learning rate that the optimizer section names: the base of a [`Schedule`](super::Schedule), and the rate
/// without one.
pub fn base_lr(config: &OptimizerConfig) -> f64 {
    from_config(config).lr()
}

/// The momentum that the optimizer section names: what a [`Schedule`](super::Schedule) starts from.
pub fn momentum(config: &OptimizerConfig) -> Momentum {
    from_config(config).momentum()
}
