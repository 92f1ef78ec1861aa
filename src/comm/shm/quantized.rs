//! Collectives whose elements are sent as small integers with a scale per block.
//!
//! A sending rank encodes the blocks in its slot, and a receiving rank reads them there, so no separate buffer of
//! blocks is needed. Blocks are counted from the start of each rank's chunk, so that they do not depend on the pieces
//! in which the chunk is sent.

use super::exchange::ShmExchange;
use super::partition::{StridedRanks, pieces, received_from_peers, send_to_peers};
use super::region::SLOT_BYTES;
use crate::error::CommError;
use crate::kernels::simd::{SimdLoop, level};
use crate::precision::cast::{accumulate, narrow, widen};
use crate::precision::{BLOCK, Flat, FlatMut, IntFormat};
use std::ops::Range;

/// Reduces a piece like the function of the same name for exact elements, but the peers' parts are encoded as `ints`.
/// This rank's part is added exactly.
pub(in crate::comm) fn reduce_piece(
    ex: &mut ShmExchange,
    ints: IntFormat,
    input: &mut Flat,
    at: usize,
    range: Range<usize>,
) -> Result<(), CommError> {
    let (rank, chunk) = (ex.rank(), input.len() / ex.size());
    let bytes = ints.encoded_len(range.len());
    send_to_peers(ex, bytes, |r, part| ints.encode(input.slice(r * chunk + range.start..r * chunk + range.end), part))?;
    let exact = range.len() * input.dtype().size_in_bytes();
    let peers: Vec<_> = received_from_peers(ex, bytes, exact).collect();
    sum_blocks(ints, input, (rank * chunk + range.start, at + range.start), range.len(), rank, &peers);
    Ok(())
}

/// Concatenates the `shard`s of the ranks of a group, in rank order. All of them, including this rank's, are rounded to
/// the values that their codes represent. The other ranks gather in their own groups at the same time.
pub(in crate::comm) fn gather_of(
    ex: &mut ShmExchange,
    ints: IntFormat,
    group: StridedRanks,
    mut shard: Flat,
) -> Result<Flat, CommError> {
    let (rank, chunk) = (ex.rank(), shard.len());
    shard.reserve_exact(chunk * (group.len() - 1));
    shard.extend_zeros(chunk * (group.len() - 1));
    for range in pieces(chunk, ints.whole_blocks_in(SLOT_BYTES)) {
        let bytes = ints.encoded_len(range.len());
        let range_of = |r: usize| group.position(r) * chunk + range.start..group.position(r) * chunk + range.end;
        // The shard is at the start, in the first rank's position. It is encoded before that rank's shard arrives.
        ex.publish(bytes, |slot| {
            ints.encode(shard.slice(range.clone()), slot);
            ints.decode(slot, shard.slice_mut(range_of(rank)));
        });
        ex.await_peers()?;
        let exact = range.len() * shard.dtype().size_in_bytes();
        for r in group.ranks().filter(|r| *r != rank) {
            ints.decode(ex.coded(r, 0, bytes, exact), shard.slice_mut(range_of(r)));
        }
    }
    Ok(shard)
}

/// Adds the peers' blocks to elements `own ..` of `values`, and writes the sums to elements `to ..`.
pub(in crate::comm) fn sum_blocks(
    ints: IntFormat,
    values: &mut Flat,
    (own, to): (usize, usize),
    len: usize,
    rank: usize,
    peers: &[&[u8]],
) {
    level().run(QuantizedRankSum { ints, values: values.as_mut(), own, sum: to, len, rank, peers });
}

/// A loop that sums elements `own ..` of `values` and the peers' blocks in rank order in f32, rounds each sum once and
/// writes it to elements `sum ..`.
struct QuantizedRankSum<'a> {
    ints: IntFormat,
    values: FlatMut<'a>,
    own: usize,
    sum: usize,
    len: usize,
    rank: usize,
    peers: &'a [&'a [u8]],
}

impl SimdLoop for QuantizedRankSum<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { ints, mut values, own, sum, len, rank, peers } = self;
        let (mut total, mut part) = ([0f32; BLOCK], [0f32; BLOCK]);
        for (i, start) in (0..len).step_by(BLOCK).enumerate() {
            let end = len.min(start + BLOCK);
            let (total, part) = (&mut total[..end - start], &mut part[..end - start]);
            for r in 0..=peers.len() {
                let own = || own + start..own + end;
                match r {
                    0 if rank == 0 => widen(total, values.as_ref().slice(own())),
                    0 => ints.decode_nth(i, peers[0], total),
                    r if r == rank => accumulate(total, values.as_ref().slice(own())),
                    r => {
                        ints.decode_nth(i, peers[if r < rank { r } else { r - 1 }], part);
                        total.iter_mut().zip(&*part).for_each(|(t, p)| *t += p);
                    }
                }
            }
            narrow(values.reborrow().slice(sum + start..sum + end), total);
        }
    }
}
