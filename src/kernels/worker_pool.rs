//! Threads that help the calling thread with a kernel's tasks.
//!
//! A step runs thousands of kernels, and most take less than a millisecond. Waking a sleeping thread each time would
//! take a large part of that time, so helpers spin for a moment before they sleep. The caller never waits for a helper
//! that has not entered the job: the caller works too, and closes the job when no task is left.
//!
//! ```text
//!   caller:  open ── works ─────────────── close ── waits for those inside ── returns
//!   helper:     polls ── enters ── works ── leaves ── polls ... sleeps
//! ```
//!
//! The state of a job is in one word, `state`: the number of the job, the number of helpers that may still enter, and
//! the number of helpers inside. The job is stored next to it, and is written only while no helper may enter and none
//! is inside. A process has one pool, which runs one job at a time: a second caller, or a task that calls a kernel
//! itself, works without helpers.

mod primitives;
mod protocol;

use primitives::{AtomicU64, AtomicUsize, CallerMutex, Condvar, JobCell, Mutex};
use protocol::WorkerPool;

static POOL: WorkerPool = WorkerPool::new();

/// Calls `work` on this thread and concurrently on up to `helpers` other threads. Returns when all calls have returned.
///
/// # Panics
/// Panics if a call panicked.
pub(super) fn run(helpers: usize, work: &(dyn Fn() + Sync)) {
    run_on(&POOL, helpers, work);
}

/// Does the same as [`run`] with the helpers of `pool`.
fn run_on(pool: &'static WorkerPool, helpers: usize, work: &(dyn Fn() + Sync)) {
    let start = |number| {
        let helper = std::thread::Builder::new().name(format!("kernels-{number}"));
        helper.spawn(|| help(pool)).is_ok()
    };
    pool.run(helpers, start, work);
}

/// Runs a helper thread: waits for jobs and works on them.
fn help(pool: &WorkerPool) {
    let mut last = 0;
    loop {
        last = pool.help(last);
    }
}

impl WorkerPool {
    const fn new() -> Self {
        Self {
            state: AtomicU64::new(0),
            job: JobCell::new(None),
            caller: CallerMutex::new(0),
            asleep: AtomicUsize::new(0),
            sleeping: Mutex::new(()),
            wake_up: Condvar::new(),
            panic: Mutex::new(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::UnsafeCell;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

    struct Pool(&'static WorkerPool);

    impl Pool {
        fn run(&self, helpers: usize, work: &(dyn Fn() + Sync)) {
            run_on(self.0, helpers, work);
        }
    }

    fn pool() -> Pool {
        Pool(Box::leak(Box::new(WorkerPool::new())))
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
    fn meeting_of(n: u32) -> impl Fn() + Sync {
        let arrived = AtomicU32::new(0);
        move || {
            arrived.fetch_add(1, Ordering::SeqCst);
            while arrived.load(Ordering::SeqCst) < n {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn what_helpers_have_written_is_there_when_a_job_is_done() {
        let pool = pool();
        for job in 0..if cfg!(miri) { 100 } else { 20_000u64 } {
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
            pool.run(2, &meeting_of(3));
            while pool.0.asleep.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_crew_goes_on() {
        let pool = pool();
        let me = std::thread::current().id();
        for (caller, helper) in [(false, true), (true, false), (true, true), (false, true)] {
            let meet = meeting_of(2);
            let work = || {
                meet();
                let panics = if std::thread::current().id() == me { caller } else { helper };
                assert!(!panics, "deliberate panic");
            };
            let panic = catch_unwind(AssertUnwindSafe(|| pool.run(1, &work))).expect_err("a panic");
            assert_eq!(panic.downcast_ref(), Some(&"deliberate panic"));
            pool.run(1, &meeting_of(2));
        }
    }

    #[test]
    fn a_second_caller_works_alone() {
        let (pool, calls) = (pool(), AtomicU32::new(0));
        let meet = meeting_of(2);
        pool.run(1, &|| {
            meet();
            pool.run(1, &|| _ = calls.fetch_add(1, Ordering::SeqCst));
        });
        assert_eq!(calls.load(Ordering::SeqCst), 2);
    }
}
