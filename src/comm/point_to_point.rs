//! Messages from one rank to another. Each is launched first, and waited for where its result is needed.
//!
//! ```text
//!   send      jobs of the link to that rank ----> its thread: packets into the mailbox, or MPI messages
//!   receive   jobs of the link from that rank --> its thread: fingerprints equal? -> packets out of the mailbox
//! ```
//!
//! A pair of ranks has one link per direction and communicator, whose messages arrive in the order in which they were
//! launched. Links are independent of each other and of collectives: each has a thread, started with its first message,
//! so that ranks can launch messages to different ranks in any order.

use super::Pending;
use super::collective_kind::CollectiveKind;
use super::engine_call;
use super::fingerprint::CollectiveFingerprint;
use super::joined_rank::JoinedRank;
use super::links::{LinkDirection, LinkEnd, LinkId, LinkJob};
use super::message_fingerprint::MessageFingerprint;
use super::shm::point_to_point::{MailboxEnd, MailboxPointToPoint};
use super::stats::counters::{CommCounters, ReceivedBytes};
use super::wire::format::WireFormat;
use crate::error::CommError;
use crate::precision::Flat;
use crate::timeline::{self, TimelineLane};
use candle_core::DType;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;

/// Opens this rank's end of a link.
fn open(presence: &JoinedRank, LinkId { peer, direction, channel }: LinkId) -> Result<LinkEnd, CommError> {
    let (region, first) = (presence.region(), presence.first());
    let local = peer.checked_sub(first).filter(|local| *local < region.world_size());
    match (local, presence.other_hosts()) {
        (Some(local), _) => {
            let rank = presence.rank() - first;
            let end = match direction {
                LinkDirection::Sending => MailboxEnd::sender(region, channel, rank, local)?,
                LinkDirection::Receiving => MailboxEnd::receiver(region, channel, local, rank)?,
            };
            let messages = MailboxPointToPoint::new(region.clone(), end, (rank, local), first, presence.timeout());
            Ok(LinkEnd::Local(messages))
        }
        (None, Some(mpi)) => Ok(LinkEnd::Remote(mpi.messages(channel, peer, presence.timeout()))),
        (None, None) => unreachable!("rank {peer} is on this host or another one"),
    }
}

/// Launches a message to `peer`, a rank of the job.
pub(super) fn send(
    presence: &Arc<JoinedRank>,
    counters: &Arc<CommCounters>,
    (peer, channel): (usize, usize),
    data: Flat,
    tag: u64,
) -> Pending<()> {
    let shape = (data.dtype(), data.len());
    launch(
        presence,
        counters,
        LinkId { peer, direction: LinkDirection::Sending, channel },
        CollectiveKind::Send,
        shape,
        tag,
        move |end, call| {
            match end {
                LinkEnd::Local(messages) => messages.send(call, data.as_bytes())?,
                LinkEnd::Remote(messages) => messages.send(call, data.as_bytes())?,
            }
            Ok(((), ReceivedBytes::default()))
        },
    )
}

/// Starts receiving a message with the given dtype and number of elements from `peer`, a rank of the job.
pub(super) fn receive(
    presence: &Arc<JoinedRank>,
    counters: &Arc<CommCounters>,
    (peer, channel): (usize, usize),
    shape: (DType, usize),
    tag: u64,
) -> Pending<Flat> {
    let id = LinkId { peer, direction: LinkDirection::Receiving, channel };
    launch(presence, counters, id, CollectiveKind::Receive, shape, tag, move |end, call| {
        let mut data = Flat::zeros(shape.0, shape.1);
        let bytes = data.size_in_bytes();
        let between_hosts = match end {
            LinkEnd::Local(messages) => messages.receive(call, data.as_bytes_mut()).map(|()| 0)?,
            LinkEnd::Remote(messages) => messages.receive(call, data.as_bytes_mut()).map(|()| bytes)?,
        };
        Ok((data, ReceivedBytes { wire: bytes, exact: bytes, between_hosts }))
    })
}

fn launch<T: Send + 'static>(
    presence: &Arc<JoinedRank>,
    counters: &Arc<CommCounters>,
    id: LinkId,
    kind: CollectiveKind,
    (dtype, elements): (DType, usize),
    tag: u64,
    run: impl FnOnce(&mut LinkEnd, &MessageFingerprint) -> Result<(T, ReceivedBytes), CommError> + Send + 'static,
) -> Pending<T> {
    let (sender, receiver) = mpsc::channel();
    let timeline_context = timeline::carry();
    let job_context = timeline_context.clone();
    let is_available = Arc::new(AtomicBool::new(false));
    let (counters, call, is_done) = (counters.clone(), engine_call::current(), is_available.clone());
    let wait_counters = counters.clone();
    let job: LinkJob = Box::new(move |worker| {
        worker.sequence += 1;
        // Sender and receiver both describe the message as a send, so that their fingerprints are equal.
        let fingerprint =
            CollectiveFingerprint::new(worker.sequence, CollectiveKind::Send, WireFormat::Exact, dtype, elements, tag);
        let failed = worker.first_failure.clone().or_else(|| worker.abort_signal.error());
        let result = match failed {
            Some(failure) => Err(failure),
            None => {
                let start = Instant::now();
                let span =
                    job_context.span(TimelineLane::Collectives, timeline::EventCategory::Collective, kind.name());
                let result = run(&mut worker.end, &MessageFingerprint { fingerprint, kind, call });
                drop(span.with("bytes", (elements * dtype.size_in_bytes()) as u64));
                result.map(|(value, received)| {
                    counters.add(kind, elements, received, start.elapsed());
                    value
                })
            }
        };
        if let (Err(error), None) = (&result, &worker.first_failure) {
            worker.abort_signal.abort(&error.to_string());
            worker.first_failure = Some(error.clone());
        }
        // No thread waits for a result whose Pending was dropped.
        _ = sender.send(result);
        is_done.store(true, Ordering::Release);
    });
    let (open, token) = (|| open(presence, id), Arc::new(()));
    if let Err(error) = presence.links().push(id, presence.abort_signal(), open, (job, &token)) {
        // Abort immediately: the result may never be requested, while the other rank is waiting.
        presence.abort_signal().abort(&error.to_string());
        return Pending::from_fn(move || Err(error.into()));
    }
    Pending::observed(is_available, move || {
        let _token = token;
        let _span = timeline::span(timeline::EventCategory::Wait, "wait").with_subject_of(&timeline_context);
        let start = Instant::now();
        let result = receiver.recv().unwrap_or(Err(CommError::ThreadEnded));
        wait_counters.waited(start.elapsed());
        Ok(result?)
    })
}
