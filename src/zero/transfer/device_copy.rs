//! Buffers on their way between the host and the GPU on which the model computes, beside the work of both (ZeRO-Offload, arXiv
//! 2101.06840; ZeRO-Infinity, arXiv 2104.07857).
//!
//! ```text
//!   gradients   summed on the GPU -> this rank's part leaves while backward runs -> its share on the host, or in files
//!   updates     the step on the host -> weights of one parameter go to the GPU while the next are computed
//!   shards      on the host, or read from a file -> GPU -> gathered there
//! ```
//!
//! What lies where it belongs stays there.

use crate::config::ZeroConfig;
use crate::error::Result;
use crate::memory::{MemoryKind, MemoryTier};
use crate::tensor::flat_buffer::FlatBuffer;
#[cfg(feature = "cuda")]
use crate::{
    cuda::{CopyQueue, DeviceFlat, PendingCopy},
    memory::{Ledger, LedgerEntry},
    precision::{ElementBuffer, Flat},
    tensor::flat_buffer::BufferDevice,
    timeline::TimelineLane,
    util::lock,
};
#[cfg(feature = "cuda")]
use candle_core::CudaDevice;
#[cfg(feature = "cuda")]
use std::sync::{Arc, Mutex};

/// What is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyKind {
    /// Sums of gradients, to this rank's share.
    Gradients,
    /// Weights after a step.
    Updates,
    /// Shards that are to be gathered.
    Shards,
}

impl CopyKind {
    /// The purpose of its memory.
    pub fn memory_kind(self) -> MemoryKind {
        match self {
            Self::Gradients | Self::Updates => MemoryKind::Buckets,
            Self::Shards => MemoryKind::Gathered,
        }
    }
}

/// Bytes of the windows through which each kind of copy passes: with two of 4 MiB a GPU's bus has reached its bandwidth.
pub(crate) const WINDOWS_BYTES: usize = 8 << 20;

/// Elements of weights that are updated together, while those before them are on their way: a few windows of them.
pub(crate) const UPDATED_TOGETHER: usize = 4 << 20;

/// Where these windows are: in page-locked memory as `offload_optimizer.pin_memory` and `offload_param.pin_memory` say.
pub(crate) fn windows_tier(zero: &ZeroConfig, kind: CopyKind) -> MemoryTier {
    let pinned = match kind {
        CopyKind::Gradients | CopyKind::Updates => {
            zero.offload_optimizer.as_ref().is_none_or(|offload| offload.pin_memory)
        }
        CopyKind::Shards => zero.offload_param.as_ref().is_none_or(|offload| offload.pin_memory),
    };
    if pinned { MemoryTier::Pinned } else { MemoryTier::Host }
}

/// A buffer on its way, or where it belongs already.
pub(crate) enum DeviceCopy {
    There(FlatBuffer),
    #[cfg(feature = "cuda")]
    ToHost(PendingCopy<Flat>, [LedgerEntry; 2]),
    #[cfg(feature = "cuda")]
    ToDevice(PendingCopy<DeviceFlat>, [LedgerEntry; 2]),
}

impl DeviceCopy {
    /// Waits until it is where it belongs.
    ///
    /// # Errors
    /// The driver's.
    pub fn wait(self) -> Result<FlatBuffer> {
        match self {
            Self::There(buffer) => Ok(buffer),
            #[cfg(feature = "cuda")]
            Self::ToHost(copying, _held) => Ok(FlatBuffer::Host(copying.wait()?)),
            #[cfg(feature = "cuda")]
            Self::ToDevice(copying, _held) => Ok(FlatBuffer::Device(copying.wait()?)),
        }
    }
}

/// The queues between the host and a GPU. Each is there from its first use on, or from [`prepare`](DeviceCopyQueues::prepare).
#[cfg(feature = "cuda")]
pub(crate) struct DeviceCopyQueues {
    device: CudaDevice,
    ledger: Ledger,
    zero: ZeroConfig,
    queues: Mutex<[Option<TrackedCopyQueue>; 3]>,
}

/// A queue, and its windows.
#[cfg(feature = "cuda")]
type TrackedCopyQueue = (Arc<CopyQueue>, LedgerEntry);

#[cfg(feature = "cuda")]
impl DeviceCopyQueues {
    pub fn new(device: &CudaDevice, zero: &ZeroConfig, ledger: &Ledger) -> Self {
        Self { device: device.clone(), ledger: ledger.clone(), zero: zero.clone(), queues: Mutex::default() }
    }

    /// Makes a queue: locking memory waits for all that the GPU does, also for a collective whose peer has failed.
    ///
    /// # Errors
    /// The driver's: no memory to lock.
    pub fn prepare(&self, kind: CopyKind) -> Result<()> {
        self.queue(kind).map(drop)
    }

    /// Begins to bring a buffer to a place. On a GPU there will be room for `capacity` elements.
    ///
    /// # Errors
    /// The driver's: no memory on the GPU, or none to lock.
    pub fn send(&self, kind: CopyKind, buffer: FlatBuffer, to: &BufferDevice, capacity: usize) -> Result<DeviceCopy> {
        let hold = |tier, bytes| self.ledger.hold_in(tier, kind.memory_kind(), bytes);
        let (here, len, size) = (buffer.capacity_in_bytes(), buffer.len(), buffer.dtype().size_in_bytes());
        match (buffer, to) {
            (FlatBuffer::Device(buffer), BufferDevice::Host) => {
                let held = [hold(MemoryTier::Device, here), hold(MemoryTier::Host, len * size)];
                Ok(DeviceCopy::ToHost(self.queue(kind)?.down(buffer)?, held))
            }
            (FlatBuffer::Host(buffer), BufferDevice::Device(device)) => {
                let held = [hold(MemoryTier::Host, here), hold(MemoryTier::Device, capacity.max(len) * size)];
                Ok(DeviceCopy::ToDevice(self.queue(kind)?.up(device, buffer, capacity)?, held))
            }
            (buffer, _) => Ok(DeviceCopy::There(buffer)),
        }
    }

    fn queue(&self, kind: CopyKind) -> Result<Arc<CopyQueue>> {
        let queue = &mut lock(&self.queues)[kind as usize];
        if let Some((queue, _)) = queue {
            return Ok(queue.clone());
        }
        let lane = match kind {
            CopyKind::Gradients => TimelineLane::Gradients,
            CopyKind::Updates => TimelineLane::Updates,
            CopyKind::Shards => TimelineLane::Shards,
        };
        let tier = windows_tier(&self.zero, kind);
        let made = Arc::new(CopyQueue::new(&self.device, WINDOWS_BYTES, tier == MemoryTier::Pinned, lane)?);
        *queue = Some((made.clone(), self.ledger.hold_in(tier, MemoryKind::Staging, WINDOWS_BYTES)));
        Ok(made)
    }
}
