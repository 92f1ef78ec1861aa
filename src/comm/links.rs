//! The links of a rank to the other ranks, and their threads.

use super::abort_signal::AbortSignal;
use super::mpi::MpiPointToPoint;
use super::shm::point_to_point::MailboxPointToPoint;
use crate::error::CommError;
use crate::util::lock;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;

/// A link of this rank. Communicators use different channels, and the messages of each channel have their own order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LinkId {
    pub peer: usize,
    pub direction: LinkDirection,
    pub channel: usize,
}

/// The direction of a link, as seen by this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LinkDirection {
    Sending,
    Receiving,
}

/// This rank's end of a link.
pub(super) enum LinkEnd {
    /// The peer is on this host.
    Local(MailboxPointToPoint),
    /// The peer is on another host.
    Remote(MpiPointToPoint),
}

/// This rank's end of a link, and the state of the thread that serves it.
pub(super) struct LinkThreadState {
    pub end: LinkEnd,
    /// The number of messages so far.
    pub sequence: u64,
    pub abort_signal: Arc<AbortSignal>,
    /// The first failure, which every later message repeats.
    pub first_failure: Option<CommError>,
}

pub(super) type LinkJob = Box<dyn FnOnce(&mut LinkThreadState) + Send>;

struct LinkThread {
    jobs: Sender<LinkJob>,
    /// The launched messages whose result may still be requested.
    result_tokens: Vec<Weak<()>>,
    thread: JoinHandle<()>,
}

impl LinkThread {
    fn start(id: LinkId, end: LinkEnd, abort_signal: &Arc<AbortSignal>) -> Result<Self, CommError> {
        let (jobs, receiver) = mpsc::channel::<LinkJob>();
        let mut worker = LinkThreadState { end, sequence: 0, abort_signal: abort_signal.clone(), first_failure: None };
        let name = match id.direction {
            LinkDirection::Sending => format!("to-{}", id.peer),
            LinkDirection::Receiving => format!("from-{}", id.peer),
        };
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            for job in receiver {
                job(&mut worker);
            }
        });
        let thread = thread.map_err(|source| abort_signal.thread_not_started(source))?;
        Ok(Self { jobs, result_tokens: Vec::new(), thread })
    }
}

/// The links of a rank to all others, opened when they are first used.
#[derive(Default)]
pub(super) struct PointToPointLinks(Mutex<BTreeMap<LinkId, LinkThread>>);

impl PointToPointLinks {
    /// Waits until all launched messages to other ranks are sent, but not for messages from other ranks, which may
    /// never arrive.
    pub(super) fn finish_sends(&self) {
        let (done, waiting) = mpsc::channel::<()>();
        let is_sending = |(id, _): &(&LinkId, &LinkThread)| id.direction == LinkDirection::Sending;
        for (_, link) in lock(&self.0).iter().filter(is_sending) {
            let done = done.clone();
            _ = link.jobs.send(Box::new(move |_| drop(done)));
        }
        drop(done);
        // This wait ends when all jobs above have run or been dropped.
        _ = waiting.recv();
    }

    /// Ends the links' threads once all launched messages are done. A message that is not awaited, and that may never
    /// arrive, is left to its thread, which ends when the other rank leaves.
    pub(super) fn close(&self, abort_signal: &AbortSignal) {
        for (id, LinkThread { jobs, result_tokens, thread }) in std::mem::take(&mut *lock(&self.0)) {
            drop(jobs);
            if id.direction == LinkDirection::Receiving && result_tokens.iter().all(|token| token.strong_count() == 0) {
                continue;
            }
            // A panic of the thread has already been printed; this notifies the peers.
            if thread.join().is_err() {
                abort_signal.abort("its message thread panicked; see its own output");
            }
        }
    }

    /// Appends a job to a link. If it is the link's first job, `open` opens this rank's end of the link. `token` is
    /// alive as long as the result may be requested.
    pub(super) fn push(
        &self,
        id: LinkId,
        abort_signal: &Arc<AbortSignal>,
        open: impl FnOnce() -> Result<LinkEnd, CommError>,
        (job, token): (LinkJob, &Arc<()>),
    ) -> Result<(), CommError> {
        let mut links = lock(&self.0);
        let link = match links.entry(id) {
            Entry::Occupied(link) => link.into_mut(),
            Entry::Vacant(entry) => entry.insert(LinkThread::start(id, open()?, abort_signal)?),
        };
        link.result_tokens.retain(|token| token.strong_count() > 0);
        link.result_tokens.push(Arc::downgrade(token));
        // The thread ends only if it panics; the message's result is then reported as lost.
        _ = link.jobs.send(job);
        Ok(())
    }
}
