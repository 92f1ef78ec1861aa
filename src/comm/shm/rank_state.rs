//! The state of each rank in the job, and the failure that came first.
//!
//! # Orderings
//!
//! `state` is stored with Release after the text that explains it, and loaded with Acquire before the text is read. The
//! first failure is set after the text and before `state`, in the same way. The consequences of a failure, which follow
//! from that state, therefore cannot be taken for the first failure, and a rank that finds the first failure can read
//! its text. Loom checks both: see [`super::piece_slots`].

use super::region::{CHANNELS, FailureTextKind, SharedMemoryRegion, TEXT_BYTES, wake};
use std::sync::atomic::Ordering;

/// The state of a rank in the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RankState {
    /// The rank has not opened the region yet.
    Absent,
    /// The rank has joined the job.
    Running,
    /// The rank has left without an error.
    Finished,
    /// The rank gave up, for the reason in this text.
    Aborted(String),
    /// The rank's process ended abnormally. The text is the cause of death.
    Dead(String),
}

/// The fault of the first rank to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(hidden)]
pub enum RankFault {
    /// The rank's process ended abnormally.
    Died = 1,
    /// The rank gave up after its own error.
    GaveUp = 2,
    /// The rank left without an error while others needed it.
    Left = 3,
    /// The rank's heartbeat stopped.
    Silent = 4,
    /// The rank was alive, but others waited for it longer than their limit.
    Late = 5,
}

impl RankFault {
    const ALL: [Self; 5] = [Self::Died, Self::GaveUp, Self::Left, Self::Silent, Self::Late];
}

/// The reason why a wait for a peer's piece of data ended before the piece arrived.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PeerFailure {
    /// The rank to blame.
    pub peer: usize,
    pub fault: RankFault,
    /// The text of a rank that died or gave up.
    pub why: String,
}

const ABSENT: u32 = 0;
const RUNNING: u32 = 1;
const FINISHED: u32 = 2;
const ABORTED: u32 = 3;
const DEAD: u32 = 4;

impl SharedMemoryRegion {
    /// Records that the process of `rank` has ended abnormally. Called by the launcher or, if there is none, by the
    /// rank whose call to `claims_cause` returned true. Every waiting rank returns an error with `why`.
    pub fn mark_dead(&self, rank: usize, why: &str) {
        self.write_text(rank, FailureTextKind::Cause, why);
        self.record_first_failure(rank, RankFault::Died);
        self.leave(rank, DEAD);
    }

    /// Records that the process of `rank` has ended with exit code 0. Called by the launcher.
    pub fn mark_left(&self, rank: usize) {
        self.leave(rank, FINISHED);
    }

    /// Changes the state from absent to running. The error is the state that the rank already has.
    pub(crate) fn start(&self, rank: usize) -> Result<(), RankState> {
        let exchange = self.state_word(rank).compare_exchange(ABSENT, RUNNING, Ordering::AcqRel, Ordering::Acquire);
        exchange.map(drop).map_err(|_| self.state(rank))
    }

    pub(crate) fn finish(&self, rank: usize) {
        self.leave(rank, FINISHED);
    }

    /// Records that `rank` gives up, and why. Called once per rank, because others may read the text from then on.
    pub(crate) fn abort(&self, rank: usize, why: &str) {
        self.write_text(rank, FailureTextKind::AbortReason, why);
        if matches!(self.state(rank), RankState::Absent | RankState::Running) {
            self.record_first_failure(rank, RankFault::GaveUp);
        }
        self.leave(rank, ABORTED);
    }

    /// Records the first failure of the job; later ones change nothing.
    pub(super) fn record_first_failure(&self, rank: usize, fault: RankFault) {
        let value = (rank as u64 + 1) << 8 | fault as u64;
        let _ = self.first_failure_word().compare_exchange(0, value, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Returns the failure from which all others follow, if there is one: the rank and its fault.
    #[doc(hidden)]
    pub fn first_failure(&self) -> Option<(usize, RankFault)> {
        let value = self.first_failure_word().load(Ordering::Acquire);
        let fault = RankFault::ALL.into_iter().find(|fault| *fault as u64 == value & 0xff)?;
        let rank = (value >> 8).checked_sub(1)? as usize;
        (rank < self.world_size()).then_some((rank, fault))
    }

    /// Returns the first failure of the job if it is that of a rank other than `rank`.
    pub(crate) fn failure_of_other(&self, rank: usize) -> Option<PeerFailure> {
        let (peer, fault) = self.first_failure().filter(|(peer, _)| *peer != rank)?;
        Some(PeerFailure { peer, fault, why: self.failure_text(peer, fault) })
    }

    /// Returns the text of the first failure, which was written before the failure was recorded.
    pub(crate) fn failure_text(&self, rank: usize, fault: RankFault) -> String {
        self.read_text(
            rank,
            if fault == RankFault::Died { FailureTextKind::Cause } else { FailureTextKind::AbortReason },
        )
    }

    /// Returns the reason that `rank` gave for giving up.
    #[doc(hidden)]
    pub fn abort_reason(&self, rank: usize) -> Option<String> {
        match self.state(rank) {
            RankState::Aborted(why) => Some(why),
            _ => None,
        }
    }

    pub(crate) fn state(&self, rank: usize) -> RankState {
        match self.state_word(rank).load(Ordering::Acquire) {
            ABSENT => RankState::Absent,
            RUNNING => RankState::Running,
            FINISHED => RankState::Finished,
            ABORTED => RankState::Aborted(self.read_text(rank, FailureTextKind::AbortReason)),
            DEAD => RankState::Dead(self.read_text(rank, FailureTextKind::Cause)),
            other => RankState::Aborted(format!("it wrote the unknown state {other}")),
        }
    }

    /// Changes the state of a rank that is absent or running to `state`; later calls do not change it again. Wakes all
    /// threads that wait for the rank.
    fn leave(&self, rank: usize, state: u32) {
        let new_state = |now| (now <= RUNNING).then_some(state);
        let _ = self.state_word(rank).fetch_update(Ordering::AcqRel, Ordering::Acquire, new_state);
        (0..CHANNELS).for_each(|channel| wake(self.published(self.seat(channel, rank))));
    }

    /// Returns an error if `rank` cannot continue: any rank has died or given up, or one that it still `needs` has
    /// left.
    pub(super) fn check_ranks(&self, rank: usize, needs: impl Fn(usize) -> bool) -> Result<(), PeerFailure> {
        let state_check = self.check_states(needs);
        // The first failure explains all later ones, which are often only its consequences. It is read after the
        // states, because it was recorded before any consequence that has been seen.
        match self.first_failure() {
            Some((peer, fault)) if peer != rank => match (fault, self.state(peer)) {
                (RankFault::Left | RankFault::Silent | RankFault::Late, _) => {
                    Err(PeerFailure { peer, fault, why: String::new() })
                }
                (_, RankState::Dead(why)) => Err(PeerFailure { peer, fault: RankFault::Died, why }),
                (_, RankState::Aborted(why)) => Err(PeerFailure { peer, fault: RankFault::GaveUp, why }),
                // The failure is recorded a moment before the state. The text is already available.
                (RankFault::Died | RankFault::GaveUp, _) => {
                    Err(PeerFailure { peer, fault, why: self.failure_text(peer, fault) })
                }
            },
            _ => state_check,
        }
    }

    /// Performs the check of [`Self::check_ranks`], but considers only the states of the ranks, not the first failure.
    fn check_states(&self, needs: impl Fn(usize) -> bool) -> Result<(), PeerFailure> {
        for peer in 0..self.world_size() {
            match self.state(peer) {
                RankState::Dead(why) => return Err(PeerFailure { peer, fault: RankFault::Died, why }),
                RankState::Aborted(why) => return Err(PeerFailure { peer, fault: RankFault::GaveUp, why }),
                // A rank that has left publishes nothing more.
                RankState::Finished if needs(peer) => {
                    self.record_first_failure(peer, RankFault::Left);
                    return Err(PeerFailure { peer, fault: RankFault::Left, why: String::new() });
                }
                RankState::Finished | RankState::Running | RankState::Absent => {}
            }
        }
        Ok(())
    }

    fn write_text(&self, rank: usize, kind: FailureTextKind, text: &str) {
        let mut end = text.len().min(TEXT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        // SAFETY: the area is TEXT_BYTES long and written by one process, before the state that publishes it is stored
        // with Release; a second text of the same kind comes from the same writer.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), self.text_mut(rank, kind), end) };
        self.text_len(rank, kind).store(end as u32, Ordering::Release);
    }

    fn read_text(&self, rank: usize, kind: FailureTextKind) -> String {
        let len = (self.text_len(rank, kind).load(Ordering::Acquire) as usize).min(TEXT_BYTES);
        let mut bytes = vec![0; len];
        // SAFETY: inside the area; the writer finished before the state that the caller has seen.
        unsafe { std::ptr::copy_nonoverlapping(self.text(rank, kind), bytes.as_mut_ptr(), len) };
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl RankState {
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Absent => "absent".into(),
            Self::Running => "running".into(),
            Self::Finished => "finished".into(),
            Self::Aborted(why) => format!("stopped: {why}"),
            Self::Dead(why) => format!("dead: {why}"),
        }
    }
}
