//! Creates the optimizer that a configuration names.

use super::{Momentum, Optimizer, adafactor, adagrad, adam, eight_bit, lamb, lars, lion, muon, schedule_free, sgd};
use crate::config::OptimizerConfig;

/// Creates the optimizer that the configuration names. Its learning rate is passed with each
/// [`StepContext`](super::StepContext).
pub fn from_config(config: &OptimizerConfig) -> Box<dyn Optimizer> {
    match config {
        OptimizerConfig::Adam(config) => Box::new(adam::Adam::new(*config)),
        OptimizerConfig::Sgd(config) => Box::new(sgd::Sgd::new(*config)),
        OptimizerConfig::Lion(config) => Box::new(lion::Lion::new(*config)),
        OptimizerConfig::Adagrad(config) => Box::new(adagrad::Adagrad::new(*config)),
        OptimizerConfig::Lamb(config) => Box::new(lamb::Lamb::new(*config)),
        OptimizerConfig::EightBit(config) => Box::new(eight_bit::EightBitOptimizer::new(*config)),
        OptimizerConfig::Muon(config) => Box::new(muon::Muon::new(*config)),
        OptimizerConfig::Lars(config) => Box::new(lars::Lars::new(*config)),
        OptimizerConfig::Adafactor(config) => Box::new(adafactor::Adafactor::new(*config)),
        OptimizerConfig::ScheduleFree(config) => Box::new(schedule_free::AdamWScheduleFree::new(*config)),
    }
}

/// Returns the learning rate in the optimizer section, which is the base of a [`Schedule`](super::Schedule), or the
/// constant rate if there is no schedule.
pub fn base_lr(config: &OptimizerConfig) -> f64 {
    from_config(config).lr()
}

/// Returns the momentum in the optimizer section, which is the initial value of a [`Schedule`](super::Schedule).
pub fn momentum(config: &OptimizerConfig) -> Momentum {
    from_config(config).momentum()
}
