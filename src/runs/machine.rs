//! The machine on which a run is recorded: that of rank 0.

use crate::kernels;
use crate::util::{host_name, proc_field};
use serde::{Deserialize, Serialize};

/// The machine of rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RunMachine {
    /// The name of the host.
    pub host: String,
    /// The name of the processor.
    pub processor: String,
    /// The SIMD level of the kernels.
    pub simd: String,
    /// The number of cores that the process may use.
    pub cores: usize,
    /// The size of the memory in bytes.
    pub memory_bytes: u64,
    /// The kernel of the operating system.
    pub system: String,
}

impl RunMachine {
    /// Describes this machine.
    pub(super) fn current() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let (cpu, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
        let kib = proc_field(&memory, "MemTotal").and_then(|text| text.strip_suffix(" kB")?.parse().ok());
        Self {
            host: host_name(),
            processor: proc_field(&cpu, "model name").unwrap_or(std::env::consts::ARCH).to_owned(),
            simd: kernels::checked_level().map_or(String::new(), |level| level.name().to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kib.map_or(0, |kib: u64| kib.saturating_mul(1024)),
            system: format!("Linux {}", read("/proc/sys/kernel/osrelease").trim()),
        }
    }
}
