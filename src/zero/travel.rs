//! Buffers on their way through a collective.
//!
//! ```text
//!   on the host    the communicator has the buffer until it is waited for
//!   on a GPU       a copy on the host travels, and comes back into the buffer's memory; with one rank nothing moves
//! ```

use crate::comm::{Communicator, Pending, Wire};
use crate::error::Result;
use crate::memory::Ledger;
use crate::precision::Flat;
use crate::tensor::flat_buffer::FlatBuffer;
#[cfg(feature = "cuda")]
use crate::{
    cuda::DeviceFlat,
    memory::{Held, Kind},
};

/// A collective on elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Collective {
    AllReduce,
    ReduceScatter,
    AllGather,
    /// An all-gather inside of each group of so many neighbours.
    GatherWithin(usize),
    /// A sum over all ranks that each group of so many neighbours divides.
    ReduceToGroups(usize),
}

impl Collective {
    /// Begins it. The result lies in the memory of `buffer`.
    fn begin(self, comm: &dyn Communicator, wire: Wire, buffer: Flat, tag: u64) -> Pending<Flat> {
        match self {
            Self::AllReduce => comm.all_reduce_as(wire, buffer, tag),
            Self::ReduceScatter => comm.reduce_scatter_as(wire, buffer, tag),
            Self::AllGather => comm.all_gather_as(wire, buffer, tag),
            Self::GatherWithin(ranks) => comm.all_gather_within_as(wire, ranks, buffer, tag),
            Self::ReduceToGroups(ranks) => comm.reduce_to_groups_as(wire, ranks, buffer, tag),
        }
    }

    /// The elements that it makes of `len` elements, with so many ranks in all.
    #[cfg(feature = "cuda")]
    fn result_len(self, len: usize, world_size: usize) -> usize {
        match self {
            Self::AllReduce => len,
            Self::ReduceScatter => len / world_size,
            Self::AllGather => len * world_size,
            Self::GatherWithin(ranks) => len * ranks,
            Self::ReduceToGroups(ranks) => len / ranks,
        }
    }
}

/// A buffer on its way.
pub(crate) enum Travel {
    Host(Pending<Flat>),
    /// Nobody else is there.
    #[cfg(feature = "cuda")]
    Alone(DeviceFlat),
    /// What is in the buffer has been copied.
    #[cfg(feature = "cuda")]
    Copied {
        copy: Pending<Flat>,
        buffer: DeviceFlat,
        _held: Held,
    },
}

impl Travel {
    /// Begins a collective on a buffer.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(
        comm: &dyn Communicator,
        ledger: &Ledger,
        collective: Collective,
        wire: Wire,
        buffer: FlatBuffer,
        tag: u64,
    ) -> Result<Self> {
        _ = ledger;
        match buffer {
            FlatBuffer::Host(buffer) => Ok(Self::Host(collective.begin(comm, wire, buffer, tag))),
            #[cfg(feature = "cuda")]
            FlatBuffer::Device(buffer) if comm.size() == 1 => Ok(Self::Alone(buffer)),
            #[cfg(feature = "cuda")]
            FlatBuffer::Device(buffer) => {
                let room = buffer.len().max(collective.result_len(buffer.len(), comm.size()));
                let mut copy = Flat::with_capacity(buffer.dtype(), room);
                copy.extend_zeros(buffer.len());
                buffer.read(0..buffer.len(), copy.as_mut())?;
                let _held = ledger.hold(Kind::Buckets, copy.capacity_in_bytes());
                Ok(Self::Copied { copy: collective.begin(comm, wire, copy, tag), buffer, _held })
            }
        }
    }

    /// Waits for the result, which lies in the memory of what was launched.
    ///
    /// # Errors
    /// A rank has failed, or ranks have diverged; the driver's.
    pub fn wait(self) -> Result<FlatBuffer> {
        match self {
            Self::Host(pending) => Ok(FlatBuffer::Host(pending.wait()?)),
            #[cfg(feature = "cuda")]
            Self::Alone(buffer) => Ok(FlatBuffer::Device(buffer)),
            #[cfg(feature = "cuda")]
            Self::Copied { copy, mut buffer, _held } => {
                buffer.replace(copy.wait()?.as_ref())?;
                Ok(FlatBuffer::Device(buffer))
            }
        }
    }
}
