//! The memory of a mailbox: see [`super::mailbox`].

use super::published_count::PublishedCount;
use super::region::{MAILBOX_BYTES, SharedMemoryRegion, Word32, Word64};
use crate::error::CommError;
use memmap2::MmapRaw;

/// The maximum number of packets in flight.
pub(super) const PACKETS: u32 = 4;
/// The maximum number of bytes of a packet.
pub(in crate::comm) const PACKET_BYTES: usize = 1 << 16;
/// The maximum number of words of a packet's header.
const MAX_HEADER_WORDS: usize = 8;

// Offsets. Each count has its own cache line.
const SENT: usize = 0;
const RECEIVED: usize = 64;
const SLEEPERS: usize = 4;
const HEADERS: usize = 128;
const SLOTS: usize = 4096;
const _: () = assert!(SLOTS + PACKETS as usize * PACKET_BYTES == MAILBOX_BYTES);

/// The memory for the packets from one rank to another.
pub(in crate::comm) struct Mailbox {
    map: MmapRaw,
}

impl Mailbox {
    /// Opens the mailbox for the messages from one rank of the region to another in a channel.
    ///
    /// # Errors
    /// Fails if the system cannot map its memory.
    pub(super) fn open(region: &SharedMemoryRegion, channel: usize, from: usize, to: usize) -> Result<Self, CommError> {
        Ok(Self { map: region.map_mailbox(channel, from, to)? })
    }

    /// Returns the number of packets sent so far.
    pub(super) fn sent(&self) -> PublishedCount<'_> {
        self.count(SENT)
    }

    /// Returns the number of packets read so far.
    pub(super) fn received(&self) -> PublishedCount<'_> {
        self.count(RECEIVED)
    }

    fn count(&self, at: usize) -> PublishedCount<'_> {
        PublishedCount { word: self.word32(at), sleepers: self.word32(at + SLEEPERS) }
    }

    fn word32(&self, offset: usize) -> &Word32 {
        assert!(offset.is_multiple_of(4) && offset < HEADERS);
        // SAFETY: inside the mapping, aligned, lives as long as self, and only ever accessed atomically.
        unsafe { Word32::from_ptr(self.map.as_mut_ptr().add(offset).cast()) }
    }

    /// Returns a word of a packet's header.
    pub(super) fn header_word(&self, slot: usize, word: usize) -> &Word64 {
        assert!(slot < PACKETS as usize && word < MAX_HEADER_WORDS);
        let offset = HEADERS + (slot * MAX_HEADER_WORDS + word) * 8;
        // SAFETY: as in `word32`.
        unsafe { Word64::from_ptr(self.map.as_mut_ptr().add(offset).cast()) }
    }

    /// Returns the start of a packet's data, PACKET_BYTES long, for reading.
    pub(super) fn slot(&self, slot: usize) -> *const u8 {
        self.slot_mut(slot)
    }

    /// Returns the start of a packet's data, for writing.
    pub(super) fn slot_mut(&self, slot: usize) -> *mut u8 {
        assert!(slot < PACKETS as usize);
        // SAFETY: inside the mapping.
        unsafe { self.map.as_mut_ptr().add(SLOTS + slot * PACKET_BYTES) }
    }
}
