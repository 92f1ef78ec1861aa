//! The commands of `zerorun` besides launching: inspect, consolidate, check, estimate, tune and the others.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod bench_disk;
mod bench_scaling;
mod check;
mod checkpoint;
mod commands;
mod dash;
mod documents;
mod estimate;
mod estimate_tool;
mod report;
mod runs;
mod schedule;
mod sweep;
mod sweep_hosts;
mod tune;
mod verify;
