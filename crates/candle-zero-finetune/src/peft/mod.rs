//! Low-rank adapters in PEFT's file format.
//!
//! | file | content |
//! |---|---|
//! | `adapter.rs`, `config.rs` | `adapter_model.safetensors` and `adapter_config.json` |
//! | `adapter_initial_values.rs` | initial values of a model with adapters |
//! | `qlora_weight_selection.rs` | the weights that are held in 4 bits |

pub(super) mod adapter;
pub(super) mod adapter_initial_values;
mod config;
pub(super) mod qlora_weight_selection;
