//! The collectives in shared memory, as sequences of pieces.

use super::exchange::ShmExchange;
use super::partition::{StridedRanks, others, pieces, received_from_peers, send_to_peers, sort_chunks_by_rank};
use super::quantized;
use super::region::SLOT_BYTES;
use super::streaming_copy;
use crate::comm::collective_kind::CollectiveKind;
use crate::comm::wire::format::WireFormat;
use crate::error::CommError;
use crate::kernels::simd::{SimdLoop, level};
use crate::precision::{Flat, FlatMut, FlatRef, cast};
use crate::util::counted;
use candle_core::DType;
use std::mem::MaybeUninit;
use std::ops::Range;

/// The maximum size in bytes of an all-reduce of two ranks that is sent in one exchange. With two ranks, one exchange
/// moves as many bytes as two exchanges of halves; with more ranks it would move more.
const SHORT_BYTES: usize = 16 << 10;

/// The size in bytes from which a gathered buffer is written with stores that bypass the caches, which it would
/// otherwise fill.
const CACHE_BYPASS_BYTES: usize = 4 << 20;

type Result<T> = std::result::Result<T, CommError>;

/// Sums the `input` of all ranks and returns this rank's chunk of the sums, in the memory of `input`.
pub(in crate::comm) fn reduce_scatter(
    ex: &mut ShmExchange,
    wire: WireFormat,
    mut input: Flat,
    tag: u64,
) -> Result<Flat> {
    ex.begin(CollectiveKind::ReduceScatter, wire, input.dtype(), input.len(), tag);
    assert!(
        input.len().is_multiple_of(ex.size()),
        "{} cannot form {} equal chunks",
        counted(input.len(), "element"),
        ex.size()
    );
    let chunk = input.len() / ex.size();
    let (wire, step) = piece_of(ex.size(), wire, input.dtype());
    for range in pieces(chunk, step) {
        reduce_piece(ex, wire, &mut input, 0, range)?;
    }
    input.truncate(chunk);
    Ok(input)
}

/// Gathers the shards. The result is in the memory of `shard` if its capacity is sufficient.
pub(in crate::comm) fn all_gather(ex: &mut ShmExchange, wire: WireFormat, shard: Flat, tag: u64) -> Result<Flat> {
    ex.begin(CollectiveKind::AllGather, wire, shard.dtype(), shard.len(), tag);
    gather_of(ex, wire, StridedRanks::all(ex.size()), shard)
}

/// Gathers the shards of this rank's group of `ranks` consecutive ranks. All groups have the same size.
pub(in crate::comm) fn all_gather_within(
    ex: &mut ShmExchange,
    wire: WireFormat,
    ranks: usize,
    shard: Flat,
    tag: u64,
) -> Result<Flat> {
    ex.begin(CollectiveKind::AllGather, wire, shard.dtype(), shard.len(), tag);
    assert!(ex.size().is_multiple_of(ranks), "{} cannot form groups of {ranks}", counted(ex.size(), "rank"));
    gather_of(ex, wire, StridedRanks::neighbours(ex.rank(), ranks), shard)
}

/// Runs a reduce-scatter to all ranks, then a gather of the sums of the ranks that have the same position in their
/// groups, all in the memory of `input`.
pub(in crate::comm) fn reduce_to_groups(
    ex: &mut ShmExchange,
    wire: WireFormat,
    ranks: usize,
    mut input: Flat,
    tag: u64,
) -> Result<Flat> {
    assert!(ex.size().is_multiple_of(ranks), "{} cannot form groups of {ranks}", counted(ex.size(), "rank"));
    sort_chunks_by_rank(&mut input, ranks, ex.size());
    let sum = reduce_scatter(ex, wire, input, tag)?;
    // Every group must have the same sums, so they are sent without quantization.
    gather_of(ex, WireFormat::Exact, StridedRanks::across(ex.rank(), ranks, ex.size()), sum)
}

/// Concatenates the shards of the ranks of a group. The other ranks gather in their own groups at the same time.
pub(in crate::comm) fn gather_of(
    ex: &mut ShmExchange,
    wire: WireFormat,
    group: StridedRanks,
    mut shard: Flat,
) -> Result<Flat> {
    if let WireFormat::Blocks(ints) = wire {
        return quantized::gather_of(ex, ints, group, shard);
    }
    let (total, bytes) = (shard.len() * group.len(), shard.size_in_bytes());
    let mut separate_shard = None;
    if shard.capacity_in_bytes() < bytes * group.len() {
        let out = Flat::with_capacity(shard.dtype(), total);
        separate_shard = Some(std::mem::replace(&mut shard, out));
    }
    let output = shard.uninit_bytes(total);
    let own = separate_shard.as_ref().map_or(OwnShardLocation::At(0), |own| OwnShardLocation::Separate(own.as_bytes()));
    for range in pieces(bytes, SLOT_BYTES) {
        gather_piece(ex, group, output, own, range)?;
    }
    // SAFETY: the pieces of all ranks of the group cover the complete buffer.
    unsafe { shard.set_len(total) };
    Ok(shard)
}

/// Runs a reduce-scatter and an all-gather as one collective, piece by piece in the memory of `input`. The sums are
/// those of [`reduce_scatter`], bit for bit.
pub(in crate::comm) fn all_reduce(ex: &mut ShmExchange, wire: WireFormat, mut input: Flat, tag: u64) -> Result<Flat> {
    ex.begin(CollectiveKind::AllReduce, wire, input.dtype(), input.len(), tag);
    let (len, size) = (input.len(), input.dtype().size_in_bytes());
    if wire.within_host() == WireFormat::Exact && ex.size() == 2 && input.size_in_bytes() <= SHORT_BYTES {
        reduce_in_one_piece(ex, &mut input)?;
        return Ok(input);
    }
    let chunk = len.div_ceil(ex.size());
    input.extend_zeros(chunk * ex.size() - len);
    let own = ex.rank() * chunk;
    // The sums are gathered without quantization, in the same pieces.
    let (wire, step) = piece_of(ex.size(), wire, input.dtype());
    for range in pieces(chunk, step.min(SLOT_BYTES / size)) {
        reduce_piece(ex, wire, &mut input, own, range.clone())?;
        let output = input.uninit_bytes(chunk * ex.size());
        gather_piece(
            ex,
            StridedRanks::all(ex.size()),
            output,
            OwnShardLocation::At(own * size),
            range.start * size..range.end * size,
        )?;
    }
    input.truncate(len);
    Ok(input)
}

pub(in crate::comm) fn gather_bytes(ex: &mut ShmExchange, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    ex.begin(CollectiveKind::Control, WireFormat::Exact, DType::U8, bytes.len(), 0);
    let mut all = vec![Vec::new(); ex.size()];
    for range in pieces(bytes.len(), SLOT_BYTES) {
        let own = &bytes[range];
        ex.piece(own.len(), |slot| slot.copy_from_slice(own))?;
        for (r, message) in all.iter_mut().enumerate() {
            message.extend_from_slice(if r == ex.rank() { own } else { ex.peer(r, 0, own.len()) });
        }
    }
    Ok(all)
}

pub(in crate::comm) fn barrier(ex: &mut ShmExchange) -> Result<()> {
    ex.begin(CollectiveKind::Barrier, WireFormat::Exact, DType::U8, 0, 0);
    ex.piece(0, |_| {})
}

/// Returns the wire format of a reduction's elements, and how many elements of every peer's chunk are in one piece. If
/// a slot has no room for a block for each peer (with Int8, from 994 ranks on), the elements are sent without
/// quantization.
pub(in crate::comm) fn piece_of(world: usize, wire: WireFormat, dtype: DType) -> (WireFormat, usize) {
    let bytes = SLOT_BYTES / (world - 1).max(1);
    let blocks = if let WireFormat::Blocks(ints) = wire { ints.whole_blocks_in(bytes) } else { 0 };
    if blocks > 0 { (wire, blocks) } else { (WireFormat::Exact, bytes / dtype.size_in_bytes()) }
}

/// Sums elements `range` of this rank's chunk over all ranks' `input` (one chunk per rank), and writes the sums to
/// `at + range` of `input`, where `at` is the position of the first chunk or of this rank's chunk. The elements that
/// they overwrite have already been published or belong to this rank's own chunk.
fn reduce_piece(
    ex: &mut ShmExchange,
    wire: WireFormat,
    input: &mut Flat,
    at: usize,
    range: Range<usize>,
) -> Result<()> {
    if let WireFormat::Blocks(ints) = wire {
        return quantized::reduce_piece(ex, ints, input, at, range);
    }
    let (rank, dtype) = (ex.rank(), input.dtype());
    let chunk = input.len() / ex.size();
    let bytes = range.len() * dtype.size_in_bytes();
    send_to_peers(ex, bytes, |r, part| {
        part.copy_from_slice(input.slice(r * chunk + range.start..r * chunk + range.end).as_bytes());
    })?;
    let peers: Vec<_> = received_from_peers(ex, bytes, bytes).map(|part| FlatRef::of_bytes(dtype, part)).collect();
    sum_exact(input, (rank * chunk + range.start, at + range.start), range.len(), rank, &peers);
    Ok(())
}

/// Replaces `input`, which must fit into one piece, with the sum of all ranks' `input`.
fn reduce_in_one_piece(ex: &mut ShmExchange, input: &mut Flat) -> Result<()> {
    let (world, rank, dtype, len) = (ex.size(), ex.rank(), input.dtype(), input.len());
    let bytes = input.size_in_bytes();
    ex.piece(bytes, |slot| slot.copy_from_slice(input.as_bytes()))?;
    let peers: Vec<_> = others(world, rank).map(|(r, _)| FlatRef::of_bytes(dtype, ex.peer(r, 0, bytes))).collect();
    sum_exact(input, (0, 0), len, rank, &peers);
    Ok(())
}

/// Adds the peers' parts to elements `own ..` of `values`, and writes the sums to elements `to ..`.
pub(in crate::comm) fn sum_exact(
    values: &mut Flat,
    (own, to): (usize, usize),
    len: usize,
    rank: usize,
    peers: &[FlatRef<'_>],
) {
    level().run(RankOrderSum { values: values.as_mut(), own, sum: to, len, rank, peers });
}

/// A loop that sums elements `own ..` of `values` and the peers' parts in rank order in f32, rounds each sum once and
/// writes it to elements `sum ..`, block by block, so that each block stays in the first-level cache.
struct RankOrderSum<'a> {
    values: FlatMut<'a>,
    own: usize,
    sum: usize,
    len: usize,
    rank: usize,
    peers: &'a [FlatRef<'a>],
}

impl SimdLoop for RankOrderSum<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        const BLOCK: usize = 1024;
        let Self { mut values, own, sum, len, rank, peers } = self;
        let mut block = [0f32; BLOCK];
        for start in (0..len).step_by(BLOCK) {
            let block = &mut block[..BLOCK.min(len - start)];
            let end = start + block.len();
            for r in 0..=peers.len() {
                let part = match r {
                    r if r < rank => peers[r].slice(start..end),
                    r if r == rank => values.as_ref().slice(own + start..own + end),
                    r => peers[r - 1].slice(start..end),
                };
                if r == 0 { cast::widen(block, part) } else { cast::accumulate(block, part) }
            }
            cast::narrow(values.reborrow().slice(sum + start..sum + end), block);
        }
    }
}

/// The location of a rank's own part of a gather.
#[derive(Clone, Copy)]
enum OwnShardLocation<'a> {
    /// In the buffer to be filled, from this byte on: at its final position, or at the start.
    At(usize),
    /// In separate memory.
    Separate(&'a [u8]),
}

/// Writes bytes `range` of the parts of a group's ranks, this one included, to their positions in `output`. Pieces must
/// be passed in order: a part that is at the start, in the first rank's position, is moved to its own position before
/// the first rank's part arrives.
fn gather_piece(
    ex: &mut ShmExchange,
    group: StridedRanks,
    output: &mut [MaybeUninit<u8>],
    own: OwnShardLocation<'_>,
    range: Range<usize>,
) -> Result<()> {
    let rank = ex.rank();
    let bypass_caches = output.len() >= CACHE_BYPASS_BYTES;
    let position_of = |r: usize| group.position(r) * (output.len() / group.len()) + range.start;
    let (own_position, len) = (position_of(rank), range.len());
    let peer_positions: Vec<_> = group.ranks().filter(|r| *r != rank).map(|r| (r, position_of(r))).collect();
    match own {
        OwnShardLocation::Separate(own) => {
            ex.publish(len, |slot| slot.copy_from_slice(&own[range.clone()]));
            streaming_copy::copy(&mut output[own_position..own_position + len], &own[range], bypass_caches);
        }
        OwnShardLocation::At(start) => {
            let from = start + range.start;
            ex.publish(len, |slot| {
                // SAFETY: this rank's part is initialized.
                slot.copy_from_slice(unsafe { output[from..from + len].assume_init_ref() });
            });
            if from != own_position {
                output.copy_within(from..from + len, own_position);
            }
        }
    }
    ex.await_peers()?;
    for (r, position) in peer_positions {
        streaming_copy::copy(&mut output[position..position + len], ex.peer(r, 0, len), bypass_caches);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::{BLOCK, IntFormat};

    #[test]
    fn a_piece_of_a_reduction_has_elements_for_every_peer_in_any_world() {
        for world in 2..=2048 {
            for wire in [WireFormat::Exact, WireFormat::Blocks(IntFormat::Int8), WireFormat::Blocks(IntFormat::Int4)] {
                let (used_wire, step) = piece_of(world, wire, DType::F32);
                let bytes = match used_wire {
                    WireFormat::Exact | WireFormat::BetweenHosts(_) => 4 * step,
                    WireFormat::Blocks(ints) => ints.encoded_len(step),
                };
                assert!(step > 0 && bytes * (world - 1) <= SLOT_BYTES, "world size {world}, {wire:?}: {step}");
                assert!(used_wire == wire && (wire == WireFormat::Exact || step.is_multiple_of(BLOCK)) || world >= 994);
            }
        }
    }
}
