//! The inputs of an estimate besides the model and the configuration.

use crate::offload::DiskAccess;

/// The inputs of an estimate besides the model and the configuration.
#[derive(Debug, Clone, Copy, Default)]
pub struct EstimateOptions {
    /// Whether the model computes on a GPU.
    pub gpu: bool,
    /// Whether the model's units recompute their forward pass even if the configuration does not enable recomputation.
    pub recompute: bool,
    /// The number of hosts, each with the same number of ranks. 0 and 1 mean that all ranks are on one host.
    pub hosts: usize,
    /// The access mode of files. By default, it is the mode that the engine would choose on this machine.
    pub disk_access: Option<DiskAccess>,
}
