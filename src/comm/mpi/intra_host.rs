//! The contribution of this host's ranks to partial sums: they share their parts, and each adds up some of the chunks.

use super::inter_host::{InterHostExchange, Result};
use super::partial_sum::{PartialSumTerm, SlotLayout, add};
use crate::comm::shm::partition::pieces;
use crate::comm::shm::region::SLOT_BYTES;
use crate::comm::wire::format::WireFormat;
use crate::precision::{Flat, FlatRef};
use std::ops::Range;

/// One rank's work on a sum within its host.
pub(super) struct IntraHostSum<'a> {
    /// The layout of the parts in a slot.
    pub layout: SlotLayout,
    /// This rank's parts: world size x `chunk` elements.
    pub input: &'a Flat,
    /// The number of elements of a chunk.
    pub chunk: usize,
    /// The owners of the chunks that this rank adds up, in order. Each chunk is added up by one rank of the host.
    pub owners: &'a [usize],
    /// Whether sums start with the part of this host's first rank; otherwise, they already contain the parts of other
    /// hosts.
    pub starts_sum: bool,
}

impl IntraHostSum<'_> {
    /// Adds to `partial` the parts that this host's ranks have for elements `block` of the owners' chunks, one owner
    /// after another. All ranks of the host call this function with the same block.
    pub(super) fn add_parts(
        &self,
        inter_host: &mut InterHostExchange,
        partial: &mut [f32],
        block: &Range<usize>,
    ) -> Result<()> {
        let (layout, rank, local_ranks) = (self.layout, inter_host.rank(), inter_host.hosts.local_ranks());
        // A single rank has no one to share its parts with.
        let is_only_rank = local_ranks.len() == 1;
        let step = if is_only_rank { block.len().max(1) } else { layout.elements_in(SLOT_BYTES) };
        let mut own_codes = Vec::new();
        for piece in pieces(block.len(), step) {
            let len = piece.len();
            let range_of = |owner: usize| {
                let start = owner * self.chunk + block.start;
                start + piece.start..start + piece.end
            };
            let shared_bytes = if is_only_rank { 0 } else { layout.bytes(len) };
            inter_host.local.piece(shared_bytes, |slot| {
                for owner in (0..layout.world).filter(|owner| !is_only_rank && !self.owners.contains(owner)) {
                    let part = self.input.slice(range_of(owner));
                    let target = &mut slot[layout.offset(rank, owner, len)..][..layout.part(rank, owner, len)];
                    match layout.wire {
                        WireFormat::Blocks(ints) if owner != rank => ints.encode(part, target),
                        _ => target.copy_from_slice(part.as_bytes()),
                    }
                }
            })?;
            if len == 0 {
                continue;
            }
            for (owner, sum) in self.owners.iter().zip(partial.chunks_exact_mut(block.len())) {
                let own = self.input.slice(range_of(*owner));
                let own = match layout.wire {
                    WireFormat::Blocks(ints) if *owner != rank => {
                        own_codes.resize(ints.encoded_len(len), 0);
                        ints.encode(own, &mut own_codes);
                        PartialSumTerm::Blocks(ints, &own_codes)
                    }
                    _ => PartialSumTerm::Exact(own),
                };
                let part = |r: usize| {
                    let (offset, bytes) = (layout.offset(r, *owner, len), layout.part(r, *owner, len));
                    let part = inter_host.local.coded(r - local_ranks.start, offset, bytes, len * layout.size);
                    match layout.wire {
                        WireFormat::Blocks(ints) if *owner != r => PartialSumTerm::Blocks(ints, part),
                        _ => PartialSumTerm::Exact(FlatRef::of_bytes(self.input.dtype(), part)),
                    }
                };
                let parts: Vec<PartialSumTerm<'_>> =
                    local_ranks.clone().map(|r| if r == rank { own } else { part(r) }).collect();
                add(&mut sum[piece.clone()], self.starts_sum, &parts);
            }
        }
        Ok(())
    }
}
