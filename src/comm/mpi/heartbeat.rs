//! Detects dead hosts if no launcher of this library watches them.
//!
//! ```text
//!   first rank of each host -- 1 beat per second --> first rank of each other host
//!                                                    silent for 8 s -> shared memory -> all ranks
//! ```
//!
//! The ranks of one host watch each other in shared memory, and notify the other hosts when one is gone. The remaining
//! case is a host that can no longer notify anyone: MPI may wait for it for minutes, or indefinitely.

use super::link::{MessageTag, MpiLink, MpiTransfer};
use super::peer_exit_notices::PeerExitNotices;
use super::topology::HostTopology;
use crate::comm::shm::region::SharedMemoryRegion;
use crate::error::CommError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time between two beats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// The time between two checks.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The duration of silence after which a host is considered dead.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(8);
/// The maximum time for the last beats when a job ends normally.
const FINAL_BEATS_TIMEOUT: Duration = Duration::from_secs(2);
/// The content of a beat that is followed by another one. The content of the final beat is `BEAT_FINAL`.
const BEAT_CONTINUES: u8 = 1;
const BEAT_FINAL: u8 = 2;

/// The thread that sends and receives beats.
pub(super) struct HostHeartbeat {
    stop: Arc<AtomicBool>,
    /// The thread's handle; it returns the hosts with which beats are still exchanged.
    thread: JoinHandle<Vec<WatchedHost>>,
}

/// Another host, represented by its first rank.
struct WatchedHost {
    rank: usize,
    /// The host's next beat; `None` after its last one.
    incoming: Option<MpiTransfer>,
    /// The last beat sent to the host, until it has been delivered.
    outgoing: Option<MpiTransfer>,
    silent: Duration,
}

impl HostHeartbeat {
    /// Starts the watch, on the first rank of each host. Dead hosts are recorded in `region`.
    ///
    /// # Errors
    /// Fails if MPI or the system fails.
    pub(super) fn start(
        link: Arc<MpiLink>,
        hosts: &HostTopology,
        peer_exit_notices: Arc<PeerExitNotices>,
        region: Arc<SharedMemoryRegion>,
    ) -> Result<Self, CommError> {
        let mut others = Vec::new();
        for rank in hosts.remote_ranks().map(|ranks| ranks.start) {
            let incoming = Some(link.receive(rank, MessageTag::Beat, 1)?);
            others.push(WatchedHost { rank, incoming, outgoing: None, silent: Duration::ZERO });
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let watch = move || {
            let (mut last_turn, mut next_beat) = (Instant::now(), Instant::now());
            while !stopped.load(Ordering::Relaxed) && !link.has_failed() {
                let now = Instant::now();
                // A suspended job does not listen, so the time for which it was suspended does not count as silence
                // from the others.
                let passed = now.duration_since(last_turn).min(HEARTBEAT_INTERVAL);
                let beat_is_due = now >= next_beat;
                (last_turn, next_beat) = (now, if beat_is_due { now + HEARTBEAT_INTERVAL } else { next_beat });
                for other in &mut others {
                    // MPI's own errors also occur in the next collective, which reports them.
                    let Ok(silent) = other.exchange_beats(&link, passed, beat_is_due) else { return Vec::new() };
                    if silent > HEARTBEAT_TIMEOUT && !peer_exit_notices.has_left(other.rank) {
                        let seconds = HEARTBEAT_TIMEOUT.as_secs();
                        let why = format!("its host is gone: it sent nothing for {seconds} s");
                        region.mark_remote_death(other.rank, &why);
                        return Vec::new();
                    }
                }
                std::thread::park_timeout(POLL_INTERVAL);
            }
            others
        };
        let spawned = std::thread::Builder::new().name("pulse".into()).spawn(watch);
        let thread = spawned
            .map_err(|e| CommError::Region { action: "start the thread that sends heartbeats", source: Arc::new(e) })?;
        Ok(Self { stop, thread })
    }

    /// Stops the watch when all ranks end normally. MPI requires that no message stays in flight, so this function
    /// waits for the last beats, for at most [`FINAL_BEATS_TIMEOUT`].
    pub(super) fn stop(self, link: &Arc<MpiLink>) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
        // If the thread panicked, the panic has already been printed.
        let Ok(others) = self.thread.join() else { return };
        let deadline = Instant::now() + FINAL_BEATS_TIMEOUT;
        let sent: Vec<_> =
            others.iter().map(|other| link.send(other.rank, MessageTag::Beat, vec![BEAT_FINAL])).collect();
        others.into_iter().zip(sent).for_each(|(other, last)| {
            // The job has ended normally, whatever MPI reports now.
            _ = last.and_then(|last| other.finish(link, last, deadline));
        });
    }
}

impl WatchedHost {
    /// Sends and receives the beats that are due, and returns how long the host has been silent.
    fn exchange_beats(
        &mut self,
        link: &Arc<MpiLink>,
        passed: Duration,
        beat_is_due: bool,
    ) -> Result<Duration, CommError> {
        let heard = self.receive_beat(link)?;
        self.silent = if heard || self.incoming.is_none() { Duration::ZERO } else { self.silent + passed };
        if let Some(outgoing) = &mut self.outgoing
            && outgoing.is_done()?
        {
            self.outgoing.take().map(MpiTransfer::into_bytes);
        }
        if beat_is_due && self.outgoing.is_none() {
            self.outgoing = Some(link.send(self.rank, MessageTag::Beat, vec![BEAT_CONTINUES])?);
        }
        Ok(self.silent)
    }

    /// Receives a beat if one has arrived, and returns whether one has.
    fn receive_beat(&mut self, link: &Arc<MpiLink>) -> Result<bool, CommError> {
        let Some(incoming) = &mut self.incoming else { return Ok(false) };
        if !incoming.is_done()? {
            return Ok(false);
        }
        let is_last = self.incoming.take().is_some_and(|beat| beat.into_bytes() == [BEAT_FINAL]);
        self.incoming = if is_last { None } else { Some(link.receive(self.rank, MessageTag::Beat, 1)?) };
        Ok(true)
    }

    /// Receives beats up to the host's last one, and waits until this rank's own beats have been delivered.
    fn finish(mut self, link: &Arc<MpiLink>, mut last: MpiTransfer, deadline: Instant) -> Result<(), CommError> {
        while Instant::now() < deadline {
            self.receive_beat(link)?;
            let delivered = last.is_done()? && self.outgoing.as_mut().map_or(Ok(true), MpiTransfer::is_done)?;
            if delivered && self.incoming.is_none() {
                break;
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}
