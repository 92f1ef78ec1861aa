//! The wire format: how elements are encoded when they are sent between ranks.

use super::inter_host::InterHostFormat;
use crate::comm::collective_kind::CollectiveKind;
use crate::precision::{BLOCK, IntFormat};
use candle_core::DType;

/// The encoding in which elements are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum WireFormat {
    /// Elements as they are in memory.
    #[default]
    Exact,
    /// Integers with a scale per [`BLOCK`] elements, as in ZeRO++.
    Blocks(IntFormat),
    /// Exact within a host, and encoded between hosts.
    ///
    /// In a sum, each host adds up its ranks' parts, in rank order and in f32. This partial sum is encoded; the owner
    /// adds the partial sums of all hosts in host order (that of its own host unencoded) and rounds once. The bits
    /// therefore depend on which ranks share a host. In a gather that crosses host boundaries, shards are encoded for
    /// all ranks. If all ranks are on one host, or are not known to be on several, nothing is encoded.
    BetweenHosts(InterHostFormat),
}

impl WireFormat {
    /// Returns the number of elements that are encoded together. Data that begins at a multiple of this number in a
    /// rank's chunk shares no block with the data before it.
    pub fn alignment(self) -> usize {
        match self {
            Self::Exact => 1,
            Self::Blocks(_) => BLOCK,
            Self::BetweenHosts(code) => code.alignment(),
        }
    }

    /// Returns the wire format within a host.
    pub(in crate::comm) fn within_host(self) -> Self {
        match self {
            Self::BetweenHosts(_) => Self::Exact,
            wire => wire,
        }
    }

    /// Returns the encoding of a gather's shards between hosts; `None` if they are not encoded.
    pub(in crate::comm) fn code(self) -> Option<InterHostFormat> {
        match self {
            Self::Exact => None,
            Self::Blocks(ints) => Some(InterHostFormat::Blocks(ints)),
            Self::BetweenHosts(code) => Some(code),
        }
    }

    /// Returns the number of bytes in which `elements` elements of `size` bytes each are sent within a host.
    pub(in crate::comm) fn encoded_len(self, elements: usize, size: usize) -> usize {
        match self {
            Self::Exact | Self::BetweenHosts(_) => elements * size,
            Self::Blocks(ints) => ints.encoded_len(elements),
        }
    }

    /// Returns the number of bytes that one of `world` ranks of a host receives from the others in a collective whose
    /// argument has `elements` elements.
    pub(crate) fn bytes(self, kind: CollectiveKind, elements: usize, dtype: DType, world: usize) -> usize {
        let exact = |elements: usize| elements * dtype.size_in_bytes();
        let coded = |elements: usize| self.encoded_len(elements, dtype.size_in_bytes());
        let bytes_per_peer = match kind {
            // In a reduction, a rank receives a summand for its complete chunk from every other rank; in an all-reduce,
            // it also receives the others' sums, which are never encoded.
            CollectiveKind::ReduceScatter => coded(elements / world),
            CollectiveKind::AllReduce => coded(elements.div_ceil(world)) + exact(elements.div_ceil(world)),
            CollectiveKind::AllGather | CollectiveKind::Control => coded(elements),
            CollectiveKind::Barrier | CollectiveKind::Send => 0,
            CollectiveKind::Receive => return exact(elements),
        };
        bytes_per_peer * (world - 1)
    }
}
