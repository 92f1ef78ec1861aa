//! The one primitive under every collective: each rank shows the others one piece of data.
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
//! A wait ends with an error when a peer has died, given up or left, when its heartbeat stops, or when the time
//! limit is over. It never hangs.

use super::fingerprint::{Fingerprint, Kind};
use super::shm::{RankState, Region, SLOT_BYTES, sleep_on, wake};
use crate::error::CommError;
use candle_core::DType;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Turns of a spinning wait before the thread sleeps; a few microseconds.
const SPINS: u32 = 2_000;
/// How long a sleeping wait goes before it looks at the peers' states.
const NAP_MILLIS: u32 = 20;
/// Silence of a heartbeat, which beats four times a second, that counts as death.
pub(super) const HEARTBEAT_LIMIT: Duration = Duration::from_secs(8);

/// One rank's side of the region.
pub(super) struct Exchange {
    region: Arc<Region>,
    rank: usize,
    timeout: Duration,
    /// Pieces published so far.
    pieces: u32,
    /// Collectives begun so far.
    sequence: u64,
    current: Option<Fingerprint>,
    /// Bytes read from peers in the current collective.
    wire_bytes: usize,
}

impl Exchange {
    pub(super) fn new(region: Arc<Region>, rank: usize, timeout: Duration) -> Self {
        Self { region, rank, timeout, pieces: 0, sequence: 0, current: None, wire_bytes: 0 }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn size(&self) -> usize {
        self.region.world_size()
    }

    /// Begins a collective; its fingerprint goes out with every piece.
    pub(super) fn begin(&mut self, kind: Kind, dtype: DType, elements: usize, tag: u64) {
        self.sequence += 1;
        self.current = Some(Fingerprint::new(self.sequence, kind, dtype, elements, tag));
        self.wire_bytes = 0;
    }

    /// Bytes read from peers since [`Exchange::begin`].
    pub(super) fn wire_bytes(&self) -> usize {
        self.wire_bytes
    }

    /// Lets `fill` write this rank's next piece (at most SLOT_BYTES), publishes it, and waits until every peer has
    /// published its own. Peers' pieces can be read with [`Exchange::peer`] until the next call.
    pub(super) fn piece(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> Result<(), CommError> {
        assert!(len <= SLOT_BYTES, "a piece of {len} bytes");
        let fingerprint = self.current.expect("a piece belongs to a collective that was begun");
        let next = self.pieces.wrapping_add(1);
        let parity = (next & 1) as usize;
        // SAFETY: the slot is this rank's and holds SLOT_BYTES. No peer reads it now: see the module's argument.
        fill(unsafe { std::slice::from_raw_parts_mut(self.region.slot(self.rank, parity), len) });
        for (i, word) in fingerprint.words().into_iter().enumerate() {
            self.region.fingerprint_word(self.rank, parity, i).store(word, Ordering::Relaxed);
        }
        let word = self.region.published(self.rank);
        word.store(next, Ordering::Release);
        wake(word);
        self.pieces = next;
        for peer in (0..self.size()).filter(|r| *r != self.rank) {
            self.wait_for(peer, next, &fingerprint)?;
            self.compare(peer, parity, &fingerprint)?;
        }
        Ok(())
    }

    /// Bytes of the current piece of `peer` (not of this rank).
    pub(super) fn peer(&mut self, peer: usize, offset: usize, len: usize) -> &[u8] {
        assert!(peer != self.rank && offset + len <= SLOT_BYTES);
        self.wire_bytes += len;
        let parity = (self.pieces & 1) as usize;
        // SAFETY: inside the slot. The peer published this piece (Acquire in wait_for) and does not write the slot
        // again before this rank publishes its next piece, which needs &mut self and so ends this borrow.
        unsafe { std::slice::from_raw_parts(self.region.slot(peer, parity).add(offset), len) }
    }

    fn wait_for(&self, peer: usize, target: u32, fingerprint: &Fingerprint) -> Result<(), CommError> {
        let word = self.region.published(peer);
        let reached = |seen: u32| seen.wrapping_sub(target) as i32 >= 0;
        for _ in 0..SPINS {
            if reached(word.load(Ordering::Acquire)) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let start = Instant::now();
        let mut beat = (self.region.heartbeat(peer).load(Ordering::Relaxed), start);
        loop {
            let seen = word.load(Ordering::Acquire);
            if reached(seen) {
                return Ok(());
            }
            self.look_at_peers(peer, fingerprint)?;
            // The peer may have published and left between the two looks.
            if reached(word.load(Ordering::Acquire)) {
                return Ok(());
            }
            let now = self.region.heartbeat(peer).load(Ordering::Relaxed);
            if now != beat.0 {
                beat = (now, Instant::now());
            }
            let (op, waited) = (fingerprint.to_string(), start.elapsed());
            if now != 0 && beat.1.elapsed() > HEARTBEAT_LIMIT {
                return Err(CommError::HeartbeatLost { rank: self.rank, peer, op, seconds: HEARTBEAT_LIMIT.as_secs() });
            }
            if waited > self.timeout {
                return Err(CommError::Timeout { rank: self.rank, peer, op, limit: self.timeout });
            }
            sleep_on(word, seen, NAP_MILLIS);
        }
    }

    /// An error if the job cannot go on: a peer is dead or gave up, the awaited one has left, or this rank gave up.
    fn look_at_peers(&self, awaited: usize, fingerprint: &Fingerprint) -> Result<(), CommError> {
        let (rank, op) = (self.rank, fingerprint.to_string());
        for peer in 0..self.size() {
            match self.region.state(peer) {
                RankState::Dead(why) => return Err(CommError::RankDied { rank, peer, why, op }),
                RankState::Aborted(why) => return Err(CommError::RankAborted { rank, peer, why, op }),
                RankState::Finished if peer == awaited => {
                    // It may have published its last piece just before.
                    let last = self.region.published(peer).load(Ordering::Acquire);
                    if (last.wrapping_sub(self.pieces) as i32) < 0 {
                        return Err(CommError::RankLeft { rank, peer, op });
                    }
                }
                RankState::Finished | RankState::Running | RankState::Absent => {}
            }
        }
        Ok(())
    }

    fn compare(&self, peer: usize, parity: usize, mine: &Fingerprint) -> Result<(), CommError> {
        let words = std::array::from_fn(|i| self.region.fingerprint_word(peer, parity, i).load(Ordering::Relaxed));
        let theirs = Fingerprint::from_words(words);
        if theirs == *mine {
            return Ok(());
        }
        Err(CommError::Diverged { rank: self.rank, here: mine.to_string(), peer, there: theirs.to_string() })
    }
}
