//! Checkpoints: saving and loading them, damaged files, interrupted jobs, and checkpoints that DeepSpeed wrote.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod buffers;
mod deepspeed_continue;
mod deepspeed_import;
mod faults;
mod folders;
mod older;
mod on_hosts;
mod save_and_load;
#[cfg(feature = "s3")]
mod store;
