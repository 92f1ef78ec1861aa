//! Weights that are not trained, packed: integers or NF4 with scales, at rest and on the wire.
//!
//! Elements are packed in [units](WeightPacking::unit) that know nothing of one another. Packed units stand one after the
//! other, so the bytes of shards of whole units, put together, are those of the whole.

use super::nf4::{self, Nf4Scales};
use super::{BLOCK, FlatMut, FlatRef, IntFormat};
use crate::kernels::parallel;
use crate::kernels::simd::level;

/// Elements that one thread takes at a time: whole units of every packing.
const CHUNK: usize = 256 * 1024;

/// How elements become bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WeightPacking {
    /// Eight bits, and a scale (f32) for 128 elements: 1.03 bytes an element.
    Int8,
    /// Four bits, and a scale for 64 elements.
    Nf4(Nf4Scales),
}

impl WeightPacking {
    /// Elements that are packed together, independently of all others: 128, 64, or 16384 where scales are
    /// double-quantized. A shard is a multiple of them, but for the last one's end.
    pub fn unit(self) -> usize {
        match self {
            Self::Int8 => BLOCK,
            Self::Nf4(scales) => scales.unit(),
        }
    }

    /// Bytes of `elements` elements, scales included.
    pub fn packed_len(self, elements: usize) -> usize {
        match self {
            Self::Int8 => IntFormat::Int8.encoded_len(elements),
            Self::Nf4(scales) => scales.packed_len(elements),
        }
    }

    /// Writes the packed elements of `src` to `dst`, of [`packed_len`](Self::packed_len) bytes.
    ///
    /// # Panics
    /// If `dst` has another length.
    pub fn pack(self, src: FlatRef<'_>, dst: &mut [u8]) {
        assert_eq!(dst.len(), self.packed_len(src.len()), "room for the packed elements");
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

    /// The values of the packed elements in `src`, rounded to the dtype of `dst`.
    ///
    /// # Panics
    /// If `src` does not have the [bytes](Self::packed_len) of as many elements.
    pub fn unpack(self, src: &[u8], dst: FlatMut<'_>) {
        assert_eq!(src.len(), self.packed_len(dst.len()), "packed elements of as many");
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
