//! Sums of which every rank gets all parts: raw parts go from host to host.
//!
//! A rank sends its part of a chunk to the owner on another host, as it travels on one machine (as integers, where those
//! are). Ranks of one host show each other theirs in shared memory, and the owner adds all of them in rank order. Parts of
//! the next pieces are on their way while this one is added up. What that costs stands in [`super::traffic`].

use super::crossing::{AHEAD, Crossing, Result, message_bytes};
use super::link::{Tag, Transfer};
use crate::comm::coded::sum_blocks;
use crate::comm::collectives::{piece_of, sum_exact};
use crate::comm::encoding::Wire;
use crate::comm::split::{give_each, given, pieces};
use crate::precision::{Flat, FlatRef};
use std::collections::VecDeque;
use std::ops::Range;

/// Sums this rank's chunk of all ranks' `input` (world size x n elements), of which elements travel as `wire`, and writes
/// it from element `at` on: the place of the first chunk or of this rank's.
pub(super) fn reduce(crossing: &mut Crossing, wire: Wire, input: &mut Flat, at: usize) -> Result<()> {
    let (world, rank, dtype) = (crossing.size(), crossing.rank(), input.dtype());
    let here = crossing.hosts.here();
    let remote: Vec<usize> = crossing.hosts.remote().collect();
    let (chunk, size) = (input.len() / world, dtype.size_in_bytes());
    let (local_wire, local_step) = piece_of(here.len(), wire, dtype);
    assert!(local_wire == wire, "fewer ranks leave more room");
    let local_step = if here.len() == 1 { usize::MAX } else { local_step };
    let step = message_elements(wire, size, remote.len());
    let encoded = |len: usize| wire.encoded_len(len, size);
    crossing.greet(&remote)?;
    let mut coming = VecDeque::new();
    let mut ahead = pieces(chunk, step);
    for range in ahead.by_ref().take(AHEAD - 1) {
        coming.push_back(post(crossing, &remote, wire, input, range, encoded)?);
    }
    for range in pieces(chunk, step) {
        if let Some(range) = ahead.next() {
            coming.push_back(post(crossing, &remote, wire, input, range, encoded)?);
        }
        let arriving = coming.pop_front().unwrap_or_default();
        let mut parts = Vec::with_capacity(remote.len());
        for (peer, transfer) in remote.iter().zip(arriving) {
            parts.push(crossing.finish(*peer, transfer)?);
        }
        crossing.count(remote.len() * encoded(range.len()), remote.len() * range.len() * size);
        for inside in pieces(range.len(), local_step) {
            let bytes = encoded(inside.len());
            let of =
                |owner: usize| owner * chunk + range.start + inside.start..owner * chunk + range.start + inside.end;
            give_each(&mut crossing.local, bytes, |r, part| match wire {
                Wire::Blocks(ints) => ints.encode(input.slice(of(here.start + r)), part),
                _ => part.copy_from_slice(input.slice(of(here.start + r)).as_bytes()),
            })?;
            if inside.is_empty() {
                continue;
            }
            let from = encoded(inside.start);
            let (before, after) = parts.split_at(here.start);
            let peers: Vec<&[u8]> = (before.iter().map(|part| &part[from..from + bytes]))
                .chain(given(&crossing.local, bytes, inside.len() * size))
                .chain(after.iter().map(|part| &part[from..from + bytes]))
                .collect();
            let places = (of(rank).start, at + range.start + inside.start);
            match wire {
                Wire::Blocks(ints) => sum_blocks(ints, input, places, inside.len(), rank, &peers),
                _ => {
                    let peers: Vec<_> = peers.into_iter().map(|part| FlatRef::of_bytes(dtype, part)).collect();
                    sum_exact(input, places, inside.len(), rank, &peers);
                }
            }
        }
    }
    Ok(())
}

/// Sends the elements `range` of each remote rank's chunk, and begins to receive theirs of this rank's.
fn post(
    crossing: &mut Crossing,
    remote: &[usize],
    wire: Wire,
    input: &Flat,
    range: Range<usize>,
    encoded: impl Fn(usize) -> usize,
) -> Result<Vec<Transfer>> {
    let chunk = input.len() / crossing.size();
    let bytes = encoded(range.len());
    let arriving = crossing.receive_each(remote, Tag::Data, bytes)?;
    for peer in remote {
        let part = input.slice(peer * chunk + range.start..peer * chunk + range.end);
        let message = match wire {
            Wire::Blocks(ints) => {
                let mut coded = vec![0; bytes];
                ints.encode(part, &mut coded);
                coded
            }
            _ => part.as_bytes().to_vec(),
        };
        crossing.send(*peer, Tag::Data, message)?;
    }
    Ok(arriving)
}

/// Elements of a message to each of `peers` ranks, whole blocks of them where they travel in blocks.
pub(super) fn message_elements(wire: Wire, size: usize, peers: usize) -> usize {
    let bytes = message_bytes(peers);
    match wire {
        Wire::Blocks(ints) => ints.whole_blocks_in(bytes),
        _ => bytes / size,
    }
}
