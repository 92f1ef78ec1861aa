//! Loom's replacements for `src/kernels/worker_pool/primitives.rs`.
//!
//! - Atomic words are loom's. A load may return any value that the C11 memory model allows it to return.
//! - The cell of the job is loom's: loom reports two accesses, of which at least one writes, unless one happens before
//!   the other.
//! - A pause lets another thread run. There is no clock: [`Settings::sleep`] determines whether a helper that finds no
//!   job sleeps at once or keeps looking.
//! - The lock of the caller is a word, because loom's mutex cannot be used again after a panic.
//!
//! Loom treats SeqCst as acquire and release (and a little more), so a thread executes a SeqCst fence, which loom
//! supports, between a SeqCst store and its next SeqCst load. A fence, or the mutex, may also hide a missing Acquire or
//! Release. There are therefore also tests in which no helper sleeps; they do not need SeqCst, and use no fences.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{self, Ordering, fence};
pub use loom::sync::{Mutex, MutexGuard};
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, TryLockError, TryLockResult};

/// A deliberate deviation from what the protocol requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolPlant {
    None,
    /// A job is opened with a relaxed store.
    RelaxedOpening,
    /// Helpers look for the job and enter it with relaxed operations.
    RelaxedEntry,
    /// A helper leaves with a relaxed operation.
    RelaxedLeaving,
    /// The job is closed with a relaxed operation.
    RelaxedClosing,
    /// The caller waits for helpers with relaxed loads.
    RelaxedWait,
    /// Closing does not take away the free places for helpers.
    PlacesStay,
    /// There is no order between `state` and `asleep`.
    NoTotalOrder,
    /// No helper is woken.
    NoWakeUp,
}

/// The settings of a test's pool.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Whether helpers that find no job sleep. Otherwise, they keep looking.
    pub sleep: bool,
    pub plant: PoolPlant,
}

thread_local! {
    /// The settings of the test. Loom runs all threads of a model on one thread of the operating system.
    static SETTINGS: Cell<Settings> = const { Cell::new(Settings { sleep: false, plant: PoolPlant::None }) };
}

pub fn set(settings: Settings) {
    SETTINGS.set(settings);
}

fn planted(plant: PoolPlant) -> bool {
    SETTINGS.get().plant == plant
}

/// Returns `ordering`, or Relaxed if the test plants this deviation.
fn unless(plant: PoolPlant, ordering: Ordering) -> Ordering {
    if planted(plant) { Ordering::Relaxed } else { ordering }
}

loom::thread_local! {
    /// Whether this thread has performed a SeqCst store since its last fence.
    static STORED: Cell<bool> = Cell::new(false);
}

fn after_store(ordering: Ordering) {
    if ordering == Ordering::SeqCst && SETTINGS.get().sleep && !planted(PoolPlant::NoTotalOrder) {
        STORED.with(|stored| stored.set(true));
    }
}

fn before_load(ordering: Ordering) {
    if ordering == Ordering::SeqCst && STORED.with(|stored| stored.replace(false)) {
        fence(Ordering::SeqCst);
    }
}

/// The pool's state.
pub struct AtomicU64(atomic::AtomicU64);

impl AtomicU64 {
    pub fn new(value: u64) -> Self {
        Self(atomic::AtomicU64::new(value))
    }

    pub fn load(&self, ordering: Ordering) -> u64 {
        before_load(ordering);
        self.0.load(match ordering {
            Ordering::SeqCst => unless(PoolPlant::RelaxedEntry, ordering),
            Ordering::Acquire => unless(PoolPlant::RelaxedWait, ordering),
            ordering => ordering,
        })
    }

    pub fn store(&self, value: u64, ordering: Ordering) {
        self.0.store(value, unless(PoolPlant::RelaxedOpening, ordering));
        after_store(ordering);
    }

    pub fn fetch_and(&self, mask: u64, ordering: Ordering) -> u64 {
        let mask = if planted(PoolPlant::PlacesStay) { u64::MAX } else { mask };
        self.0.fetch_and(mask, unless(PoolPlant::RelaxedClosing, ordering))
    }

    pub fn fetch_sub(&self, value: u64, ordering: Ordering) -> u64 {
        self.0.fetch_sub(value, unless(PoolPlant::RelaxedLeaving, ordering))
    }

    pub fn compare_exchange_weak(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.0.compare_exchange_weak(current, new, unless(PoolPlant::RelaxedEntry, success), failure)
    }
}

/// The number of helpers that sleep.
pub struct AtomicUsize(atomic::AtomicUsize);

impl AtomicUsize {
    pub fn new(value: usize) -> Self {
        Self(atomic::AtomicUsize::new(value))
    }

    pub fn load(&self, ordering: Ordering) -> usize {
        before_load(ordering);
        self.0.load(ordering)
    }

    pub fn fetch_add(&self, value: usize, ordering: Ordering) -> usize {
        before_load(ordering);
        let before = self.0.fetch_add(value, ordering);
        after_store(ordering);
        before
    }

    pub fn fetch_sub(&self, value: usize, ordering: Ordering) -> usize {
        self.0.fetch_sub(value, ordering)
    }
}

pub struct JobCell<T>(UnsafeCell<T>);

impl<T: Copy> JobCell<T> {
    pub fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// # Safety
    /// The caller need not ensure anything, because loom reports races.
    pub unsafe fn get(&self) -> T {
        // SAFETY: loom runs one thread at a time.
        self.0.with(|value| unsafe { *value })
    }

    /// # Safety
    /// The caller need not ensure anything, because loom reports races.
    pub unsafe fn set(&self, value: T) {
        // SAFETY: loom runs one thread at a time.
        self.0.with_mut(|pointer| unsafe { *pointer = value });
    }
}

pub struct Condvar(loom::sync::Condvar);

impl Condvar {
    pub fn new() -> Self {
        Self(loom::sync::Condvar::new())
    }

    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        self.0.wait(guard)
    }

    pub fn notify_all(&self) {
        if !planted(PoolPlant::NoWakeUp) {
            self.0.notify_all();
        }
    }
}

/// A lock for which no thread ever waits. A panic in its holder does not poison it.
pub struct CallerMutex<T> {
    locked: atomic::AtomicBool,
    value: std::cell::UnsafeCell<T>,
}

impl<T> CallerMutex<T> {
    pub fn new(value: T) -> Self {
        Self { locked: atomic::AtomicBool::new(false), value: std::cell::UnsafeCell::new(value) }
    }

    pub fn try_lock(&self) -> TryLockResult<CallerGuard<'_, T>> {
        match self.locked.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Ok(CallerGuard(self)),
            Err(_) => Err(TryLockError::WouldBlock),
        }
    }
}

pub struct CallerGuard<'a, T>(&'a CallerMutex<T>);

impl<T> Deref for CallerGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: only the holder of the lock uses the value.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for CallerGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: only the holder of the lock uses the value.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for CallerGuard<'_, T> {
    fn drop(&mut self) {
        self.0.locked.store(false, Ordering::Release);
    }
}

/// A helper's polling for the next job.
pub struct SpinWait;

impl SpinWait {
    pub fn new() -> Self {
        Self
    }

    pub fn pause(&mut self) -> bool {
        let sleep = SETTINGS.get().sleep;
        if !sleep {
            loom::thread::yield_now();
        }
        !sleep
    }
}

pub fn pause(_looks: &mut u32) {
    loom::thread::yield_now();
}
