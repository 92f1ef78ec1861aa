//! Recorded behaviour of DeepSpeed and PyTorch, case by case.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod checkpoint;
mod config;
mod engine;
mod flat_layout;
mod launcher;
mod layout;
mod ledger;
mod optimizers;
mod partition;
mod schedules;
mod small_states;
mod training;
mod trajectories;
