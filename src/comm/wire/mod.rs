//! How elements are encoded while they travel between ranks.

pub(in crate::comm) mod format;
pub(in crate::comm) mod inter_host;
