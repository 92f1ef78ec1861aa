//! Partial sums: f32 sums over the first ranks, to which the parts of the next ranks are added in rank order.
//!
//! On one machine, a sum starts with the part of rank 0, widened; the part of each following rank is added in f32; and
//! the result is rounded once. A part that is sent as integers contributes its decoded values, except that the rank
//! that owns the sum adds its own part exactly. Here, the same additions are performed in the same order, some of them
//! on each host.

use crate::comm::wire::format::WireFormat;
use crate::kernels::simd::{SimdLoop, level};
use crate::precision::cast::{accumulate, widen};
use crate::precision::{BLOCK, FlatRef, IntFormat};

/// The number of elements that are added up together: complete blocks of integers.
const SUM_CHUNK: usize = 8 * BLOCK;

/// One rank's part of a sum.
#[derive(Debug, Clone, Copy)]
pub(super) enum PartialSumTerm<'a> {
    /// Exact elements.
    Exact(FlatRef<'a>),
    /// Blocks of integers, from the start of a block on.
    Blocks(IntFormat, &'a [u8]),
}

/// Adds `parts` to `sum` in their order. If `starts_sum`, the sum starts with the first part, and the initial content
/// of `sum` is ignored.
pub(super) fn add(sum: &mut [f32], starts_sum: bool, parts: &[PartialSumTerm<'_>]) {
    level().run(AddSummands { sum, starts_sum, parts });
}

struct AddSummands<'a> {
    sum: &'a mut [f32],
    starts_sum: bool,
    parts: &'a [PartialSumTerm<'a>],
}

impl SimdLoop for AddSummands<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { sum, starts_sum, parts } = self;
        let mut decoded = [0f32; BLOCK];
        for (chunk_index, sum) in sum.chunks_mut(SUM_CHUNK).enumerate() {
            let (start, end) = (chunk_index * SUM_CHUNK, chunk_index * SUM_CHUNK + sum.len());
            for (i, part) in parts.iter().enumerate() {
                let first = starts_sum && i == 0;
                match part {
                    PartialSumTerm::Exact(values) if first => widen(sum, values.slice(start..end)),
                    PartialSumTerm::Exact(values) => accumulate(sum, values.slice(start..end)),
                    PartialSumTerm::Blocks(ints, codes) => {
                        for (i, sum) in sum.chunks_mut(BLOCK).enumerate() {
                            let nth = start / BLOCK + i;
                            if first {
                                ints.decode_nth(nth, codes, sum);
                                continue;
                            }
                            let values = &mut decoded[..sum.len()];
                            ints.decode_nth(nth, codes, values);
                            sum.iter_mut().zip(&*values).for_each(|(s, v)| *s += v);
                        }
                    }
                }
            }
        }
    }
}

/// The layout of the parts of a piece for all owners in one rank's slot: those for others in the wire format, then the
/// rank's own as in memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct SlotLayout {
    pub wire: WireFormat,
    /// The number of bytes of an element.
    pub size: usize,
    pub world: usize,
}

impl SlotLayout {
    /// Returns the maximum number of elements of each owner's chunk that fit in a slot of `bytes`, in complete blocks
    /// if they are quantized; the result can be 0.
    pub(super) fn elements_in(self, bytes: usize) -> usize {
        match self.wire {
            WireFormat::Exact | WireFormat::BetweenHosts(_) => bytes / (self.world * self.size),
            WireFormat::Blocks(_) => bytes / self.bytes(BLOCK) * BLOCK,
        }
    }

    /// Returns the number of bytes of `len` elements for every owner.
    pub(super) fn bytes(self, len: usize) -> usize {
        (self.world - 1) * self.stride(len) + len * self.size
    }

    /// Returns the number of bytes of the part of `rank` for `owner`: `len` elements.
    pub(super) fn part(self, rank: usize, owner: usize, len: usize) -> usize {
        if owner == rank { len * self.size } else { self.encoded(len) }
    }

    /// Returns the offset in the slot of `rank` of its part for `owner`. Elements are aligned.
    pub(super) fn offset(self, rank: usize, owner: usize, len: usize) -> usize {
        let position = match owner {
            owner if owner < rank => owner,
            owner if owner > rank => owner - 1,
            _ => self.world - 1,
        };
        position * self.stride(len)
    }

    fn stride(self, len: usize) -> usize {
        match self.wire {
            WireFormat::Exact | WireFormat::BetweenHosts(_) => len * self.size,
            WireFormat::Blocks(_) => self.encoded(len).next_multiple_of(4),
        }
    }

    fn encoded(self, len: usize) -> usize {
        self.wire.encoded_len(len, self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::shm::collectives::sum_exact;
    use crate::comm::shm::quantized::sum_blocks;
    use crate::comm::shm::region::SLOT_BYTES;
    use crate::precision::Flat;
    use candle_core::DType;

    const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
    const WIRES: [WireFormat; 3] =
        [WireFormat::Exact, WireFormat::Blocks(IntFormat::Int8), WireFormat::Blocks(IntFormat::Int4)];

    /// Returns numbers whose sums depend on their order, including negative zeros.
    fn part(rank: usize, len: usize, dtype: DType) -> Flat {
        let value = |i: usize| match i % 29 {
            3 => -0.0,
            _ => ((i * 7 + rank * 13) % 101) as f32 * 0.37 + 1.0 / (1 + i % 17 + rank) as f32 - 20.0,
        };
        Flat::from_f32((0..len).map(value).collect(), dtype)
    }

    #[test]
    fn sums_carried_from_host_to_host_have_the_bits_of_one_machine() {
        for (dtype, wire) in DTYPES.into_iter().flat_map(|dtype| WIRES.map(|wire| (dtype, wire))) {
            for (world, cuts) in [(2, vec![1]), (5, vec![2, 3]), (7, vec![1, 4])] {
                for (owner, len) in (0..world).flat_map(|owner| [1, 127, 1024, 3001].map(|len| (owner, len))) {
                    let parts: Vec<Flat> = (0..world).map(|rank| part(rank, len, dtype)).collect();
                    let coded: Vec<Vec<u8>> = (parts.iter())
                        .map(|part| match wire {
                            WireFormat::Exact | WireFormat::BetweenHosts(_) => part.as_bytes().to_vec(),
                            WireFormat::Blocks(ints) => {
                                let mut codes = vec![0; ints.encoded_len(len)];
                                ints.encode(part.as_ref(), &mut codes);
                                codes
                            }
                        })
                        .collect();
                    let mut expected = parts[owner].clone();
                    let peers: Vec<&[u8]> = (0..world).filter(|r| *r != owner).map(|r| &*coded[r]).collect();
                    match wire {
                        WireFormat::Exact | WireFormat::BetweenHosts(_) => {
                            let peers: Vec<_> = peers.iter().map(|part| FlatRef::of_bytes(dtype, part)).collect();
                            sum_exact(&mut expected, (0, 0), len, owner, &peers);
                        }
                        WireFormat::Blocks(ints) => sum_blocks(ints, &mut expected, (0, 0), len, owner, &peers),
                    }
                    let mut sum = vec![f32::NAN; len];
                    let bounds: Vec<usize> = [0].into_iter().chain(cuts.clone()).chain([world]).collect();
                    for host in bounds.windows(2) {
                        let parts: Vec<PartialSumTerm<'_>> = (host[0]..host[1])
                            .map(|rank| match wire {
                                WireFormat::Blocks(ints) if rank != owner => PartialSumTerm::Blocks(ints, &coded[rank]),
                                _ => PartialSumTerm::Exact(parts[rank].as_ref()),
                            })
                            .collect();
                        add(&mut sum, host[0] == 0, &parts);
                    }
                    let mut rounded = Flat::zeros(dtype, len);
                    rounded.as_mut().copy_cast(FlatRef::F32(&sum));
                    assert!(
                        rounded.as_bytes() == expected.as_bytes(),
                        "{dtype:?} {wire:?}, world size {world}, cut at {cuts:?}, {len} of rank {owner}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_parts_of_a_slot_are_apart_aligned_and_inside() {
        for (wire, size) in WIRES.into_iter().flat_map(|wire| [2, 4].map(|size| (wire, size))) {
            for world in [2, 3, 16, 500] {
                let layout = SlotLayout { wire, size, world };
                let max_len = layout.elements_in(SLOT_BYTES);
                assert!(max_len > 0 && max_len.is_multiple_of(wire.alignment()));
                for (len, r) in [1, 77, max_len].into_iter().flat_map(|len| [0, world / 2, world - 1].map(|r| (len, r)))
                {
                    let len = len.min(max_len);
                    let extent = |owner| (layout.offset(r, owner, len), layout.part(r, owner, len));
                    let mut extents: Vec<_> = (0..world).map(extent).collect();
                    assert!(
                        extents[r].0.is_multiple_of(size)
                            && (wire != WireFormat::Exact || extents[0].0.is_multiple_of(size))
                    );
                    extents.sort_unstable();
                    assert!(extents.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{layout:?} {len} {r}");
                    let (start, bytes) = extents[world - 1];
                    assert!(start + bytes <= layout.bytes(len) && layout.bytes(len) <= SLOT_BYTES, "{layout:?} {len}");
                }
            }
        }
    }
}
