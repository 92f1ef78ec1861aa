//! Pieces of data that ranks show each other: who writes and reads what, and in which order.
//!
//! ```text
//!   rank 0   write piece k -> publish k -> wait for all k -> read peers' k -> write k+1 -> publish k+1 -> ...
//!   rank 1   write piece k -> publish k -> wait for all k -> read peers' k -> ...
//! ```
//!
//! A piece lies in the even or the odd slot of its rank. Piece k+2 overwrites piece k: that is safe because a rank
//! writes k+2 only after it saw every peer publish k+1, and a peer publishes k+1 only after it has read all of k.
//! So one wait per piece is enough.
//!
//! # Orderings
//!
//! `published` is stored with Release (and stronger) after the piece's data and header, and loaded with Acquire before
//! a peer reads them. The same pair orders a peer's reads of piece k before this rank's writes of piece k+2. Between
//! `published` and `sleepers`, SeqCst keeps a rank from falling asleep as the piece comes that it waits for. What
//! `state` orders stands in [`super::rank_state`]. Nothing else carries an ordering.
//!
//! # Checked with loom
//!
//! `tests/loom` compiles this file and `rank_state.rs` with loom's memory in the place of [`super::region`] and runs them in
//! every order in which their accesses can take effect: two ranks and three pieces, the third of which lies where the
//! first lay. With sleep the threads are interrupted at most four times, with three ranks once. Ranks that give up or
//! leave are run with one and two pieces. Loom finds no race on slots or texts, no wrong byte, no sleep that nobody
//! ends, and no failure that is told wrongly; and it finds what its tests do wrong on purpose, such as a publication
//! before the data or without Release. It does not know time limits, heartbeats and the kernel's futex.

use super::rank_state::{PeerFailure, RankFault, RankState};
use super::region::{SLOT_BYTES, SharedMemoryRegion, sleep_on, spin_loop, wake, yield_now};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How long a sleeping wait goes before it looks at the peers' states: this for up to [`FEW_RANKS`] ranks, and longer
/// the more there are, or many ranks on few cores would do nothing but look.
const NAP_MILLIS: u32 = 20;
const FEW_RANKS: usize = 64;

/// Turns of a wait before the thread sleeps. It spins first, some ten microseconds. Then it lets other threads run in
/// between: one that the awaited rank needs may have been put on this core.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpinLimits {
    pub spins: u32,
    pub yields: u32,
}

/// One rank's pieces, and its view of those of its peers.
pub(super) struct PieceSlots {
    region: Arc<SharedMemoryRegion>,
    rank: usize,
    /// Pieces published so far, modulo 2^32. The last of them is the present one.
    published: u32,
    nap_millis: u32,
}

impl PieceSlots {
    /// The pieces of a rank that has published `published` of them.
    pub(super) fn new(region: Arc<SharedMemoryRegion>, rank: usize, published: u32) -> Self {
        let crowds = region.world_size().div_ceil(FEW_RANKS) as u32;
        Self { region, rank, published, nap_millis: NAP_MILLIS * crowds }
    }

    /// Waits look at the peers' states after naps of this length at most.
    pub(super) fn nap_at_most(&mut self, millis: u32) {
        self.nap_millis = self.nap_millis.min(millis);
    }

    pub(super) fn region(&self) -> &SharedMemoryRegion {
        &self.region
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Pieces published so far, modulo 2^32.
    #[cfg(test)]
    pub(super) fn published(&self) -> u32 {
        self.published
    }

    /// Lets `fill` write the `len` bytes of this rank's next piece, and publishes it with its `header`. A wait for
    /// every peer comes next.
    pub(super) fn publish<const N: usize>(&mut self, header: [u64; N], len: usize, fill: impl FnOnce(&mut [u8])) {
        assert!(len <= SLOT_BYTES, "a piece of {len} bytes");
        let next = self.published.wrapping_add(1);
        let parity = (next & 1) as usize;
        // SAFETY: the slot is this rank's and holds SLOT_BYTES. No peer reads it now: see the module's argument.
        fill(unsafe { std::slice::from_raw_parts_mut(self.region.slot_mut(self.rank, parity), len) });
        for (i, word) in header.into_iter().enumerate() {
            self.region.header_word(self.rank, parity, i).store(word, Ordering::Relaxed);
        }
        let word = self.region.published(self.rank);
        // In the one order of all SeqCst operations either this store comes before the sleeper's look at the word, and
        // it does not sleep, or its count comes before the look at the count here, and it is woken.
        word.store(next, Ordering::SeqCst);
        if self.region.sleepers(self.rank).load(Ordering::SeqCst) > 0 {
            wake(word);
        }
        self.published = next;
    }

    /// Waits for the present piece of `peer` without sleep. Whether it came.
    pub(super) fn spin_for(&self, peer: usize, spin_limits: SpinLimits) -> bool {
        let SpinLimits { spins, yields } = spin_limits;
        for turn in 0..spins + yields {
            if self.has_published(peer) {
                return true;
            }
            if turn < spins { spin_loop() } else { yield_now() }
        }
        false
    }

    /// Waits for the present piece of `peer` in naps. `overdue` says after each whether `peer` is to be blamed.
    ///
    /// # Errors
    /// The piece cannot be waited for: its rank has failed or left, or another has failed.
    pub(super) fn sleep_for(
        &self,
        peer: usize,
        mut overdue: impl FnMut() -> Option<RankFault>,
    ) -> Result<(), PeerFailure> {
        loop {
            let seen = self.region.published(peer).load(Ordering::Acquire);
            let trouble = self.look_at_ranks();
            // In this order: a peer that published and then failed or left has done its part of this piece.
            if self.has_published(peer) {
                return Ok(());
            }
            trouble?;
            if let Some(fault) = overdue() {
                self.region.blame(peer, fault);
                return Err(PeerFailure { peer, fault, why: String::new() });
            }
            self.sleep_until_published(peer, seen);
        }
    }

    /// The header of the present piece of `peer`, which has published it.
    pub(super) fn header<const N: usize>(&self, peer: usize) -> [u64; N] {
        std::array::from_fn(|i| self.region.header_word(peer, self.parity(), i).load(Ordering::Relaxed))
    }

    /// Bytes of the present piece of `peer`, which has published it.
    pub(super) fn bytes(&self, peer: usize, offset: usize, len: usize) -> &[u8] {
        assert!(peer != self.rank && offset + len <= SLOT_BYTES);
        // SAFETY: inside the slot. The peer published this piece (Acquire in has_published) and does not write the
        // slot again before this rank publishes its next piece, which needs &mut self and so ends this borrow.
        unsafe { std::slice::from_raw_parts(self.region.slot(peer, self.parity()).add(offset), len) }
    }

    /// Which of a rank's two slots has the present piece.
    fn parity(&self) -> usize {
        (self.published & 1) as usize
    }

    /// Whether `peer` has published the present piece (or, one ahead, the next one).
    fn has_published(&self, peer: usize) -> bool {
        let published = self.region.published(peer).load(Ordering::Acquire);
        published.wrapping_sub(self.published) as i32 >= 0
    }

    /// Sleeps until `peer` has published more than the `seen` pieces, it has left, or about a nap is over.
    fn sleep_until_published(&self, peer: usize, seen: u32) {
        let (word, sleepers) = (self.region.published(peer), self.region.sleepers(peer));
        sleepers.fetch_add(1, Ordering::SeqCst);
        if word.load(Ordering::SeqCst) == seen {
            sleep_on(word, seen, self.nap_millis);
        }
        sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// An error if the job cannot go on: a rank has died or given up, or one has left that this piece needs.
    fn look_at_ranks(&self) -> Result<(), PeerFailure> {
        let seen = self.look_at_states();
        // The first failure explains all later ones, which are often but its echo. In this order: it was there before
        // any echo that has been seen.
        match self.region.first_failure() {
            Some((peer, fault)) if peer != self.rank => match (fault, self.region.state(peer)) {
                (RankFault::Left | RankFault::Silent | RankFault::Late, _) => {
                    Err(PeerFailure { peer, fault, why: String::new() })
                }
                (_, RankState::Dead(why)) => Err(PeerFailure { peer, fault: RankFault::Died, why }),
                (_, RankState::Aborted(why)) => Err(PeerFailure { peer, fault: RankFault::GaveUp, why }),
                // Recorded a moment before its state. The text is there already.
                (RankFault::Died | RankFault::GaveUp, _) => {
                    Err(PeerFailure { peer, fault, why: self.region.explained(peer, fault) })
                }
            },
            _ => seen,
        }
    }

    /// The same by the states of the ranks alone.
    fn look_at_states(&self) -> Result<(), PeerFailure> {
        for peer in 0..self.region.world_size() {
            match self.region.state(peer) {
                RankState::Dead(why) => return Err(PeerFailure { peer, fault: RankFault::Died, why }),
                RankState::Aborted(why) => return Err(PeerFailure { peer, fault: RankFault::GaveUp, why }),
                // It publishes nothing more.
                RankState::Finished if !self.has_published(peer) => {
                    self.region.blame(peer, RankFault::Left);
                    return Err(PeerFailure { peer, fault: RankFault::Left, why: String::new() });
                }
                RankState::Finished | RankState::Running | RankState::Absent => {}
            }
        }
        Ok(())
    }
}
