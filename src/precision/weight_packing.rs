//! Packing of frozen weights as integers or NF4, with scales, for storage and for transfers.
//!
//! Elements are packed in [units](WeightPacking::unit) that are independent of each other. Packed units are stored one
//! after the other, so the concatenated bytes of shards of full units are the bytes of the complete parameter.

use super::nf4::{self, Nf4Scales};
use super::{BLOCK, FlatMut, FlatRef, IntFormat};
use crate::kernels::parallel;
use crate::kernels::simd::level;

/// The number of elements that one thread processes at a time: a multiple of the unit of every packing.
const CHUNK: usize = 256 * 1024;

/// The packed format of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WeightPacking {
    /// Eight bits per element, and an f32 scale for every 128 elements: 1.03 bytes per element.
    Int8,
    /// Four bits per element, and a scale for every 64 elements.
    Nf4(Nf4Scales),
}

impl WeightPacking {
    /// Returns the number of elements that are packed together, independently of all others: 128, 64, or 16384 with
    /// double-quantized scales. The length of a shard is a multiple of this number, except perhaps that of the last
    /// shard.
    pub fn unit(self) -> usize {
        match self {
            Self::Int8 => BLOCK,
            Self::Nf4(scales) => scales.unit(),
        }
    }

    /// Returns the number of bytes that `elements` elements take when packed, including scales.
    pub fn packed_len(self, elements: usize) -> usize {
        match self {
            Self::Int8 => IntFormat::Int8.encoded_len(elements),
            Self::Nf4(scales) => scales.packed_len(elements),
        }
    }

    /// Writes the packed elements of `src` to `dst`, which has [`packed_len`](Self::packed_len) bytes.
    ///
    /// # Panics
    /// Panics if `dst` has a different length.
    pub fn pack(self, src: FlatRef<'_>, dst: &mut [u8]) {
        assert_eq!(dst.len(), self.packed_len(src.len()), "dst must fit the packed elements exactly");
        if src.len() <= CHUNK {
            return match self {
                Self::Int8 => IntFormat::Int8.encode(src, dst),
                Self::Nf4(scales) => level().run(nf4::PackNf4 { scales, src, dst }),
            };
        }
        let mid = (src.len() / 2).next_multiple_of(CHUNK);
        let (front, back) = dst.split_at_mut(self.packed_len(mid));
        parallel::join(|| self.pack(src.slice(0..mid), front), || self.pack(src.slice(mid..src.len()), back));
    }

    /// Unpacks the elements in `src`, and rounds the values to the dtype of `dst`.
    ///
    /// # Panics
    /// Panics if the length of `src` is not the [packed length](Self::packed_len) of the elements of `dst`.
    pub fn unpack(self, src: &[u8], dst: FlatMut<'_>) {
        assert_eq!(src.len(), self.packed_len(dst.len()), "src must have the packed length of dst's elements");
        let len = dst.len();
        if len <= CHUNK {
            return match self {
                Self::Int8 => IntFormat::Int8.decode(src, dst),
                Self::Nf4(scales) => level().run(nf4::UnpackNf4 { scales, src, dst }),
            };
        }
        let mid = (len / 2).next_multiple_of(CHUNK);
        let (front, back) = src.split_at(self.packed_len(mid));
        let (first, second) = dst.split_at(mid);
        parallel::join(|| self.unpack(front, first), || self.unpack(back, second));
    }
}

#[cfg(test)]
mod tests;
