//! How elements are encoded on the way between ranks.

use super::inter_host::InterHostFormat;
use crate::comm::collective_kind::CollectiveKind;
use crate::precision::{BLOCK, IntFormat};
use candle_core::DType;

/// How elements travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WireFormat {
    /// As they are in memory.
    #[default]
    Exact,
    /// As integers with a scale per [`BLOCK`] elements: ZeRO++.
    Blocks(IntFormat),
    /// As they are inside of a host, and as codes between hosts.
    ///
    /// Of a sum each host adds up its ranks' parts, in rank order and in f32. What is coded is this partial sum; the owner
    /// adds those of all hosts in their order, that of its own host as it is, and rounds once. So the bits depend on which
    /// ranks share a host. Of a gather shards are coded, for all ranks, where it crosses between hosts. Where all ranks are on
    /// one host, or are not known to be on several, elements travel as they are.
    BetweenHosts(InterHostFormat),
}

impl WireFormat {
    /// Elements that are coded together. What begins at a multiple of it in a rank's chunk has blocks of its own.
    pub fn alignment(self) -> usize {
        match self {
            Self::Exact => 1,
            Self::Blocks(_) => BLOCK,
            Self::BetweenHosts(code) => code.alignment(),
        }
    }

    /// How they travel inside of a host.
    pub(in crate::comm) fn inside(self) -> Self {
        match self {
            Self::BetweenHosts(_) => Self::Exact,
            wire => wire,
        }
    }

    /// What stands for shards of a gather between hosts; `None`: they travel as they are.
    pub(in crate::comm) fn code(self) -> Option<InterHostFormat> {
        match self {
            Self::Exact => None,
            Self::Blocks(ints) => Some(InterHostFormat::Blocks(ints)),
            Self::BetweenHosts(code) => Some(code),
        }
    }

    /// Bytes of `elements` of `size` bytes each, inside of a host.
    pub(in crate::comm) fn encoded_len(self, elements: usize, size: usize) -> usize {
        match self {
            Self::Exact | Self::BetweenHosts(_) => elements * size,
            Self::Blocks(ints) => ints.encoded_len(elements),
        }
    }

    /// Bytes that one of `world` ranks of a host takes from the others in a collective whose argument has `elements` elements.
    pub(crate) fn bytes(self, kind: CollectiveKind, elements: usize, dtype: DType, world: usize) -> usize {
        let exact = |elements: usize| elements * dtype.size_in_bytes();
        let coded = |elements: usize| self.encoded_len(elements, dtype.size_in_bytes());
        let of_each = match kind {
            // A reduction brings every other rank's part of this rank's chunk; an all-reduce brings the others' sums
            // too, which are never coded.
            CollectiveKind::ReduceScatter => coded(elements / world),
            CollectiveKind::AllReduce => coded(elements.div_ceil(world)) + exact(elements.div_ceil(world)),
            CollectiveKind::AllGather | CollectiveKind::Control => coded(elements),
            CollectiveKind::Barrier => 0,
        };
        of_each * (world - 1)
    }
}
