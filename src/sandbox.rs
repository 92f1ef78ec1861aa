//! Work of other crates on files of strangers, within bounds: its panics are errors and are not printed, and what takes too
//! long, too much memory or too much of the stack ends the process with an error instead of a hang, an abort or a full
//! machine.
//!
//! What bounds itself, as the steps of a template, is bounded where it runs and is an error like others; this is for all that
//! does not. Time is measured by a thread of its own, as what the working one computed. Memory is counted by [`BoundedAllocator`], where a program has it as its
//! allocator, as `zerorun` has. A thread cannot be stopped from outside, and neither an allocation nor an overflow of the
//! stack can be refused so that code which expects none goes on: the process ends.

mod bounded_allocator;
mod signals;

pub use bounded_allocator::BoundedAllocator;

use crate::util::lock;
use rustix::process::Pid;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

/// Memory that all work within bounds may take at a time.
const MOST_MEMORY: usize = 512 << 20;

/// How often running work is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// The most that works on one subject compute, all together, beyond what the sizes of what they work on explain.
const MOST_TIME: Duration = Duration::from_secs(3);

/// What work is on, for the error that ends the process: the name of a file, for instance.
#[derive(Debug, Clone)]
pub struct SandboxSubject(Arc<SubjectRecord>);

#[derive(Debug)]
struct SubjectRecord {
    name: String,
    /// Nanoseconds that works took beyond what is usual.
    slow: AtomicU64,
}

impl SandboxSubject {
    pub fn new(name: impl Into<String>) -> Self {
        Self(Arc::new(SubjectRecord { name: name.into(), slow: AtomicU64::new(0) }))
    }
}

/// Work that runs.
struct RunningWork {
    subject: SandboxSubject,
    /// What is usual.
    usual: Duration,
    /// What the thread had computed when this work was first seen, and last.
    seen: Option<[Duration; 2]>,
}

/// A thread.
struct WatchedThread {
    id: Pid,
    work: Mutex<Option<RunningWork>>,
}

type WatchedThreadRef = Arc<WatchedThread>;

/// The slots of all threads that had work.
static SLOTS: Mutex<Vec<WatchedThreadRef>> = Mutex::new(vec![]);

thread_local! {
    static SLOT: WatchedThreadRef = register();
    /// Works within work of this thread.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// A slot for this thread.
fn register() -> WatchedThreadRef {
    let slot = WatchedThreadRef::new(WatchedThread { id: rustix::thread::gettid(), work: Mutex::default() });
    let mut slots = lock(&SLOTS);
    slots.retain(|slot| Arc::strong_count(slot) > 1);
    slots.push(slot.clone());
    slot
}

/// For how long a thread has computed: on a machine that is busy a minute may go by in which it did nothing.
fn computed(id: Pid) -> Option<Duration> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{}/schedstat", id.as_raw_nonzero())).ok()?;
    text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}

/// Ends the process when work has run for too long.
fn watch() {
    let is_at_work = |slot: &WatchedThreadRef| {
        let mut work = lock(&slot.work);
        let Some(running) = &mut *work else { return false };
        if let Some(now) = computed(slot.id) {
            let [first, last] = *running.seen.get_or_insert([now, now]);
            running.seen = Some([first, now]);
            let slow = now.saturating_sub(last.max(first + running.usual)).as_nanos() as u64;
            let all = running.subject.0.slow.fetch_add(slow, Ordering::Relaxed).saturating_add(slow);
            if Duration::from_nanos(all) >= MOST_TIME {
                signals::end(&running.subject.0.name, " takes too long");
            }
        }
        true
    };
    loop {
        // All of them are looked at.
        let running = lock(&SLOTS).iter().filter(|slot| is_at_work(slot)).count();
        std::thread::sleep(if running > 0 { LOOK } else { LOOK * 10 });
    }
}

/// Runs `work` on `subject`, of which `bytes` bytes are worked on. Its panic is an error, whose text this gives.
pub fn within<T>(subject: &SandboxSubject, bytes: usize, work: impl FnOnce() -> T) -> Result<T, String> {
    /// Bytes that take a second, on a slow machine.
    const A_SECOND: u64 = 256 << 10;
    begin();
    if DEPTH.get() > 0 {
        // Bounded by what is around it.
        return catch_unwind(AssertUnwindSafe(work)).map_err(text_of);
    }
    let usual = Duration::from_millis(50 + (bytes as u64).saturating_mul(1000) / A_SECOND);
    let here = 0_u8;
    let _entered = SLOT.with(|slot| {
        *lock(&slot.work) = Some(RunningWork { subject: subject.clone(), usual, seen: None });
        SandboxGuard { slot: slot.clone() }
    });
    DEPTH.set(1);
    signals::enter(&subject.0.name, &raw const here);
    bounded_allocator::enter(MOST_MEMORY);
    catch_unwind(AssertUnwindSafe(work)).map_err(text_of)
}

/// Work of this thread, until it is dropped.
struct SandboxGuard {
    slot: WatchedThreadRef,
}

impl Drop for SandboxGuard {
    fn drop(&mut self) {
        bounded_allocator::leave();
        signals::leave();
        DEPTH.set(0);
        *lock(&self.slot.work) = None;
    }
}

/// What a panic said.
fn text_of(panic: Box<dyn Any + Send>) -> String {
    const SHOWN: usize = 200;
    let text = panic.downcast_ref::<String>().map(String::as_str);
    // A text that is not UTF-8 is in it with all its bytes.
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").chars().take(SHOWN).collect()
}

/// From now on panics within bounds are not printed, and time is measured.
fn begin() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if DEPTH.try_with(Cell::get).unwrap_or(0) == 0 {
                usual(panic);
            }
        }));
        signals::listen();
        // Without this thread nothing is measured, which is no reason not to work.
        _ = std::thread::Builder::new().name("watch".into()).spawn(watch);
    });
}

/// From now on a panic of a thread or a stack for which there is no memory, because of the limits that are set for this
/// process (`ulimit`), ends it with an error that says so.
pub fn explain_limits() {
    use rustix::process::Resource;
    let is_set = |resource| rustix::process::getrlimit(resource).current.is_some();
    if ![Resource::As, Resource::Data, Resource::Nproc].into_iter().any(is_set) {
        return;
    }
    signals::listen();
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload_as_str().unwrap_or_default();
        let of = ["thread pool", "failed to spawn thread", "stack", "Cannot allocate memory", "Resource temporarily"];
        match of.iter().any(|of| text.contains(of)) {
            true => {
                // "assertion `left != right` failed: mmap failed to allocate stack: ..." and the two values below.
                let line = text.lines().next().unwrap_or_default();
                let what = line.split_once(" failed: ").map_or(line, |(_, what)| what);
                signals::end("", &format!("{} ({what})", signals::LIMITS))
            }
            false => usual(panic),
        }
    }));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_text() {
        let subject = SandboxSubject::new("x");
        assert_eq!(within(&subject, 0, || 7), Ok(7));
        assert_eq!(within(&subject, 0, || -> u8 { panic!("no {}", 1) }), Err("no 1".into()));
        assert_eq!(within(&subject, 0, || within(&subject, 0, || -> u8 { panic!("in") })), Ok(Err("in".into())));
        assert_eq!(within(&subject, 0, || 8), Ok(8));
    }
}
