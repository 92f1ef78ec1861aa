//! Threads that help the calling thread with a kernel's tasks.
//!
//! A step runs thousands of kernels, and most take less than a millisecond. Waking a sleeping thread each time would
//! take a large part of that, so helpers spin for a moment before they sleep. The caller never waits for a helper that
//! has not entered: it works too, and when no task is left it closes the job.
//!
//! ```text
//!   caller:  open ── works ─────────────── close ── waits for those inside ── returns
//!   helper:     looks ── enters ── works ── leaves ── looks ... sleeps
//! ```
//!
//! All state is in one word, `state`: the number of the job, the number of helpers that may still enter, and the number
//! of helpers inside. The job is stored next to it, and is written while no helper may enter and none is inside. A
//! process has one pool, which runs one job at a time: a second caller, or a task that calls a kernel itself, works
//! without helpers.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// How long a helper looks for the next job before it sleeps. The gap between two kernels of a step is some tens of
/// microseconds.
const LOOKING: Duration = Duration::from_micros(200);

/// The number of looks between two readings of the clock, which take some microseconds.
const LOOKS: u32 = 64;

/// One helper inside, in `state`.
const INSIDE: u64 = 1;
/// One helper that may enter, in `state`.
const PLACE: u64 = 1 << 16;
/// One job, in `state`.
const JOB: u64 = 1 << 32;
/// The maximum number of helpers that may enter.
const MOST: usize = 1 << 12;

fn inside(state: u64) -> u64 {
    state % PLACE
}

fn places(state: u64) -> u64 {
    state % JOB / PLACE
}

fn number(state: u64) -> u64 {
    state / JOB
}

/// The caller's work, which helpers call. It is valid while the job is open or a helper is inside.
type PoolJob = *const (dyn Fn() + Sync);

struct WorkerPool {
    state: AtomicU64,
    job: UnsafeCell<Option<PoolJob>>,
    /// The number of helpers. The caller of the job holds the lock.
    caller: Mutex<usize>,
    /// The number of helpers that sleep or are about to sleep.
    asleep: AtomicUsize,
    sleeping: Mutex<()>,
    wake_up: Condvar,
    /// The payload of a helper's panic.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written by the holder of `caller` while no helper may enter and none is inside, and read by those
// inside.
unsafe impl Sync for WorkerPool {}

static POOL: WorkerPool = WorkerPool::new();

/// Calls `work` on this thread and concurrently on up to `helpers` other threads. Returns when all calls have returned.
///
/// # Panics
/// Panics if a call panicked.
pub(super) fn run(helpers: usize, work: &(dyn Fn() + Sync)) {
    POOL.run(helpers, work);
}

impl WorkerPool {
    const fn new() -> Self {
        Self {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            caller: Mutex::new(0),
            asleep: AtomicUsize::new(0),
            sleeping: Mutex::new(()),
            wake_up: Condvar::new(),
            panic: Mutex::new(None),
        }
    }

    fn run(&'static self, helpers: usize, work: &(dyn Fn() + Sync)) {
        let mut count = match self.caller.try_lock() {
            Ok(count) => count,
            Err(TryLockError::Poisoned(count)) => count.into_inner(),
            Err(TryLockError::WouldBlock) => return work(),
        };
        let helpers = helpers.min(MOST);
        while *count < helpers {
            let helper = std::thread::Builder::new().name(format!("kernels-{}", *count + 1));
            if helper.spawn(|| self.help()).is_err() {
                break;
            }
            *count += 1;
        }
        // SAFETY: only the lifetime changes; `close` waits until no helper uses the job, also when this unwinds.
        let job: PoolJob = unsafe { std::mem::transmute::<*const (dyn Fn() + Sync + '_), PoolJob>(work) };
        // SAFETY: the lock is held, so no job is open and no helper is inside.
        unsafe { *self.job.get() = Some(job) };
        let state = self.state.load(Ordering::Relaxed);
        // Helpers that see this state see the job. `SeqCst` is used here, below, and where helpers fall asleep: either
        // this thread sees that a helper is about to sleep, or that helper sees the job.
        self.state.store((number(state) + 1) % JOB * JOB + helpers as u64 * PLACE, Ordering::SeqCst);
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
        let mut state = self.state.fetch_and(!(JOB - PLACE), Ordering::Acquire);
        let mut looks = 0u32;
        // From here on, everything that helpers wrote before they left is visible.
        while inside(state) > 0 {
            looks += 1;
            if looks < 10_000 {
                std::hint::spin_loop()
            } else {
                std::thread::yield_now()
            }
            state = self.state.load(Ordering::Acquire);
        }
    }

    /// Runs a helper thread: waits for jobs and works on them.
    fn help(&self) {
        let mut last = 0;
        loop {
            let state = self.next(last);
            last = number(state);
            if !self.enter(state) {
                continue;
            }
            // SAFETY: the job was stored before helpers could enter, and stays until those inside have left.
            let work = unsafe { *self.job.get() }.map(|job| unsafe { &*job });
            if let Some(Err(panic)) = work.map(|work| catch_unwind(AssertUnwindSafe(work))) {
                lock(&self.panic).get_or_insert(panic);
            }
            self.state.fetch_sub(INSIDE, Ordering::Release);
        }
    }

    /// Waits for a job after the one that was entered last, and returns the state in which it is open.
    fn next(&self, last: u64) -> u64 {
        let open = |state: u64| places(state) > 0 && number(state) != last;
        let start = Instant::now();
        let mut looks = 0;
        loop {
            let state = self.state.load(Ordering::SeqCst);
            if open(state) {
                return state;
            }
            looks += 1;
            std::hint::spin_loop();
            if looks % LOOKS == 0 {
                if start.elapsed() > LOOKING {
                    break;
                }
                // Lets another thread run if there are more threads than cores.
                std::thread::yield_now();
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
        let job = number(state);
        while number(state) == job && places(state) > 0 {
            match self.state.compare_exchange_weak(state, state - PLACE + INSIDE, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }
}

/// Closes the job on drop, also when the caller panics: the work must not be used after its lifetime.
struct CloseJobOnDrop<'a>(&'a WorkerPool);

impl Drop for CloseJobOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
        if std::thread::panicking() {
            // The caller's own panic continues. A helper's panic must not stay for the next job.
            lock(&self.0.panic).take();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn pool() -> &'static WorkerPool {
        Box::leak(Box::new(WorkerPool::new()))
    }

    struct Cells<'a>(&'a [UnsafeCell<u64>]);

    // SAFETY: each is written by the one thread that took its number.
    unsafe impl Sync for Cells<'_> {}

    impl Cells<'_> {
        fn at(&self, i: usize) -> Option<*mut u64> {
            self.0.get(i).map(UnsafeCell::get)
        }
    }

    /// Returns work that ends once `n` threads run it at the same time.
    fn together(n: u32) -> impl Fn() + Sync {
        let here = AtomicU32::new(0);
        move || {
            here.fetch_add(1, Ordering::SeqCst);
            while here.load(Ordering::SeqCst) < n {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn what_helpers_have_written_is_there_when_a_job_is_done() {
        let pool = pool();
        for job in 0..20_000u64 {
            let next = AtomicUsize::new(0);
            // Plain memory: a helper that is still running, or whose writes are not visible, would leave a wrong sum.
            let cells: Vec<UnsafeCell<u64>> = (0..8).map(|_| UnsafeCell::new(0)).collect();
            let shared = Cells(&cells);
            pool.run(3, &|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(cell) = shared.at(i) else { return };
                    // SAFETY: only this thread has taken i.
                    unsafe { *cell += job + i as u64 };
                }
            });
            let sum: u64 = cells.into_iter().map(UnsafeCell::into_inner).sum();
            assert_eq!(sum, 8 * job + 28);
        }
    }

    #[test]
    fn helpers_that_sleep_are_woken() {
        let pool = pool();
        for _ in 0..5 {
            pool.run(2, &together(3));
            while pool.asleep.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_crew_goes_on() {
        let pool = pool();
        let me = std::thread::current().id();
        for (caller, helper) in [(false, true), (true, false), (true, true), (false, true)] {
            let all = together(2);
            let work = || {
                all();
                let panics = if std::thread::current().id() == me { caller } else { helper };
                assert!(!panics, "as planted");
            };
            let panic = catch_unwind(AssertUnwindSafe(|| pool.run(1, &work))).expect_err("a panic");
            assert_eq!(panic.downcast_ref(), Some(&"as planted"));
            pool.run(1, &together(2));
        }
    }

    #[test]
    fn a_second_caller_works_alone() {
        let (pool, alone) = (pool(), AtomicU32::new(0));
        let both = together(2);
        pool.run(1, &|| {
            both();
            pool.run(1, &|| _ = alone.fetch_add(1, Ordering::SeqCst));
        });
        assert_eq!(alone.load(Ordering::SeqCst), 2);
    }
}
