//! Loom's memory in place of `src/comm/shm/mailbox_memory.rs`.

use crate::published_count::PublishedCount;
use crate::region::{Changes, Plant, Sleep, Word32, Word64};
use loom::cell::UnsafeCell;
use std::sync::Arc;

pub const PACKETS: u32 = 2;
pub const PACKET_BYTES: usize = 1;

/// The memory for the packets from one rank to another.
#[derive(Clone)]
pub struct Mailbox(Arc<Memory>);

struct Memory {
    counts: [Word32; 2],
    sleepers: [Word32; 2],
    headers: Vec<Word64>,
    slots: Vec<UnsafeCell<[u8; PACKET_BYTES]>>,
}

// SAFETY: loom runs one thread at a time, and reports unordered accesses to cells.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

impl Mailbox {
    pub fn new(sleep: Sleep, plant: Plant) -> Self {
        let changes = Arc::new(Changes::default());
        let count = || {
            let mut count = Word32::new(sleep, &changes);
            count.plant(plant);
            count
        };
        Self(Arc::new(Memory {
            counts: [count(), count()],
            sleepers: [count(), count()],
            headers: (0..PACKETS).map(|_| Word64::new(sleep, &changes)).collect(),
            slots: (0..PACKETS).map(|_| UnsafeCell::default()).collect(),
        }))
    }

    pub fn sent(&self) -> PublishedCount<'_> {
        PublishedCount { word: &self.0.counts[0], sleepers: &self.0.sleepers[0] }
    }

    pub fn received(&self) -> PublishedCount<'_> {
        PublishedCount { word: &self.0.counts[1], sleepers: &self.0.sleepers[1] }
    }

    pub fn header_word(&self, slot: usize, word: usize) -> &Word64 {
        assert_eq!(word, 0);
        &self.0.headers[slot]
    }

    pub fn slot(&self, slot: usize) -> *const u8 {
        self.0.slots[slot].with(|slot| slot.cast())
    }

    pub fn slot_mut(&self, slot: usize) -> *mut u8 {
        self.0.slots[slot].with_mut(|slot| slot.cast())
    }
}
