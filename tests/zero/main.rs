//! The promises of ZeRO: every stage computes the same, with any model; and the facts about Candle that this needs.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod absent_parameter;
mod candle_facts;
#[cfg(feature = "cuda")]
mod cuda;
mod frozen;
mod optimizer_stages;
mod passing_backward;
mod small_states;
mod stage_equality;
mod unusual_models;
