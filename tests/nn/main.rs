//! Layers and models: values, gradients and guarantees.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod batch_norm;
#[cfg(feature = "cuda")]
mod cuda_attention;
#[cfg(feature = "cuda")]
mod cuda_layers;
mod dropout;
mod foreign_models;
mod generation;
mod gpt;
mod graph;
mod grids;
mod key_value_cache;
mod layers;
mod llama;
mod promises;
