//! Models on [`candle_nn::VarBuilder`] and [`crate::nn`]: trainable as they stand, with or without an engine.

mod config;
pub mod gpt;
mod sampling;

pub use gpt::{Block, Gpt, GptConfig};
pub use sampling::{TokenRng, next_token};
