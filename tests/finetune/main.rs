//! Fine-tuning: models, tokenizers, chat templates and targets, data, packing; against records of transformers and PEFT.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod bad_models;
mod chat;
mod fixtures;
mod generation;
mod gguf;
mod logits;
mod packed_rows;
mod trajectories;
