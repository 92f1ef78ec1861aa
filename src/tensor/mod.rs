//! Candle's tensors from inside: their elements for the kernels, and their storages taken out and put back.

pub(crate) mod bytes;
#[cfg(feature = "cuda")]
pub(crate) mod device_elements;
pub(crate) mod element;
pub(crate) mod flat_buffer;
pub(crate) mod host_slice;
pub(crate) mod residency;
