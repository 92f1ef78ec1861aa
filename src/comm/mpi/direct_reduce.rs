//! Direct sums: the owner of a sum receives all parts, which are sent between hosts individually.
//!
//! A rank sends its part of a chunk to the owner on another host, in the wire format that a single machine would use
//! (as integers if that format uses integers). Ranks of one host share their parts through shared memory, and the owner
//! adds all of them in rank order. Parts of the next pieces are in flight while the current one is added up.
//! [`super::traffic_model`] gives the cost.

use super::inter_host::{InterHostExchange, MESSAGES_IN_FLIGHT, Result, message_bytes};
use super::link::{MessageTag, MpiTransfer};
use crate::comm::shm::collectives::{piece_of, sum_exact};
use crate::comm::shm::partition::{pieces, received_from_peers, send_to_peers};
use crate::comm::shm::quantized::sum_blocks;
use crate::comm::wire::format::WireFormat;
use crate::precision::{Flat, FlatRef};
use std::collections::VecDeque;
use std::ops::Range;

/// Sums this rank's chunk over the `input` (world size x n elements) of all ranks, whose parts are sent in the format
/// `wire`. Writes the sum to `input` from element `at` on. `at` is the position of the first chunk or of this rank's
/// chunk.
pub(super) fn reduce(inter_host: &mut InterHostExchange, wire: WireFormat, input: &mut Flat, at: usize) -> Result<()> {
    let (world, rank, dtype) = (inter_host.size(), inter_host.rank(), input.dtype());
    let local_ranks = inter_host.hosts.local_ranks();
    let remote: Vec<usize> = inter_host.hosts.remote().collect();
    let (chunk, size) = (input.len() / world, dtype.size_in_bytes());
    let (local_wire, local_step) = piece_of(local_ranks.len(), wire, dtype);
    assert!(local_wire == wire, "fewer ranks leave more room");
    let local_step = if local_ranks.len() == 1 { usize::MAX } else { local_step };
    let step = message_elements(wire, size, remote.len());
    let encoded = |len: usize| wire.encoded_len(len, size);
    inter_host.announce_collective(&remote)?;
    let mut incoming = VecDeque::new();
    let mut ranges_to_post = pieces(chunk, step);
    for range in ranges_to_post.by_ref().take(MESSAGES_IN_FLIGHT - 1) {
        incoming.push_back(post(inter_host, &remote, wire, input, range, encoded)?);
    }
    for range in pieces(chunk, step) {
        if let Some(range) = ranges_to_post.next() {
            incoming.push_back(post(inter_host, &remote, wire, input, range, encoded)?);
        }
        let transfers = incoming.pop_front().unwrap_or_default();
        let mut parts = Vec::with_capacity(remote.len());
        for (peer, transfer) in remote.iter().zip(transfers) {
            parts.push(inter_host.finish(*peer, transfer)?);
        }
        inter_host.count(remote.len() * encoded(range.len()), remote.len() * range.len() * size);
        for piece in pieces(range.len(), local_step) {
            let bytes = encoded(piece.len());
            let range_of =
                |owner: usize| owner * chunk + range.start + piece.start..owner * chunk + range.start + piece.end;
            send_to_peers(&mut inter_host.local, bytes, |r, part| match wire {
                WireFormat::Blocks(ints) => ints.encode(input.slice(range_of(local_ranks.start + r)), part),
                _ => part.copy_from_slice(input.slice(range_of(local_ranks.start + r)).as_bytes()),
            })?;
            if piece.is_empty() {
                continue;
            }
            let from = encoded(piece.start);
            let (lower, higher) = parts.split_at(local_ranks.start);
            let peers: Vec<&[u8]> = (lower.iter().map(|part| &part[from..from + bytes]))
                .chain(received_from_peers(&inter_host.local, bytes, piece.len() * size))
                .chain(higher.iter().map(|part| &part[from..from + bytes]))
                .collect();
            let positions = (range_of(rank).start, at + range.start + piece.start);
            match wire {
                WireFormat::Blocks(ints) => sum_blocks(ints, input, positions, piece.len(), rank, &peers),
                _ => {
                    let peers: Vec<_> = peers.into_iter().map(|part| FlatRef::of_bytes(dtype, part)).collect();
                    sum_exact(input, positions, piece.len(), rank, &peers);
                }
            }
        }
    }
    Ok(())
}

/// Sends this rank's part of elements `range` of each remote rank's chunk, and begins to receive the remote ranks'
/// parts of this rank's chunk.
fn post(
    inter_host: &mut InterHostExchange,
    remote: &[usize],
    wire: WireFormat,
    input: &Flat,
    range: Range<usize>,
    encoded: impl Fn(usize) -> usize,
) -> Result<Vec<MpiTransfer>> {
    let chunk = input.len() / inter_host.size();
    let bytes = encoded(range.len());
    let transfers = inter_host.receive_each(remote, MessageTag::Data, bytes)?;
    for peer in remote {
        let part = input.slice(peer * chunk + range.start..peer * chunk + range.end);
        let message = match wire {
            WireFormat::Blocks(ints) => {
                let mut coded = vec![0; bytes];
                ints.encode(part, &mut coded);
                coded
            }
            _ => part.as_bytes().to_vec(),
        };
        inter_host.send(*peer, MessageTag::Data, message)?;
    }
    Ok(transfers)
}

/// Returns the number of elements in a message to each of `peers` ranks. If the format has blocks, they are complete.
pub(super) fn message_elements(wire: WireFormat, size: usize, peers: usize) -> usize {
    let bytes = message_bytes(peers);
    match wire {
        WireFormat::Blocks(ints) => ints.whole_blocks_in(bytes),
        _ => bytes / size,
    }
}
