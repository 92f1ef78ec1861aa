//! One rank's side of a collective across hosts: the ranks of its host, its messages to other hosts, and its waits.
//!
//! A message is either a header, which names the collective that a rank is in, or data. All sends and receives are
//! non-blocking; a wait for a message ends with an error if a rank has failed or left, or if the time limit has
//! expired. Waits for ranks on this host also make progress on messages, because those ranks may depend, through other
//! hosts, on what this rank has sent.

use super::group_link::GroupLink;
use super::link::{MessageTag, MpiTransfer};
use super::message_wait::{MessageWait, POLL_SLEEP};
use super::topology::HostTopology;
use crate::comm::collective_kind::CollectiveKind;
use crate::comm::fingerprint::CollectiveFingerprint;
use crate::comm::shm::exchange::ShmExchange;
use crate::comm::stats::counters::ReceivedBytes;
use crate::comm::wire::format::WireFormat;
use crate::error::CommError;
use candle_core::DType;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The maximum number of bytes of a message.
pub(super) const MAX_MESSAGE_BYTES: usize = 1 << 18;
/// The maximum number of bytes that a rank sends to all others at a time.
const MAX_SENT_BYTES: usize = 16 << 20;
/// The number of messages in flight to and from each other rank: the network is not idle while a received message is
/// processed, nor while the MPI library waits for the other side's permission to send.
pub(super) const MESSAGES_IN_FLIGHT: usize = 4;
/// The time for which the failure of a rank on another host may go unnoticed after its consequence has been noticed on
/// this host.
const REMOTE_FAILURE_DELAY: Duration = Duration::from_millis(100);
pub(super) type Result<T> = std::result::Result<T, CommError>;

/// Returns the maximum number of bytes of a message if a rank sends one to each of `peers` ranks at a time.
pub(super) fn message_bytes(peers: usize) -> usize {
    MAX_MESSAGE_BYTES.min((MAX_SENT_BYTES / peers.max(1)).max(1 << 12))
}

/// One rank's side of collectives across hosts.
pub(super) struct InterHostExchange {
    /// The exchange with the ranks of this host, counted from 0.
    pub(super) local: ShmExchange,
    pub(super) link: GroupLink,
    /// The hosts of the participating ranks, which are counted from 0.
    pub(super) hosts: Arc<HostTopology>,
    wait: MessageWait,
    /// The current collective, and the engine call in which it was launched.
    current: Option<CollectiveFingerprint>,
    sequence: u64,
    call: u64,
    /// The number of bytes from other hosts in the current collective, as sent.
    wire_bytes: usize,
    /// The number of bytes from other hosts in the current collective, as decoded in memory.
    exact_bytes: usize,
    /// The messages being sent, oldest first.
    sends: VecDeque<(usize, MpiTransfer)>,
}

impl InterHostExchange {
    pub(super) fn new(local: ShmExchange, link: GroupLink, hosts: Arc<HostTopology>, wait: MessageWait) -> Self {
        let notices = wait.peer_exit_notices.clone();
        Self {
            local: local.with_wait_callback(move || notices.progress()),
            link,
            hosts,
            wait,
            current: None,
            sequence: 0,
            call: 0,
            wire_bytes: 0,
            exact_bytes: 0,
            sends: VecDeque::new(),
        }
    }

    pub(super) fn rank(&self) -> usize {
        self.link.rank()
    }

    pub(super) fn size(&self) -> usize {
        self.hosts.world_size()
    }

    pub(super) fn set_engine_call(&mut self, call: u64) {
        self.call = call;
        self.local.set_engine_call(call);
    }

    /// Returns the bytes received from other ranks in the current collective.
    pub(super) fn bytes(&self) -> ReceivedBytes {
        let local = self.local.bytes();
        let (wire, exact) = (local.wire + self.wire_bytes, local.exact + self.exact_bytes);
        ReceivedBytes { wire, exact, between_hosts: self.wire_bytes }
    }

    /// Counts bytes that came from another host: as sent, and as decoded in memory.
    pub(super) fn count(&mut self, wire: usize, exact: usize) {
        self.wire_bytes += wire;
        self.exact_bytes += exact;
    }

    /// Begins a collective.
    pub(super) fn begin(&mut self, kind: CollectiveKind, wire: WireFormat, dtype: DType, elements: usize, tag: u64) {
        self.sequence += 1;
        self.current = Some(CollectiveFingerprint::new(self.sequence, kind, wire, dtype, elements, tag));
        self.local.begin(kind, wire, dtype, elements, tag);
        (self.wire_bytes, self.exact_bytes) = (0, 0);
    }

    /// Ends a collective with this `result`. A success is returned only after all of this rank's messages have been
    /// sent, because the process may end before it takes part in another collective.
    pub(super) fn end<T>(&mut self, result: Result<T>) -> Result<T> {
        result.and_then(|result| self.limit_in_flight(0).map(|()| result)).map_err(|error| self.original_failure(error))
    }

    /// Returns the original failure if `error` is only its consequence: a rank of this host may have been notified of a
    /// failure on another host before this rank was.
    fn original_failure(&self, error: CommError) -> CommError {
        if !matches!(error, CommError::RankAborted { .. } | CommError::RankLeft { .. }) {
            return error;
        }
        let deadline = Instant::now() + REMOTE_FAILURE_DELAY;
        loop {
            match self.wait.peer_exit_notices.failure() {
                Ok(Some((from, why))) => return self.wait.aborted(from, &why, self.op()),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(POLL_SLEEP),
                _ => return error,
            }
        }
    }

    /// Announces this collective to the ranks with which data will be exchanged, and checks that theirs is the same.
    pub(super) fn announce_collective(&mut self, peers: &[usize]) -> Result<()> {
        let mine = self.current.expect("a collective has begun");
        let transfers = self.receive_each(peers, MessageTag::Header, 8 * (CollectiveFingerprint::WORDS + 1))?;
        let header: Vec<u8> = mine.words().into_iter().chain([self.call]).flat_map(u64::to_le_bytes).collect();
        for peer in peers {
            self.send(*peer, MessageTag::Header, header.clone())?;
        }
        for (peer, transfer) in peers.iter().zip(transfers) {
            let bytes = self.finish(*peer, transfer)?;
            let mut words = [0u64; CollectiveFingerprint::WORDS + 1];
            for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
                *word = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            }
            let [words @ .., call] = words;
            let theirs = CollectiveFingerprint::from_words(words);
            if theirs != mine {
                let (here, there) = (mine.within(self.call), theirs.within(call));
                let (rank, peer) = (self.link.in_job(self.rank()), self.link.in_job(*peer));
                return Err(CommError::Diverged { rank, here, peer, there });
            }
        }
        Ok(())
    }

    pub(super) fn receive_each(&self, peers: &[usize], tag: MessageTag, len: usize) -> Result<Vec<MpiTransfer>> {
        peers.iter().map(|peer| self.link.receive(*peer, tag, len)).collect()
    }

    /// Begins to receive `len` bytes.
    pub(super) fn receive(&self, peer: usize, tag: MessageTag, len: usize) -> Result<MpiTransfer> {
        self.link.receive(peer, tag, len)
    }

    /// Begins to send a message. Earlier messages are freed once they are done.
    pub(super) fn send(&mut self, peer: usize, tag: MessageTag, bytes: Vec<u8>) -> Result<()> {
        while let Some((_, oldest)) = self.sends.front_mut() {
            if !oldest.is_done()? {
                break;
            }
            drop(self.sends.pop_front().map(|(_, sent)| sent.into_bytes()));
        }
        self.sends.push_back((peer, self.link.send(peer, tag, bytes)?));
        Ok(())
    }

    /// Waits until no sent message is in flight except the newest `messages`.
    pub(super) fn limit_in_flight(&mut self, messages: usize) -> Result<()> {
        while self.sends.len() > messages
            && let Some((peer, sent)) = self.sends.pop_front()
        {
            self.finish(peer, sent)?;
        }
        Ok(())
    }

    /// Waits for a message to or from a rank of another host.
    pub(super) fn finish(&mut self, peer: usize, transfer: MpiTransfer) -> Result<Vec<u8>> {
        let peer = self.link.in_job(peer);
        self.wait.finish(peer, transfer, self.local.spin_limits(), &|| self.op())
    }

    /// Returns the name of the current collective, for messages.
    fn op(&self) -> String {
        self.current.map(|fingerprint| fingerprint.to_string()).unwrap_or_default()
    }
}
