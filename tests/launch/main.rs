//! `zerorun` as the launcher of ranks: how they start, fail, end and restart.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod apart;
mod bad_input;
mod cores;
mod engines;
mod faults;
mod finetune_hosts;
mod mpi;
mod nodes;
mod pipeline;
mod port;
mod ranks;
mod recorded;
mod restarts;
mod script;
mod slurm;
mod stuck;
mod train_gpt;
mod train_gpt_ends;
mod train_vision;
