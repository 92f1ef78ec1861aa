//! Fine-tuning: models, tokenizers, chat templates and targets, data, packing and adapters, compared with records of
//! transformers and PEFT.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod adapters;
mod answers;
mod bad_models;
mod bert;
mod bounds;
mod chat;
mod classify;
mod data;
mod data_forms;
mod data_show;
mod decoder_classifiers;
mod dpo;
mod encoders;
mod ends;
mod families;
mod fixtures;
mod generate_tool;
mod generation;
mod gguf;
mod gguf_families;
mod gguf_gpt_oss;
mod gguf_mixture;
mod gguf_tokenizer;
#[cfg(feature = "hub")]
mod hub;
#[cfg(feature = "hub")]
mod hub_server;
mod identity;
mod islands;
mod logits;
mod lora;
mod merge_tool;
mod moe;
mod moe_folders;
mod moe_lora;
mod moe_runs;
mod outputs;
mod packed_rows;
mod parquet;
mod pipeline;
mod qlora;
mod runs;
mod smollm2;
mod trajectories;
