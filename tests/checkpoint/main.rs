//! Checkpoints: saved, loaded, damaged, interrupted, and those that DeepSpeed wrote.
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
