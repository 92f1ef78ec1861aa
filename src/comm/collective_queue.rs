//! Collectives in two halves: they are launched into the queue of this rank, and waited for where the result is needed.
//!
//! ```text
//!   launch ----> jobs, in issue order ----> comm thread: while the training thread computes
//!                                     \---> the waiting thread: jobs that are not started yet
//! ```
//!
//! A thread that runs jobs holds the worker and takes the first job, so jobs run in the order of issue whichever thread
//! runs them. If a waiting thread left its job to the comm thread, it would wait for that thread to wake, run the job
//! and wake it again, which takes longer than a short collective itself. For the same reason the comm thread is not
//! woken for short collectives: they start when a thread waits for them, with the next long one, or after
//! [`MAX_QUEUE_DELAY`].

use super::backend::CollectiveBackend;
use super::engine_call;
use super::mpi::MpiRank;
use super::shm::exchange::{CollectiveThread, ShmExchange};
use super::shm::rank_state::PeerFailure;
use super::shm::region::SharedMemoryRegion;
use super::stats::counters::CommCounters;
use super::{CollectiveKind, CommLog, CommReport, Communicator, Pending, WireFormat};
use crate::error::{CommError, Result, without_backtrace};
use crate::precision::Flat;
use crate::timeline::{self, TimelineLane};
use crate::util::{lock, unpoisoned};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The size up to which a collective is short: the comm thread is not woken for it.
pub(crate) const SHORT_BYTES: usize = 16 << 10;
/// The maximum time that a short collective stays in the queue while no thread waits for it.
pub(crate) const MAX_QUEUE_DELAY: Duration = Duration::from_millis(5);
/// The number of unsuccessful checks, one per [`MAX_QUEUE_DELAY`], after which the comm thread sleeps until a job arrives.
const IDLE_POLLS_BEFORE_SLEEP: u32 = 100;

type CollectiveJob = Box<dyn FnOnce(&mut CollectiveWorker) + Send>;

/// The jobs that are launched but not started, and the worker that runs them.
struct CollectiveQueue {
    jobs: Mutex<QueuedJobs>,
    /// Signals the comm thread that `jobs` is urgent or closed.
    changed: Condvar,
    /// The worker, locked by the thread that runs a job.
    worker: Mutex<CollectiveWorker>,
}

#[derive(Default)]
struct QueuedJobs {
    waiting: VecDeque<CollectiveJob>,
    /// Whether a long job is among the waiting ones.
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

    /// Closes the queue for new jobs; waiting jobs still run.
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
            self.run_first(worker, CollectiveThread::Waiter);
        }
    }

    /// Runs jobs on the comm thread until the queue is closed and empty.
    fn serve(&self) {
        let mut in_vain = 0;
        loop {
            let mut jobs = self.jobs();
            if in_vain >= IDLE_POLLS_BEFORE_SLEEP {
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
                in_vain = if std::mem::take(&mut jobs.urgent) { 0 } else { in_vain + 1 };
                continue;
            }
            in_vain = 0;
            drop(jobs);
            self.run_first(self.worker(), CollectiveThread::CommThread);
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
    fn run_first(&self, worker: Option<MutexGuard<'_, CollectiveWorker>>, runner: CollectiveThread) {
        let Some(mut worker) = worker else { return };
        let first = self.jobs().waiting.pop_front();
        if let Some(job) = first {
            worker.backend.run_by(runner);
            job(&mut worker);
        }
    }
}

/// A communicator for ranks in shared memory, as processes or as threads, and over MPI for several hosts.
pub struct CpuCommunicator {
    region: Arc<SharedMemoryRegion>,
    rank: usize,
    world_size: usize,
    ranks_here: Range<usize>,
    abort_signal: Arc<AbortSignal>,
    counters: Arc<CommCounters>,
    queue: Arc<CollectiveQueue>,
    comm_thread: Option<JoinHandle<()>>,
    heartbeat: Option<HeartbeatThread>,
    log: Mutex<Option<Arc<CommLog>>>,
    /// The maximum time that a rank waits for another.
    timeout: Duration,
}

/// The backend and the state needed to run a job.
struct CollectiveWorker {
    backend: CollectiveBackend,
    abort_signal: Arc<AbortSignal>,
    counters: Arc<CommCounters>,
    /// The first failure. Every later collective returns it again, because the ranks are out of step after it.
    failed: Option<CommError>,
}

/// Notifies the other ranks, once, that this rank gives up. Shared by the training thread and the comm thread.
struct AbortSignal {
    region: Arc<SharedMemoryRegion>,
    rank: usize,
    /// This rank's index in the shared memory region.
    local_rank: usize,
    /// The connection to other hosts, if there are any.
    mpi: Option<MpiRank>,
    /// The reason that this rank has reported.
    why: OnceLock<String>,
}

impl AbortSignal {
    fn abort(&self, why: &str) {
        // A backtrace would clutter the other ranks' own messages.
        let why = without_backtrace(why);
        if self.why.set(why.clone()).is_ok() {
            self.region.abort(self.local_rank, &why);
            self.mpi.iter().for_each(|mpi| mpi.abort(&why));
        }
    }

    /// Returns the error of every collective of this rank after it has given up.
    fn error(&self) -> Option<CommError> {
        self.why.get().map(|why| CommError::GaveUp { rank: self.rank, why: why.clone() })
    }
}

impl CpuCommunicator {
    /// Joins the job of `region` as `rank`. A wait of more than `timeout` for a peer is an error.
    ///
    /// # Errors
    /// The rank is already taken, or a thread cannot be started.
    pub(crate) fn new(region: Arc<SharedMemoryRegion>, rank: usize, timeout: Duration) -> Result<Self> {
        Self::with(region, rank, timeout, None)
    }

    /// Joins the job as `rank`, with the other ranks of this host in `region` and those of other hosts over `mpi`.
    ///
    /// # Errors
    /// The errors of [`CpuCommunicator::new`].
    pub(super) fn across_hosts(
        region: Arc<SharedMemoryRegion>,
        rank: usize,
        timeout: Duration,
        mpi: MpiRank,
    ) -> Result<Self> {
        Self::with(region, rank, timeout, Some(mpi))
    }

    fn with(region: Arc<SharedMemoryRegion>, rank: usize, timeout: Duration, mpi: Option<MpiRank>) -> Result<Self> {
        let local_rank = rank - mpi.as_ref().map_or(0, MpiRank::first);
        let world_size = mpi.as_ref().map_or(region.world_size(), MpiRank::world_size);
        region.enter(local_rank)?;
        let exchange = ShmExchange::new(region.clone(), local_rank, timeout).numbered_from(rank - local_rank);
        let backend = match &mpi {
            Some(mpi) if world_size > region.world_size() => {
                CollectiveBackend::MultiHost(mpi.collectives(exchange, timeout))
            }
            _ => CollectiveBackend::SingleHost(exchange),
        };
        let why = OnceLock::new();
        let abort_signal = Arc::new(AbortSignal { region: region.clone(), rank, local_rank, mpi, why });
        let counters = Arc::new(CommCounters::default());
        let worker =
            CollectiveWorker { backend, abort_signal: abort_signal.clone(), counters: counters.clone(), failed: None };
        let queue = CollectiveQueue { jobs: Mutex::default(), changed: Condvar::new(), worker: Mutex::new(worker) };
        let queue = Arc::new(queue);
        let spawn_failed = |e| {
            abort_signal.abort("it could not start a thread");
            CommError::Region { action: "start a thread for", source: Arc::new(e) }
        };
        let served = queue.clone();
        let comm_thread = std::thread::Builder::new()
            .name(format!("comm-{rank}"))
            .spawn(move || served.serve())
            .map_err(spawn_failed)?;
        // Ranks that are threads live and die with the process that would watch them.
        let heartbeat = if region.is_shared_between_processes() {
            Some(HeartbeatThread::start(region.clone(), local_rank).map_err(spawn_failed)?)
        } else {
            None
        };
        let first = rank - local_rank;
        let ranks_here = first..first + region.world_size();
        Ok(Self {
            region,
            rank,
            world_size,
            ranks_here,
            abort_signal,
            counters,
            queue,
            comm_thread: Some(comm_thread),
            heartbeat,
            log: Mutex::default(),
            timeout,
        })
    }

    /// Notifies the other ranks that this rank has panicked.
    pub(super) fn abort_in_panic(&self) {
        self.abort_signal.abort("it panicked; see its own output");
    }

    /// Waits until all launched collectives are done.
    pub(super) fn finish_launched(&self) {
        self.queue.run_until(|| self.queue.jobs().waiting.is_empty().then_some(()));
    }

    fn launch<T: Send + 'static>(
        &self,
        kind: CollectiveKind,
        (elements, bytes): (usize, usize),
        run: impl FnOnce(&mut CollectiveBackend) -> Result<T, CommError> + Send + 'static,
    ) -> Pending<T> {
        let (sender, receiver) = mpsc::channel();
        let log = lock(&self.log).clone();
        let carried = timeline::carry();
        let call = engine_call::present();
        let on_the_wire = carried.clone();
        let job: CollectiveJob = Box::new(move |worker| {
            let begin = Instant::now();
            let failed = worker.failed.clone().or_else(|| worker.abort_signal.error());
            let result = match failed {
                Some(failure) => Err(failure),
                None => {
                    worker.backend.called_in(call);
                    let start = Instant::now();
                    let span =
                        on_the_wire.span(TimelineLane::Collectives, timeline::EventCategory::Collective, kind.name());
                    let result = run(&mut worker.backend);
                    drop(span.with("bytes", bytes as u64));
                    worker.counters.add(kind, elements, worker.backend.bytes(), start.elapsed());
                    result
                }
            };
            if let (Ok(_), Some(log)) = (&result, log) {
                log.add(kind, bytes, begin.elapsed());
            }
            if let (Err(error), None) = (&result, &worker.failed) {
                // Abort at once: the training thread may compute for a long time before it waits for the result.
                worker.abort_signal.abort(&error.to_string());
                worker.failed = Some(error.clone());
            }
            // No thread waits for a result whose Pending was dropped.
            let _ = sender.send(result);
        });
        self.queue.push(job, bytes > SHORT_BYTES);
        let (queue, counters) = (self.queue.clone(), self.counters.clone());
        Pending::from_fn(move || {
            let _span = timeline::span(timeline::EventCategory::Wait, "wait").of_carried(&carried);
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

/// Returns the number of elements and of bytes.
fn size(flat: &Flat) -> (usize, usize) {
    (flat.len(), flat.size_in_bytes())
}

impl Communicator for CpuCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.world_size
    }

    fn all_reduce_as(&self, wire: WireFormat, input: Flat, tag: u64) -> Pending<Flat> {
        self.launch(CollectiveKind::AllReduce, size(&input), move |backend| backend.all_reduce(wire, input, tag))
    }

    fn reduce_scatter_as(&self, wire: WireFormat, input: Flat, tag: u64) -> Pending<Flat> {
        self.launch(CollectiveKind::ReduceScatter, size(&input), move |backend| {
            backend.reduce_scatter(wire, input, tag)
        })
    }

    fn all_gather_as(&self, wire: WireFormat, shard: Flat, tag: u64) -> Pending<Flat> {
        self.launch(CollectiveKind::AllGather, size(&shard), move |backend| backend.all_gather(wire, shard, tag))
    }

    fn ranks_here(&self) -> Range<usize> {
        self.ranks_here.clone()
    }

    fn all_gather_within_as(&self, wire: WireFormat, ranks: usize, shard: Flat, tag: u64) -> Pending<Flat> {
        self.launch(CollectiveKind::AllGather, size(&shard), move |backend| {
            backend.all_gather_within(wire, ranks, shard, tag)
        })
    }

    fn reduce_to_groups_as(&self, wire: WireFormat, ranks: usize, input: Flat, tag: u64) -> Pending<Flat> {
        self.launch(CollectiveKind::ReduceScatter, size(&input), move |backend| {
            backend.reduce_to_groups(wire, ranks, input, tag)
        })
    }

    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.launch(CollectiveKind::Control, (CollectiveKind::control_elements(&bytes), bytes.len()), move |backend| {
            backend.gather_bytes(&bytes)
        })
    }

    fn barrier(&self) -> Pending<()> {
        self.launch(CollectiveKind::Barrier, (0, 0), CollectiveBackend::barrier)
    }

    fn abort(&self, why: &str) {
        self.abort_signal.abort(why);
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn failure(&self) -> Option<CommError> {
        let op = || "a collective between GPUs".to_string();
        let first = self.ranks_here.start;
        if let Some((peer, fault)) = self.region.first_failure().filter(|(peer, _)| first + peer != self.rank) {
            let failure = PeerFailure { peer, fault, why: self.region.explained(peer, fault) };
            return Some(failure.error(first, self.rank - first, op(), self.timeout));
        }
        let (peer, why) = self.region.remote_death()?;
        Some(CommError::RankAborted { rank: self.rank, peer, why, op: op() })
    }

    fn report(&self) -> CommReport {
        self.counters.report()
    }

    fn log_into(&self, log: Option<Arc<CommLog>>) {
        *lock(&self.log) = log;
    }
}

impl Drop for CpuCommunicator {
    /// Leaves the job. Launched collectives finish first because peers depend on them, unless this rank panics.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort_in_panic();
        }
        self.queue.close();
        if let Some(thread) = self.comm_thread.take() {
            // A panic of the comm thread has already been printed; the state below notifies the peers.
            if thread.join().is_err() {
                self.abort_signal.abort("its communication thread panicked");
            }
        }
        self.region.finish(self.abort_signal.local_rank);
        self.heartbeat.take();
    }
}

/// The thread that shows the other processes that this one is alive.
struct HeartbeatThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HeartbeatThread {
    fn start(region: Arc<SharedMemoryRegion>, rank: usize) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name(format!("heart-{rank}")).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                region.heartbeat(rank).fetch_add(1, Ordering::Relaxed);
                std::thread::park_timeout(Duration::from_millis(250));
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for HeartbeatThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The loop above cannot panic.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Returns how often the threads of this process with that name have gone to sleep.
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
        let rank = CpuCommunicator::new(region, 37, Duration::from_secs(10)).unwrap();
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
        begun.recv_timeout(Duration::from_secs(5)).expect("no rank waits for it, yet it runs");
        pending.wait().unwrap();
    }
}
