//! Models on [`candle_nn::VarBuilder`] and [`crate::nn`]: trainable as they stand, with or without an engine.

mod config;
mod gpt;
mod sampling;

pub use config::GptConfig;
pub use gpt::{Block, Gpt};
pub use sampling::{TokenRng, next_token};
