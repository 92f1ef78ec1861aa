//! The job that a caller shares with its helpers: who may read and write what, and in which order.
//!
//! # Orderings
//!
//! `state` is stored with Release (or stronger) after `job`, and loaded with Acquire before a helper reads `job`. A
//! helper leaves with Release, and the caller checks with Acquire whether all have left, so it sees what they wrote,
//! and may write `job` again. All changes to `state` between opening and that check are read-modify-write operations,
//! which continue the release sequence of the helpers that left earlier. Between `state` and `asleep`, SeqCst keeps a
//! helper from falling asleep just as a job opens; the lock `sleeping` does so between a helper's last poll and its
//! wait.
//!
//! # Checked with loom
//!
//! `tests/loom` compiles this file with loom's atomic words, cells and locks in place of [`super::primitives`], and
//! runs two jobs of one or two parts, in every order in which their accesses can take effect. The number of
//! preemptions is limited: to six for one helper that keeps polling, four for one that sleeps, one for two helpers
//! that keep polling, two for two that sleep, and three for two callers. Loom finds no race on `job` or on what the
//! parts write, no part that is run twice or not at all, no helper that works on a job that has returned or enters one
//! twice, no panic that is lost or left for the next job, and no helper that sleeps forever. The pool never ends its
//! helpers, so there is no end to check.
//!
//! Loom finds the deliberate mistakes in its tests: a job that is opened, polled, left, closed or waited for with
//! Relaxed, a closed job that helpers can still enter, SeqCst operations without a total order, and a missing wake-up.
//! The following mistakes were made in this file by hand, one by one, and each was found too: waking without the lock,
//! falling asleep without a second poll, `asleep` that is never incremented, closing that does not wait, no closing
//! when the caller panics, a helper's panic that is not caught or not cleared, entering without taking a slot,
//! entering a different job from the one polled, and polling for any job instead of a new one. Using Relaxed only in
//! `enter` is not detected, because the load before it has at least Acquire ordering. The check does not cover the
//! clock, a job number that wraps around, or the start of threads.

use super::primitives::{AtomicU64, AtomicUsize, CallerMutex, Condvar, JobCell, Mutex, MutexGuard, SpinWait, pause};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering;
use std::sync::{PoisonError, TryLockError};

/// The amount that each helper inside adds to `state`.
const ONE_INSIDE: u64 = 1;
/// The amount that each helper that may still enter adds to `state`.
const ONE_SLOT: u64 = 1 << 16;
/// The amount by which each new job increases `state`.
const ONE_JOB: u64 = 1 << 32;
/// The maximum number of helpers that may enter.
const MAX_HELPERS: usize = 1 << 12;

fn helpers_inside(state: u64) -> u64 {
    state % ONE_SLOT
}

fn free_slots(state: u64) -> u64 {
    state % ONE_JOB / ONE_SLOT
}

fn job_number(state: u64) -> u64 {
    state / ONE_JOB
}

/// The caller's work, which helpers call. It is valid while the job is open or a helper is inside.
pub(super) type PoolJob = *const (dyn Fn() + Sync);

/// The state of a pool and the operations of its threads. Every word starts as zero, and `job` starts empty.
pub(super) struct WorkerPool {
    pub(super) state: AtomicU64,
    pub(super) job: JobCell<Option<PoolJob>>,
    /// The number of helpers. The caller of the job holds the lock.
    pub(super) caller: CallerMutex<usize>,
    /// The number of helpers that sleep or are about to sleep.
    pub(super) asleep: AtomicUsize,
    pub(super) sleeping: Mutex<()>,
    pub(super) wake_up: Condvar,
    /// The payload of a helper's panic.
    pub(super) panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written by the holder of `caller` while no helper may enter and none is inside, and read only by
// helpers inside.
unsafe impl Sync for WorkerPool {}

impl WorkerPool {
    /// Calls `work` on this thread and concurrently on up to `helpers` helpers. Returns when all calls have returned.
    /// While there are fewer helpers, `start` is called to start the next one, with its number (counted from 1).
    /// `start` returns false if it cannot do so.
    ///
    /// # Panics
    /// Panics if a call panicked.
    pub(super) fn run(&self, helpers: usize, mut start: impl FnMut(usize) -> bool, work: &(dyn Fn() + Sync)) {
        let mut count = match self.caller.try_lock() {
            Ok(count) => count,
            Err(TryLockError::Poisoned(count)) => count.into_inner(),
            Err(TryLockError::WouldBlock) => return work(),
        };
        let helpers = helpers.min(MAX_HELPERS);
        while *count < helpers && start(*count + 1) {
            *count += 1;
        }
        // SAFETY: only the lifetime changes; `close` waits until no helper uses the job, even if this function unwinds.
        let job: PoolJob = unsafe { std::mem::transmute::<*const (dyn Fn() + Sync + '_), PoolJob>(work) };
        // SAFETY: the lock is held, so no job is open and no helper is inside.
        unsafe { self.job.set(Some(job)) };
        let state = self.state.load(Ordering::Relaxed);
        // Helpers that see this state see the job. `SeqCst` is used here, below, and where helpers fall asleep: either
        // this thread sees that a helper is about to sleep, or that helper sees the job.
        self.state.store((job_number(state) + 1) % ONE_JOB * ONE_JOB + helpers as u64 * ONE_SLOT, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.sleeping));
            self.wake_up.notify_all();
        }
        let closing = CloseJobOnDrop(self);
        work();
        drop(closing);
        let panic = lock(&self.panic).take();
        drop(count);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Stops helpers from entering, and waits for those inside.
    fn close(&self) {
        // Meanwhile, only helpers that enter or leave change the state.
        let mut state = self.state.fetch_and(!(ONE_JOB - ONE_SLOT), Ordering::Acquire);
        let mut polls = 0u32;
        // From here on, everything that helpers wrote before they left is visible.
        while helpers_inside(state) > 0 {
            pause(&mut polls);
            state = self.state.load(Ordering::Acquire);
        }
    }

    /// Waits for a job with a number other than `last`, and works on it unless it closes first. Returns its number. A
    /// helper calls this indefinitely.
    #[inline]
    pub(super) fn help(&self, last: u64) -> u64 {
        let state = self.wait_for_job(last);
        if self.enter(state) {
            // SAFETY: the job was stored before helpers could enter, and stays until those inside have left.
            let work = unsafe { self.job.get() }.map(|job| unsafe { &*job });
            if let Some(Err(panic)) = work.map(|work| catch_unwind(AssertUnwindSafe(work))) {
                lock(&self.panic).get_or_insert(panic);
            }
            self.state.fetch_sub(ONE_INSIDE, Ordering::Release);
        }
        job_number(state)
    }

    /// Waits for a job with a number other than `last`, and returns the state in which it is open.
    fn wait_for_job(&self, last: u64) -> u64 {
        let open = |state: u64| free_slots(state) > 0 && job_number(state) != last;
        let mut spin_wait = SpinWait::new();
        loop {
            let state = self.state.load(Ordering::SeqCst);
            if open(state) {
                return state;
            }
            if !spin_wait.pause() {
                break;
            }
        }
        let mut sleeping = lock(&self.sleeping);
        self.asleep.fetch_add(1, Ordering::SeqCst);
        let state = loop {
            let state = self.state.load(Ordering::SeqCst);
            if open(state) {
                break state;
            }
            sleeping = self.wake_up.wait(sleeping).unwrap_or_else(PoisonError::into_inner);
        };
        self.asleep.fetch_sub(1, Ordering::SeqCst);
        state
    }

    /// Enters the job of this state, unless it is closed or full.
    fn enter(&self, mut state: u64) -> bool {
        let job = job_number(state);
        while job_number(state) == job && free_slots(state) > 0 {
            match self.state.compare_exchange_weak(
                state,
                state - ONE_SLOT + ONE_INSIDE,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(current) => state = current,
            }
        }
        false
    }
}

/// A guard that closes the job on drop, even if the caller panics: the work must not be used after its lifetime.
struct CloseJobOnDrop<'a>(&'a WorkerPool);

impl Drop for CloseJobOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
        if std::thread::panicking() {
            // The caller's own panic continues. A helper's panic must not be left for the next job.
            lock(&self.0.panic).take();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
