//! Layers and models: values, gradients and promises.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod batch_norm;
mod dropout;
mod foreign_models;
mod gpt;
mod graph;
mod layers;
mod llama;
mod promises;
