//! Shared helpers of the tests.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod cluster;
pub mod convnet;
pub mod device;
pub mod experts;
pub mod gan;
pub mod processes;
pub mod recorded;
pub mod skips;
pub mod slurm;
pub mod swap;
pub mod synth;
pub mod tiny;
