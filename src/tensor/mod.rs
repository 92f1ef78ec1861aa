//! Candle's tensors from inside: their elements for the kernels, and their storages taken out and put back.

pub(crate) mod bytes;
pub(crate) mod element;
pub(crate) mod flat_buffer;
#[cfg(feature = "cuda")]
pub(crate) mod on_device;
pub(crate) mod part;
pub(crate) mod residency;
