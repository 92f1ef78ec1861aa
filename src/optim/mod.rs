//! Optimizers on slices of flat f32 buffers, and learning-rate schedules.
//!
//! An optimizer does not depend on tensors: it updates the elements of slices. A share of the flat space may be cut
//! anywhere (by rank, by sub-group, by chunk), and every element still gets the same bits: an update reads no
//! neighbouring element, and no code path treats the end of a slice differently. If an update also depends on norms of
//! the parameter, on sums over its rows and columns, or on the full parameter, separate passes compute these first:
//! see `Layerwise`, `FactoredOptimizer` and `WholeParameterOptimizer` in `optimizer.rs`.
//!
//! | file | content |
//! | --- | --- |
//! | `optimizer.rs` | the optimizer trait |
//! | `from_config.rs` | the optimizer that a configuration names |
//! | `adam.rs` | Adam and AdamW |
//! | `sgd.rs` | SGD |
//! | `lion.rs` | Lion |
//! | `adagrad.rs` | Adagrad |
//! | `lamb.rs` | LAMB |
//! | `lars.rs` | LARS |
//! | `adafactor.rs` | Adafactor: second moments of matrices as sums over rows and columns |
//! | `schedule_free.rs` | Schedule-Free AdamW |
//! | `muon.rs`, `newton_schulz.rs` | Muon: orthogonalized momentum for matrices |
//! | `eight_bit.rs` | Adam8bit, AdamW8bit and Lion8bit: 8-bit states |
//! | `state_format.rs` | the storage format of states between steps |
//! | `elementwise_kernel.rs` | one parallel pass over all the buffers |
//! | `parameter_groups.rs` | parameter groups: parameters with their own learning rate or weight decay |
//! | `fp32_modules.rs` | modules that stay in f32 in a 16-bit model, by name |
//! | `sub_group_key.rs` | parameter classes: which optimizer trains a parameter, if any, and its weight format |
//! | `grouped_optimizer.rs` | an engine's optimizer, its parameter groups and their schedules |
//! | `schedule.rs` | learning rate and momentum by step |

mod adafactor;
mod adagrad;
mod adam;
mod eight_bit;
mod elementwise_kernel;
pub(crate) mod error;
mod fp32_modules;
mod from_config;
mod grouped_optimizer;
mod lamb;
mod lars;
mod lion;
mod muon;
mod newton_schulz;
mod optimizer;
mod parameter_groups;
mod schedule;
mod schedule_free;
mod sgd;
mod state_format;
mod sub_group_key;

pub(crate) use fp32_modules::Fp32Modules;
pub use from_config::{base_lr, from_config, momentum};
pub(crate) use grouped_optimizer::{GroupStepSettings, GroupedOptimizer};
pub use optimizer::{
    FactoredOptimizer, FactoredSlice, Layerwise, Momentum, Optimizer, OptimizerNeeds, RateRule, SQUARES_BLOCK,
    SlicePosition, SquareSums, StepContext, WeightAveraging, WholeParameterOptimizer,
};
pub use parameter_groups::ParameterGroup;
pub(crate) use parameter_groups::{ParameterGrouping, TrainableFilter};
pub use schedule::{LrSchedule, Schedule};
pub use state_format::StateFormat;
pub(crate) use state_format::{DecodeMode, decode, encode, scales_of};
pub(crate) use sub_group_key::{OptimizerRole, SubGroupKey, WeightFormat};
