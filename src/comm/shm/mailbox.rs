//! Mailboxes: packets from one rank to another, without the participation of a third rank.
//!
//! ```text
//!   sender     room for packet k? -> write it -> sent = k + 1 -> ...
//!   receiver                                    packet k sent? -> read it -> received = k + 1 -> ...
//! ```
//!
//! A pair of ranks has one mailbox per direction: a ring of `PACKETS` packets. Packet k is in slot k % PACKETS; the
//! sender writes it once the receiver has read packet k - PACKETS. The sender increments `sent`, on which the receiver
//! waits, and the receiver increments `received`, on which the sender waits. Both counts have the orderings of
//! [`PublishedCount`](super::published_count::PublishedCount), so that each side's accesses to a slot happen before
//! the next ones of the other. `tests/loom` compiles this file with loom's memory in place of `mailbox_memory.rs`.

use super::mailbox_memory::{Mailbox, PACKET_BYTES, PACKETS};
use std::sync::atomic::Ordering;

/// The only end of a mailbox that writes packets.
pub(crate) struct MailboxSender {
    mailbox: Mailbox,
    sent: u32,
}

impl MailboxSender {
    pub(super) fn new(mailbox: Mailbox) -> Self {
        let sent = mailbox.sent().get();
        Self { mailbox, sent }
    }

    /// Returns whether the receiver has read enough for another packet.
    pub(super) fn has_room(&self) -> bool {
        self.sent.wrapping_sub(self.mailbox.received().get()) < PACKETS
    }

    /// Sleeps until the receiver has read another packet, or until about one nap has passed.
    pub(super) fn sleep(&self, nap_millis: u32) {
        let received = self.mailbox.received();
        received.sleep_while(self.sent.wrapping_sub(PACKETS), nap_millis);
    }

    /// Lets `fill` write the `len` bytes of the next packet, for which there is room.
    pub(super) fn send<const N: usize>(&mut self, header: [u64; N], len: usize, fill: impl FnOnce(&mut [u8])) {
        assert!(len <= PACKET_BYTES && self.has_room(), "a packet of {len} bytes");
        let slot = (self.sent % PACKETS) as usize;
        // SAFETY: the slot holds PACKET_BYTES, and this end is the only one to write it. The receiver has read the
        // slot's previous packet (Acquire in has_room) and does not read it before the next one is published below.
        fill(unsafe { std::slice::from_raw_parts_mut(self.mailbox.slot_mut(slot), len) });
        for (i, word) in header.into_iter().enumerate() {
            self.mailbox.header_word(slot, i).store(word, Ordering::Relaxed);
        }
        self.sent = self.sent.wrapping_add(1);
        self.mailbox.sent().publish(self.sent);
    }
}

/// The only end of a mailbox that reads packets.
pub(crate) struct MailboxReceiver {
    mailbox: Mailbox,
    received: u32,
}

impl MailboxReceiver {
    pub(super) fn new(mailbox: Mailbox) -> Self {
        let received = mailbox.received().get();
        Self { mailbox, received }
    }

    /// Returns whether a packet has arrived.
    pub(super) fn has_packet(&self) -> bool {
        self.mailbox.sent().get() != self.received
    }

    /// Sleeps until a packet arrives, or until about one nap has passed.
    pub(super) fn sleep(&self, nap_millis: u32) {
        self.mailbox.sent().sleep_while(self.received, nap_millis);
    }

    /// Returns the header of the packet that has arrived.
    pub(super) fn header<const N: usize>(&self) -> [u64; N] {
        let slot = (self.received % PACKETS) as usize;
        std::array::from_fn(|i| self.mailbox.header_word(slot, i).load(Ordering::Relaxed))
    }

    /// Lets `read` read the first `len` bytes of the packet that has arrived, and makes room for another one.
    pub(super) fn receive(&mut self, len: usize, read: impl FnOnce(&[u8])) {
        assert!(len <= PACKET_BYTES && self.has_packet(), "a packet of {len} bytes");
        let slot = (self.received % PACKETS) as usize;
        // SAFETY: inside the slot. The sender has published this packet (Acquire in has_packet) and does not write the
        // slot again before this end publishes below that it has read the packet.
        read(unsafe { std::slice::from_raw_parts(self.mailbox.slot(slot), len) });
        self.received = self.received.wrapping_add(1);
        self.mailbox.received().publish(self.received);
    }
}
