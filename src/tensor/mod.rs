//! Candle's tensors from inside: their elements for the kernels, and their storages taken out and put back.

pub(crate) mod bytes;
pub(crate) mod element;
pub(crate) mod residency;
