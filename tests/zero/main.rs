//! The guarantees of ZeRO: every stage computes the same results, with any model; and the facts about Candle on which
//! these guarantees rely.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod absent_parameter;
mod adapters;
mod buffers;
mod candle_facts;
mod candle_gradients;
mod conditional;
#[cfg(feature = "cuda")]
mod cuda;
mod expert_parallel;
mod frozen;
mod keep_f32;
mod mixture;
mod optimizer_stages;
mod own_writes;
mod passing_backward;
mod programs;
mod quantized;
mod recomputation;
mod routed_experts;
mod second_copy;
mod shard_groups;
mod small_states;
mod stage_equality;
mod unusual_models;
