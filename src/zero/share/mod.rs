//! This rank's share of the model.
//!
//! | file | contents |
//! | --- | --- |
//! | `var_builder_backend.rs`, `share_plan.rs` | the `VarBuilder` backend: registers parameters and shards them |
//! | `share_storage.rs` | the memory and the files in which a rank keeps its share |
//! | `state_storage.rs` | the storage of a state of a sub-group |
//! | `sub_group.rs`, `sub_group_builder.rs` | the share, sub-group by sub-group, and its layout |
//! | `optim_state.rs` | an optimizer state of a sub-group, in its format |
//! | `packed_weight_shards.rs` | packed weights, as words |
//! | `state_access.rs` | states by parameter, read and written in any storage |
//! | `param_access.rs` | reads and sets one parameter, its gradient and states |
//! | `freeze.rs` | freezes and unfreezes parameters between steps |
//! | `whole_model.rs` | the parameters of the complete model, including those of the other stages of a pipeline |
//! | `safetensors_export.rs` | writes whole parameters to a file |

mod freeze;
pub(crate) mod optim_state;
pub(in crate::zero) mod packed_weight_shards;
mod param_access;
mod safetensors_export;
pub(crate) mod share_plan;
pub(crate) mod share_storage;
pub(crate) mod state_access;
pub(crate) mod state_storage;
pub(crate) mod sub_group;
pub(crate) mod sub_group_builder;
pub(crate) mod var_builder_backend;
pub(crate) mod whole_model;
