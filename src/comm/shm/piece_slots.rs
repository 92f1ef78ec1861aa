//! Pieces of data that ranks show each other: which rank writes and reads what, and in which order.
//!
//! ```text
//!   rank 0   write piece k -> publish k -> wait for all k -> read peers' k -> write k+1 -> publish k+1 -> ...
//!   rank 1   write piece k -> publish k -> wait for all k -> read peers' k -> ...
//! ```
//!
//! A piece is in the even or the odd slot of its rank. Piece k+2 overwrites piece k. This is safe because a rank
//! writes k+2 only after it has seen every peer publish k+1, and a peer publishes k+1 only after it has read all of k.
//! One wait per piece is therefore enough.
//!
//! # Orderings
//!
//! [`PublishedCount`] is incremented with Release (or a stronger ordering) after the piece's data and header, and
//! loaded with Acquire before a peer reads them. The same pair orders a peer's reads of piece k before this rank's
//! writes of piece k+2. [`super::rank_state`] describes what `state` orders. Nothing else carries an ordering.
//!
//! # Checked with loom
//!
//! `tests/loom` compiles this file, `published_count.rs` and `rank_state.rs` with loom's memory in place of
//! [`super::region`] and runs them in every order in which their accesses can take effect: two ranks and three pieces,
//! the third of which uses the slot of the first. If ranks sleep, threads are interrupted at most four times with two
//! ranks, and at most once with three. Ranks that give up or leave are run with one or two pieces: two ranks in every
//! order or with at most four interruptions, three ranks with at most two. Loom finds no race on slots or texts, no
//! wrong byte, no thread that sleeps forever, and no failure that is reported incorrectly. It finds the deliberate
//! mistakes in its tests, such as a publication before the data or without Release. It does not cover time limits,
//! heartbeats or the kernel's futex.

use super::published_count::PublishedCount;
use super::rank_state::{PeerFailure, RankFault};
use super::region::{SLOT_BYTES, SharedMemoryRegion, spin_loop, yield_now};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The number of checks that a wait makes before the thread sleeps. The thread spins first, for at most about ten
/// microseconds. Then it yields to other threads between checks: the thread of the awaited rank may be on this core.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpinLimits {
    pub spins: u32,
    pub yields: u32,
}

/// Returns the length of the naps of a sleeping wait, between which it checks the peers' states.
pub(super) fn nap_millis(ranks: usize) -> u32 {
    // With naps of a fixed length, many ranks on few cores would do nothing but check.
    const FEW_RANKS: usize = 64;
    20 * ranks.div_ceil(FEW_RANKS) as u32
}

/// One rank's pieces, and its view of its peers' pieces. Ranks are counted within their group.
pub(super) struct PieceSlots {
    region: Arc<SharedMemoryRegion>,
    channel: usize,
    /// The ranks of the group, in ascending order, as the region counts them.
    members: Vec<usize>,
    /// This rank's position among `members`.
    rank: usize,
    /// The number of pieces published so far, modulo 2^32. The last of them is the current one.
    published: u32,
    nap_millis: u32,
}

impl PieceSlots {
    /// Returns the pieces of a rank that exchanges them with all others, and has published `published` of them.
    pub(super) fn new(region: Arc<SharedMemoryRegion>, rank: usize, published: u32) -> Self {
        let all = (0..region.world_size()).collect();
        Self { published, ..Self::of_group(region, 0, all, rank) }
    }

    /// Returns the pieces of the rank at position `rank` of the group `members`, which uses `channel`.
    pub(super) fn of_group(region: Arc<SharedMemoryRegion>, channel: usize, members: Vec<usize>, rank: usize) -> Self {
        let nap_millis = nap_millis(region.world_size());
        Self { region, channel, members, rank, published: 0, nap_millis }
    }

    /// Limits the length of naps, after which waits check the peers' states.
    pub(super) fn nap_at_most(&mut self, millis: u32) {
        self.nap_millis = self.nap_millis.min(millis);
    }

    pub(super) fn region(&self) -> &SharedMemoryRegion {
        &self.region
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks in the group.
    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    /// Returns the number that the region gives to a rank of the group.
    pub(super) fn in_region(&self, rank: usize) -> usize {
        self.members[rank]
    }

    /// Returns the number of pieces published so far, modulo 2^32.
    #[cfg(test)]
    pub(super) fn published(&self) -> u32 {
        self.published
    }

    /// Lets `fill` write the `len` bytes of this rank's next piece, and publishes it with its `header`. A wait for
    /// every peer must follow.
    pub(super) fn publish<const N: usize>(&mut self, header: [u64; N], len: usize, fill: impl FnOnce(&mut [u8])) {
        assert!(len <= SLOT_BYTES, "a piece of {len} bytes");
        let next = self.published.wrapping_add(1);
        let parity = (next & 1) as usize;
        // SAFETY: the slot is this rank's and holds SLOT_BYTES. No peer reads it now: see the module's docs.
        fill(unsafe { std::slice::from_raw_parts_mut(self.region.slot_mut(self.seat(self.rank), parity), len) });
        for (i, word) in header.into_iter().enumerate() {
            self.region.header_word(self.seat(self.rank), parity, i).store(word, Ordering::Relaxed);
        }
        self.count(self.rank).publish(next);
        self.published = next;
    }

    /// Waits for the current piece of `peer` without sleeping. Returns whether it arrived.
    pub(super) fn spin_for(&self, peer: usize, spin_limits: SpinLimits) -> bool {
        let SpinLimits { spins, yields } = spin_limits;
        for poll in 0..spins + yields {
            if self.has_published(peer) {
                return true;
            }
            if poll < spins { spin_loop() } else { yield_now() }
        }
        false
    }

    /// Waits for the current piece of `peer` in naps. Before each nap, `find_fault` decides whether `peer` is at
    /// fault.
    ///
    /// # Errors
    /// Fails if the piece will not arrive: its rank has failed or left, or another rank has failed.
    pub(super) fn sleep_for(
        &self,
        peer: usize,
        mut find_fault: impl FnMut() -> Option<RankFault>,
    ) -> Result<(), PeerFailure> {
        loop {
            let seen = self.count(peer).get();
            let rank_check = self.check_ranks();
            // The piece is checked after the ranks: a peer that published it and then failed or left has done its part.
            if self.has_published(peer) {
                return Ok(());
            }
            rank_check?;
            if let Some(fault) = find_fault() {
                let peer = self.in_region(peer);
                self.region.record_first_failure(peer, fault);
                return Err(PeerFailure { peer, fault, why: String::new() });
            }
            self.count(peer).sleep_while(seen, self.nap_millis);
        }
    }

    /// Returns the header of the current piece of `peer`, which has published it.
    pub(super) fn header<const N: usize>(&self, peer: usize) -> [u64; N] {
        std::array::from_fn(|i| self.region.header_word(self.seat(peer), self.parity(), i).load(Ordering::Relaxed))
    }

    /// Returns bytes of the current piece of `peer`, which has published it.
    pub(super) fn bytes(&self, peer: usize, offset: usize, len: usize) -> &[u8] {
        assert!(peer != self.rank && offset + len <= SLOT_BYTES);
        // SAFETY: inside the slot. The peer published this piece (Acquire in has_published) and does not write the slot
        // again before this rank publishes its next piece, which needs &mut self and so ends this borrow.
        unsafe { std::slice::from_raw_parts(self.region.slot(self.seat(peer), self.parity()).add(offset), len) }
    }

    /// Returns which of a rank's two slots has the current piece.
    fn parity(&self) -> usize {
        (self.published & 1) as usize
    }

    /// Returns whether `peer` has published the current piece, and possibly the next one.
    fn has_published(&self, peer: usize) -> bool {
        self.count(peer).get().wrapping_sub(self.published) as i32 >= 0
    }

    /// Returns the number of pieces that `peer` has published.
    fn count(&self, peer: usize) -> PublishedCount<'_> {
        let seat = self.seat(peer);
        PublishedCount { word: self.region.published(seat), sleepers: self.region.sleepers(seat) }
    }

    fn seat(&self, rank: usize) -> usize {
        self.region.seat(self.channel, self.members[rank])
    }

    /// Returns an error if the job cannot continue: a rank has died or given up, or a rank that this piece needs has
    /// left.
    fn check_ranks(&self) -> Result<(), PeerFailure> {
        let needs = |peer: usize| self.members.binary_search(&peer).is_ok_and(|peer| !self.has_published(peer));
        self.region.check_ranks(self.in_region(self.rank), needs)
    }
}
