//! Pipelines: the same bits as one rank that accumulates gradients, for every schedule and number of ranks.
#![allow(clippy::unwrap_used)]

mod buffers;
mod checkpoints;
mod estimate;
mod held_activations;
mod inference;
mod models;
mod parts_of_a_model;
mod same_bits;
