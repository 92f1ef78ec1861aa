//! Pieces of data that ranks show each other: which rank writes and reads what, and in which order.
//!
//! ```text
//!   rank 0   write piece k -> publish k -> wait for all k -> read peers' k -> write k+1 -> publish k+1 -> ...
//!   rank 1   write piece k -> publish k -> wait for all k -> read peers' k -> ...
//! ```
//!
//! A piece is in the even or the odd slot of its rank. Piece k+2 overwrites piece k. This is safe because a rank
//! writes k+2 only after it saw every peer publish k+1, and a peer publishes k+1 only after it has read all of k. One
//! wait per piece is therefore enough.
//!
//! # Orderings
//!
//! `published` is stored with Release (and stronger) after the piece's data and header, and loaded with Acquire before
//! a peer reads them. The same pair orders a peer's reads of piece k before this rank's writes of piece k+2. Between
//! `published` and `sleepers`, SeqCst keeps a rank from falling asleep just as the piece that it awaits arrives.
//! [`super::rank_state`] describes what `state` orders. Nothing else carries an ordering.
//!
//! # Checked with loom
//!
//! `tests/loom` compiles this file and `rank_state.rs` with loom's memory in place of [`super::region`] and runs them
//! in every order in which their accesses can take effect: two ranks and three pieces, the third of which uses the slot
//! of the first. If ranks sleep, threads are interrupted at most four times, and with three ranks once. Ranks that give up
//! or leave are run with one and two pieces. Loom finds no race on slots or texts, no wrong byte, no sleep that nothing
//! ends, and no failure that is reported wrongly; and it finds the deliberate mistakes of its tests, such as a
//! publication before the data or without Release. It does not cover time limits, heartbeats or the kernel's futex.

use super::rank_state::{PeerFailure, RankFault, RankState};
use super::region::{SLOT_BYTES, SharedMemoryRegion, sleep_on, spin_loop, wake, yield_now};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How long a waiting rank sleeps before it checks the peers' states: this long for up to [`FEW_RANKS`] ranks, and
/// longer for more ranks, because many ranks on few cores would otherwise do nothing but check.
const NAP_MILLIS: u32 = 20;
const FEW_RANKS: usize = 64;

/// The number of turns of a wait before the thread sleeps. It spins first, for some ten microseconds. Then it yields to
/// other threads between checks: the thread of the awaited rank may be on this core.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpinLimits {
    pub spins: u32,
    pub yields: u32,
}

/// One rank's pieces, and its view of its peers' pieces.
pub(super) struct PieceSlots {
    region: Arc<SharedMemoryRegion>,
    rank: usize,
    /// The number of pieces published so far, modulo 2^32. The last of them is the current one.
    published: u32,
    nap_millis: u32,
}

impl PieceSlots {
    /// Returns the pieces of a rank that has published `published` of them.
    pub(super) fn new(region: Arc<SharedMemoryRegion>, rank: usize, published: u32) -> Self {
        let crowds = region.world_size().div_ceil(FEW_RANKS) as u32;
        Self { region, rank, published, nap_millis: NAP_MILLIS * crowds }
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
        // SAFETY: the slot is this rank's and holds SLOT_BYTES. No peer reads it now: see the module's documentation.
        fill(unsafe { std::slice::from_raw_parts_mut(self.region.slot_mut(self.rank, parity), len) });
        for (i, word) in header.into_iter().enumerate() {
            self.region.header_word(self.rank, parity, i).store(word, Ordering::Relaxed);
        }
        let word = self.region.published(self.rank);
        // In the total order of all SeqCst operations either this store comes before the sleeper's check of the word,
        // and it does not sleep, or its count comes before the check of the count here, and it is woken.
        word.store(next, Ordering::SeqCst);
        if self.region.sleepers(self.rank).load(Ordering::SeqCst) > 0 {
            wake(word);
        }
        self.published = next;
    }

    /// Waits for the current piece of `peer` without sleep. Returns whether it arrived.
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

    /// Waits for the current piece of `peer` in naps. After each nap `overdue` decides whether `peer` is to be blamed.
    ///
    /// # Errors
    /// The piece will not arrive: its rank has failed or left, or another rank has failed.
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
                self.region.record_first_failure(peer, fault);
                return Err(PeerFailure { peer, fault, why: String::new() });
            }
            self.sleep_until_published(peer, seen);
        }
    }

    /// Returns the header of the current piece of `peer`, which has published it.
    pub(super) fn header<const N: usize>(&self, peer: usize) -> [u64; N] {
        std::array::from_fn(|i| self.region.header_word(peer, self.parity(), i).load(Ordering::Relaxed))
    }

    /// Returns bytes of the current piece of `peer`, which has published it.
    pub(super) fn bytes(&self, peer: usize, offset: usize, len: usize) -> &[u8] {
        assert!(peer != self.rank && offset + len <= SLOT_BYTES);
        // SAFETY: inside the slot. The peer published this piece (Acquire in has_published) and does not write the slot
        // again before this rank publishes its next piece, which needs &mut self and so ends this borrow.
        unsafe { std::slice::from_raw_parts(self.region.slot(peer, self.parity()).add(offset), len) }
    }

    /// Returns which of a rank's two slots has the current piece.
    fn parity(&self) -> usize {
        (self.published & 1) as usize
    }

    /// Returns whether `peer` has published the current piece (or, one ahead, the next one).
    fn has_published(&self, peer: usize) -> bool {
        let published = self.region.published(peer).load(Ordering::Acquire);
        published.wrapping_sub(self.published) as i32 >= 0
    }

    /// Sleeps until `peer` has published more than `seen` pieces or has left, or about one nap is over.
    fn sleep_until_published(&self, peer: usize, seen: u32) {
        let (word, sleepers) = (self.region.published(peer), self.region.sleepers(peer));
        sleepers.fetch_add(1, Ordering::SeqCst);
        if word.load(Ordering::SeqCst) == seen {
            sleep_on(word, seen, self.nap_millis);
        }
        sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns an error if the job cannot continue: a rank has died or given up, or a rank that this piece needs has
    /// left.
    fn look_at_ranks(&self) -> Result<(), PeerFailure> {
        let seen = self.look_at_states();
        // The first failure explains all later ones, which are often only its consequences. It is read after the
        // states, because it was recorded before any consequence that they show.
        match self.region.first_failure() {
            Some((peer, fault)) if peer != self.rank => match (fault, self.region.state(peer)) {
                (RankFault::Left | RankFault::Silent | RankFault::Late, _) => {
                    Err(PeerFailure { peer, fault, why: String::new() })
                }
                (_, RankState::Dead(why)) => Err(PeerFailure { peer, fault: RankFault::Died, why }),
                (_, RankState::Aborted(why)) => Err(PeerFailure { peer, fault: RankFault::GaveUp, why }),
                // The failure is recorded a moment before the state. The text is already available.
                (RankFault::Died | RankFault::GaveUp, _) => {
                    Err(PeerFailure { peer, fault, why: self.region.explained(peer, fault) })
                }
            },
            _ => seen,
        }
    }

    /// Does the same check with only the states of the ranks.
    fn look_at_states(&self) -> Result<(), PeerFailure> {
        for peer in 0..self.region.world_size() {
            match self.region.state(peer) {
                RankState::Dead(why) => return Err(PeerFailure { peer, fault: RankFault::Died, why }),
                RankState::Aborted(why) => return Err(PeerFailure { peer, fault: RankFault::GaveUp, why }),
                // A rank that has left publishes nothing more.
                RankState::Finished if !self.has_published(peer) => {
                    self.region.record_first_failure(peer, RankFault::Left);
                    return Err(PeerFailure { peer, fault: RankFault::Left, why: String::new() });
                }
                RankState::Finished | RankState::Running | RankState::Absent => {}
            }
        }
        Ok(())
    }
}
