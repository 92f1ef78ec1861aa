//! A sandbox for other crates' work on untrusted files. Panics become errors and are not printed. Work that takes too
//! much time, memory or stack ends the process with an error, instead of causing a hang or an abort, or exhausting the
//! machine's memory.
//!
//! Work that can limit itself, such as a template engine that counts its steps, is limited where it runs and returns an
//! ordinary error; the sandbox is for everything else. A separate thread measures the CPU time of the working thread.
//! Memory is counted by [`SandboxAllocator`], if a program uses it as its allocator, as `zerorun` does. The process
//! must end because a thread cannot be stopped from outside, and code that is not prepared for a failed allocation or a
//! stack overflow cannot continue after one.

mod memory_limit_allocator;
mod signals;

pub use memory_limit_allocator::SandboxAllocator;

use crate::util::lock;
use rustix::process::Pid;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

/// The maximum number of bytes that all sandboxed work may hold at a time.
const MAX_MEMORY_BYTES: usize = 512 << 20;

/// The interval at which running work is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The maximum total CPU time of work on one subject, beyond the time expected for the sizes of its inputs.
const MAX_CPU_TIME: Duration = Duration::from_secs(3);

/// The subject of work, such as a file name, for the error that ends the process.
#[derive(Debug, Clone)]
pub struct SandboxSubject(Arc<SubjectRecord>);

#[derive(Debug)]
struct SubjectRecord {
    name: String,
    /// The nanoseconds that work took beyond the expected time.
    excess: AtomicU64,
}

impl SandboxSubject {
    pub fn new(name: impl Into<String>) -> Self {
        Self(Arc::new(SubjectRecord { name: name.into(), excess: AtomicU64::new(0) }))
    }
}

/// Work in progress.
struct RunningWork {
    subject: SandboxSubject,
    /// The expected CPU time.
    expected: Duration,
    /// The thread's CPU time when the watchdog first saw this work, and when it last saw it.
    cpu_times: Option<[Duration; 2]>,
}

/// The slot of a thread that the watchdog checks.
struct WatchdogSlot {
    id: Pid,
    work: Mutex<Option<RunningWork>>,
}

type WatchdogSlotRef = Arc<WatchdogSlot>;

/// The slots of all threads that have run work.
static SLOTS: Mutex<Vec<WatchdogSlotRef>> = Mutex::new(vec![]);

thread_local! {
    static SLOT: WatchdogSlotRef = register();
    /// 1 while this thread runs sandboxed work, however deeply nested; 0 otherwise.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Registers a slot for this thread.
fn register() -> WatchdogSlotRef {
    let slot = WatchdogSlotRef::new(WatchdogSlot { id: rustix::thread::gettid(), work: Mutex::default() });
    let mut slots = lock(&SLOTS);
    slots.retain(|slot| Arc::strong_count(slot) > 1);
    slots.push(slot.clone());
    slot
}

/// Returns a thread's CPU time. Wall-clock time would be misleading, because a thread may do nothing for a minute on a
/// busy machine.
fn cpu_time(id: Pid) -> Option<Duration> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{}/schedstat", id.as_raw_nonzero())).ok()?;
    text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}

/// Checks all work at intervals, and ends the process if work has run for too long.
fn watch() {
    let is_at_work = |slot: &WatchdogSlotRef| {
        let mut work = lock(&slot.work);
        let Some(running) = &mut *work else { return false };
        if let Some(now) = cpu_time(slot.id) {
            let [first, last] = *running.cpu_times.get_or_insert([now, now]);
            running.cpu_times = Some([first, now]);
            let excess = now.saturating_sub(last.max(first + running.expected)).as_nanos() as u64;
            let total = running.subject.0.excess.fetch_add(excess, Ordering::Relaxed).saturating_add(excess);
            if Duration::from_nanos(total) >= MAX_CPU_TIME {
                signals::end(&running.subject.0.name, " takes too long");
            }
        }
        true
    };
    loop {
        // `count` visits every slot, so the check runs on each of them.
        let running = lock(&SLOTS).iter().filter(|slot| is_at_work(slot)).count();
        std::thread::sleep(if running > 0 { CHECK_INTERVAL } else { CHECK_INTERVAL * 10 });
    }
}

/// Runs `work` on `bytes` bytes of `subject`. A panic is returned as an error with its text.
pub fn run_sandboxed<T>(subject: &SandboxSubject, bytes: usize, work: impl FnOnce() -> T) -> Result<T, String> {
    /// The number of bytes that a slow machine processes per second.
    const BYTES_PER_SECOND: u64 = 256 << 10;
    begin();
    if DEPTH.get() > 0 {
        // The enclosing work is already bounded.
        return catch_unwind(AssertUnwindSafe(work)).map_err(text_of);
    }
    let expected = Duration::from_millis(50 + (bytes as u64).saturating_mul(1000) / BYTES_PER_SECOND);
    let stack_marker = 0_u8;
    let _guard = SLOT.with(|slot| {
        *lock(&slot.work) = Some(RunningWork { subject: subject.clone(), expected, cpu_times: None });
        SandboxGuard { slot: slot.clone() }
    });
    DEPTH.set(1);
    signals::enter(&subject.0.name, &raw const stack_marker);
    memory_limit_allocator::enter(MAX_MEMORY_BYTES);
    catch_unwind(AssertUnwindSafe(work)).map_err(text_of)
}

/// A guard for this thread's work, which ends when it is dropped.
struct SandboxGuard {
    slot: WatchdogSlotRef,
}

impl Drop for SandboxGuard {
    fn drop(&mut self) {
        memory_limit_allocator::leave();
        signals::leave();
        DEPTH.set(0);
        *lock(&self.slot.work) = None;
    }
}

/// Returns the text of a panic.
fn text_of(panic: Box<dyn Any + Send>) -> String {
    const MAX_SHOWN_CHARS: usize = 200;
    let text = panic.downcast_ref::<String>().map(String::as_str);
    // The text is truncated, because the message about invalid UTF-8 contains all the bytes.
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").chars().take(MAX_SHOWN_CHARS).collect()
}

/// Suppresses the output of panics within the sandbox, and starts the time measurement.
fn begin() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous_hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if DEPTH.try_with(Cell::get).unwrap_or(0) == 0 {
                previous_hook(panic);
            }
        }));
        signals::listen();
        // Without this thread, time is not measured, but work can still run.
        _ = std::thread::Builder::new().name("watch".into()).spawn(watch);
    });
}

/// Makes the process end with an error at any later panic that occurs because a thread or a stack cannot be created, if
/// limits are set for the memory or the threads of this process (`ulimit`). The error names the cause: too little
/// memory within these limits.
pub fn explain_limits() {
    use rustix::process::Resource;
    let is_set = |resource| rustix::process::getrlimit(resource).current.is_some();
    if ![Resource::As, Resource::Data, Resource::Nproc].into_iter().any(is_set) {
        return;
    }
    signals::listen();
    let previous_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload_as_str().unwrap_or_default();
        let causes =
            ["thread pool", "failed to spawn thread", "stack", "Cannot allocate memory", "Resource temporarily"];
        match causes.iter().any(|cause| text.contains(cause)) {
            true => {
                // For example "assertion `left != right` failed: mmap failed to allocate stack: ...", with the two
                // values on the lines below.
                let line = text.lines().next().unwrap_or_default();
                let reason = line.split_once(" failed: ").map_or(line, |(_, reason)| reason);
                signals::end("", &format!("{} ({reason})", signals::PROCESS_LIMITS_PROBLEM))
            }
            false => previous_hook(panic),
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
        assert_eq!(run_sandboxed(&subject, 0, || 7), Ok(7));
        assert_eq!(run_sandboxed(&subject, 0, || -> u8 { panic!("no {}", 1) }), Err("no 1".into()));
        let nested = run_sandboxed(&subject, 0, || run_sandboxed(&subject, 0, || -> u8 { panic!("in") }));
        assert_eq!(nested, Ok(Err("in".into())));
        assert_eq!(run_sandboxed(&subject, 0, || 8), Ok(8));
    }
}
