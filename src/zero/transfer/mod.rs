//! Buffers in transfer: `pending_collective.rs` between ranks, `device_copy.rs` between the host and the GPU.

pub(crate) mod device_copy;
pub(crate) mod pending_collective;
