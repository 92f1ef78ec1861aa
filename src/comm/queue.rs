//! Collectives in two halves: launched onto the comm thread of this rank, waited for where the result is needed.

use super::collectives;
use super::counters::Counters;
use super::exchange::Exchange;
use super::shm::Region;
use super::{CommReport, Communicator, Kind};
use crate::error::{CommError, Result, without_backtrace};
use crate::precision::Flat;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A collective under way. Dropping it does not stop the collective: the other ranks count on it.
#[must_use = "a collective's result is waited for"]
pub struct Pending<T>(State<T>);

enum State<T> {
    Ready(T),
    Launched(Receiver<Result<T, CommError>>, Arc<Counters>),
}

impl<T> Pending<T> {
    /// A result that is there already.
    pub fn ready(value: T) -> Self {
        Self(State::Ready(value))
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// [`CommError`]: a peer died, gave up, left, fell silent or diverged, or the time limit is over.
    pub fn wait(self) -> Result<T> {
        match self.0 {
            State::Ready(value) => Ok(value),
            State::Launched(receiver, counters) => {
                let start = Instant::now();
                let result = receiver.recv().unwrap_or(Err(CommError::ThreadEnded));
                counters.waited(start.elapsed());
                Ok(result?)
            }
        }
    }
}

type Job = Box<dyn FnOnce(&mut Worker) + Send>;

/// Ranks of one machine over shared memory, as processes or as threads.
pub struct Shared {
    region: Arc<Region>,
    rank: usize,
    voice: Arc<Voice>,
    counters: Arc<Counters>,
    /// `None` once the communicator is being dropped.
    queue: Mutex<Option<Sender<Job>>>,
    worker: Option<JoinHandle<()>>,
    heart: Option<Heart>,
}

/// What the comm thread owns.
struct Worker {
    exchange: Exchange,
    voice: Arc<Voice>,
    counters: Arc<Counters>,
    /// The first failure; every later collective returns it again, for the ranks are out of step after it.
    failed: Option<CommError>,
}

/// Tells the others, once, that this rank gives up. Training thread and comm thread share it.
struct Voice {
    region: Arc<Region>,
    rank: usize,
    used: AtomicBool,
}

impl Voice {
    fn abort(&self, why: &str) {
        if !self.used.swap(true, Ordering::Relaxed) {
            // A backtrace would be in the way of the others' own messages.
            self.region.abort(self.rank, &without_backtrace(why));
        }
    }
}

impl Shared {
    /// Joins the job of `region` as `rank`. A wait of more than `timeout` for a peer is an error.
    ///
    /// # Errors
    /// The rank is taken already, or a thread cannot be started.
    pub fn new(region: Arc<Region>, rank: usize, timeout: Duration) -> Result<Self> {
        region.enter(rank)?;
        let voice = Arc::new(Voice { region: region.clone(), rank, used: AtomicBool::new(false) });
        let counters = Arc::new(Counters::default());
        let exchange = Exchange::new(region.clone(), rank, timeout);
        let mut worker = Worker { exchange, voice: voice.clone(), counters: counters.clone(), failed: None };
        let (queue, jobs) = mpsc::channel::<Job>();
        let spawn_failed = |e| {
            voice.abort("it could not start a thread");
            CommError::Region { action: "start a thread for", source: Arc::new(e) }
        };
        let handle = std::thread::Builder::new()
            .name(format!("comm-{rank}"))
            .spawn(move || jobs.into_iter().for_each(|job| job(&mut worker)))
            .map_err(spawn_failed)?;
        // Ranks that are threads live and die with the process that would watch them.
        let heart = if region.is_shared_between_processes() {
            Some(Heart::start(region.clone(), rank).map_err(spawn_failed)?)
        } else {
            None
        };
        let (queue, worker) = (Mutex::new(Some(queue)), Some(handle));
        Ok(Self { region, rank, voice, counters, queue, worker, heart })
    }

    fn launch<T: Send + 'static>(
        &self,
        kind: Kind,
        elements: usize,
        run: impl FnOnce(&mut Exchange) -> Result<T, CommError> + Send + 'static,
    ) -> Pending<T> {
        let (sender, receiver) = mpsc::channel();
        let job: Job = Box::new(move |worker| {
            let result = match &worker.failed {
                Some(failure) => Err(failure.clone()),
                None => {
                    let start = Instant::now();
                    let result = run(&mut worker.exchange);
                    worker.counters.add(kind, elements, worker.exchange.wire_bytes(), start.elapsed());
                    result
                }
            };
            if let (Err(error), None) = (&result, &worker.failed) {
                // At once: the training thread may compute for long before it comes for the result.
                worker.voice.abort(&error.to_string());
                worker.failed = Some(error.clone());
            }
            // Nobody waits for a result whose Pending was dropped.
            let _ = sender.send(result);
        });
        let queue = self.queue.lock().unwrap_or_else(|p| p.into_inner());
        if let Some(queue) = queue.as_ref() {
            // A send fails only if the thread has ended; the receiver then reports it.
            let _ = queue.send(job);
        }
        Pending(State::Launched(receiver, self.counters.clone()))
    }
}

impl Communicator for Shared {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.region.world_size()
    }

    fn all_reduce(&self, input: Flat, tag: u64) -> Pending<Flat> {
        self.launch(Kind::AllReduce, input.len(), move |ex| collectives::all_reduce(ex, input, tag))
    }

    fn reduce_scatter(&self, input: Flat, tag: u64) -> Pending<Flat> {
        self.launch(Kind::ReduceScatter, input.len(), move |ex| collectives::reduce_scatter(ex, input, tag))
    }

    fn all_gather(&self, shard: Flat, tag: u64) -> Pending<Flat> {
        self.launch(Kind::AllGather, shard.len(), move |ex| collectives::all_gather(ex, shard, tag))
    }

    fn gather_f64(&self, values: Vec<f64>) -> Pending<Vec<Vec<f64>>> {
        self.launch(Kind::Control, values.len(), move |ex| collectives::gather_f64(ex, &values))
    }

    fn barrier(&self) -> Pending<()> {
        self.launch(Kind::Barrier, 0, collectives::barrier)
    }

    fn abort(&self, why: &str) {
        self.voice.abort(why);
    }

    fn report(&self) -> CommReport {
        self.counters.report()
    }
}

impl Drop for Shared {
    /// Leaves the job: what was launched is finished first, because peers count on it, unless this rank panics.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.voice.abort("it panicked; its own output tells where");
        }
        *self.queue.lock().unwrap_or_else(|p| p.into_inner()) = None;
        if let Some(worker) = self.worker.take() {
            // A panic of the comm thread has been printed; the state below tells the peers.
            if worker.join().is_err() {
                self.voice.abort("its communication thread panicked");
            }
        }
        self.region.finish(self.rank);
        self.heart.take();
    }
}

/// Shows the other processes that this one lives.
struct Heart {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Heart {
    fn start(region: Arc<Region>, rank: usize) -> std::io::Result<Self> {
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

impl Drop for Heart {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The loop above cannot panic.
            let _ = thread.join();
        }
    }
}
