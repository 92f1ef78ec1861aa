//! Low-rank adapters in PEFT's file format.
//!
//! | file | content |
//! |---|---|
//! | `adapter.rs`, `config.rs` | `adapter_model.safetensors` and `adapter_config.json` |
//! | `adapted_values.rs` | initial values of a model with adapters |
//! | `qlora.rs` | the weights that are held in 4 bits |

pub(super) mod adapted_values;
pub(super) mod adapter;
mod config;
pub(super) mod qlora;
