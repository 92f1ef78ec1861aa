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
use crate::memory::{Kind, Tier};
use crate::tensor::flat_buffer::FlatBuffer;
#[cfg(feature = "cuda")]
use crate::{
    cuda::{CopyQueue, DeviceFlat, PendingCopy},
    memory::{Held, Ledger},
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
pub(crate) enum Cargo {
    /// Sums of gradients, to this rank's share.
    Gradients,
    /// Weights after a step.
    Updates,
    /// Shards that are to be gathered.
    Shards,
}

impl Cargo {
    /// The purpose of its memory.
    pub fn kind(self) -> Kind {
        match self {
            Self::Gradients | Self::Updates => Kind::Buckets,
            Self::Shards => Kind::Gathered,
        }
    }
}

/// Bytes of the windows through which each kind of cargo passes: with two of 4 MiB a GPU's bus has reached its bandwidth.
pub(crate) const WINDOWS_BYTES: usize = 8 << 20;

/// Elements of weights that are updated together, while those before them are on their way: a few windows of them.
pub(crate) const UPDATED_TOGETHER: usize = 4 << 20;

/// Where these windows are: in page-locked memory as `offload_optimizer.pin_memory` and `offload_param.pin_memory` say.
pub(crate) fn windows_tier(zero: &ZeroConfig, cargo: Cargo) -> Tier {
    let pinned = match cargo {
        Cargo::Gradients | Cargo::Updates => zero.offload_optimizer.as_ref().is_none_or(|offload| offload.pin_memory),
        Cargo::Shards => zero.offload_param.as_ref().is_none_or(|offload| offload.pin_memory),
    };
    if pinned { Tier::Pinned } else { Tier::Host }
}

/// A buffer on its way, or where it belongs already.
pub(crate) enum Moving {
    There(FlatBuffer),
    #[cfg(feature = "cuda")]
    ToHost(PendingCopy<Flat>, [Held; 2]),
    #[cfg(feature = "cuda")]
    ToDevice(PendingCopy<DeviceFlat>, [Held; 2]),
}

impl Moving {
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

/// The queues between the host and a GPU. Each is there from its first use on, or from [`prepare`](Copies::prepare).
#[cfg(feature = "cuda")]
pub(crate) struct Copies {
    device: CudaDevice,
    ledger: Ledger,
    zero: ZeroConfig,
    queues: Mutex<[Option<Queue>; 3]>,
}

/// A queue, and its windows.
#[cfg(feature = "cuda")]
type Queue = (Arc<CopyQueue>, Held);

#[cfg(feature = "cuda")]
impl Copies {
    pub fn new(device: &CudaDevice, zero: &ZeroConfig, ledger: &Ledger) -> Self {
        Self { device: device.clone(), ledger: ledger.clone(), zero: zero.clone(), queues: Mutex::default() }
    }

    /// Makes a queue: locking memory waits for all that the GPU does, also for a collective whose peer has failed.
    ///
    /// # Errors
    /// The driver's: no memory to lock.
    pub fn prepare(&self, cargo: Cargo) -> Result<()> {
        self.queue(cargo).map(drop)
    }

    /// Begins to bring a buffer to a place. On a GPU there will be room for `capacity` elements.
    ///
    /// # Errors
    /// The driver's: no memory on the GPU, or none to lock.
    pub fn send(&self, cargo: Cargo, buffer: FlatBuffer, to: &BufferDevice, capacity: usize) -> Result<Moving> {
        let hold = |tier, bytes| self.ledger.hold_in(tier, cargo.kind(), bytes);
        let (here, len, size) = (buffer.capacity_in_bytes(), buffer.len(), buffer.dtype().size_in_bytes());
        match (buffer, to) {
            (FlatBuffer::Device(buffer), BufferDevice::Host) => {
                let held = [hold(Tier::Device, here), hold(Tier::Host, len * size)];
                Ok(Moving::ToHost(self.queue(cargo)?.down(buffer)?, held))
            }
            (FlatBuffer::Host(buffer), BufferDevice::Device(device)) => {
                let held = [hold(Tier::Host, here), hold(Tier::Device, capacity.max(len) * size)];
                Ok(Moving::ToDevice(self.queue(cargo)?.up(device, buffer, capacity)?, held))
            }
            (buffer, _) => Ok(Moving::There(buffer)),
        }
    }

    fn queue(&self, cargo: Cargo) -> Result<Arc<CopyQueue>> {
        let queue = &mut lock(&self.queues)[cargo as usize];
        if let Some((queue, _)) = queue {
            return Ok(queue.clone());
        }
        let lane = match cargo {
            Cargo::Gradients => TimelineLane::Gradients,
            Cargo::Updates => TimelineLane::Updates,
            Cargo::Shards => TimelineLane::Shards,
        };
        let tier = windows_tier(&self.zero, cargo);
        let made = Arc::new(CopyQueue::new(&self.device, WINDOWS_BYTES, tier == Tier::Pinned, lane)?);
        *queue = Some((made.clone(), self.ledger.hold_in(tier, Kind::Staging, WINDOWS_BYTES)));
        Ok(made)
    }
}
