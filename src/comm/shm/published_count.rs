//! A count that one rank increments, and on which others sleep until it has changed.
//!
//! # Orderings
//!
//! The count is stored with Release (or a stronger ordering), and loaded with Acquire. SeqCst accesses to the
//! count and to the number of sleepers keep a thread from falling asleep just as the count changes. Loom checks this:
//! see [`super::piece_slots`].

use super::region::{Word32, sleep_on, wake};
use std::sync::atomic::Ordering;

/// A count in shared memory, modulo 2^32.
#[derive(Clone, Copy)]
pub(super) struct PublishedCount<'a> {
    pub word: &'a Word32,
    /// The number of threads that sleep on the word.
    pub sleepers: &'a Word32,
}

impl PublishedCount<'_> {
    /// Returns the count. Data that was written before the count was stored can be read afterwards.
    pub fn get(self) -> u32 {
        self.word.load(Ordering::Acquire)
    }

    /// Stores the next count, and wakes the sleeping threads.
    pub fn publish(self, next: u32) {
        // In the total order of all SeqCst operations, either this store comes before a sleeper's check of the word,
        // and the sleeper does not sleep, or the sleeper is counted before the check of `sleepers` here, and it is
        // woken.
        self.word.store(next, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            wake(self.word);
        }
    }

    /// Sleeps until the count is no longer `seen`, the word's owner has left, or about `nap_millis` milliseconds
    /// have passed.
    pub fn sleep_while(self, seen: u32, nap_millis: u32) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        if self.word.load(Ordering::SeqCst) == seen {
            sleep_on(self.word, seen, nap_millis);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}
