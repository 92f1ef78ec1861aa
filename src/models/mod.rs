//! Models on [`candle_nn::VarBuilder`] and [`crate::nn`]: trainable as they stand, with or without an engine; and how they
//! continue a text ([`LanguageModel::generate`], and [`Session`] token by token).

mod config;
pub(crate) mod error;
mod gpt;
mod gpt_config;
mod language_model;
mod llama;
mod llama_config;
mod sampling;
mod session;

pub use gpt::{Gpt, GptBlock, GptLayers};
pub use gpt_config::GptConfig;
pub use language_model::{Architecture, LanguageModel};
pub use llama::{Llama, LlamaBlock, LlamaLayers};
pub use llama_config::LlamaConfig;
pub use sampling::{TokenRng, next_token};
pub use session::Session;

/// `name`, if a model of any architecture is known by it.
///
/// # Errors
/// An unknown name; the message lists the known ones.
pub(crate) fn preset_named(name: &str) -> crate::Result<&'static str> {
    let names: Vec<&str> = GptConfig::preset_names().chain(LlamaConfig::preset_names()).collect();
    config::find_preset(&names, |known| known, name).copied()
}
