//! The primitive under every collective: each rank shows the others one piece of data.
//!
//! [`super::piece_slots`] describes how pieces pass through shared memory. This file adds a fingerprint of
//! the collective to each piece, and a limit to each wait.
//!
//! A wait ends with an error when a peer has died, given up or left, when its heartbeat stops, or when the time limit
//! is exceeded. A wait never hangs. Everything that can be completed is completed: a peer's failure counts only for a
//! piece that it has not published. Every rank reports the failure that came first.

use super::piece_slots::{PieceSlots, SpinLimits};
use super::rank_state::{PeerFailure, RankFault};
use super::region::SharedMemoryRegion;
use crate::comm::collective_kind::CollectiveKind;
use crate::comm::fingerprint::CollectiveFingerprint;
use crate::comm::rank_env::BOUND;
use crate::comm::stats::counters::ReceivedBytes;
use crate::comm::wire::format::WireFormat;
use crate::error::CommError;
use candle_core::DType;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The number of words of a piece's header: the fingerprint, and the engine call, which is used only in error messages.
const HEADER_WORDS: usize = CollectiveFingerprint::WORDS + 1;
/// The spin limits of the comm thread, which competes for CPU time with the computing thread.
const COMM_THREAD_SPINS: SpinLimits = SpinLimits { spins: 500, yields: 20 };
/// The spin limits of a thread that has nothing else to do.
const IDLE_SPINS: SpinLimits = SpinLimits { spins: 500, yields: 500 };
/// The spin limits if ranks share cores: the awaited rank may need this core.
const SHARED_CORE_SPINS: SpinLimits = SpinLimits { spins: 20, yields: 20 };
/// The length of heartbeat silence after which a rank counts as dead. A heartbeat beats four times a second.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(8);
/// The maximum time counted for one turn of a wait (a nap and a check). See [`PeerWaitTimer`].
const MAX_COUNTED_TURN: Duration = Duration::from_secs(1);

/// The kind of thread that runs a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum CollectiveThreadKind {
    /// The comm thread of the rank.
    CommThread,
    /// The thread that waits for the result.
    Waiter,
}

/// One rank's side of the region.
pub(in crate::comm) struct ShmExchange {
    pieces: PieceSlots,
    timeout: Duration,
    /// The number of the region's rank 0 in the job, for messages.
    first: usize,
    /// The number of collectives begun so far.
    sequence: u64,
    current: Option<CollectiveFingerprint>,
    /// The engine call in which the next collective was launched: see [`crate::comm::engine_call`].
    call: u64,
    /// The number of bytes read from peers in the current collective.
    wire_bytes: Cell<usize>,
    /// The size of these bytes in memory, without any encoding.
    exact_bytes: Cell<usize>,
    /// A function to call between naps while this rank waits.
    wait_callback: Option<Box<dyn Fn() + Send>>,
    /// Whether each rank has its own core.
    has_own_cores: bool,
    spin_limits: SpinLimits,
}

impl ShmExchange {
    /// Returns the side of `rank` in exchanges between all ranks of the region.
    pub(in crate::comm) fn new(region: Arc<SharedMemoryRegion>, rank: usize, timeout: Duration) -> Self {
        Self::with(PieceSlots::new(region, rank, 0), timeout)
    }

    /// Returns the side of the rank at position `rank` of the group `members`, which uses `channel`.
    pub(in crate::comm) fn of_group(
        region: Arc<SharedMemoryRegion>,
        channel: usize,
        members: Vec<usize>,
        rank: usize,
        timeout: Duration,
    ) -> Self {
        Self::with(PieceSlots::of_group(region, channel, members, rank), timeout)
    }

    fn with(pieces: PieceSlots, timeout: Duration) -> Self {
        let ranks = pieces.region().world_size();
        let has_own_cores = std::env::var_os(BOUND).is_some()
            || std::thread::available_parallelism().is_ok_and(|cores| cores.get() >= ranks);
        Self {
            pieces,
            timeout,
            first: 0,
            sequence: 0,
            current: None,
            call: 0,
            wire_bytes: Cell::new(0),
            exact_bytes: Cell::new(0),
            wait_callback: None,
            has_own_cores,
            spin_limits: SHARED_CORE_SPINS,
        }
    }

    /// Sets the number that the region's rank 0 has in the job.
    pub(in crate::comm) fn numbered_from(self, first: usize) -> Self {
        Self { first, ..self }
    }

    /// Sets a function that is called about once a millisecond during waits.
    pub(in crate::comm) fn with_wait_callback(mut self, wait_callback: impl Fn() + Send + 'static) -> Self {
        self.pieces.nap_at_most(1);
        Self { wait_callback: Some(Box::new(wait_callback)), ..self }
    }

    pub(in crate::comm) fn rank(&self) -> usize {
        self.pieces.rank()
    }

    pub(in crate::comm) fn size(&self) -> usize {
        self.pieces.size()
    }

    /// Returns the number that a rank of this group has in the job.
    fn in_job(&self, rank: usize) -> usize {
        self.first + self.pieces.in_region(rank)
    }

    /// Sets the thread that runs the next collective: the one that needs its result, or the comm thread, which runs
    /// alongside a thread that computes.
    pub(in crate::comm) fn set_runner(&mut self, runner: CollectiveThreadKind) {
        self.spin_limits = match (self.has_own_cores, runner) {
            (false, _) => SHARED_CORE_SPINS,
            (true, CollectiveThreadKind::CommThread) => COMM_THREAD_SPINS,
            (true, CollectiveThreadKind::Waiter) => IDLE_SPINS,
        };
    }

    /// Returns how long waits of the current collective spin before they sleep.
    pub(in crate::comm) fn spin_limits(&self) -> SpinLimits {
        self.spin_limits
    }

    /// Sets the engine call in which the following collectives were launched.
    pub(in crate::comm) fn set_engine_call(&mut self, call: u64) {
        self.call = call;
    }

    /// Begins a collective; its fingerprint is sent with every piece.
    pub(in crate::comm) fn begin(
        &mut self,
        kind: CollectiveKind,
        wire: WireFormat,
        dtype: DType,
        elements: usize,
        tag: u64,
    ) {
        self.sequence += 1;
        self.current = Some(CollectiveFingerprint::new(self.sequence, kind, wire, dtype, elements, tag));
        self.wire_bytes.set(0);
        self.exact_bytes.set(0);
    }

    /// Returns the bytes read from peers since [`ShmExchange::begin`], and their size in memory.
    pub(in crate::comm) fn bytes(&self) -> ReceivedBytes {
        ReceivedBytes { wire: self.wire_bytes.get(), exact: self.exact_bytes.get(), between_hosts: 0 }
    }

    /// Lets `fill` write this rank's next piece (at most SLOT_BYTES) and publishes it. A call to
    /// [`ShmExchange::await_peers`] must follow.
    pub(in crate::comm) fn publish(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) {
        let mut header = [self.call; HEADER_WORDS];
        header[..CollectiveFingerprint::WORDS].copy_from_slice(&self.fingerprint().words());
        self.pieces.publish(header, len, fill);
    }

    /// Waits until every peer has published its piece. Peers' pieces can be read with [`ShmExchange::peer`] until this
    /// rank publishes the next one.
    pub(in crate::comm) fn await_peers(&mut self) -> Result<(), CommError> {
        let fingerprint = self.fingerprint();
        let mut clock = None;
        // The last rank is awaited first: ranks mostly arrive in order, and a rank that waits for the last one sleeps
        // once instead of once for each.
        for peer in (0..self.size()).rev().filter(|r| *r != self.rank()) {
            self.wait_for(peer, &mut clock)?;
            self.compare(peer, &fingerprint)?;
        }
        Ok(())
    }

    fn fingerprint(&self) -> CollectiveFingerprint {
        self.current.expect("a piece belongs to a collective that was begun")
    }

    /// Publishes a piece and waits for the peers, with nothing in between.
    pub(in crate::comm) fn piece(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> Result<(), CommError> {
        self.publish(len, fill);
        self.await_peers()
    }

    /// Returns bytes of the current piece of `peer` (not of this rank).
    pub(in crate::comm) fn peer(&self, peer: usize, offset: usize, len: usize) -> &[u8] {
        self.coded(peer, offset, len, len)
    }

    /// Returns `len` bytes of the current piece of `peer`, which are the encoding of `exact` bytes in memory.
    pub(in crate::comm) fn coded(&self, peer: usize, offset: usize, len: usize, exact: usize) -> &[u8] {
        self.wire_bytes.set(self.wire_bytes.get() + len);
        self.exact_bytes.set(self.exact_bytes.get() + exact);
        self.pieces.bytes(peer, offset, len)
    }

    /// Waits for the current piece of `peer`. `clock` keeps running across all peers of one piece.
    fn wait_for(&self, peer: usize, clock: &mut Option<PeerWaitTimer>) -> Result<(), CommError> {
        if self.pieces.spin_for(peer, self.spin_limits) {
            return Ok(());
        }
        let beat = || self.pieces.region().heartbeat(self.pieces.in_region(peer)).load(Ordering::Relaxed);
        let clock = clock.get_or_insert_with(|| PeerWaitTimer::new(Instant::now()));
        clock.watch(beat());
        let find_fault = || {
            if let Some(wait_callback) = &self.wait_callback {
                wait_callback();
            }
            clock.turn(Instant::now(), beat());
            clock.fault(self.timeout)
        };
        self.pieces.sleep_for(peer, find_fault).map_err(|failure| self.error(failure))
    }

    /// Returns the failure as this rank reports it.
    fn error(&self, failure: PeerFailure) -> CommError {
        failure.error(self.first, self.pieces.in_region(self.rank()), self.op(), self.timeout)
    }

    /// Returns the name of the current collective, for messages.
    fn op(&self) -> String {
        self.current.map(|fingerprint| fingerprint.to_string()).unwrap_or_default()
    }

    fn compare(&self, peer: usize, mine: &CollectiveFingerprint) -> Result<(), CommError> {
        let [words @ .., call] = self.pieces.header::<HEADER_WORDS>(peer);
        let theirs = CollectiveFingerprint::from_words(words);
        if theirs == *mine {
            return Ok(());
        }
        let (here, there) = (mine.within(self.call), theirs.within(call));
        Err(CommError::Diverged { rank: self.in_job(self.rank()), here, peer: self.in_job(peer), there })
    }
}

impl PeerFailure {
    /// Returns the failure as reported by rank `rank` of the region, which waits in `op` for at most `limit`. The
    /// region's rank 0 is rank `first` of the job.
    pub(in crate::comm) fn error(self, first: usize, rank: usize, op: String, limit: Duration) -> CommError {
        let Self { peer, fault, why } = self;
        let (rank, peer) = (first + rank, first + peer);
        match fault {
            RankFault::Died => CommError::RankDied { rank, peer, why, op },
            RankFault::GaveUp => CommError::RankAborted { rank, peer, why, op },
            RankFault::Left => CommError::RankLeft { rank, peer, op },
            RankFault::Silent => CommError::HeartbeatLost { rank, peer, op, seconds: HEARTBEAT_TIMEOUT.as_secs() },
            RankFault::Late => CommError::Timeout { rank, peer, op, limit },
        }
    }
}

/// The duration of a wait, and of the silence of the awaited heartbeat.
///
/// In both, a turn of the waiting loop counts for at most [`MAX_COUNTED_TURN`], so that the time for which the complete
/// job was suspended (Ctrl-Z) does not count.
pub(in crate::comm) struct PeerWaitTimer {
    last_turn: Instant,
    waited: Duration,
    beat: u64,
    silence: Duration,
}

impl PeerWaitTimer {
    pub(in crate::comm) fn new(now: Instant) -> Self {
        Self { last_turn: now, waited: Duration::ZERO, beat: 0, silence: Duration::ZERO }
    }

    /// Switches to another rank's heartbeat.
    pub(in crate::comm) fn watch(&mut self, beat: u64) {
        (self.beat, self.silence) = (beat, Duration::ZERO);
    }

    /// Counts a turn of the loop. A beat of 0 belongs to a rank without a heartbeat: a thread, or a rank that has not
    /// started yet.
    pub(in crate::comm) fn turn(&mut self, now: Instant, beat: u64) {
        let passed = now.duration_since(self.last_turn).min(MAX_COUNTED_TURN);
        self.last_turn = now;
        self.waited += passed;
        self.silence = if beat == self.beat && beat != 0 { self.silence + passed } else { Duration::ZERO };
        self.beat = beat;
    }

    /// Returns the fault of the awaited rank, if it has been silent for too long or the wait exceeds `timeout`.
    pub(in crate::comm) fn fault(&self, timeout: Duration) -> Option<RankFault> {
        if self.silence > HEARTBEAT_TIMEOUT {
            Some(RankFault::Silent)
        } else if self.waited > timeout {
            Some(RankFault::Late)
        } else {
            None
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn seconds(clock: &PeerWaitTimer) -> (f64, f64) {
        (clock.waited.as_secs_f64(), clock.silence.as_secs_f64())
    }

    #[test]
    fn a_wait_counts_its_turns_and_silence_ends_with_a_beat() {
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let mut clock = PeerWaitTimer::new(start);
        clock.watch(7);
        clock.turn(at(0.5), 7);
        clock.turn(at(1.0), 7);
        assert_eq!(seconds(&clock), (1.0, 1.0));
        clock.turn(at(1.5), 8);
        assert_eq!(seconds(&clock), (1.5, 0.0));
        clock.turn(at(2.0), 8);
        clock.watch(3);
        assert_eq!(seconds(&clock), (2.0, 0.0), "another peer, the same piece");
        clock.turn(at(2.5), 0);
        clock.turn(at(3.0), 0);
        assert_eq!(seconds(&clock), (3.0, 0.0), "no heartbeat yet");
    }

    #[test]
    fn an_hour_in_which_the_job_was_stopped_does_not_count() {
        let start = Instant::now();
        let mut clock = PeerWaitTimer::new(start);
        clock.watch(7);
        clock.turn(start + Duration::from_secs(3600), 7);
        assert_eq!(seconds(&clock), (1.0, 1.0));
    }

    #[test]
    fn the_count_of_pieces_may_wrap_around() {
        let world = 3;
        let region = Arc::new(SharedMemoryRegion::anonymous(world).unwrap());
        let initial_count = u32::MAX - 4;
        (0..world).for_each(|r| region.published(region.seat(0, r)).store(initial_count, Ordering::Relaxed));
        std::thread::scope(|scope| {
            for rank in 0..world {
                let region = region.clone();
                scope.spawn(move || {
                    region.enter(rank).unwrap();
                    let mut exchange = ShmExchange::new(region.clone(), rank, Duration::from_secs(10));
                    exchange.pieces = PieceSlots::new(region.clone(), rank, initial_count);
                    for round in 0u8..10 {
                        exchange.begin(CollectiveKind::Barrier, WireFormat::Exact, DType::U8, 1, 0);
                        exchange.piece(1, |slot| slot[0] = 10 * rank as u8 + round).unwrap();
                        for peer in (0..world).filter(|r| *r != rank) {
                            assert_eq!(exchange.peer(peer, 0, 1), [10 * peer as u8 + round]);
                        }
                    }
                    assert_eq!(exchange.pieces.published(), 5);
                    region.finish(rank);
                });
            }
        });
    }
}
