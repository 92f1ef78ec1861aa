//! The encoding of elements that are sent between ranks.

pub(in crate::comm) mod format;
pub(in crate::comm) mod inter_host;
