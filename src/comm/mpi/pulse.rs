//! Whether the other hosts live, where no launcher of this library watches them.
//!
//! ```text
//!   first rank of each host -- a beat a second --> first rank of each other host: silent for 8 s -> shared memory -> all ranks
//! ```
//!
//! The ranks of one host watch each other in shared memory, and tell the other hosts when one is gone. What is left is a host
//! that cannot tell anything any more: MPI may wait for it for minutes, or for ever.

use super::hosts::Hosts;
use super::link::{Link, Tag, Transfer};
use super::notices::Notices;
use crate::comm::shm::Region;
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

/// The thread that sends beats and listens for them.
pub(super) struct Pulse {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// Another host, by its first rank.
struct Other {
    rank: usize,
    /// Its next beat.
    coming: Transfer,
    /// The last beat to it, until it has gone.
    going: Option<Transfer>,
    silent: Duration,
}

impl Pulse {
    /// Begins to watch, on the first rank of each host. What is found is written into `region`.
    ///
    /// # Errors
    /// MPI's and the system's.
    pub(super) fn start(
        link: Arc<Link>,
        hosts: &Hosts,
        notices: Arc<Notices>,
        region: Arc<Region>,
    ) -> Result<Self, CommError> {
        let mut others = Vec::new();
        for rank in hosts.elsewhere().map(|ranks| ranks.start) {
            let coming = link.receive(rank, Tag::Beat, 1)?;
            others.push(Other { rank, coming, going: None, silent: Duration::ZERO });
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
                    let Ok(silent) = other.turn(&link, passed, beats) else { return };
                    if silent > LIMIT && !notices.has_left(other.rank) {
                        let seconds = LIMIT.as_secs();
                        let why = format!("its host is gone: nothing was heard of it for {seconds} s");
                        region.mark_elsewhere(other.rank, &why);
                        return;
                    }
                }
                std::thread::park_timeout(TURN);
            }
        };
        let spawned = std::thread::Builder::new().name("pulse".into()).spawn(watch);
        let thread = spawned.map_err(|e| CommError::Region { action: "start a thread for", source: Arc::new(e) })?;
        Ok(Self { stop, thread })
    }

    /// Ends it, and waits until it has ended.
    pub(super) fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
        // A panic of it has been printed.
        _ = self.thread.join();
    }
}

impl Other {
    /// Sends and takes what there is; how long it has been silent.
    fn turn(&mut self, link: &Arc<Link>, passed: Duration, beats: bool) -> Result<Duration, CommError> {
        if self.coming.is_done()? {
            let next = link.receive(self.rank, Tag::Beat, 1)?;
            drop(std::mem::replace(&mut self.coming, next).into_bytes());
            self.silent = Duration::ZERO;
        } else {
            self.silent += passed;
        }
        if let Some(going) = &mut self.going
            && going.is_done()?
        {
            self.going.take().map(Transfer::into_bytes);
        }
        if beats && self.going.is_none() {
            self.going = Some(link.send(self.rank, Tag::Beat, vec![1])?);
        }
        Ok(self.silent)
    }
}
