//! Sums of hosts' partial sums, which are encoded between hosts: [`WireFormat::BetweenHosts`].
//!
//! ```text
//!   host 0   parts of its ranks -> partial sum of rank 2's chunk --(code)--> rank 2:  decoded partial sum of host 0
//!   host 1   parts of its ranks -> partial sum of rank 2's chunk -----(f32)------->  + partial sum of host 1, exact
//!   host 2   parts of its ranks -> partial sum of rank 2's chunk --(code)-------->  + decoded partial sum of host 2
//! ```
//!
//! A host sends each owner on another host one encoded chunk, however many ranks the sending host has. Each rank adds
//! up its own chunk and chunks of ranks on other hosts. If all hosts have the same number of ranks, these are the
//! chunks of the ranks at the same position on the other hosts. The owner adds the hosts' sums in host order, in f32,
//! and rounds once. With one rank on each host, the bits are thus those of individually encoded parts; on a single
//! host, they are those of exact parts.
//!
//! # Blocks in flight
//!
//! A block is the same piece of every chunk. It is sent, encoded, once it has been added up on this host. The blocks of
//! the other hosts are awaited when [`MESSAGES_IN_FLIGHT`] - 1 further blocks have been added up, so that hosts and
//! their network links do not wait for individual messages. The partial sums of a block that a rank computes take at
//! most [`MAX_PARTIAL_SUM_BYTES`] bytes, and their encoded form at most half of that. A rank holds the partial sums of
//! one block, the encoded form of MESSAGES_IN_FLIGHT + 1 outgoing and 2 MESSAGES_IN_FLIGHT incoming blocks, and
//! MESSAGES_IN_FLIGHT blocks of its own chunk's sums: less than 20 MiB, whatever the size of the sum.
//! [`super::traffic_model`] gives the cost on the network.

use super::inter_host::{InterHostExchange, MESSAGES_IN_FLIGHT, Result, message_bytes};
use super::intra_host::IntraHostSum;
use super::link::{MessageTag, MpiTransfer};
use super::partial_sum::{PartialSumTerm, SlotLayout, add};
use super::topology::HostTopology;
use super::traffic_model::MIN_MESSAGE_BYTES;
use crate::comm::shm::partition::pieces;
use crate::comm::wire::format::WireFormat;
use crate::comm::wire::inter_host::InterHostFormat;
use crate::precision::{Flat, FlatRef};
use std::collections::VecDeque;
use std::ops::Range;

/// The maximum number of bytes of a block's partial sums on a rank, unless one block of integers per chunk is larger.
const MAX_PARTIAL_SUM_BYTES: usize = 2 << 20;
/// The number of blocks that a sufficiently long sum is cut into, so that some are added up while others are in flight.
const BLOCKS_PER_SUM: usize = 8;

/// The role of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HostSumRole {
    /// The owners of the chunks for which this rank adds up its host's parts, itself included, in order.
    owners: Vec<usize>,
    /// The rank of each other host that adds up this rank's chunk there, in order.
    senders: Vec<usize>,
}

impl HostSumRole {
    /// Returns the role of `rank`, which is on this host.
    fn of(hosts: &HostTopology, rank: usize) -> Self {
        let local_ranks = hosts.local_ranks();
        let sender = |host: &Range<usize>, position: usize| host.start + position % host.len();
        let owners_on = |ranks: &Range<usize>| {
            let start = ranks.start;
            ranks.clone().filter(|owner| sender(&local_ranks, owner - start) == rank).collect::<Vec<_>>()
        };
        Self {
            owners: hosts.host_ranks().iter().flat_map(owners_on).collect(),
            senders: hosts.remote_ranks().map(|host| sender(&host, rank - local_ranks.start)).collect(),
        }
    }

    /// Returns the ranks of other hosts with which this one exchanges messages, in order. The relation is symmetric.
    fn partners(&self, rank: usize) -> Vec<usize> {
        let mut partners = [&self.owners[..], &self.senders].concat();
        partners.sort_unstable();
        partners.dedup();
        partners.retain(|partner| *partner != rank);
        partners
    }
}

/// Returns the maximum number of chunks that a rank of any host adds up.
fn max_chunks(hosts: &HostTopology) -> usize {
    let of = |ranks: &Range<usize>| hosts.host_ranks().iter().map(|host| host.len().div_ceil(ranks.len())).sum();
    hosts.host_ranks().iter().map(of).max().unwrap_or(1)
}

/// Returns the number of elements of every chunk in one block; a message contains this many elements of one chunk. The
/// number is the same on all ranks.
pub(super) fn block_elements(hosts: &HostTopology, code: InterHostFormat, chunk: usize) -> usize {
    let chunks = max_chunks(hosts);
    let bytes = (code.encoded_len(chunk) / BLOCKS_PER_SUM).max(MIN_MESSAGE_BYTES).min(message_bytes(chunks));
    let max_elements = MAX_PARTIAL_SUM_BYTES / (size_of::<f32>() * chunks);
    let align = code.alignment();
    (code.elements_in(bytes).min(max_elements) / align * align).max(align)
}

/// Sums this rank's chunk of all ranks' `input` (world size x n elements), and writes the sum to `input`, starting at
/// element `at`: the position of the first chunk or of this rank's chunk.
pub(super) fn reduce(
    inter_host: &mut InterHostExchange,
    code: InterHostFormat,
    input: &mut Flat,
    at: usize,
) -> Result<()> {
    let (world, rank, size) = (inter_host.size(), inter_host.rank(), input.dtype().size_in_bytes());
    let (hosts, chunk) = (inter_host.hosts.clone(), input.len() / world);
    let role = HostSumRole::of(&hosts, rank);
    inter_host.announce_collective(&role.partners(rank))?;
    let blocks: Vec<_> = pieces(chunk, block_elements(&hosts, code, chunk)).collect();
    let (incoming, own_partials) = (VecDeque::new(), VecDeque::new());
    let mut sums = HostSumReduce { inter_host, code, role, at, incoming, own_partials };
    for block in blocks.iter().take(MESSAGES_IN_FLIGHT) {
        sums.expect(block)?;
    }
    for (i, block) in blocks.iter().enumerate() {
        if let Some(block) = blocks.get(i + MESSAGES_IN_FLIGHT) {
            sums.expect(block)?;
        }
        let mut partial = vec![0f32; sums.role.owners.len() * block.len()];
        let layout = SlotLayout { wire: WireFormat::Exact, size, world };
        let intra_host = IntraHostSum { layout, input, chunk, owners: &sums.role.owners, starts_sum: true };
        intra_host.add_parts(sums.inter_host, &mut partial, block)?;
        sums.give(&partial, block)?;
        if sums.own_partials.len() == MESSAGES_IN_FLIGHT {
            sums.take(input)?;
        }
    }
    while !sums.own_partials.is_empty() {
        sums.take(input)?;
    }
    Ok(())
}

/// One rank's side of one collective between hosts.
struct HostSumReduce<'a> {
    inter_host: &'a mut InterHostExchange,
    code: InterHostFormat,
    role: HostSumRole,
    /// The element at which this rank's chunk of the sum is written.
    at: usize,
    /// The incoming encoded blocks from each other host, oldest block first.
    incoming: VecDeque<Vec<MpiTransfer>>,
    /// This host's partial sums of this rank's chunk, for blocks that are still awaited from other hosts.
    own_partials: VecDeque<(Range<usize>, Vec<f32>)>,
}

impl HostSumReduce<'_> {
    /// Begins to receive a block's encoded partial sums from the other hosts.
    fn expect(&mut self, block: &Range<usize>) -> Result<()> {
        let bytes = self.code.encoded_len(block.len());
        self.incoming.push_back(self.inter_host.receive_each(&self.role.senders, MessageTag::Data, bytes)?);
        Ok(())
    }

    /// Sends a block's partial sums to their owners on other hosts, and keeps those of this rank's chunk.
    fn give(&mut self, partial: &[f32], block: &Range<usize>) -> Result<()> {
        let mut sent = 0;
        for (position, owner) in self.role.owners.iter().enumerate() {
            let sum = &partial[position * block.len()..(position + 1) * block.len()];
            if *owner == self.inter_host.rank() {
                self.own_partials.push_back((block.clone(), sum.to_vec()));
                continue;
            }
            let mut codes = vec![0; self.code.encoded_len(sum.len())];
            self.code.encode(FlatRef::F32(sum), &mut codes);
            self.inter_host.send(*owner, MessageTag::Data, codes)?;
            sent += 1;
        }
        self.inter_host.limit_in_flight(MESSAGES_IN_FLIGHT * sent)
    }

    /// Receives the other hosts' partial sums of the oldest block, and writes the sums of this rank's chunk.
    fn take(&mut self, input: &mut Flat) -> Result<()> {
        let (Some((block, own)), Some(incoming)) = (self.own_partials.pop_front(), self.incoming.pop_front()) else {
            return Ok(());
        };
        let mut encoded_sums = Vec::with_capacity(incoming.len());
        for (sender, transfer) in self.role.senders.iter().zip(incoming) {
            let codes = self.inter_host.finish(*sender, transfer)?;
            self.inter_host.count(codes.len(), size_of_val(&own[..]));
            encoded_sums.push(codes);
        }
        let sum = sum_of(self.code, &encoded_sums, &own, self.inter_host.hosts.host_index());
        input.slice_mut(self.at + block.start..self.at + block.end).copy_cast(FlatRef::F32(&sum));
        Ok(())
    }
}

/// Returns the sum of all hosts' partial sums in host order: the decoded sums of the other hosts, and this host's `own`
/// at position `position`.
fn sum_of(code: InterHostFormat, codes: &[Vec<u8>], own: &[f32], position: usize) -> Vec<f32> {
    if own.is_empty() {
        // An empty message has no alignment.
        return Vec::new();
    }
    let read = |codes| match code.ints_or_dtype() {
        Ok(ints) => PartialSumTerm::Blocks(ints, codes),
        Err(dtype) => PartialSumTerm::Exact(FlatRef::of_bytes(dtype, codes)),
    };
    let mut parts: Vec<PartialSumTerm<'_>> = codes.iter().map(|codes| read(codes)).collect();
    parts.insert(position, PartialSumTerm::Exact(FlatRef::F32(own)));
    let mut sum = vec![0f32; own.len()];
    add(&mut sum, true, &parts);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::mpi::inter_host::MAX_MESSAGE_BYTES;
    use crate::comm::shm::quantized::sum_blocks;
    use crate::precision::IntFormat;
    use proptest::prelude::*;

    const CODES: [InterHostFormat; 4] = [
        InterHostFormat::Blocks(IntFormat::Int8),
        InterHostFormat::Blocks(IntFormat::Int4),
        InterHostFormat::Bf16,
        InterHostFormat::F16,
    ];

    fn all(counts: &[usize]) -> Vec<(HostTopology, HostSumRole)> {
        let of = |rank| {
            let hosts = HostTopology::with(counts, rank);
            let role = HostSumRole::of(&hosts, rank);
            (hosts, role)
        };
        (0..counts.iter().sum()).map(of).collect()
    }

    /// Returns numbers whose sums depend on their order.
    fn values(rank: usize, len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7 + rank * 13) % 101) as f32 * 0.37 + 1.0 / (1 + i % 17 + rank) as f32 - 20.0).collect()
    }

    fn encoded(code: InterHostFormat, values: &[f32]) -> Vec<u8> {
        let mut codes = vec![0; code.encoded_len(values.len())];
        code.encode(FlatRef::F32(values), &mut codes);
        codes
    }

    #[test]
    fn of_one_rank_on_each_host_the_bits_are_those_of_parts_that_are_coded_one_by_one() {
        for (world, ints) in
            [2, 3, 5].into_iter().flat_map(|world| [IntFormat::Int8, IntFormat::Int4].map(|ints| (world, ints)))
        {
            let (code, parts): (_, Vec<_>) =
                (InterHostFormat::Blocks(ints), (0..world).map(|rank| values(rank, 999)).collect());
            for owner in 0..world {
                let others = (0..world).filter(|rank| *rank != owner);
                let codes: Vec<Vec<u8>> = others.map(|rank| encoded(code, &parts[rank])).collect();
                let mut expected = Flat::from(parts[owner].clone());
                let peers: Vec<&[u8]> = codes.iter().map(|codes| &codes[..]).collect();
                sum_blocks(ints, &mut expected, (0, 0), 999, owner, &peers);
                assert_eq!(
                    Flat::from(sum_of(code, &codes, &parts[owner], owner)),
                    expected,
                    "{world} {ints:?} {owner}"
                );
            }
        }
    }

    #[test]
    fn of_one_host_the_sum_is_exact_and_of_several_the_own_hosts_part_is() {
        let own = values(0, 300);
        for code in CODES {
            assert_eq!(sum_of(code, &[], &own, 0), own);
            // The others send zeros, whose encoding is exact.
            let zeros = encoded(code, &[0.0; 300]);
            for position in 0..3 {
                assert_eq!(sum_of(code, &[zeros.clone(), zeros.clone()], &own, position), own, "{code:?}");
            }
        }
    }

    #[test]
    fn an_overflow_of_one_host_is_seen_by_the_owner() {
        for code in CODES {
            let mut part = values(1, 300);
            part[200] = f32::INFINITY;
            let sum = sum_of(code, &[encoded(code, &part)], &values(0, 300), 0);
            assert!(!sum[200].is_finite(), "{code:?}");
        }
    }

    proptest! {
        #[test]
        fn the_ranks_of_each_host_share_all_chunks_and_each_adds_up_its_own(
            counts in prop::collection::vec(1usize..7, 1..6),
        ) {
            let all = all(&counts);
            for ranks in all[0].0.host_ranks() {
                let mut owners: Vec<usize> = ranks.clone().flat_map(|rank| all[rank].1.owners.clone()).collect();
                owners.sort_unstable();
                prop_assert_eq!(owners, (0..all.len()).collect::<Vec<_>>());
            }
            let max = max_chunks(&all[0].0);
            for (rank, (_, role)) in all.iter().enumerate() {
                prop_assert!(role.owners.contains(&rank) && role.owners.is_sorted());
                prop_assert!(role.owners.len() <= max);
            }
            prop_assert!(all.iter().any(|(_, role)| role.owners.len() == max));
            if counts.iter().all(|count| *count == counts[0]) {
                prop_assert_eq!(max, counts.len());
            }
        }

        #[test]
        fn every_partial_sum_that_a_rank_sends_is_awaited_by_its_owner_once(
            counts in prop::collection::vec(1usize..7, 1..6),
        ) {
            let all = all(&counts);
            for (rank, (hosts, role)) in all.iter().enumerate() {
                prop_assert_eq!(role.senders.len(), counts.len() - 1);
                for (sender, host) in role.senders.iter().zip(hosts.remote_ranks()) {
                    prop_assert!(host.contains(sender) && all[*sender].1.owners.contains(&rank));
                }
                for partner in role.partners(rank) {
                    prop_assert!(!hosts.local_ranks().contains(&partner));
                    prop_assert!(all[partner].1.partners(partner).contains(&rank));
                }
            }
        }

        #[test]
        fn blocks_are_whole_and_of_bounded_memory(
            counts in prop::collection::vec(1usize..70, 1..40),
            chunk in prop_oneof![0usize..300, 1usize..1 << 26],
        ) {
            let hosts = HostTopology::with(&counts, 0);
            for code in CODES {
                let elements = block_elements(&hosts, code, chunk);
                prop_assert!(elements > 0 && elements.is_multiple_of(code.alignment()));
                prop_assert!(code.encoded_len(elements) <= MAX_MESSAGE_BYTES);
                let held = 4 * elements * max_chunks(&hosts);
                prop_assert!(held <= MAX_PARTIAL_SUM_BYTES || elements == code.alignment(), "{} of {:?}", elements, code);
            }
        }
    }
}
