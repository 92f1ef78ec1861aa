//! Sums that grow from host to host, in rank order: what goes on is the sum of all ranks so far.
//!
//! ```text
//!   host 0   parts of its ranks -> lane sums --(f32)--> host 1   + parts of its ranks --(f32)--> ... -> last host: the sums
//!   lane 0                                      lane 0                                                  lane 0
//!   lane 1                                      lane 1                                                  lane 1
//!   owners   <------------------------------ sums of their chunks, rounded -------------------------------/
//! ```
//!
//! Each lane adds up some of the chunks: see [`super::chain_roles`]. A block is the same piece of every chunk. In shared memory the
//! ranks of a host show each other their parts of it, as they travel on one machine; each lane adds those of its chunks to
//! the partial sums of the host before, and sends them on. Of the last host's lanes every owner on another host gets its sums
//! in a message, and one on the last host from its lane in shared memory.
//!
//! # Blocks on their way
//!
//! Partial sums are received [`AHEAD`] blocks ahead, as many may be on their way to the next host, and an owner takes a
//! block's sums when its host is [`behind`] blocks further. So hosts work on different blocks at a time, and neither they nor
//! their cables wait for one message to cross. All is received in memory that was set aside before the sender could have made
//! it. A rank holds as many messages of at most [`MESSAGE_BYTES`](super::inter_host::MESSAGE_BYTES): AHEAD that come, AHEAD
//! and one that go, one that is worked on, and its own sums, which are less than 2 AHEAD messages: 4.5 MiB, whatever is
//! summed. What that costs on the cables stands in [`super::traffic`].

use super::chain_roles::{ChainRole, handed_by};
use super::inter_host::{AHEAD, InterHostExchange, Result};
use super::intra_host::IntraHostSum;
use super::link::{MessageTag, MpiTransfer};
use super::partial_sum::SlotLayout;
use super::traffic::block_elements;
use crate::comm::shm::partition::pieces;
use crate::comm::shm::region::SLOT_BYTES;
use crate::comm::wire::format::WireFormat;
use crate::precision::{Flat, FlatRef};
use std::collections::VecDeque;
use std::ops::Range;

/// How many blocks later than its own parts a rank takes its sums: those that `hosts` hosts can have among them.
fn behind(hosts: usize) -> usize {
    2 * AHEAD * (hosts - 1)
}

/// Sums this rank's chunk of all ranks' `input` (world size x n elements), of which elements travel as `wire`, and writes
/// it from element `at` on: the place of the first chunk or of this rank's.
pub(super) fn reduce(inter_host: &mut InterHostExchange, wire: WireFormat, input: &mut Flat, at: usize) -> Result<()> {
    let (world, rank, size) = (inter_host.size(), inter_host.rank(), input.dtype().size_in_bytes());
    let (hosts, chunk) = (inter_host.hosts.clone(), input.len() / world);
    let role = ChainRole::of(&hosts, rank);
    inter_host.greet(&role.partners(&hosts))?;
    let layout = SlotLayout { wire, size, world };
    let blocks: Vec<_> = pieces(chunk, block_elements(&hosts, wire, chunk)).collect();
    let hands_over =
        hosts.each().last().is_some_and(|last| last.clone().any(|rank| !handed_by(&hosts, rank).is_empty()));
    let hands_over = hands_over && role.last;
    let (coming, sums) = (VecDeque::new(), VecDeque::new());
    let mut chain = ChainReduce { inter_host, role, layout, input, chunk, at, coming, sums };
    for block in blocks.iter().take(AHEAD) {
        chain.expect_partial(block)?;
    }
    let behind = behind(hosts.each().len());
    for (i, block) in blocks.iter().enumerate() {
        chain.expect_sums(block)?;
        let mut partial = chain.take_partial(block)?;
        if let Some(block) = blocks.get(i + AHEAD) {
            chain.expect_partial(block)?;
        }
        let ChainReduce { inter_host, role, layout, input, chunk, .. } = &mut chain;
        let here = IntraHostSum { layout: *layout, input, chunk: *chunk, owners: &role.owners, begins: role.first };
        here.add_parts(inter_host, &mut partial, block)?;
        if chain.role.last {
            let kept = chain.give_sums(&partial, block)?;
            if hands_over {
                chain.hand_over(&kept, block)?;
            }
        } else {
            chain.pass_on(&partial)?;
            if let Some(i) = i.checked_sub(behind) {
                chain.take_sums(&blocks[i])?;
            }
        }
    }
    // Nothing is left of these on the last host.
    blocks[blocks.len().saturating_sub(behind)..].iter().try_for_each(|block| chain.take_sums(block))
}

/// One rank's work on one collective.
struct ChainReduce<'a> {
    inter_host: &'a mut InterHostExchange,
    role: ChainRole,
    layout: SlotLayout,
    input: &'a mut Flat,
    /// Elements of a chunk.
    chunk: usize,
    /// Where this rank's chunk of the sum goes.
    at: usize,
    /// Partial sums from the host before, and sums of this rank's chunk, oldest first.
    coming: VecDeque<MpiTransfer>,
    sums: VecDeque<MpiTransfer>,
}

impl ChainReduce<'_> {
    /// Begins to receive the partial sums of a block.
    fn expect_partial(&mut self, block: &Range<usize>) -> Result<()> {
        if let Some(before) = self.role.before {
            let bytes = size_of::<f32>() * self.role.owners.len() * block.len();
            self.coming.push_back(self.inter_host.receive(before, MessageTag::Data, bytes)?);
        }
        Ok(())
    }

    /// Begins to receive the sums of this rank's chunk in a block.
    fn expect_sums(&mut self, block: &Range<usize>) -> Result<()> {
        if !self.role.last {
            self.sums.push_back(self.inter_host.receive(
                self.role.giver,
                MessageTag::Data,
                block.len() * self.layout.size,
            )?);
        }
        Ok(())
    }

    /// The partial sums of a block from the host before: owner after owner; without meaning on the first host.
    fn take_partial(&mut self, block: &Range<usize>) -> Result<Vec<f32>> {
        let mut partial = vec![0f32; self.role.owners.len() * block.len()];
        if let (Some(before), Some(transfer)) = (self.role.before, self.coming.pop_front()) {
            let bytes = self.inter_host.finish(before, transfer)?;
            self.inter_host.count(bytes.len(), bytes.len());
            bytemuck::cast_slice_mut(&mut partial).copy_from_slice(&bytes);
        }
        Ok(partial)
    }

    /// Sends the partial sums of a block to the next host.
    fn pass_on(&mut self, partial: &[f32]) -> Result<()> {
        if let Some(after) = self.role.after {
            self.inter_host.send(after, MessageTag::Data, bytemuck::cast_slice(partial).to_vec())?;
            self.inter_host.hold(AHEAD)?;
        }
        Ok(())
    }

    /// On the last host: sends the sums of a block to their owners on other hosts, and writes those of this rank's chunk. What
    /// is left is for others of this host, as bytes, in order.
    fn give_sums(&mut self, partial: &[f32], block: &Range<usize>) -> Result<Vec<Vec<u8>>> {
        let (dtype, here) = (self.input.dtype(), self.inter_host.hosts.here());
        let mut kept = Vec::new();
        let mut sent = 0;
        for (owner, sum) in self.role.owners.iter().zip(partial.chunks_exact(block.len())) {
            if *owner == self.inter_host.rank() {
                self.input.slice_mut(self.at + block.start..self.at + block.end).copy_cast(FlatRef::F32(sum));
                continue;
            }
            let mut rounded = Flat::zeros(dtype, sum.len());
            rounded.as_mut().copy_cast(FlatRef::F32(sum));
            if here.contains(owner) {
                kept.push(rounded.as_bytes().to_vec());
            } else {
                self.inter_host.send(*owner, MessageTag::Data, rounded.as_bytes().to_vec())?;
                sent += 1;
            }
        }
        self.inter_host.hold(AHEAD * sent)?;
        Ok(kept)
    }

    /// On the last host: shows the sums of a block that are for other ranks of this host, and takes those for this one.
    fn hand_over(&mut self, kept: &[Vec<u8>], block: &Range<usize>) -> Result<()> {
        let (size, rank, giver) = (self.layout.size, self.inter_host.rank(), self.role.giver);
        let (hosts, here) = (self.inter_host.hosts.clone(), self.inter_host.hosts.here());
        let place = handed_by(&hosts, giver).iter().position(|owner| *owner == rank);
        for inside in pieces(block.len(), SLOT_BYTES / (here.len() * size)) {
            let (bytes, range) = (inside.len() * size, inside.start * size..inside.end * size);
            self.inter_host.local.piece(kept.len() * bytes, |slot| {
                slot.chunks_exact_mut(bytes).zip(kept).for_each(|(to, sums)| to.copy_from_slice(&sums[range.clone()]));
            })?;
            if let Some(place) = place {
                let sums = self.inter_host.local.peer(giver - here.start, place * bytes, bytes);
                let start = (self.at + block.start) * size;
                self.input.as_bytes_mut()[start + range.start..start + range.end].copy_from_slice(sums);
            }
        }
        Ok(())
    }

    /// Takes the sums of a block of this rank's chunk, from the last host.
    fn take_sums(&mut self, block: &Range<usize>) -> Result<()> {
        if let Some(transfer) = self.sums.pop_front() {
            let bytes = self.inter_host.finish(self.role.giver, transfer)?;
            self.inter_host.count(bytes.len(), bytes.len());
            let start = (self.at + block.start) * self.layout.size;
            self.input.as_bytes_mut()[start..start + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }
}
