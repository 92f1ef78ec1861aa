//! Sums that grow from host to host, in rank order: each host passes on the sum of all ranks so far.
//!
//! ```text
//!   host 0   parts of its ranks -> lane sums --(f32)--> host 1   + parts of its ranks --(f32)--> ... -> last host
//!   lane 0                                      lane 0                                                  lane 0
//!   lane 1                                      lane 1                                                  lane 1
//!   owners   <------------------------------ sums of their chunks, rounded -------------------------------/
//! ```
//!
//! Each lane adds up some of the chunks: see [`super::chain_roles`]. A block is the same piece of every chunk. The
//! ranks of a host share their parts of a block through shared memory, in the wire format that a single machine would
//! use. Each lane adds the parts of its chunks to the partial sums of the previous host, and sends the new sums to the
//! next host. Every owner on another host receives its sums from the last host's lanes in a message, and an owner on
//! the last host receives them through shared memory.
//!
//! # Blocks in flight
//!
//! Partial sums are received [`MESSAGES_IN_FLIGHT`] blocks ahead, the same number may be in flight to the next host,
//! and an owner receives a block's sums when its host has advanced by [`block_lag`] further blocks. Hosts thus work on
//! different blocks at the same time, and neither they nor their network links wait for individual messages. Everything
//! is received in memory that was allocated before the sender could have produced it. A rank holds messages of at most
//! [`MAX_MESSAGE_BYTES`](super::inter_host::MAX_MESSAGE_BYTES): MESSAGES_IN_FLIGHT incoming messages,
//! MESSAGES_IN_FLIGHT + 1 outgoing messages, one message in use, and its own sums, which amount to fewer than
//! 2 MESSAGES_IN_FLIGHT messages: 4.5 MiB in total, whatever the size of the sum. [`super::traffic_model`] gives the
//! cost on the network.

use super::chain_roles::{ChainRole, receivers_from};
use super::inter_host::{InterHostExchange, MESSAGES_IN_FLIGHT, Result};
use super::intra_host::IntraHostSum;
use super::link::{MessageTag, MpiTransfer};
use super::partial_sum::SlotLayout;
use super::traffic_model::block_elements;
use crate::comm::shm::partition::pieces;
use crate::comm::shm::region::SLOT_BYTES;
use crate::comm::wire::format::WireFormat;
use crate::precision::{Flat, FlatRef};
use std::collections::VecDeque;
use std::ops::Range;

/// Returns by how many blocks the sums that a rank receives lag behind the parts that it adds: the number of blocks
/// that can be in flight among `hosts` hosts.
fn block_lag(hosts: usize) -> usize {
    2 * MESSAGES_IN_FLIGHT * (hosts - 1)
}

/// Sums this rank's chunk of all ranks' `input` (world size x n elements), sent in the format `wire`, and writes the
/// sum to `input` from element `at` on, which is the position of the first chunk or of this rank's chunk.
pub(super) fn reduce(inter_host: &mut InterHostExchange, wire: WireFormat, input: &mut Flat, at: usize) -> Result<()> {
    let (world, rank, size) = (inter_host.size(), inter_host.rank(), input.dtype().size_in_bytes());
    let (hosts, chunk) = (inter_host.hosts.clone(), input.len() / world);
    let role = ChainRole::of(&hosts, rank);
    inter_host.announce_collective(&role.partners(&hosts))?;
    let layout = SlotLayout { wire, size, world };
    let blocks: Vec<_> = pieces(chunk, block_elements(&hosts, wire, chunk)).collect();
    let hands_over =
        hosts.host_ranks().last().is_some_and(|last| last.clone().any(|rank| !receivers_from(&hosts, rank).is_empty()));
    let hands_over = hands_over && role.last;
    let (partials, sums) = (VecDeque::new(), VecDeque::new());
    let mut chain = ChainReduce { inter_host, role, layout, input, chunk, at, partials, sums };
    for block in blocks.iter().take(MESSAGES_IN_FLIGHT) {
        chain.expect_partial(block)?;
    }
    let block_lag = block_lag(hosts.host_ranks().len());
    for (i, block) in blocks.iter().enumerate() {
        chain.expect_sums(block)?;
        let mut partial = chain.take_partial(block)?;
        if let Some(block) = blocks.get(i + MESSAGES_IN_FLIGHT) {
            chain.expect_partial(block)?;
        }
        let ChainReduce { inter_host, role, layout, input, chunk, .. } = &mut chain;
        let intra_host =
            IntraHostSum { layout: *layout, input, chunk: *chunk, owners: &role.owners, starts_sum: role.first };
        intra_host.add_parts(inter_host, &mut partial, block)?;
        if chain.role.last {
            let sums_here = chain.give_sums(&partial, block)?;
            if hands_over {
                chain.hand_over(&sums_here, block)?;
            }
        } else {
            chain.pass_on(&partial)?;
            if let Some(i) = i.checked_sub(block_lag) {
                chain.take_sums(&blocks[i])?;
            }
        }
    }
    // On the last host, no sums remain to be received.
    blocks[blocks.len().saturating_sub(block_lag)..].iter().try_for_each(|block| chain.take_sums(block))
}

/// One rank's work on one collective.
struct ChainReduce<'a> {
    inter_host: &'a mut InterHostExchange,
    role: ChainRole,
    layout: SlotLayout,
    input: &'a mut Flat,
    /// The number of elements of a chunk.
    chunk: usize,
    /// The element at which this rank's chunk of the sum is written.
    at: usize,
    /// The incoming partial sums from the previous host, oldest first.
    partials: VecDeque<MpiTransfer>,
    /// The incoming sums of this rank's chunk, oldest first.
    sums: VecDeque<MpiTransfer>,
}

impl ChainReduce<'_> {
    /// Begins to receive the partial sums of a block.
    fn expect_partial(&mut self, block: &Range<usize>) -> Result<()> {
        if let Some(previous) = self.role.previous {
            let bytes = size_of::<f32>() * self.role.owners.len() * block.len();
            self.partials.push_back(self.inter_host.receive(previous, MessageTag::Data, bytes)?);
        }
        Ok(())
    }

    /// Begins to receive the sums of this rank's chunk in a block.
    fn expect_sums(&mut self, block: &Range<usize>) -> Result<()> {
        if !self.role.last {
            self.sums.push_back(self.inter_host.receive(
                self.role.sum_sender,
                MessageTag::Data,
                block.len() * self.layout.size,
            )?);
        }
        Ok(())
    }

    /// Waits for the partial sums of a block from the previous host, in the order of their owners. On the first host,
    /// the values have no meaning.
    fn take_partial(&mut self, block: &Range<usize>) -> Result<Vec<f32>> {
        let mut partial = vec![0f32; self.role.owners.len() * block.len()];
        if let (Some(previous), Some(transfer)) = (self.role.previous, self.partials.pop_front()) {
            let bytes = self.inter_host.finish(previous, transfer)?;
            self.inter_host.count(bytes.len(), bytes.len());
            bytemuck::cast_slice_mut(&mut partial).copy_from_slice(&bytes);
        }
        Ok(partial)
    }

    /// Sends the partial sums of a block to the next host.
    fn pass_on(&mut self, partial: &[f32]) -> Result<()> {
        if let Some(next) = self.role.next {
            self.inter_host.send(next, MessageTag::Data, bytemuck::cast_slice(partial).to_vec())?;
            self.inter_host.limit_in_flight(MESSAGES_IN_FLIGHT)?;
        }
        Ok(())
    }

    /// Sends, on the last host, the sums of a block to their owners on other hosts, and writes those of this rank's
    /// chunk. Returns the remaining sums, which are for other ranks of this host, as bytes, in order.
    fn give_sums(&mut self, partial: &[f32], block: &Range<usize>) -> Result<Vec<Vec<u8>>> {
        let (dtype, local_ranks) = (self.input.dtype(), self.inter_host.hosts.local_ranks());
        let mut sums_here = Vec::new();
        let mut sent = 0;
        for (owner, sum) in self.role.owners.iter().zip(partial.chunks_exact(block.len())) {
            if *owner == self.inter_host.rank() {
                self.input.slice_mut(self.at + block.start..self.at + block.end).copy_cast(FlatRef::F32(sum));
                continue;
            }
            let mut rounded = Flat::zeros(dtype, sum.len());
            rounded.as_mut().copy_cast(FlatRef::F32(sum));
            if local_ranks.contains(owner) {
                sums_here.push(rounded.as_bytes().to_vec());
            } else {
                self.inter_host.send(*owner, MessageTag::Data, rounded.as_bytes().to_vec())?;
                sent += 1;
            }
        }
        self.inter_host.limit_in_flight(MESSAGES_IN_FLIGHT * sent)?;
        Ok(sums_here)
    }

    /// Shares, on the last host, the sums of a block with their owners on this host, and takes those of this rank.
    fn hand_over(&mut self, sums_here: &[Vec<u8>], block: &Range<usize>) -> Result<()> {
        let (size, rank, sum_sender) = (self.layout.size, self.inter_host.rank(), self.role.sum_sender);
        let (hosts, local_ranks) = (self.inter_host.hosts.clone(), self.inter_host.hosts.local_ranks());
        let index = receivers_from(&hosts, sum_sender).iter().position(|owner| *owner == rank);
        for piece in pieces(block.len(), SLOT_BYTES / (local_ranks.len() * size)) {
            let (bytes, range) = (piece.len() * size, piece.start * size..piece.end * size);
            self.inter_host.local.piece(sums_here.len() * bytes, |slot| {
                slot.chunks_exact_mut(bytes)
                    .zip(sums_here)
                    .for_each(|(to, sums)| to.copy_from_slice(&sums[range.clone()]));
            })?;
            if let Some(index) = index {
                let sums = self.inter_host.local.peer(sum_sender - local_ranks.start, index * bytes, bytes);
                let start = (self.at + block.start) * size;
                self.input.as_bytes_mut()[start + range.start..start + range.end].copy_from_slice(sums);
            }
        }
        Ok(())
    }

    /// Receives the sums of a block of this rank's chunk, from the last host.
    fn take_sums(&mut self, block: &Range<usize>) -> Result<()> {
        if let Some(transfer) = self.sums.pop_front() {
            let bytes = self.inter_host.finish(self.role.sum_sender, transfer)?;
            self.inter_host.count(bytes.len(), bytes.len());
            let start = (self.at + block.start) * self.layout.size;
            self.input.as_bytes_mut()[start..start + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }
}
