//! Collectives, each split into a launch and a wait: they are launched into the queue of this rank, and waited for
//! where their results are needed.
//!
//! ```text
//!   launch ----> jobs, in issue order ----> comm thread: while the training thread computes
//!                                     \---> the waiting thread: jobs that have not started yet
//! ```
//!
//! A thread that runs jobs holds the worker and takes the first job, so jobs run in the order of issue, whichever
//! thread runs them. If a waiting thread left its job to the comm thread, the comm thread would have to wake, run the
//! job and wake the waiting thread, which takes longer than a short collective itself. For the same reason, the comm
//! thread is not woken for short collectives: they start when a thread waits for them, with the next long one, or after
//! [`MAX_QUEUE_DELAY`].

use super::abort_signal::AbortSignal;
use super::backend::CollectiveBackend;
use super::engine_call;
use super::shm::exchange::CollectiveThreadKind;
use super::stats::counters::CommCounters;
use super::{CollectiveKind, CommLog, Pending};
use crate::error::CommError;
use crate::timeline::{self, TimelineLane};
use crate::util::{lock, unpoisoned};
use std::collections::VecDeque;
use std::sync::mpsc::{self, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The size in bytes up to which a collective is short: the comm thread is not woken for it.
pub(crate) const SHORT_BYTES: usize = 16 << 10;
/// The maximum time that a short collective stays in the queue while no thread waits for it.
pub(crate) const MAX_QUEUE_DELAY: Duration = Duration::from_millis(5);
/// The number of unsuccessful checks, one per [`MAX_QUEUE_DELAY`], after which the comm thread sleeps until a job
/// arrives.
const IDLE_POLLS_BEFORE_SLEEP: u32 = 100;

type CollectiveJob = Box<dyn FnOnce(&mut CollectiveWorker) + Send>;

/// The jobs that have been launched but not started, and the worker that runs them.
struct CollectiveQueue {
    jobs: Mutex<QueuedJobs>,
    /// Wakes the comm thread if a job is urgent, the queue is closed, or a job arrives while the thread is asleep.
    changed: Condvar,
    /// The worker, locked by the thread that runs a job.
    worker: Mutex<CollectiveWorker>,
}

#[derive(Default)]
struct QueuedJobs {
    waiting: VecDeque<CollectiveJob>,
    /// Whether a long job has been pushed since the comm thread last found the queue empty.
    urgent: bool,
    /// Whether the comm thread sleeps without a timeout: the next job, however short, must wake it.
    asleep: bool,
    /// Whether the queue accepts no more jobs.
    closed: bool,
}

impl CollectiveQueue {
    fn jobs(&self) -> MutexGuard<'_, QueuedJobs> {
        lock(&self.jobs)
    }

    /// Appends a job, or drops it if the queue is closed.
    fn push(&self, job: CollectiveJob, urgent: bool) {
        let mut jobs = self.jobs();
        if !jobs.closed {
            jobs.waiting.push_back(job);
            jobs.urgent |= urgent;
            if urgent || jobs.asleep {
                self.changed.notify_one();
            }
        }
    }

    /// Closes the queue to new jobs; waiting jobs still run.
    fn close(&self) {
        self.jobs().closed = true;
        self.changed.notify_one();
    }

    /// Waits for the current job, then runs the next ones until there is a `result`.
    fn run_until<T>(&self, mut result: impl FnMut() -> Option<T>) -> T {
        loop {
            let worker = self.worker();
            if let Some(result) = result() {
                return result;
            }
            self.run_first(worker, CollectiveThreadKind::Waiter);
        }
    }

    /// Runs jobs on the comm thread until the queue is closed and empty.
    fn serve(&self) {
        let mut idle_polls = 0;
        loop {
            let mut jobs = self.jobs();
            if idle_polls >= IDLE_POLLS_BEFORE_SLEEP {
                jobs.asleep = true;
                let nothing = |jobs: &mut QueuedJobs| jobs.waiting.is_empty() && !jobs.urgent && !jobs.closed;
                jobs = unpoisoned(self.changed.wait_while(jobs, nothing));
                jobs.asleep = false;
            }
            let idle = |jobs: &mut QueuedJobs| !jobs.urgent && !jobs.closed;
            let wait = self.changed.wait_timeout_while(jobs, MAX_QUEUE_DELAY, idle);
            let (mut jobs, _) = unpoisoned(wait);
            if jobs.waiting.is_empty() {
                if jobs.closed {
                    return;
                }
                // Threads that wait for results may just have run a job.
                idle_polls = if std::mem::take(&mut jobs.urgent) { 0 } else { idle_polls + 1 };
                continue;
            }
            idle_polls = 0;
            drop(jobs);
            self.run_first(self.worker(), CollectiveThreadKind::CommThread);
        }
    }

    /// Waits for the current job. Returns `None` if a job has panicked: the remaining jobs are then dropped, which
    /// notifies the threads that wait for their results.
    fn worker(&self) -> Option<MutexGuard<'_, CollectiveWorker>> {
        let worker = self.worker.lock().ok();
        if worker.is_none() {
            let mut jobs = self.jobs();
            jobs.closed = true;
            jobs.waiting.clear();
        }
        worker
    }

    /// Runs the first waiting job, if there is one.
    fn run_first(&self, worker: Option<MutexGuard<'_, CollectiveWorker>>, runner: CollectiveThreadKind) {
        let Some(mut worker) = worker else { return };
        let first = self.jobs().waiting.pop_front();
        if let Some(job) = first {
            worker.backend.set_runner(runner);
            job(&mut worker);
        }
    }
}

/// The queue of a communicator, and the thread that runs its collectives while no other thread waits for them.
pub(super) struct CollectiveLauncher {
    queue: Arc<CollectiveQueue>,
    comm_thread: Option<JoinHandle<()>>,
    abort_signal: Arc<AbortSignal>,
    counters: Arc<CommCounters>,
    log: Mutex<Option<Arc<CommLog>>>,
}

/// The backend and the state needed to run a job.
struct CollectiveWorker {
    backend: CollectiveBackend,
    abort_signal: Arc<AbortSignal>,
    counters: Arc<CommCounters>,
    /// The first failure. Every later collective returns this failure again, because the ranks are then out of step.
    first_failure: Option<CommError>,
}

impl CollectiveLauncher {
    /// Starts the comm thread, called `name`, for collectives of `backend`.
    ///
    /// # Errors
    /// Fails if the system cannot start a thread.
    pub(super) fn start(
        name: String,
        backend: CollectiveBackend,
        abort_signal: Arc<AbortSignal>,
    ) -> std::io::Result<Self> {
        let counters = Arc::new(CommCounters::default());
        let worker = CollectiveWorker {
            backend,
            abort_signal: abort_signal.clone(),
            counters: counters.clone(),
            first_failure: None,
        };
        let queue = CollectiveQueue { jobs: Mutex::default(), changed: Condvar::new(), worker: Mutex::new(worker) };
        let queue = Arc::new(queue);
        let thread_queue = queue.clone();
        let comm_thread = Some(std::thread::Builder::new().name(name).spawn(move || thread_queue.serve())?);
        Ok(Self { queue, comm_thread, abort_signal, counters, log: Mutex::default() })
    }

    /// Waits until all launched collectives are done.
    pub(super) fn finish_launched(&self) {
        self.queue.run_until(|| self.queue.jobs().waiting.is_empty().then_some(()));
    }

    pub(super) fn counters(&self) -> &Arc<CommCounters> {
        &self.counters
    }

    /// Logs collectives in `log` from now on.
    pub(super) fn log_into(&self, log: Option<Arc<CommLog>>) {
        *lock(&self.log) = log;
    }

    /// Launches a collective of this many elements and bytes.
    pub(super) fn launch<T: Send + 'static>(
        &self,
        kind: CollectiveKind,
        (elements, bytes): (usize, usize),
        run: impl FnOnce(&mut CollectiveBackend) -> Result<T, CommError> + Send + 'static,
    ) -> Pending<T> {
        let (sender, receiver) = mpsc::channel();
        let log = lock(&self.log).clone();
        let timeline_context = timeline::carry();
        let call = engine_call::current();
        let job_context = timeline_context.clone();
        let job: CollectiveJob = Box::new(move |worker| {
            let begin = Instant::now();
            let failure = worker.first_failure.clone().or_else(|| worker.abort_signal.error());
            let result = match failure {
                Some(failure) => Err(failure),
                None => {
                    worker.backend.set_engine_call(call);
                    let start = Instant::now();
                    let span =
                        job_context.span(TimelineLane::Collectives, timeline::EventCategory::Collective, kind.name());
                    let result = run(&mut worker.backend);
                    drop(span.with("bytes", bytes as u64));
                    worker.counters.add(kind, elements, worker.backend.bytes(), start.elapsed());
                    result
                }
            };
            if let (Ok(_), Some(log)) = (&result, log) {
                log.add(kind, bytes, begin.elapsed());
            }
            if let (Err(error), None) = (&result, &worker.first_failure) {
                // Abort immediately: the training thread may compute for a long time before it waits for the result.
                worker.abort_signal.abort(&error.to_string());
                worker.first_failure = Some(error.clone());
            }
            // No thread waits for a result whose Pending was dropped.
            let _ = sender.send(result);
        });
        self.queue.push(job, bytes > SHORT_BYTES);
        let (queue, counters) = (self.queue.clone(), self.counters.clone());
        Pending::from_fn(move || {
            let _span = timeline::span(timeline::EventCategory::Wait, "wait").with_subject_of(&timeline_context);
            let start = Instant::now();
            let result = queue.run_until(|| match receiver.try_recv() {
                Ok(result) => Some(result),
                Err(TryRecvError::Disconnected) => Some(Err(CommError::ThreadEnded)),
                Err(TryRecvError::Empty) => None,
            });
            counters.waited(start.elapsed());
            Ok(result?)
        })
    }
}

impl Drop for CollectiveLauncher {
    /// Waits for the launched collectives, because peers depend on them.
    fn drop(&mut self) {
        self.queue.close();
        if let Some(thread) = self.comm_thread.take() {
            // A panic of the comm thread has already been printed; this notifies the peers.
            if thread.join().is_err() {
                self.abort_signal.abort("its communication thread panicked");
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::joined_rank::JoinedRank;
    use super::super::shm::exchange::ShmExchange;
    use super::super::shm::region::SharedMemoryRegion;
    use super::*;

    /// Returns how often this process's thread called `name` has gone to sleep. There must be only one such thread.
    fn sleeps(name: &str) -> u64 {
        let status = |entry: std::fs::DirEntry| std::fs::read_to_string(entry.path().join("status")).ok();
        let all = std::fs::read_dir("/proc/self/task").unwrap().flatten().filter_map(status);
        let field = |text: &str, key: &str| {
            text.lines().find_map(|line| Some(line.strip_prefix(key)?.trim().to_string())).unwrap_or_default()
        };
        let ours: Vec<u64> = all
            .filter(|text| field(text, "Name:") == name)
            .map(|text| field(&text, "voluntary_ctxt_switches:").parse().unwrap())
            .collect();
        assert_eq!(ours.len(), 1, "threads called {name}");
        ours[0]
    }

    #[test]
    fn an_idle_comm_thread_sleeps_and_a_short_job_still_begins_by_itself() {
        // No other test has this many ranks, so the thread's name is unique.
        let region = Arc::new(SharedMemoryRegion::anonymous(38).unwrap());
        let presence = JoinedRank::enter(region.clone(), 37, Duration::from_secs(10), None).unwrap();
        let backend = CollectiveBackend::SingleHost(ShmExchange::new(region, 37, Duration::from_secs(10)));
        let rank = CollectiveLauncher::start("comm-37".into(), backend, presence.abort_signal().clone()).unwrap();
        std::thread::sleep(MAX_QUEUE_DELAY * (IDLE_POLLS_BEFORE_SLEEP + 60));
        let before = sleeps("comm-37");
        std::thread::sleep(MAX_QUEUE_DELAY * 60);
        let slept = sleeps("comm-37") - before;
        assert!(slept < 5, "it woke {slept} times");
        let (sender, begun) = mpsc::channel();
        let pending = rank.launch(CollectiveKind::Barrier, (0, 0), move |_| {
            sender.send(()).unwrap();
            Ok(())
        });
        begun.recv_timeout(Duration::from_secs(5)).expect("the job starts although no thread waits for it");
        pending.wait().unwrap();
    }
}
