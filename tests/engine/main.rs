//! The engine as users see it: its methods and errors, optimizers and schedules, data, monitors and the timeline.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod access;
mod accumulation;
mod api;
mod config_keys;
mod data_loader;
mod draws;
mod errors;
mod for_eval;
mod generation;
mod gradient_check;
mod monitors;
mod muon;
mod overflow;
mod own_optimizer;
mod parameter_groups;
mod recorded_optimizers;
mod schedule_free;
mod schedules;
mod several_engines;
mod timeline;
