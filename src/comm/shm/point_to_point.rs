//! Messages between two ranks of this host, as packets in a mailbox.
//!
//! A wait ends with an error when the other rank has died, given up or left, when its heartbeat stops, when any rank
//! has failed, or when the time limit is exceeded, as in [`super::exchange`].

use super::exchange::PeerWaitTimer;
use super::mailbox::{MailboxReceiver, MailboxSender};
use super::mailbox_memory::{Mailbox, PACKET_BYTES};
use super::partition::pieces;
use super::piece_slots::nap_millis;
use super::rank_state::PeerFailure;
use super::region::SharedMemoryRegion;
use crate::comm::message_fingerprint::MessageFingerprint;
use crate::error::CommError;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// This rank's end of a mailbox.
pub(in crate::comm) enum MailboxEnd {
    Sender(MailboxSender),
    Receiver(MailboxReceiver),
}

impl MailboxEnd {
    /// Opens the sending end of the mailbox from one rank of the region to another in a channel.
    pub(in crate::comm) fn sender(
        region: &SharedMemoryRegion,
        channel: usize,
        from: usize,
        to: usize,
    ) -> Result<Self, CommError> {
        Ok(Self::Sender(MailboxSender::new(Mailbox::open(region, channel, from, to)?)))
    }

    /// Opens the receiving end of the mailbox from one rank of the region to another in a channel.
    pub(in crate::comm) fn receiver(
        region: &SharedMemoryRegion,
        channel: usize,
        from: usize,
        to: usize,
    ) -> Result<Self, CommError> {
        Ok(Self::Receiver(MailboxReceiver::new(Mailbox::open(region, channel, from, to)?)))
    }

    /// Returns whether the next packet can be written, or has arrived.
    fn is_ready(&self) -> bool {
        match self {
            Self::Sender(sender) => sender.has_room(),
            Self::Receiver(receiver) => receiver.has_packet(),
        }
    }

    fn sleep(&self, nap_millis: u32) {
        match self {
            Self::Sender(sender) => sender.sleep(nap_millis),
            Self::Receiver(receiver) => receiver.sleep(nap_millis),
        }
    }
}

/// Sends or receives messages through one end of a mailbox.
pub(in crate::comm) struct MailboxPointToPoint {
    region: Arc<SharedMemoryRegion>,
    end: MailboxEnd,
    /// This rank, as the region counts it.
    rank: usize,
    /// The other rank, as the region counts it.
    peer: usize,
    /// The number of the region's rank 0 in the job.
    first: usize,
    timeout: Duration,
}

impl MailboxPointToPoint {
    /// Creates the end for messages between this rank and a peer, both as the region counts them. The region's rank 0
    /// is rank `first` of the job.
    pub(in crate::comm) fn new(
        region: Arc<SharedMemoryRegion>,
        end: MailboxEnd,
        (rank, peer): (usize, usize),
        first: usize,
        timeout: Duration,
    ) -> Self {
        Self { region, end, rank, peer, first, timeout }
    }

    /// Sends a message, and returns when it is in the mailbox.
    pub(in crate::comm) fn send(&mut self, call: &MessageFingerprint, data: &[u8]) -> Result<(), CommError> {
        for range in pieces(data.len(), PACKET_BYTES) {
            self.wait(call)?;
            let MailboxEnd::Sender(sender) = &mut self.end else { unreachable!("this end receives") };
            sender.send(call.words(), range.len(), |packet| packet.copy_from_slice(&data[range]));
        }
        Ok(())
    }

    /// Receives a message of the length of `data`.
    pub(in crate::comm) fn receive(&mut self, call: &MessageFingerprint, data: &mut [u8]) -> Result<(), CommError> {
        for range in pieces(data.len(), PACKET_BYTES) {
            self.wait(call)?;
            let MailboxEnd::Receiver(receiver) = &mut self.end else { unreachable!("this end sends") };
            call.check(self.first + self.rank, self.first + self.peer, receiver.header())?;
            receiver.receive(range.len(), |packet| data[range].copy_from_slice(packet));
        }
        Ok(())
    }

    /// Waits until the next packet can be written, or has arrived.
    fn wait(&self, call: &MessageFingerprint) -> Result<(), CommError> {
        if self.end.is_ready() {
            return Ok(());
        }
        let error = |failure: PeerFailure| failure.error(self.first, self.rank, call.op(), self.timeout);
        let beat = || self.region.heartbeat(self.peer).load(Ordering::Relaxed);
        let nap = nap_millis(self.region.world_size());
        let mut clock = PeerWaitTimer::new(Instant::now());
        clock.watch(beat());
        loop {
            let rank_check = self.region.check_ranks(self.rank, |peer| peer == self.peer && !self.end.is_ready());
            // The packet is checked after the ranks: a peer that wrote it and then failed or left has done its part.
            if self.end.is_ready() {
                return Ok(());
            }
            rank_check.map_err(error)?;
            clock.turn(Instant::now(), beat());
            if let Some(fault) = clock.fault(self.timeout) {
                self.region.record_first_failure(self.peer, fault);
                return Err(error(PeerFailure { peer: self.peer, fault, why: String::new() }));
            }
            self.end.sleep(nap);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::mailbox_memory::PACKETS;
    use super::super::region::CHANNELS;
    use super::*;

    #[test]
    fn packets_arrive_in_order_and_complete_however_the_sides_take_turns() {
        let region = SharedMemoryRegion::anonymous(3).unwrap();
        let mut sender = MailboxSender::new(Mailbox::open(&region, 0, 2, 0).unwrap());
        let mut receiver = MailboxReceiver::new(Mailbox::open(&region, 0, 2, 0).unwrap());
        let byte = |k: u64, i: usize| (k as usize * 31 + i) as u8;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for k in 0..1000u64 {
                    while !sender.has_room() {
                        sender.sleep(1000);
                    }
                    sender.send([k, !k], k as usize, |slot| {
                        slot.iter_mut().enumerate().for_each(|(i, to)| *to = byte(k, i));
                    });
                }
            });
            for k in 0..1000u64 {
                while !receiver.has_packet() {
                    receiver.sleep(1000);
                }
                assert_eq!(receiver.header(), [k, !k]);
                receiver.receive(k as usize, |packet| {
                    assert!(packet.iter().enumerate().all(|(i, found)| *found == byte(k, i)), "packet {k}");
                });
            }
        });
        assert!(!receiver.has_packet());
    }

    #[test]
    fn a_mailbox_holds_its_number_of_packets_and_mailboxes_do_not_overlap() {
        let region = SharedMemoryRegion::anonymous(2).unwrap();
        let pairs = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (3, 0, 0), (CHANNELS - 1, 1, 1)];
        let mut senders =
            pairs.map(|(channel, from, to)| MailboxSender::new(Mailbox::open(&region, channel, from, to).unwrap()));
        for (k, sender) in senders.iter_mut().enumerate() {
            for i in 0..PACKETS {
                assert!(sender.has_room());
                sender.send([u64::from(i)], PACKET_BYTES, |slot| slot.fill(k as u8));
            }
            assert!(!sender.has_room());
        }
        for (k, (channel, from, to)) in pairs.into_iter().enumerate() {
            let mut receiver = MailboxReceiver::new(Mailbox::open(&region, channel, from, to).unwrap());
            for i in 0..PACKETS {
                assert_eq!(receiver.header(), [u64::from(i)]);
                receiver.receive(PACKET_BYTES, |packet| assert!(packet.iter().all(|byte| *byte == k as u8)));
            }
            assert!(!receiver.has_packet() && senders[k].has_room());
        }
    }
}
