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
//! | `chunks.rs` | how one pass over all the buffers runs in parallel |
//! | `groups.rs` | parameter groups: which parameters have a learning rate or a decay of their own |
//! | `kept_modules.rs` | modules that stay in f32 in a 16-bit model, by name |
//! | `class.rs` | what is kept of a parameter: who trains it, if anybody does |
//! | `trainer.rs` | an engine's optimizer, its parameter groups and their schedules |
//! | `schedule.rs` | learning rate and momentum by step |

mod adagrad;
mod adam;
mod chunks;
mod class;
mod eight_bit;
pub(crate) mod error;
mod from_config;
mod groups;
mod kept_modules;
mod lamb;
mod lion;
mod muon;
mod newton_schulz;
mod optimizer;
mod schedule;
mod sgd;
mod state_format;
mod trainer;

pub(crate) use class::{Class, Role, Weights};
pub use from_config::{base_lr, from_config, momentum};
pub use groups::ParameterGroup;
pub(crate) use groups::{Grouping, TrainableRule};
pub(crate) use kept_modules::KeptModules;
pub use optimizer::{Layerwise, Momentum, Needs, Optimizer, SQUARES_BLOCK, Squares, StepContext, Wholewise};
pub use schedule::{LrSchedule, Schedule};
pub use state_format::StateFormat;
pub(crate) use state_format::{Reading, decode, encode, scales_of};
pub(crate) use trainer::{GroupStep, Trainer};
