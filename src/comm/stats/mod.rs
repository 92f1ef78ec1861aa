//! The cost of communication: counters, `comms_logger`, bandwidths, and measurements of the network.

pub(in crate::comm) mod bandwidth;
pub(in crate::comm) mod comm_log;
pub(in crate::comm) mod counters;
#[doc(hidden)]
pub mod network_bench;
