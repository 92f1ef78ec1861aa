//! Whether the other hosts live, where no launcher of this library watches them.
//!
//! ```text
//!   first rank of each host -- a beat a second --> first rank of each other host: silent for 8 s -> shared memory -> all ranks
//! ```
//!
//! The ranks of one host watch each other in shared memory, and tell the other hosts when one is gone. What is left is a host
//! that cannot tell anything any more: MPI may wait for it for minutes, or for ever.

use super::link::{MessageTag, MpiLink, MpiTransfer};
use super::peer_status::PeerStatus;
use super::topology::HostTopology;
use crate::comm::shm::region::SharedMemoryRegion;
use crate::error::CommError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two beats.
const BEAT: Duration = Duration::from_secs(1);
/// Between two looks.
const TURN: Duration = Duration::from_millis(250);
/// Silence that counts as death.
const LIMIT: Duration = Duration::from_secs(8);
/// How long the last beats of a job that ends well may take.
const PARTING: Duration = Duration::from_secs(2);
/// What a beat says: another one comes, or none.
const GOES_ON: u8 = 1;
const LAST: u8 = 2;

/// The thread that sends beats and listens for them.
pub(super) struct HostHeartbeat {
    stop: Arc<AtomicBool>,
    /// Gives back those with whom beats are still exchanged.
    thread: JoinHandle<Vec<WatchedHost>>,
}

/// Another host, by its first rank.
struct WatchedHost {
    rank: usize,
    /// Its next beat; none after its last.
    coming: Option<MpiTransfer>,
    /// The last beat to it, until it has gone.
    going: Option<MpiTransfer>,
    silent: Duration,
}

impl HostHeartbeat {
    /// Begins to watch, on the first rank of each host. What is found is written into `region`.
    ///
    /// # Errors
    /// MPI's and the system's.
    pub(super) fn start(
        link: Arc<MpiLink>,
        hosts: &HostTopology,
        peer_status: Arc<PeerStatus>,
        region: Arc<SharedMemoryRegion>,
    ) -> Result<Self, CommError> {
        let mut others = Vec::new();
        for rank in hosts.elsewhere().map(|ranks| ranks.start) {
            let coming = Some(link.receive(rank, MessageTag::Beat, 1)?);
            others.push(WatchedHost { rank, coming, going: None, silent: Duration::ZERO });
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let watch = move || {
            let (mut last_turn, mut next_beat) = (Instant::now(), Instant::now());
            while !stopped.load(Ordering::Relaxed) && !link.has_failed() {
                let now = Instant::now();
                // A job that was stopped for an hour has not listened for an hour.
                let passed = now.duration_since(last_turn).min(BEAT);
                let beats = now >= next_beat;
                (last_turn, next_beat) = (now, if beats { now + BEAT } else { next_beat });
                for other in &mut others {
                    // MPI's own errors are those of the next collective too, which names it.
                    let Ok(silent) = other.exchange_beats(&link, passed, beats) else { return Vec::new() };
                    if silent > LIMIT && !peer_status.has_left(other.rank) {
                        let seconds = LIMIT.as_secs();
                        let why = format!("its host is gone: nothing was heard of it for {seconds} s");
                        region.mark_elsewhere(other.rank, &why);
                        return Vec::new();
                    }
                }
                std::thread::park_timeout(TURN);
            }
            others
        };
        let spawned = std::thread::Builder::new().name("pulse".into()).spawn(watch);
        let thread = spawned.map_err(|e| CommError::Region { action: "start a thread for", source: Arc::new(e) })?;
        Ok(Self { stop, thread })
    }

    /// Ends it when all ranks leave in good order: no message is left on its way, as MPI wants it.
    pub(super) fn stop(self, link: &Arc<MpiLink>) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
        // A panic of it has been printed.
        let Ok(others) = self.thread.join() else { return };
        let end = Instant::now() + PARTING;
        let sent: Vec<_> = others.iter().map(|other| link.send(other.rank, MessageTag::Beat, vec![LAST])).collect();
        others.into_iter().zip(sent).for_each(|(other, last)| {
            // Whatever MPI reports now, the job has gone well.
            _ = last.and_then(|last| other.finish(link, last, end));
        });
    }
}

impl WatchedHost {
    /// Sends and takes what there is; how long it has been silent.
    fn exchange_beats(&mut self, link: &Arc<MpiLink>, passed: Duration, beats: bool) -> Result<Duration, CommError> {
        let heard = self.receive_beat(link)?;
        self.silent = if heard || self.coming.is_none() { Duration::ZERO } else { self.silent + passed };
        if let Some(going) = &mut self.going
            && going.is_done()?
        {
            self.going.take().map(MpiTransfer::into_bytes);
        }
        if beats && self.going.is_none() {
            self.going = Some(link.send(self.rank, MessageTag::Beat, vec![GOES_ON])?);
        }
        Ok(self.silent)
    }

    /// Takes a beat, if one has come.
    fn receive_beat(&mut self, link: &Arc<MpiLink>) -> Result<bool, CommError> {
        let Some(coming) = &mut self.coming else { return Ok(false) };
        if !coming.is_done()? {
            return Ok(false);
        }
        let is_last = self.coming.take().is_some_and(|beat| beat.into_bytes() == [LAST]);
        self.coming = if is_last { None } else { Some(link.receive(self.rank, MessageTag::Beat, 1)?) };
        Ok(true)
    }

    /// Takes what comes up to its last beat, and waits until its own have gone.
    fn finish(mut self, link: &Arc<MpiLink>, mut last: MpiTransfer, end: Instant) -> Result<(), CommError> {
        while Instant::now() < end {
            self.receive_beat(link)?;
            let gone = last.is_done()? && self.going.as_mut().map_or(Ok(true), MpiTransfer::is_done)?;
            if gone && self.coming.is_none() {
                break;
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}
