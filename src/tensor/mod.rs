//! The internals of Candle's tensors: their elements for the kernels, and the removal and replacement of their
//! storages.

pub(crate) mod bytes;
#[cfg(feature = "cuda")]
pub(crate) mod device_elements;
pub(crate) mod element;
pub(crate) mod flat_buffer;
pub(crate) mod host_slice;
pub(crate) mod residency;
