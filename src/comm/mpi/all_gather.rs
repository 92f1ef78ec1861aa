//! All-gathers in three steps: ranks exchange their shards within each host, then slices of the host's result from host
//! to host, then these slices within each host.
//!
//! Each byte enters every other host only once, even if only the ranks at the same position of each group gather
//! (`gather_across`). [`super::traffic_model`] gives the cost.

use super::inter_host::{InterHostExchange, MESSAGES_IN_FLIGHT, Result, message_bytes};
use super::link::{MessageTag, MpiTransfer};
use super::topology::HostTopology;
use crate::comm::shm::partition::{others, pieces};
use crate::comm::shm::region::SLOT_BYTES;
use std::collections::VecDeque;
use std::ops::Range;

/// Fills `whole` with the parts of all ranks. This rank's part is already in its place. A part counts as `exact` bytes,
/// the size of the elements that it encodes.
pub(super) fn gather(inter_host: &mut InterHostExchange, whole: &mut [u8], exact: usize) -> Result<()> {
    let part = whole.len() / inter_host.size();
    let (hosts, here) = (inter_host.hosts.clone(), inter_host.hosts.local_ranks());
    let (lanes, lane) = (hosts.lanes(), inter_host.rank() - here.start);
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
        inter_host.local.piece(range.len(), |slot| slot.copy_from_slice(&whole[mine]))?;
        for (r, _) in others(here.len(), lane) {
            let from = inter_host.local.coded(r, 0, range.len(), exact_share(range.len(), part, exact));
            whole[(here.start + r) * part + range.start..][..range.len()].copy_from_slice(from);
        }
    }
    let longest = hosts.remote_ranks().chain([here.clone()]).map(|ranks| ranks.len() * part).max().unwrap_or(0);
    let blocks: Vec<Range<usize>> = pieces(longest.div_ceil(lanes), message_bytes(partners.len())).collect();
    let cut = |slice: Range<usize>, block: &Range<usize>| {
        let bound = |at: usize| (slice.start + at).min(slice.end);
        bound(block.start)..bound(block.end)
    };
    let mut coming = VecDeque::new();
    for block in &blocks[..blocks.len().min(MESSAGES_IN_FLIGHT - 1)] {
        coming.push_back(swap(inter_host, whole, &hosts, &partners, |ranks| cut(slice(ranks, lane), block))?);
    }
    for (i, block) in blocks.iter().enumerate() {
        if let Some(block) = blocks.get(i + MESSAGES_IN_FLIGHT - 1) {
            coming.push_back(swap(inter_host, whole, &hosts, &partners, |ranks| cut(slice(ranks, lane), block))?);
        }
        let mut arriving = partners.iter().zip(coming.pop_front().unwrap_or_default());
        for ranks in hosts.remote_ranks() {
            let mine = if lane < lanes { cut(slice(&ranks, lane), block) } else { 0..0 };
            if let Some((peer, transfer)) = arriving.next() {
                whole[mine.clone()].copy_from_slice(&inter_host.finish(*peer, transfer)?);
                inter_host.count(mine.len(), exact_share(mine.len(), part, exact));
            }
            for range in pieces(block.len(), SLOT_BYTES) {
                let of_lane = |lane: usize| match lane < lanes {
                    true => cut(cut(slice(&ranks, lane), block), &range),
                    false => 0..0,
                };
                let mine = of_lane(lane);
                inter_host.local.piece(mine.len(), |slot| slot.copy_from_slice(&whole[mine]))?;
                for (r, _) in others(here.len(), lane) {
                    let theirs = of_lane(r);
                    let exact = exact_share(theirs.len(), part, exact);
                    let from = inter_host.local.coded(r, 0, theirs.len(), exact);
                    whole[theirs].copy_from_slice(from);
                }
            }
        }
    }
    Ok(())
}

/// Fills `whole` with the parts of the ranks that have the same position as this one in groups of `ranks` consecutive
/// ranks. This rank's part is already in its place. Each host must have the same number of ranks, and complete groups.
/// Each part goes to every other host once: to the rank with the same local number, which shares it with the ranks at
/// its position in the other groups of that host.
pub(super) fn gather_across(inter_host: &mut InterHostExchange, whole: &mut [u8], ranks: usize) -> Result<()> {
    let (hosts, here) = (inter_host.hosts.clone(), inter_host.hosts.local_ranks());
    let (groups, part) = (here.len() / ranks, whole.len() / (inter_host.size() / ranks));
    let lane = inter_host.rank() - here.start;
    let own = lane / ranks;
    let at = |host: usize, group: usize, range: &Range<usize>| {
        let start = (host * groups + group) * part;
        start + range.start..start + range.end
    };
    let partners: Vec<usize> = hosts.remote_ranks().map(|ranks| ranks.start + lane).collect();
    let blocks: Vec<Range<usize>> = pieces(part, message_bytes(partners.len())).collect();
    let number = |ranks: &Range<usize>| ranks.start / ranks.len();
    let mut coming = VecDeque::new();
    for block in &blocks[..blocks.len().min(MESSAGES_IN_FLIGHT - 1)] {
        coming.push_back(swap(inter_host, whole, &hosts, &partners, |ranks| at(number(ranks), own, block))?);
    }
    for (i, block) in blocks.iter().enumerate() {
        if let Some(block) = blocks.get(i + MESSAGES_IN_FLIGHT - 1) {
            coming.push_back(swap(inter_host, whole, &hosts, &partners, |ranks| at(number(ranks), own, block))?);
        }
        let arriving = coming.pop_front().unwrap_or_default();
        for ((peer, transfer), ranks) in partners.iter().zip(arriving).zip(hosts.remote_ranks()) {
            whole[at(number(&ranks), own, block)].copy_from_slice(&inter_host.finish(*peer, transfer)?);
            inter_host.count(block.len(), block.len());
        }
    }
    if groups == 1 {
        return Ok(());
    }
    let all = 0..hosts.host_ranks().len();
    for range in pieces(part, SLOT_BYTES / all.len()) {
        let len = range.len();
        inter_host.local.piece(all.len() * len, |slot| {
            for host in all.clone() {
                slot[host * len..(host + 1) * len].copy_from_slice(&whole[at(host, own, &range)]);
            }
        })?;
        for group in (0..groups).filter(|group| *group != own) {
            for host in all.clone() {
                let from = inter_host.local.peer(group * ranks + lane % ranks, host * len, len);
                whole[at(host, group, &range)].copy_from_slice(from);
            }
        }
    }
    Ok(())
}

/// Sends bytes of this host to the partners, and begins to receive the bytes of their hosts.
fn swap(
    inter_host: &mut InterHostExchange,
    whole: &[u8],
    hosts: &HostTopology,
    partners: &[usize],
    range_of: impl Fn(&Range<usize>) -> Range<usize>,
) -> Result<Vec<MpiTransfer>> {
    let mut arriving = Vec::with_capacity(partners.len());
    for (peer, ranks) in partners.iter().zip(hosts.remote_ranks()) {
        arriving.push(inter_host.receive(*peer, MessageTag::Data, range_of(&ranks).len())?);
    }
    for peer in partners {
        inter_host.send(*peer, MessageTag::Data, whole[range_of(&hosts.local_ranks())].to_vec())?;
    }
    Ok(arriving)
}

/// Returns how many bytes `len` bytes of a part encode: the same fraction of `exact` as `len` is of `part`.
fn exact_share(len: usize, part: usize, exact: usize) -> usize {
    if part == 0 { 0 } else { (len as u128 * exact as u128 / part as u128) as usize }
}
