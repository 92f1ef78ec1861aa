//! Messages from one rank to another on a different host.

use super::link::{MessageTag, MpiLink, MpiTransfer};
use super::message_wait::MessageWait;
use crate::comm::message_fingerprint::MessageFingerprint;
use crate::comm::shm::piece_slots::SpinLimits;
use crate::error::CommError;
use std::collections::VecDeque;
use std::sync::Arc;

/// The maximum number of bytes in a part of a message.
const PART_BYTES: usize = 1 << 20;
/// The number of parts in flight.
const PARTS_IN_FLIGHT: usize = 4;
/// The spin limits of a link's thread, which only waits, while other threads need the cores.
const SPIN_LIMITS: SpinLimits = SpinLimits { spins: 20, yields: 20 };

/// Sends messages to, or receives messages from, a rank of another host.
pub(in crate::comm) struct MpiPointToPoint {
    link: Arc<MpiLink>,
    wait: MessageWait,
    channel: usize,
    peer: usize,
}

impl MpiPointToPoint {
    pub(super) fn new(link: Arc<MpiLink>, wait: MessageWait, channel: usize, peer: usize) -> Self {
        Self { link, wait, channel, peer }
    }

    /// Sends a message, and returns when MPI has taken all of it.
    pub(in crate::comm) fn send(&mut self, call: &MessageFingerprint, data: &[u8]) -> Result<(), CommError> {
        let header: Vec<u8> = call.words().into_iter().flat_map(u64::to_le_bytes).collect();
        let mut sends =
            VecDeque::from([self.link.send_on(self.channel, self.peer, MessageTag::MessageHeader, header)?]);
        for part in data.chunks(PART_BYTES) {
            sends.push_back(self.link.send_on(self.channel, self.peer, MessageTag::MessageData, part.to_vec())?);
            if sends.len() > PARTS_IN_FLIGHT
                && let Some(oldest) = sends.pop_front()
            {
                self.finish(oldest, call)?;
            }
        }
        sends.into_iter().try_for_each(|transfer| self.finish(transfer, call).map(drop))
    }

    /// Receives a message of the length of `data`.
    pub(in crate::comm) fn receive(&mut self, call: &MessageFingerprint, data: &mut [u8]) -> Result<(), CommError> {
        let header =
            self.link.receive_on(self.channel, self.peer, MessageTag::MessageHeader, 8 * MessageFingerprint::WORDS)?;
        let header = self.finish(header, call)?;
        let mut words = [0u64; MessageFingerprint::WORDS];
        for (word, bytes) in words.iter_mut().zip(header.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        call.check(self.wait.rank, self.peer, words)?;
        let (mut receives, mut parts) = (VecDeque::new(), data.chunks_mut(PART_BYTES));
        loop {
            while receives.len() < PARTS_IN_FLIGHT
                && let Some(part) = parts.next()
            {
                receives.push_back((
                    self.link.receive_on(self.channel, self.peer, MessageTag::MessageData, part.len())?,
                    part,
                ));
            }
            let Some((transfer, part)) = receives.pop_front() else { return Ok(()) };
            part.copy_from_slice(&self.finish(transfer, call)?);
        }
    }

    fn finish(&self, transfer: MpiTransfer, call: &MessageFingerprint) -> Result<Vec<u8>, CommError> {
        self.wait.finish(self.peer, transfer, SPIN_LIMITS, &|| call.op())
    }
}
