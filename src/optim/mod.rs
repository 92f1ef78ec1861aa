//! Optimizers on slices of flat f32 buffers, and learning-rate schedules.
//!
//! An optimizer here knows no tensors and no parameters: it updates elements. A share of the flat space may be cut
//! anywhere (by rank, by sub-group, by chunk) and every element still gets the same bits, because no step looks at
//! a neighbour and no code path treats the end of a slice in a different way.
//!
//! | file | what |
//! | --- | --- |
//! | `optimizer.rs` | what an optimizer is |
//! | `from_config.rs` | the one that a configuration names |
//! | `adam.rs` | Adam and AdamW |
//! | `sgd.rs` | SGD |
//! | `lion.rs` | Lion |
//! | `adagrad.rs` | Adagrad |
//! | `lamb.rs` | LAMB |
//! | `muon.rs`, `newton_schulz.rs` | Muon: momentum of matrices, orthogonalized |
//! | `eight_bit.rs` | Adam8bit, AdamW8bit and Lion8bit: moments of eight bits |
//! | `state_format.rs` | how states are kept between steps |
//! | `elementwise_kernel.rs` | how one pass over all the buffers runs in parallel |
//! | `parameter_groups.rs` | parameter groups: which parameters have a learning rate or a decay of their own |
//! | `fp32_modules.rs` | modules that stay in f32 in a 16-bit model, by name |
//! | `param_class.rs` | what is kept of a parameter: who trains it, if anybody does |
//! | `grouped_optimizer.rs` | an engine's optimizer, its parameter groups and their schedules |
//! | `schedule.rs` | learning rate and momentum by step |

mod adagrad;
mod adam;
mod eight_bit;
mod elementwise_kernel;
pub(crate) mod error;
mod fp32_modules;
mod from_config;
mod grouped_optimizer;
mod lamb;
mod lion;
mod muon;
mod newton_schulz;
mod optimizer;
mod param_class;
mod parameter_groups;
mod schedule;
mod sgd;
mod state_format;

pub(crate) use fp32_modules::Fp32Modules;
pub use from_config::{base_lr, from_config, momentum};
pub(crate) use grouped_optimizer::{GroupStepSettings, GroupedOptimizer};
pub use optimizer::{
    Layerwise, Momentum, Optimizer, OptimizerNeeds, SQUARES_BLOCK, SquareSums, StepContext, WholeParameterOptimizer,
};
pub(crate) use param_class::{OptimizerRole, ParamClass, WeightFormat};
pub use parameter_groups::ParameterGroup;
pub(crate) use parameter_groups::{ParameterGrouping, TrainableFilter};
pub use schedule::{LrSchedule, Schedule};
pub use state_format::StateFormat;
pub(crate) use state_format::{DecodeMode, decode, encode, scales_of};
