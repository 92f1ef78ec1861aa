//! Loom's memory in place of `src/comm/shm/region.rs`: the same words, slots and texts, each observed by loom.
//!
//! - Atomic words are loom's. A load may return any value that the C11 memory model allows it to return.
//! - Slots and texts are loom's cells: loom reports two accesses, of which at least one writes, unless one happens
//!   before the other. An access is recorded where the pointer is taken. No loom operation occurs between that place
//!   and the last use of the pointer, so no other thread runs in between.
//! - The futex is a mutex and a condition variable around the same comparison that the kernel makes. A nap has no
//!   clock: it lasts until any rank has published or left since the previous nap.
//!
//! Loom treats SeqCst as acquire and release (and a little more), so a thread executes a SeqCst fence, which loom
//! supports, between a SeqCst store and its next SeqCst load. A fence, or the mutex, may also hide a missing Acquire or
//! Release. There are therefore also tests in which no thread sleeps; they do not need SeqCst, and use no fences.

use loom::cell::UnsafeCell;
pub use loom::hint::spin_loop;
use loom::sync::atomic::{self, Ordering, fence};
use loom::sync::{Condvar, Mutex};
pub use loom::thread::yield_now;
use std::cell::Cell;
use std::sync::Arc;

pub const SLOT_BYTES: usize = 4;
pub const CHANNELS: usize = 1;
pub const TEXT_BYTES: usize = 8;

/// A deliberate deviation of the memory from what the protocol requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    None,
    /// Stores of `published` are relaxed.
    RelaxedPublication,
    /// Loads of `published` are relaxed.
    RelaxedPublicationLoad,
    /// A piece is published before its data is written.
    PublicationBeforeData,
    /// Both of a rank's slots are the same slot.
    OneSlot,
    /// There is no order between `published` and `sleepers`.
    NoTotalOrder,
    /// Stores of `state` are relaxed.
    RelaxedState,
    /// Loads of `state` are relaxed.
    RelaxedStateLoad,
}

/// The length of time that a thread sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sleep {
    /// No thread sleeps.
    Never,
    /// Until it is woken, however long that takes.
    UntilWoken,
    /// Until it is woken, or something else has changed, which represents the time limit of the nap.
    Nap,
}

/// A counter of the changes that end a nap.
#[derive(Default)]
pub struct Changes {
    count: Mutex<u32>,
    more: Condvar,
}

loom::thread_local! {
    /// The number of changes up to the end of this thread's previous nap.
    static KNOWN: Cell<u32> = Cell::new(0);
    /// Whether this thread has made a SeqCst store since its last fence.
    static STORED: Cell<bool> = Cell::new(false);
}

/// An atomic number and the queue of the threads that sleep on it.
pub struct Word<A> {
    value: A,
    /// The ordering of loads that are not relaxed; `store` is that of stores that are not relaxed.
    load: Ordering,
    store: Ordering,
    fences: bool,
    sleep: Sleep,
    queue: Mutex<()>,
    woken: Condvar,
    changes: Arc<Changes>,
}

macro_rules! word {
    ($atomic:ty, $number:ty) => {
        impl Word<$atomic> {
            pub fn new(sleep: Sleep, changes: &Arc<Changes>) -> Self {
                Self {
                    value: <$atomic>::new(0),
                    load: Ordering::Acquire,
                    store: Ordering::Release,
                    fences: sleep != Sleep::Never,
                    sleep,
                    queue: Mutex::new(()),
                    woken: Condvar::new(),
                    changes: changes.clone(),
                }
            }

            /// Makes this word deviate as `plant` requires.
            #[allow(dead_code)]
            pub fn plant(&mut self, plant: Plant) {
                match plant {
                    Plant::RelaxedPublication => self.store = Ordering::Relaxed,
                    Plant::RelaxedPublicationLoad => self.load = Ordering::Relaxed,
                    Plant::NoTotalOrder => self.fences = false,
                    _ => {}
                }
            }

            pub fn load(&self, ordering: Ordering) -> $number {
                self.before_load(ordering);
                self.value.load(if ordering == Ordering::Relaxed { ordering } else { self.load })
            }

            pub fn store(&self, value: $number, ordering: Ordering) {
                self.value.store(value, if ordering == Ordering::Relaxed { ordering } else { self.store });
                self.after_store(ordering);
            }

            pub fn compare_exchange(
                &self,
                current: $number,
                new: $number,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$number, $number> {
                self.value.compare_exchange(current, new, success, failure)
            }

            #[allow(dead_code)]
            pub fn fetch_update(
                &self,
                store: Ordering,
                load: Ordering,
                f: impl FnMut($number) -> Option<$number>,
            ) -> Result<$number, $number> {
                let relaxed = self.store == Ordering::Relaxed;
                self.value.fetch_update(if relaxed { Ordering::Relaxed } else { store }, load, f)
            }

            #[allow(dead_code)]
            pub fn fetch_add(&self, value: $number, ordering: Ordering) -> $number {
                self.before_load(ordering);
                let before = self.value.fetch_add(value, ordering);
                self.after_store(ordering);
                before
            }

            #[allow(dead_code)]
            pub fn fetch_sub(&self, value: $number, ordering: Ordering) -> $number {
                self.before_load(ordering);
                let before = self.value.fetch_sub(value, ordering);
                self.after_store(ordering);
                before
            }

            fn after_store(&self, ordering: Ordering) {
                if ordering == Ordering::SeqCst && self.fences {
                    STORED.with(|stored| stored.set(true));
                }
            }

            fn before_load(&self, ordering: Ordering) {
                if ordering == Ordering::SeqCst && self.fences && STORED.with(|stored| stored.replace(false)) {
                    fence(Ordering::SeqCst);
                }
            }
        }
    };
}

pub type Word32 = Word<atomic::AtomicU32>;
pub type Word64 = Word<atomic::AtomicU64>;
word!(atomic::AtomicU32, u32);
word!(atomic::AtomicU64, u64);

/// Wakes every thread that sleeps on `word`.
pub fn wake(word: &Word32) {
    match word.sleep {
        Sleep::Never => {}
        Sleep::UntilWoken => {
            let _queue = word.queue.lock().unwrap();
            word.woken.notify_all();
        }
        Sleep::Nap => {
            *word.changes.count.lock().unwrap() += 1;
            word.changes.more.notify_all();
        }
    }
}

/// Sleeps until the thread is woken, unless `word` already differs from `seen`; or until the nap is over.
pub fn sleep_on(word: &Word32, seen: u32, _millis: u32) {
    match word.sleep {
        Sleep::Never => panic!("a thread falls asleep"),
        Sleep::UntilWoken => {
            let queue = word.queue.lock().unwrap();
            if word.value.load(Ordering::Relaxed) == seen {
                drop(word.woken.wait(queue).unwrap());
            }
        }
        Sleep::Nap => {
            let mut count = word.changes.count.lock().unwrap();
            while *count == KNOWN.with(Cell::get) {
                count = word.changes.more.wait(count).unwrap();
            }
            KNOWN.with(|known| known.set(*count));
        }
    }
}

/// The memory that belongs to one rank.
struct Block {
    published: Word32,
    sleepers: Word32,
    state: Word32,
    headers: [Word64; 2],
    slots: [UnsafeCell<[u8; SLOT_BYTES]>; 2],
    texts: [UnsafeCell<[u8; TEXT_BYTES]>; 2],
    text_lens: [Word32; 2],
}

/// The kind of a text in a rank's control block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureTextKind {
    /// The rank's reason for giving up.
    AbortReason,
    /// The cause of the rank's death, as the launcher saw it.
    Cause,
}

/// The memory that the ranks share.
pub struct SharedMemoryRegion {
    blocks: Vec<Block>,
    first_failure: Word64,
    plant: Plant,
}

// SAFETY: loom runs one thread at a time, and reports unordered accesses to cells.
unsafe impl Sync for SharedMemoryRegion {}

impl SharedMemoryRegion {
    pub fn new(world_size: usize, sleep: Sleep, plant: Plant) -> Self {
        let changes = Arc::new(Changes::default());
        let block = || {
            let mut block = Block {
                published: Word32::new(sleep, &changes),
                sleepers: Word32::new(sleep, &changes),
                state: Word32::new(sleep, &changes),
                headers: [Word64::new(sleep, &changes), Word64::new(sleep, &changes)],
                slots: Default::default(),
                texts: Default::default(),
                text_lens: [Word32::new(sleep, &changes), Word32::new(sleep, &changes)],
            };
            match plant {
                Plant::None | Plant::PublicationBeforeData | Plant::OneSlot => {}
                Plant::RelaxedPublication | Plant::RelaxedPublicationLoad => block.published.plant(plant),
                Plant::NoTotalOrder => {
                    block.published.plant(plant);
                    block.sleepers.plant(plant);
                }
                Plant::RelaxedState => block.state.store = Ordering::Relaxed,
                Plant::RelaxedStateLoad => block.state.load = Ordering::Relaxed,
            }
            block
        };
        let blocks = (0..world_size).map(|_| block()).collect();
        Self { blocks, first_failure: Word64::new(sleep, &changes), plant }
    }

    pub fn world_size(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the seat of a rank. There is only one channel here.
    pub fn seat(&self, _channel: usize, rank: usize) -> usize {
        rank
    }

    pub fn published(&self, rank: usize) -> &Word32 {
        &self.blocks[rank].published
    }

    pub fn sleepers(&self, rank: usize) -> &Word32 {
        &self.blocks[rank].sleepers
    }

    pub fn state_word(&self, rank: usize) -> &Word32 {
        &self.blocks[rank].state
    }

    pub fn first_failure_word(&self) -> &Word64 {
        &self.first_failure
    }

    /// Returns the header word. Headers have only one word here.
    pub fn header_word(&self, rank: usize, parity: usize, word: usize) -> &Word64 {
        assert_eq!(word, 0);
        &self.blocks[rank].headers[parity]
    }

    pub fn slot(&self, rank: usize, parity: usize) -> *const u8 {
        self.cell(rank, parity).with(|slot| slot.cast())
    }

    pub fn slot_mut(&self, rank: usize, parity: usize) -> *mut u8 {
        if self.plant == Plant::PublicationBeforeData {
            self.published(rank).value.fetch_add(1, Ordering::Release);
        }
        self.cell(rank, parity).with_mut(|slot| slot.cast())
    }

    fn cell(&self, rank: usize, parity: usize) -> &UnsafeCell<[u8; SLOT_BYTES]> {
        &self.blocks[rank].slots[if self.plant == Plant::OneSlot { 0 } else { parity }]
    }

    pub fn text(&self, rank: usize, which: FailureTextKind) -> *const u8 {
        self.blocks[rank].texts[which as usize].with(|text| text.cast())
    }

    pub fn text_mut(&self, rank: usize, which: FailureTextKind) -> *mut u8 {
        self.blocks[rank].texts[which as usize].with_mut(|text| text.cast())
    }

    pub fn text_len(&self, rank: usize, which: FailureTextKind) -> &Word32 {
        &self.blocks[rank].text_lens[which as usize]
    }
}
