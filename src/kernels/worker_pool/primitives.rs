//! The primitives that [`super::protocol`] uses: atomic words, locks, a cell, and the functions for spinning.
//! `tests/loom` has the same primitives, built from loom's types.

use std::cell::UnsafeCell;
pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize};
pub(super) use std::sync::{Condvar, Mutex, Mutex as CallerMutex, MutexGuard};
use std::time::{Duration, Instant};

/// The time for which a helper polls for the next job before it sleeps. The gap between two kernels of a step is a few
/// tens of microseconds.
const SPIN_TIME: Duration = Duration::from_micros(200);

/// The number of polls between two readings of the clock. That many polls take a few microseconds.
const POLLS_PER_CLOCK_READ: u32 = 64;

/// A value that threads read and write without a lock.
pub(super) struct JobCell<T>(UnsafeCell<T>);

impl<T: Copy> JobCell<T> {
    pub(super) const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// # Safety
    /// No thread may set the value during the call.
    #[inline]
    pub(super) unsafe fn get(&self) -> T {
        // SAFETY: as the caller promises.
        unsafe { *self.0.get() }
    }

    /// # Safety
    /// No thread may set or get the value during the call.
    #[inline]
    pub(super) unsafe fn set(&self, value: T) {
        // SAFETY: as the caller promises.
        unsafe { *self.0.get() = value }
    }
}

/// A helper's polling for the next job.
pub(super) struct SpinWait {
    start: Instant,
    polls: u32,
}

impl SpinWait {
    #[inline]
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), polls: 0 }
    }

    /// Pauses until the next poll. Returns false if the thread should sleep instead.
    #[inline]
    pub(super) fn pause(&mut self) -> bool {
        self.polls += 1;
        std::hint::spin_loop();
        if self.polls.is_multiple_of(POLLS_PER_CLOCK_READ) {
            if self.start.elapsed() > SPIN_TIME {
                return false;
            }
            // Lets another thread run if there are more threads than cores.
            std::thread::yield_now();
        }
        true
    }
}

/// Pauses between two checks for something that is expected to happen soon. `polls` counts the pauses.
#[inline]
pub(super) fn pause(polls: &mut u32) {
    *polls += 1;
    if *polls < 10_000 { std::hint::spin_loop() } else { std::thread::yield_now() }
}
