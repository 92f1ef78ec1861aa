//! Pending collectives, each with its buffer.
//!
//! ```text
//!   on the host    the communicator holds the buffer until the collective is waited for
//!   on a GPU       NCCL moves it from GPU to GPU; if that is not possible, a copy on the host is sent, and the result
//!                  is copied into the buffer's memory; with one rank, nothing moves
//! ```

use crate::comm::{Communicator, Pending, WireFormat};
use crate::error::Result;
use crate::precision::Flat;
use crate::tensor::flat_buffer::FlatBuffer;
#[cfg(feature = "cuda")]
use crate::{
    comm::{
        CollectiveKind as CommKind,
        gpu_collectives::{GpuCollectives, PendingGpuCollective},
    },
    cuda::DeviceFlat,
    memory::{MemoryKind, MemoryLedger, MemoryLedgerEntry},
};

/// The means by which a rank's buffers are exchanged.
pub(crate) struct CollectiveTransport<'a> {
    pub comm: &'a dyn Communicator,
    #[cfg(feature = "cuda")]
    pub gpus: Option<&'a GpuCollectives>,
    #[cfg(feature = "cuda")]
    pub ledger: &'a MemoryLedger,
}

/// A collective on elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CollectiveOp {
    AllReduce,
    ReduceScatter,
    AllGather,
    /// An all-gather within each group of this number of neighbouring ranks.
    GatherWithin(usize),
    /// A sum over all ranks, scattered within each group of this number of neighbouring ranks.
    ReduceToGroups(usize),
}

impl CollectiveOp {
    /// Begins the collective. The result is in the memory of `buffer`.
    fn begin(self, comm: &dyn Communicator, wire: WireFormat, buffer: Flat, tag: u64) -> Pending<Flat> {
        match self {
            Self::AllReduce => comm.all_reduce_as(wire, buffer, tag),
            Self::ReduceScatter => comm.reduce_scatter_as(wire, buffer, tag),
            Self::AllGather => comm.all_gather_as(wire, buffer, tag),
            Self::GatherWithin(ranks) => comm.all_gather_within_as(wire, ranks, buffer, tag),
            Self::ReduceToGroups(ranks) => comm.reduce_to_groups_as(wire, ranks, buffer, tag),
        }
    }

    /// Returns the NCCL collective that has the same result as the communicator's, if there is one.
    #[cfg(feature = "cuda")]
    fn between_gpus(self, wire: WireFormat) -> Option<CommKind> {
        match self {
            // NCCL does not report which ranks share a host.
            _ if matches!(wire, WireFormat::BetweenHosts(_)) => None,
            Self::AllReduce => Some(CommKind::AllReduce),
            Self::ReduceScatter => Some(CommKind::ReduceScatter),
            Self::AllGather => Some(CommKind::AllGather),
            Self::GatherWithin(_) | Self::ReduceToGroups(_) => None,
        }
    }

    /// Returns the number of elements of the result for `len` elements and this number of ranks.
    pub fn result_len(self, len: usize, world_size: usize) -> usize {
        match self {
            Self::AllReduce => len,
            Self::ReduceScatter => len / world_size,
            Self::AllGather => len * world_size,
            Self::GatherWithin(ranks) => len * ranks,
            Self::ReduceToGroups(ranks) => len / ranks,
        }
    }
}

/// A pending collective.
pub(crate) enum PendingCollective {
    Host(Pending<Flat>),
    /// There is no other rank.
    #[cfg(feature = "cuda")]
    Alone(DeviceFlat),
    #[cfg(feature = "cuda")]
    BetweenGpus(PendingGpuCollective),
    /// The contents of the buffer have been copied to the host.
    #[cfg(feature = "cuda")]
    Copied {
        copy: Pending<Flat>,
        buffer: DeviceFlat,
        _held: MemoryLedgerEntry,
    },
}

impl PendingCollective {
    /// Begins a collective on a buffer.
    ///
    /// # Errors
    /// A driver error.
    pub fn launch(
        transport: &CollectiveTransport<'_>,
        collective: CollectiveOp,
        wire: WireFormat,
        buffer: FlatBuffer,
        tag: u64,
    ) -> Result<Self> {
        let comm = transport.comm;
        match buffer {
            FlatBuffer::Host(buffer) => Ok(Self::Host(collective.begin(comm, wire, buffer, tag))),
            #[cfg(feature = "cuda")]
            FlatBuffer::Device(buffer) if comm.size() == 1 => Ok(Self::Alone(buffer)),
            #[cfg(feature = "cuda")]
            FlatBuffer::Device(buffer) => {
                if let (Some(gpus), Some(kind)) = (transport.gpus, collective.between_gpus(wire)) {
                    return Ok(Self::BetweenGpus(gpus.launch(kind, wire, buffer, tag)?));
                }
                let room = buffer.len().max(collective.result_len(buffer.len(), comm.size()));
                let mut copy = Flat::with_capacity(buffer.dtype(), room);
                copy.extend_zeros(buffer.len());
                buffer.read(0..buffer.len(), copy.as_mut())?;
                let _held = transport.ledger.hold(MemoryKind::Buckets, copy.capacity_in_bytes());
                Ok(Self::Copied { copy: collective.begin(comm, wire, copy, tag), buffer, _held })
            }
        }
    }

    /// Waits for the result, which is in the memory of the buffer passed to [`launch`](Self::launch).
    ///
    /// # Errors
    /// Fails if a rank has failed, if ranks have diverged, or if the GPU's driver returns an error.
    pub fn wait(self) -> Result<FlatBuffer> {
        match self {
            Self::Host(pending) => Ok(FlatBuffer::Host(pending.wait()?)),
            #[cfg(feature = "cuda")]
            Self::Alone(buffer) => Ok(FlatBuffer::Device(buffer)),
            #[cfg(feature = "cuda")]
            Self::BetweenGpus(pending) => Ok(FlatBuffer::Device(pending.wait()?)),
            #[cfg(feature = "cuda")]
            Self::Copied { copy, mut buffer, _held } => {
                buffer.replace(copy.wait()?.as_ref())?;
                Ok(FlatBuffer::Device(buffer))
            }
        }
    }
}
