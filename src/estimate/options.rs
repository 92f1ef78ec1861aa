//! The circumstances that an estimate depends on besides model and configuration.

use crate::offload::DiskAccess;

/// The circumstances that an estimate depends on besides model and configuration.
#[derive(Debug, Clone, Copy, Default)]
pub struct EstimateOptions {
    /// The model computes on a GPU.
    pub gpu: bool,
    /// The model's units recompute their forward, also where the configuration does not ask for it.
    pub recompute: bool,
    /// Hosts, with as many ranks each; 0 and 1: all ranks are on one.
    pub hosts: usize,
    /// How files are accessed. Default: as the engine would choose on this machine.
    pub disk_access: Option<DiskAccess>,
}
