//! Fine-tuning: from a model's folder to an engine's parameters.
//!
//! | step | type |
//! |---|---|
//! | a model's folder or GGUF file: its description, and its weights by name | [`Base`] |

mod base;
pub(crate) mod error;
mod gguf;
mod gguf_config;

pub use base::Base;
