//! The pool of the kernels' helper threads, run by loom in every order that the memory model allows, up to a limited
//! number of thread switches.
//!
//! `src/kernels/worker_pool/protocol.rs` is compiled here unchanged; `pool_primitives.rs` gives it atomic words, locks
//! and pauses that loom observes. In these tests, a helper is a thread that calls `help` until a last job ends it; the
//! real helpers never end. The last tests plant an error in the primitives and pass when loom finds it.
//!
//!     cargo test --release --manifest-path tests/loom/Cargo.toml --test worker_pool

#[path = "pool_primitives.rs"]
#[allow(dead_code)]
mod primitives;
#[path = "../../src/kernels/worker_pool/protocol.rs"]
mod protocol;

use loom::cell::UnsafeCell;
use loom::sync::atomic;
use loom::thread::JoinHandle;
use primitives::{AtomicU64, AtomicUsize, CallerMutex, Condvar, JobCell, Mutex, PoolPlant, Settings};
use protocol::WorkerPool;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const POLLS: Settings = Settings { sleep: false, plant: PoolPlant::None };
const SLEEPS: Settings = Settings { sleep: true, plant: PoolPlant::None };

loom::thread_local! {
    static IS_HELPER: Cell<bool> = Cell::new(false);
    /// The job that this helper entered last, in the test that sets it.
    static ENTERED: Cell<u32> = Cell::new(0);
    /// Whether this helper has worked on the last job.
    static ENDS: Cell<bool> = Cell::new(false);
}

fn is_helper() -> bool {
    IS_HELPER.with(Cell::get)
}

/// Runs `callers` in every order with at most `switches` switches away from a thread that could continue.
fn in_every_order(switches: usize, settings: Settings, callers: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(switches);
    model.max_branches = 2_000;
    primitives::set(settings);
    model.check(callers);
}

/// A pool and its helpers.
struct Pool {
    pool: WorkerPool,
    helpers: RefCell<Vec<JoinHandle<()>>>,
}

// SAFETY: the holder of the pool's lock starts helpers, and they are joined when no other caller is left.
unsafe impl Sync for Pool {}
// SAFETY: same as above.
unsafe impl Send for Pool {}

impl Pool {
    fn new() -> Arc<Self> {
        let pool = WorkerPool {
            state: AtomicU64::new(0),
            job: JobCell::new(None),
            caller: CallerMutex::new(0),
            asleep: AtomicUsize::new(0),
            sleeping: Mutex::new(()),
            wake_up: Condvar::new(),
            panic: Mutex::new(None),
        };
        Arc::new(Self { pool, helpers: RefCell::default() })
    }

    fn run(self: &Arc<Self>, helpers: usize, work: &(dyn Fn() + Sync)) {
        let start = |_| {
            let pool = self.clone();
            self.helpers.borrow_mut().push(loom::thread::spawn(move || pool.help()));
            true
        };
        self.pool.run(helpers, start, work);
    }

    fn help(&self) {
        IS_HELPER.with(|is| is.set(true));
        let mut last = 0;
        while !ENDS.with(Cell::get) {
            last = self.pool.help(last);
        }
    }

    /// Runs a last job, which every helper must enter. A helper that kept sleeping would cause a deadlock.
    fn end(self: &Arc<Self>) {
        let count = self.helpers.borrow().len();
        self.run(count, &|| {
            if is_helper() {
                ENDS.with(|ends| ends.set(true));
            } else {
                self.helpers.take().into_iter().for_each(|helper| helper.join().unwrap());
            }
        });
    }
}

/// A job of several parts, each of which fills a cell. It is kept until the model ends, because a planted error lets
/// helpers work on a job that has returned.
struct Job {
    /// Whether the job is open; the caller clears this flag after the job.
    open: UnsafeCell<bool>,
    next: atomic::AtomicUsize,
    parts: Vec<UnsafeCell<u64>>,
    value: u64,
}

// SAFETY: loom runs one thread at a time, and reports unordered accesses to cells.
unsafe impl Sync for Job {}
// SAFETY: same as above.
unsafe impl Send for Job {}

impl Job {
    fn new(parts: usize, value: u64) -> Arc<Self> {
        let parts = (0..parts).map(|_| UnsafeCell::new(0)).collect();
        Arc::new(Self { open: UnsafeCell::new(true), next: atomic::AtomicUsize::new(0), parts, value })
    }

    /// Takes parts and runs them, one after another, until none is left.
    fn work(&self) {
        // SAFETY: see `Sync`.
        self.open.with(|open| assert!(unsafe { *open }, "the job has returned"));
        while let Some(part) = self.parts.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            // SAFETY: see `Sync`.
            part.with_mut(|part| unsafe { *part += self.value });
        }
    }

    /// Asserts that every part was run once, and that no thread works on the job.
    fn assert_done(&self) {
        // SAFETY: see `Sync`.
        self.open.with_mut(|open| unsafe { *open = false });
        for part in &self.parts {
            // SAFETY: see `Sync`.
            part.with(|part| assert_eq!(unsafe { *part }, self.value));
        }
    }
}

/// Runs a job for each number of parts with up to `helpers` helpers, and then ends the helpers.
fn run_jobs(helpers: usize, parts: &[usize]) {
    let pool = Pool::new();
    let jobs: Vec<_> = parts.iter().zip(1..).map(|(parts, value)| Job::new(*parts, value)).collect();
    // The jobs are kept until all threads have ended.
    let kept = jobs.clone();
    for job in &jobs {
        pool.run(helpers, &|| job.work());
        job.assert_done();
    }
    pool.end();
    drop(kept);
}

#[test]
fn every_part_runs_once_and_the_caller_sees_it_in_every_order() {
    in_every_order(6, POLLS, || run_jobs(1, &[2, 2]));
}

#[test]
fn jobs_of_two_helpers_never_mix() {
    in_every_order(1, POLLS, || run_jobs(2, &[2, 2]));
}

#[test]
fn a_helper_that_sleeps_is_woken_in_every_order() {
    in_every_order(4, SLEEPS, || run_jobs(1, &[2, 1]));
}

#[test]
fn helpers_that_sleep_are_woken_for_each_job() {
    in_every_order(2, SLEEPS, || run_jobs(2, &[2, 1]));
}

/// There are two helpers, and only one of them may enter the second job.
#[test]
fn no_more_helpers_enter_than_the_job_has_places() {
    in_every_order(1, SLEEPS, || {
        let pool = Pool::new();
        pool.run(2, &|| {});
        let entered = atomic::AtomicUsize::new(0);
        pool.run(1, &|| {
            if is_helper() {
                entered.fetch_add(1, Ordering::Relaxed);
            } else {
                // Lets both helpers run, without a switch that counts towards the limit.
                loom::thread::yield_now();
                loom::thread::yield_now();
            }
        });
        assert!(entered.load(Ordering::Relaxed) <= 1);
        pool.end();
    });
}

/// Each job has two places, and the first helper could take both.
#[test]
fn no_helper_enters_a_job_twice() {
    in_every_order(1, SLEEPS, || {
        let pool = Pool::new();
        for job in 1..=2 {
            pool.run(2, &|| {
                if is_helper() {
                    ENTERED.with(|entered| assert_ne!(entered.replace(job), job, "entered twice"));
                } else {
                    loom::thread::yield_now();
                    loom::thread::yield_now();
                }
            });
        }
        pool.end();
    });
}

/// Two callers run jobs at the same time, so one of them may have no helper.
#[test]
fn each_of_two_callers_gets_its_own_parts_done() {
    in_every_order(3, POLLS, || {
        let pool = Pool::new();
        let call = |pool: &Arc<Pool>, value| {
            let job = Job::new(2, value);
            pool.run(1, &|| job.work());
            job.assert_done();
        };
        let other = pool.clone();
        let second = loom::thread::spawn(move || call(&other, 7));
        call(&pool, 8);
        second.join().unwrap();
        pool.end();
    });
}

/// Panics without printing anything.
fn panic_as_planted() {
    resume_unwind(Box::new("as planted"));
}

/// The thread that takes part 0 panics. If another thread works on the job, it does the other part. The next job runs
/// like any other.
#[test]
fn a_panic_in_a_part_reaches_the_caller_and_the_pool_goes_on() {
    in_every_order(5, POLLS, || {
        let (pool, next) = (Pool::new(), atomic::AtomicUsize::new(0));
        let other = Job::new(1, 5);
        let work = || {
            loop {
                match next.fetch_add(1, Ordering::Relaxed) {
                    0 => panic_as_planted(),
                    1 => other.work(),
                    _ => return,
                }
            }
        };
        let panic = catch_unwind(AssertUnwindSafe(|| pool.run(1, &work))).expect_err("a panic");
        assert_eq!(panic.downcast_ref(), Some(&"as planted"));
        // If only one thread worked, and it panicked, no thread has done the other part.
        if next.load(Ordering::Relaxed) > 1 {
            other.assert_done();
        }
        let job = Job::new(1, 6);
        pool.run(1, &|| job.work());
        job.assert_done();
        pool.end();
    });
}

/// The caller's own panic is the one that counts, and the helper's does not remain for the next job.
#[test]
fn panics_of_all_threads_leave_none_behind() {
    in_every_order(5, POLLS, || {
        let pool = Pool::new();
        let panic = catch_unwind(AssertUnwindSafe(|| pool.run(1, &panic_as_planted))).expect_err("a panic");
        assert_eq!(panic.downcast_ref(), Some(&"as planted"));
        let job = Job::new(1, 6);
        pool.run(1, &|| job.work());
        job.assert_done();
        pool.end();
    });
}

/// Returns the error that loom finds in two jobs of one helper with the mistake `plant`, or `None` if it finds nothing.
fn found(plant: PoolPlant, sleep: bool) -> Option<String> {
    let check = || in_every_order(3, Settings { sleep, plant }, || run_jobs(1, &[2, 2]));
    let panic = catch_unwind(check).err()?;
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    Some(text.unwrap_or("a panic without a message").to_string())
}

#[track_caller]
fn assert_found(plant: PoolPlant, sleep: bool, expected: &str) {
    println!("{plant:?}");
    let found = found(plant, sleep);
    assert!(found.as_ref().is_some_and(|text| text.contains(expected)), "not {expected:?} but {found:?}");
}

const RACE: &str = "Causality violation";

#[test]
fn loom_finds_a_job_that_is_entered_before_it_is_written() {
    assert_found(PoolPlant::RelaxedOpening, false, RACE);
    assert_found(PoolPlant::RelaxedEntry, false, RACE);
}

#[test]
fn loom_finds_a_caller_that_returns_before_the_helpers_writes() {
    assert_found(PoolPlant::RelaxedLeaving, false, RACE);
    assert_found(PoolPlant::RelaxedClosing, false, RACE);
    assert_found(PoolPlant::RelaxedWait, false, RACE);
}

#[test]
fn loom_finds_a_helper_that_enters_a_closed_job() {
    assert_found(PoolPlant::PlacesStay, false, RACE);
}

/// Loom reports a deadlock while the caller waits, and again when the job is closed, which ends the process.
/// Therefore, each of these tests runs in a separate process.
#[test]
fn loom_finds_a_sleep_that_nobody_ends() {
    for planted in ["planted_no_total_order", "planted_no_wake_up"] {
        let mut test = std::process::Command::new(std::env::current_exe().unwrap());
        let output = test.args(["--exact", planted, "--ignored", "--nocapture"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("deadlock; threads"), "{planted}: {text}");
    }
}

#[test]
#[ignore = "loom_finds_a_sleep_that_nobody_ends runs it"]
fn planted_no_total_order() {
    assert_eq!(found(PoolPlant::NoTotalOrder, true), None);
}

#[test]
#[ignore = "loom_finds_a_sleep_that_nobody_ends runs it"]
fn planted_no_wake_up() {
    assert_eq!(found(PoolPlant::NoWakeUp, true), None);
}
