//! All-gathers in three steps: ranks exchange their shards within each host, then slices of the host's result from host
//! to host, then these slices within each host.
//!
//! Each byte enters every other host only once, even if only the ranks at the same position in each group gather
//! (`gather_across`). [`super::traffic_model`] gives the cost.

use super::inter_host::{InterHostExchange, MESSAGES_IN_FLIGHT, Result, message_bytes};
use super::link::{MessageTag, MpiTransfer};
use super::topology::HostTopology;
use crate::comm::shm::partition::{others, pieces};
use crate::comm::shm::region::SLOT_BYTES;
use std::collections::VecDeque;
use std::ops::Range;

/// Fills `output` with the parts of all ranks. This rank's part is already in place. A part counts as `decoded_bytes`
/// bytes, the size of the elements that it encodes.
pub(super) fn gather(inter_host: &mut InterHostExchange, output: &mut [u8], decoded_bytes: usize) -> Result<()> {
    let part = output.len() / inter_host.size();
    let (hosts, local_ranks) = (inter_host.hosts.clone(), inter_host.hosts.local_ranks());
    let (lanes, lane) = (hosts.lanes(), inter_host.rank() - local_ranks.start);
    // The rank that serves a lane sends the lane's bytes of its host's result to the ranks that serve the same lane on
    // all other hosts.
    let slice = |ranks: &Range<usize>, lane: usize| {
        let bound = |lane: usize| ranks.start * part + ranks.len() * part * lane / lanes;
        bound(lane)..bound(lane + 1)
    };
    let partners: Vec<usize> = match lane < lanes {
        true => hosts.remote_ranks().map(|ranks| ranks.start + lane).collect(),
        false => Vec::new(),
    };
    inter_host.announce_collective(&partners)?;
    let own = inter_host.rank() * part..(inter_host.rank() + 1) * part;
    for range in pieces(part, SLOT_BYTES) {
        let mine = own.start + range.start..own.start + range.end;
        inter_host.local.piece(range.len(), |slot| slot.copy_from_slice(&output[mine]))?;
        for (r, _) in others(local_ranks.len(), lane) {
            let from = inter_host.local.coded(r, 0, range.len(), decoded_share(range.len(), part, decoded_bytes));
            output[(local_ranks.start + r) * part + range.start..][..range.len()].copy_from_slice(from);
        }
    }
    let longest = hosts.remote_ranks().chain([local_ranks.clone()]).map(|ranks| ranks.len() * part).max().unwrap_or(0);
    let blocks: Vec<Range<usize>> = pieces(longest.div_ceil(lanes), message_bytes(partners.len())).collect();
    let cut = |slice: Range<usize>, block: &Range<usize>| {
        let bound = |at: usize| (slice.start + at).min(slice.end);
        bound(block.start)..bound(block.end)
    };
    let mut incoming = VecDeque::new();
    for block in &blocks[..blocks.len().min(MESSAGES_IN_FLIGHT - 1)] {
        incoming.push_back(swap(inter_host, output, &hosts, &partners, |ranks| cut(slice(ranks, lane), block))?);
    }
    for (i, block) in blocks.iter().enumerate() {
        if let Some(block) = blocks.get(i + MESSAGES_IN_FLIGHT - 1) {
            incoming.push_back(swap(inter_host, output, &hosts, &partners, |ranks| cut(slice(ranks, lane), block))?);
        }
        let mut transfers = partners.iter().zip(incoming.pop_front().unwrap_or_default());
        for ranks in hosts.remote_ranks() {
            let mine = if lane < lanes { cut(slice(&ranks, lane), block) } else { 0..0 };
            if let Some((peer, transfer)) = transfers.next() {
                output[mine.clone()].copy_from_slice(&inter_host.finish(*peer, transfer)?);
                inter_host.count(mine.len(), decoded_share(mine.len(), part, decoded_bytes));
            }
            for range in pieces(block.len(), SLOT_BYTES) {
                let of_lane = |lane: usize| match lane < lanes {
                    true => cut(cut(slice(&ranks, lane), block), &range),
                    false => 0..0,
                };
                let mine = of_lane(lane);
                inter_host.local.piece(mine.len(), |slot| slot.copy_from_slice(&output[mine]))?;
                for (r, _) in others(local_ranks.len(), lane) {
                    let theirs = of_lane(r);
                    let decoded_bytes = decoded_share(theirs.len(), part, decoded_bytes);
                    let from = inter_host.local.coded(r, 0, theirs.len(), decoded_bytes);
                    output[theirs].copy_from_slice(from);
                }
            }
        }
    }
    Ok(())
}

/// Fills `output` with the parts of the ranks that have the same position as this one in groups of `ranks` consecutive
/// ranks. This rank's part is already in place. Each host must have the same number of ranks, and complete groups.
/// Each part goes to every other host once: to the rank with the same local number, which shares it with the ranks at
/// its position in the other groups of that host.
pub(super) fn gather_across(inter_host: &mut InterHostExchange, output: &mut [u8], ranks: usize) -> Result<()> {
    let (hosts, local_ranks) = (inter_host.hosts.clone(), inter_host.hosts.local_ranks());
    let (groups, part) = (local_ranks.len() / ranks, output.len() / (inter_host.size() / ranks));
    let lane = inter_host.rank() - local_ranks.start;
    let own_group = lane / ranks;
    let locate = |host: usize, group: usize, range: &Range<usize>| {
        let start = (host * groups + group) * part;
        start + range.start..start + range.end
    };
    let partners: Vec<usize> = hosts.remote_ranks().map(|ranks| ranks.start + lane).collect();
    let blocks: Vec<Range<usize>> = pieces(part, message_bytes(partners.len())).collect();
    let host_of = |ranks: &Range<usize>| ranks.start / ranks.len();
    let mut incoming = VecDeque::new();
    for block in &blocks[..blocks.len().min(MESSAGES_IN_FLIGHT - 1)] {
        incoming
            .push_back(swap(inter_host, output, &hosts, &partners, |ranks| locate(host_of(ranks), own_group, block))?);
    }
    for (i, block) in blocks.iter().enumerate() {
        if let Some(block) = blocks.get(i + MESSAGES_IN_FLIGHT - 1) {
            incoming.push_back(swap(inter_host, output, &hosts, &partners, |ranks| {
                locate(host_of(ranks), own_group, block)
            })?);
        }
        let transfers = incoming.pop_front().unwrap_or_default();
        for ((peer, transfer), ranks) in partners.iter().zip(transfers).zip(hosts.remote_ranks()) {
            output[locate(host_of(&ranks), own_group, block)].copy_from_slice(&inter_host.finish(*peer, transfer)?);
            inter_host.count(block.len(), block.len());
        }
    }
    if groups == 1 {
        return Ok(());
    }
    let host_indices = 0..hosts.host_ranks().len();
    for range in pieces(part, SLOT_BYTES / host_indices.len()) {
        let len = range.len();
        inter_host.local.piece(host_indices.len() * len, |slot| {
            for host in host_indices.clone() {
                slot[host * len..(host + 1) * len].copy_from_slice(&output[locate(host, own_group, &range)]);
            }
        })?;
        for group in (0..groups).filter(|group| *group != own_group) {
            for host in host_indices.clone() {
                let from = inter_host.local.peer(group * ranks + lane % ranks, host * len, len);
                output[locate(host, group, &range)].copy_from_slice(from);
            }
        }
    }
    Ok(())
}

/// Sends bytes of this host to the partners, and begins to receive the bytes of their hosts.
fn swap(
    inter_host: &mut InterHostExchange,
    output: &[u8],
    hosts: &HostTopology,
    partners: &[usize],
    range_of: impl Fn(&Range<usize>) -> Range<usize>,
) -> Result<Vec<MpiTransfer>> {
    let mut transfers = Vec::with_capacity(partners.len());
    for (peer, ranks) in partners.iter().zip(hosts.remote_ranks()) {
        transfers.push(inter_host.receive(*peer, MessageTag::Data, range_of(&ranks).len())?);
    }
    for peer in partners {
        inter_host.send(*peer, MessageTag::Data, output[range_of(&hosts.local_ranks())].to_vec())?;
    }
    Ok(transfers)
}

/// Returns how many bytes `len` bytes of a part encode: the same fraction of `decoded_bytes` as `len` is of `part`.
fn decoded_share(len: usize, part: usize, decoded_bytes: usize) -> usize {
    if part == 0 { 0 } else { (len as u128 * decoded_bytes as u128 / part as u128) as usize }
}
