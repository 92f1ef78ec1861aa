//! Offload to files and to host memory: unchanged bits, error messages, and failures of disks and processes.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod errors;
mod faults;
mod stages;
