//! How elements are encoded on the way between ranks.

use super::kind::Kind;
use crate::precision::{BLOCK, Ints};
use candle_core::DType;

/// How elements travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wire {
    /// As they are in memory.
    #[default]
    Exact,
    /// As integers with a scale per [`BLOCK`] elements: ZeRO++.
    Blocks(Ints),
}

impl Wire {
    /// Elements that are coded together. What begins at a multiple of it in a rank's chunk has blocks of its own.
    pub fn alignment(self) -> usize {
        match self {
            Self::Exact => 1,
            Self::Blocks(_) => BLOCK,
        }
    }

    /// Bytes that one of `world` ranks takes from the others in a collective whose argument has `elements` elements.
    pub(crate) fn bytes(self, kind: Kind, elements: usize, dtype: DType, world: usize) -> usize {
        let exact = |elements: usize| elements * dtype.size_in_bytes();
        let coded = |elements: usize| match self {
            Self::Exact => exact(elements),
            Self::Blocks(ints) => ints.encoded_len(elements),
        };
        let of_each = match kind {
            // A reduction brings every other rank's part of this rank's chunk; an all-reduce brings the others' sums
            // too, which are never coded.
            Kind::ReduceScatter => coded(elements / world),
            Kind::AllReduce => coded(elements.div_ceil(world)) + exact(elements.div_ceil(world)),
            Kind::AllGather | Kind::Control => coded(elements),
            Kind::Barrier => 0,
        };
        of_each * (world - 1)
    }
}
