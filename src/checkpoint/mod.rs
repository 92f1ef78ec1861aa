//! State of a training run on disk.

pub mod deepspeed;
