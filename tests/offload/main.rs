//! Offload to files and to host memory: the same bits, errors, and failures of disks and processes.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod errors;
mod faults;
mod stages;
