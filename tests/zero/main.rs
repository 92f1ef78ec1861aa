//! What ZeRO promises: every stage computes the same, with any model, and what that needs of Candle.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod absent_parameter;
mod candle_facts;
#[cfg(feature = "cuda")]
mod cuda;
mod optimizer_stages;
mod stage_equality;
mod unusual_models;
