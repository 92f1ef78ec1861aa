//! Recorded behaviour of DeepSpeed and PyTorch, case by case.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod checkpoint;
mod config;
mod engine;
mod layout;
mod ledger;
mod optimizers;
mod schedules;
mod training;
mod trajectories;
