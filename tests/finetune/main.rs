//! Fine-tuning: tokenizers, chat templates and targets, data, packing; against records of transformers and PEFT.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod chat;
