//! Copies of buffers between the host and the GPU on which the model computes, concurrent with the work of both
//! (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857).
//!
//! ```text
//!   gradients   summed on the GPU -> in the same backward pass, this rank's part -> its share on the host, or in files
//!   updates     the step on the host -> a parameter's weights go to the GPU while the next parameter's are computed
//!   shards      on the host, or read from a file -> GPU -> gathered there
//! ```
//!
//! A buffer that is already in the right place is not copied.

use crate::config::ZeroConfig;
use crate::error::Result;
use crate::memory::{MemoryKind, MemoryTier};
use crate::tensor::flat_buffer::FlatBuffer;
#[cfg(feature = "cuda")]
use crate::{
    cuda::{CopyQueue, DeviceFlat, PendingCopy},
    memory::{MemoryLedger, MemoryLedgerEntry},
    precision::{ElementBuffer, Flat},
    tensor::flat_buffer::BufferDevice,
    timeline::TimelineLane,
    util::lock,
};
#[cfg(feature = "cuda")]
use candle_core::CudaDevice;
#[cfg(feature = "cuda")]
use std::sync::{Arc, Mutex};

/// The kind of data that a copy carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyPayloadKind {
    /// Sums of gradients, copied to this rank's share.
    Gradients,
    /// Weights after a step.
    Updates,
    /// Shards that are to be gathered.
    Shards,
}

impl CopyPayloadKind {
    /// Returns the memory kind of the copies.
    pub fn memory_kind(self) -> MemoryKind {
        match self {
            Self::Gradients | Self::Updates => MemoryKind::Buckets,
            Self::Shards => MemoryKind::Gathered,
        }
    }
}

/// The total bytes of the windows of each kind of copy. Two windows of 4 MiB suffice for the full bandwidth of a GPU's
/// bus.
pub(crate) const WINDOWS_BYTES: usize = 8 << 20;

/// The number of elements of weights that are updated together while earlier ones are being copied: a few windows.
pub(crate) const UPDATE_CHUNK: usize = 4 << 20;

/// Returns the memory tier of the copy windows: for shards, `offload_param.pin_memory` selects it; for gradients and
/// updates, `offload_optimizer.pin_memory`.
pub(crate) fn windows_tier(zero: &ZeroConfig, kind: CopyPayloadKind) -> MemoryTier {
    let pinned = match kind {
        CopyPayloadKind::Gradients | CopyPayloadKind::Updates => {
            zero.offload_optimizer.as_ref().is_none_or(|offload| offload.pin_memory)
        }
        CopyPayloadKind::Shards => zero.offload_param.as_ref().is_none_or(|offload| offload.pin_memory),
    };
    if pinned { MemoryTier::Pinned } else { MemoryTier::Host }
}

/// A buffer that is being copied, or that is already in the right place.
pub(crate) enum DeviceCopy {
    Complete(FlatBuffer),
    #[cfg(feature = "cuda")]
    ToHost(PendingCopy<Flat>, [MemoryLedgerEntry; 2]),
    #[cfg(feature = "cuda")]
    ToDevice(PendingCopy<DeviceFlat>, [MemoryLedgerEntry; 2]),
}

impl DeviceCopy {
    /// Waits until the buffer is in the right place.
    ///
    /// # Errors
    /// A driver error.
    pub fn wait(self) -> Result<FlatBuffer> {
        match self {
            Self::Complete(buffer) => Ok(buffer),
            #[cfg(feature = "cuda")]
            Self::ToHost(copying, _held) => Ok(FlatBuffer::Host(copying.wait()?)),
            #[cfg(feature = "cuda")]
            Self::ToDevice(copying, _held) => Ok(FlatBuffer::Device(copying.wait()?)),
        }
    }
}

/// The copy queues between the host and a GPU. Each is created at its first use, or by
/// [`prepare`](DeviceCopyQueues::prepare).
#[cfg(feature = "cuda")]
pub(crate) struct DeviceCopyQueues {
    device: CudaDevice,
    ledger: MemoryLedger,
    zero: ZeroConfig,
    queues: Mutex<[Option<TrackedCopyQueue>; 3]>,
}

/// A queue, and the ledger entry of its windows.
#[cfg(feature = "cuda")]
type TrackedCopyQueue = (Arc<CopyQueue>, MemoryLedgerEntry);

#[cfg(feature = "cuda")]
impl DeviceCopyQueues {
    pub fn new(device: &CudaDevice, zero: &ZeroConfig, ledger: &MemoryLedger) -> Self {
        Self { device: device.clone(), ledger: ledger.clone(), zero: zero.clone(), queues: Mutex::default() }
    }

    /// Creates a queue before its first use, because locking memory waits for all of the GPU's work, even for a
    /// collective whose peer has failed.
    ///
    /// # Errors
    /// A driver error: memory that cannot be locked.
    pub fn prepare(&self, kind: CopyPayloadKind) -> Result<()> {
        self.queue(kind).map(drop)
    }

    /// Begins to copy a buffer to the host or to a GPU. On a GPU, the copy has room for at least `capacity` elements.
    ///
    /// # Errors
    /// A driver error: no memory on the GPU, or memory that cannot be locked.
    pub fn send(
        &self,
        kind: CopyPayloadKind,
        buffer: FlatBuffer,
        to: &BufferDevice,
        capacity: usize,
    ) -> Result<DeviceCopy> {
        let hold = |tier, bytes| self.ledger.hold_in(tier, kind.memory_kind(), bytes);
        let (source_bytes, len, size) = (buffer.capacity_in_bytes(), buffer.len(), buffer.dtype().size_in_bytes());
        match (buffer, to) {
            (FlatBuffer::Device(buffer), BufferDevice::Host) => {
                let held = [hold(MemoryTier::Device, source_bytes), hold(MemoryTier::Host, len * size)];
                Ok(DeviceCopy::ToHost(self.queue(kind)?.down(buffer)?, held))
            }
            (FlatBuffer::Host(buffer), BufferDevice::Device(device)) => {
                let held = [hold(MemoryTier::Host, source_bytes), hold(MemoryTier::Device, capacity.max(len) * size)];
                Ok(DeviceCopy::ToDevice(self.queue(kind)?.up(device, buffer, capacity)?, held))
            }
            (buffer, _) => Ok(DeviceCopy::Complete(buffer)),
        }
    }

    fn queue(&self, kind: CopyPayloadKind) -> Result<Arc<CopyQueue>> {
        let queue = &mut lock(&self.queues)[kind as usize];
        if let Some((queue, _)) = queue {
            return Ok(queue.clone());
        }
        let lane = match kind {
            CopyPayloadKind::Gradients => TimelineLane::Gradients,
            CopyPayloadKind::Updates => TimelineLane::Updates,
            CopyPayloadKind::Shards => TimelineLane::Shards,
        };
        let tier = windows_tier(&self.zero, kind);
        let new_queue = Arc::new(CopyQueue::new(&self.device, WINDOWS_BYTES, tier == MemoryTier::Pinned, lane)?);
        *queue = Some((new_queue.clone(), self.ledger.hold_in(tier, MemoryKind::Staging, WINDOWS_BYTES)));
        Ok(new_queue)
    }
}
