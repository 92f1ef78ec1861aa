//! Runs the ranks as processes that start and end together.
//!
//! When a rank fails, the others are informed through the shared memory and may exit on their own. Ranks that do not
//! exit get SIGTERM, and finally SIGKILL. If the launcher itself ends, for whatever reason, the kernel kills the ranks.

use super::console::{ConsoleStream, eprint};
use super::core_binding;
use super::failure_report::{self, CulpritRank, EndedRank, RankExitStatus, StopRequest};
use super::hosts::core_list::CoreList;
use super::hosts::world_info::DEVICES;
use super::job_record::JobRecord;
use super::nodes::secret::SECRET;
use super::pmi;
use super::rank_output::RankOutput;
use super::run_flags::RunFlags;
use super::signals::{self, LauncherEvent, die_with_parent};
use super::stderr_tail::StderrTail;
use crate::error::{Error, LaunchError, Result};
use candle_zero::comm::RankFault;
use candle_zero::comm::agree::rank_pointed_at;
use candle_zero::comm::rank_env::{BACKEND, BOUND, DEFAULT_TIMEOUT, PMI_FD, SCRIPT, SHM_FD, TIMEOUT_MS};
use candle_zero::comm::shm::region::SharedMemoryRegion;
use candle_zero::island_server;
use candle_zero::monitor::PROMETHEUS_PORT;
use candle_zero::runs::{RECORD, RUN_FOLDERS};
use candle_zero::stop_signal::RESTART;
use candle_zero::timeline;
use candle_zero::util::lock;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::ffi::OsString;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// How long the other ranks may take to exit on their own after a failure.
const SELF_EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the other ranks may take to exit after SIGTERM.
const SIGTERM_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the ranks may take to end after a signal to the launcher, unless `--grace` is given. This leaves time for a
/// checkpoint; Slurm and Kubernetes allow the same by default.
pub(crate) const DEFAULT_GRACE: Duration = Duration::from_secs(30);
/// The time within which two signals count as one. `timeout` and some schedulers send a signal both to the launcher and
/// to its process group.
const DUPLICATE_SIGNAL_WINDOW: Duration = Duration::from_millis(250);
/// The delay after which the end of a child process is noticed even if its event is lost.
const TICK: Duration = Duration::from_millis(500);

/// Torchrun's name for [`RESTART`], the number of restarts so far.
const TORCH_RESTART: &str = "TORCHELASTIC_RESTART_COUNT";

/// The job to start.
#[derive(Debug)]
pub(crate) struct LocalJob {
    /// The absolute path of the executable.
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<OsString>,
    /// The number of ranks.
    pub(crate) world: usize,
    /// The timeout of collectives. `None` means the value from the environment, or else the ranks' default.
    pub(crate) timeout: Option<Duration>,
    /// How long the ranks may take to end after a signal to the launcher.
    pub(crate) grace: Duration,
    /// The message printed when a signal asks the job to end and the launcher waits for the ranks.
    pub(crate) on_signal: Option<&'static str>,
    /// The script as typed, for the ranks' messages about their command line.
    pub(crate) script: Option<PathBuf>,
    /// The port of rank 0, or `None` for a free port, chosen anew at each start.
    pub(crate) master_port: Option<u16>,
    /// The port on which rank 0 serves metrics. `None` means the value from the environment.
    pub(crate) prometheus: Option<u16>,
    /// The record of the run. Settings that are not given come from the environment.
    pub(crate) run: RunFlags,
    /// The place of the ranks in a run of islands.
    pub(crate) island: IslandPlace,
    /// The number of restarts so far.
    pub(crate) restart: u32,
    /// The folder in which ranks write their parts of the timeline.
    pub(crate) timeline: Option<PathBuf>,
    /// This host's part of the job, if the job has several hosts or its ranks communicate by MPI.
    pub(crate) multi_host: Option<MultiHostContext>,
    /// The cores to which ranks are bound, at least one per rank, or `None` if ranks run on any core.
    pub(crate) cores: Option<CoreList>,
    /// The ranks' [`DEVICES`]. `None` means the value from the environment.
    pub(crate) devices: Option<String>,
}

/// The place of a job's ranks in a run of islands that meet at a server. A value of `None` means that of the
/// environment or the configuration.
#[derive(Debug, Clone, Default)]
pub(crate) struct IslandPlace {
    /// The address of the server.
    pub(crate) server: Option<String>,
    /// The slot to request.
    pub(crate) slot: Option<u16>,
}

/// Returns the number by which an island server recognizes the islands that this launcher starts, one after the other.
fn launcher_number() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    // A new hasher has random keys.
    *NUMBER.get_or_init(|| RandomState::new().build_hasher().finish())
}

/// This host's part of a job on several hosts, or of a job whose ranks communicate by MPI.
#[derive(Clone)]
pub(crate) struct MultiHostContext {
    /// The number of this host's first rank among the ranks of all hosts.
    pub(crate) first: usize,
    /// The index of this host, and the number of hosts.
    pub(crate) place: usize,
    pub(crate) hosts: usize,
    /// The name of this host, for the lines of its ranks, if there are other hosts.
    pub(crate) host: Option<String>,
    /// The address of the first host, for use by the program.
    pub(crate) master_addr: String,
    /// The server that connects the ranks' MPI libraries.
    pub(crate) pmi: Arc<pmi::PmiServer>,
    /// A rank that has failed or whose host is lost or has failed, and why. [`LauncherEvent::PeerMessage`] announces
    /// it.
    pub(crate) remote_failure: Arc<Mutex<Option<(usize, String)>>>,
    /// Forwards to the other hosts a signal that asks this launcher to end.
    pub(crate) tell: Arc<dyn Fn(Signal) + Send + Sync>,
}

impl MultiHostContext {
    /// Creates the context of a job on a single host whose ranks communicate by MPI nonetheless. `start` is the number
    /// of restarts so far.
    pub(crate) fn mpi_on_one_host(ranks: usize, start: u32) -> Self {
        let now =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let space = format!("candle_zero_{:x}_{now:x}_{start}", std::process::id());
        Self {
            first: 0,
            place: 0,
            hosts: 1,
            host: None,
            master_addr: Ipv4Addr::LOCALHOST.to_string(),
            pmi: pmi::PmiServer::for_one_host(space, ranks),
            remote_failure: Arc::default(),
            tell: Arc::new(|_| {}),
        }
    }
}

impl std::fmt::Debug for MultiHostContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { first, place, hosts, host, .. } = self;
        let host = host.as_deref().unwrap_or("this one");
        write!(f, "MultiHostContext {{ ranks from {first} on, host {place} of {hosts}: {host} }}")
    }
}

/// The way in which a run ended.
#[derive(Debug)]
pub(crate) enum RunEnd {
    /// All ranks exited with code 0.
    Well,
    /// All ranks exited with code 0, but some of their output could not be passed on. This has been reported.
    Unwritten,
    /// The launcher received this signal.
    Interrupted(Signal),
    /// Another host of the job is lost or has failed.
    Elsewhere,
    Failed(RunFailure),
}

/// A run that ended because of a rank.
#[derive(Debug)]
pub(crate) struct RunFailure {
    /// The time from the start to the first failure.
    pub(crate) after: Duration,
    /// The message about which rank failed and how, without a line end.
    pub(crate) headline: String,
    /// The headline, that rank's own error output, and how the others ended.
    pub(crate) report: String,
    /// The rank, and the one that its error output blames.
    pub(crate) rank: usize,
    pub(crate) blames: Option<usize>,
    /// The launcher's exit code for the failure.
    pub(crate) code: u8,
    /// A signal that asked the launcher to end during the shutdown after the failure.
    pub(crate) asked: Option<Signal>,
}

/// Runs the ranks until they end. Must be called on the main thread.
pub(crate) fn run(job: &LocalJob, events: &Receiver<LauncherEvent>) -> Result<RunEnd> {
    let region = SharedMemoryRegion::create(job.world)?;
    let context = job.multi_host.as_ref();
    let place = context.map_or((None, 0), |context| (context.host.clone(), context.first));
    let counts = [job.world, context.map_or(job.world, |context| context.pmi.world())];
    let record = Arc::new(JobRecord::begin(&job.run, job.restart, place.1, counts));
    let mut output = RankOutput::new(place, Arc::clone(&record));
    let common = common_environment(job)?;
    let mut ranks = RankProcesses {
        region,
        all: Vec::with_capacity(job.world),
        started: Instant::now(),
        cause: ShutdownCause::Running,
        asked: None,
        grace: job.grace,
        on_signal: job.on_signal,
        multi_host: job.multi_host.clone(),
        record: Arc::clone(&record),
    };
    for rank in 0..job.world {
        ranks.start(rank, job, &common, &mut output)?;
        events.try_iter().for_each(|event| ranks.handle(event));
        if !matches!(ranks.cause, ShutdownCause::Running) {
            break;
        }
    }
    for rank in ranks.all.len()..job.world {
        ranks.region.mark_dead(rank, "it was not started: the job was asked to end");
    }
    ranks.region.let_in();
    ranks.supervise(events);
    let drained = output.drain(events);
    ranks.asked = drained.asked.or(ranks.asked);
    let end = ranks.end(&drained.tails);
    if let RunEnd::Failed(failure) = &end {
        record.failed(failure.rank, failure.headline.trim_start_matches("zerorun: "));
    }
    record.finish();
    Ok(match end {
        RunEnd::Well if drained.unwritten => RunEnd::Unwritten,
        end => end,
    })
}

/// Returns the variables that are the same for all ranks.
fn common_environment(job: &LocalJob) -> Result<Vec<(&'static str, String)>> {
    let local = job.world.to_string();
    let port = match job.master_port {
        Some(port) => port,
        None => free_port()?,
    };
    let context = job.multi_host.as_ref();
    let mut variables = vec![
        ("WORLD_SIZE", context.map_or(job.world, |context| context.pmi.world()).to_string()),
        ("LOCAL_WORLD_SIZE", local.clone()),
        ("LOCAL_SIZE", local),
        ("MASTER_ADDR", context.map_or_else(|| Ipv4Addr::LOCALHOST.to_string(), |context| context.master_addr.clone())),
        ("MASTER_PORT", port.to_string()),
        (RESTART, job.restart.to_string()),
        (TORCH_RESTART, job.restart.to_string()),
    ];
    match job.timeout {
        Some(timeout) => variables.push((TIMEOUT_MS, timeout.as_millis().to_string())),
        None if is_set(TIMEOUT_MS) => {}
        None => variables.push((TIMEOUT_MS, DEFAULT_TIMEOUT.as_millis().to_string())),
    }
    let (place, hosts) = context.map_or((0, 1), |context| (context.place, context.hosts));
    variables.extend([("CROSS_RANK", place.to_string()), ("CROSS_SIZE", hosts.to_string())]);
    variables.extend(context.map(|context| ("PMI_SIZE", context.pmi.world().to_string())));
    variables.extend(job.prometheus.map(|port| (PROMETHEUS_PORT, port.to_string())));
    variables.extend(job.island.server.clone().map(|server| (island_server::SERVER, server)));
    variables.extend(job.island.slot.map(|slot| (island_server::SLOT, slot.to_string())));
    variables.push((island_server::LAUNCHER, launcher_number().to_string()));
    variables.extend(job.devices.clone().map(|devices| (DEVICES, devices)));
    let cores = match &job.cores {
        Some(bound) => bound.cores().len(),
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    if job.world > cores && job.restart == 0 {
        eprint(&format!(
            "zerorun: warning: {} ranks share {cores} core{}; each computes with one thread, and they slow one another down",
            job.world,
            if cores == 1 { "" } else { "s" }
        ));
    }
    // This limits Candle's own thread pool and rayon's: ranks that all use every core are many times slower than ranks
    // that divide the cores among themselves.
    let threads = (cores / job.world).max(1).to_string();
    // DeepSpeed sets the number of OpenMP threads only if it binds ranks.
    let of_openmp = job.cores.as_ref().map(|_| "OMP_NUM_THREADS");
    for name in ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"].into_iter().chain(of_openmp) {
        if !is_set(name) {
            variables.push((name, threads.clone()));
        }
    }
    let (name, value) = KEEP_MEMORY;
    if cfg!(target_env = "gnu") && !is_set(name) {
        variables.push((name, value.into()));
    }
    Ok(variables)
}

/// The environment variable and the value that make the GNU C library keep freed blocks of up to 1 GiB in the process.
///
/// A training step allocates the same buffers again and again, and getting pages from the system each time costs up to
/// a fifth of the step's time. `zerorun` sets the variable for its ranks; a program that is started in another way must
/// have it set when it starts.
pub(crate) const KEEP_MEMORY: (&str, &str) =
    ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=17179869184");

fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| !value.is_empty())
}

fn free_port() -> Result<u16> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| Ok(socket.local_addr()?.port()));
    port.map_err(|source| Error::from(LaunchError::Setup { what: "finding a free port", source }))
}

/// The reason why the ranks are ending.
#[derive(Debug, Clone, Copy)]
enum ShutdownCause {
    /// They are not ending yet.
    Running,
    /// A rank failed. `first` is the one whose end was noticed first; another rank may have caused it.
    Failure { first: EndedRank, at: Instant },
    /// The launcher received a signal.
    Interrupted { signal: Signal, at: Instant },
    /// Another host is lost or has failed.
    Elsewhere { at: Instant },
}

#[derive(Debug)]
struct RankProcess {
    child: Child,
    /// The process id, which is also the id of its process group.
    pid: Pid,
    request: StopRequest,
    end: Option<EndedRank>,
}

impl RankProcess {
    fn signal(&self, signal: Signal) {
        if self.end.is_none() {
            // A group that has ended needs no signal.
            let _ = kill_process_group(self.pid, signal);
        }
    }

    /// Returns whether the process has ended. It stays a zombie, so that its process id is not reused.
    fn has_ended(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(self.pid), options) {
            Ok(status) => status.is_some(),
            Err(error) => error != rustix::io::Errno::INTR,
        }
    }

    /// Kills the rest of its group (helpers that it started) and returns its exit status.
    fn collect(&mut self) -> RankExitStatus {
        let _ = kill_process_group(self.pid, Signal::KILL);
        // It is our own child and has not been waited for, so this cannot fail.
        self.child.wait().map_or(RankExitStatus::Signal(9), RankExitStatus::of)
    }
}

struct RankProcesses {
    region: SharedMemoryRegion,
    all: Vec<RankProcess>,
    started: Instant,
    cause: ShutdownCause,
    /// The last signal that asked the launcher to end.
    asked: Option<Signal>,
    grace: Duration,
    on_signal: Option<&'static str>,
    multi_host: Option<MultiHostContext>,
    record: Arc<JobRecord>,
}

impl RankProcesses {
    fn start(&mut self, rank: usize, job: &LocalJob, common: &[(&str, String)], output: &mut RankOutput) -> Result<()> {
        // The region's descriptor stays open across exec.
        let fd = self.region.as_fd().as_raw_fd();
        let mut command = Command::new(&job.program);
        command.args(&job.args).envs(common.iter().map(|(name, value)| (name, value)));
        // The secret is for launchers only, and scripts may write their variables into logs.
        command.env_remove(SECRET);
        match &job.timeline {
            Some(folder) => command.env(timeline::PARTS, folder),
            // These may be set if this launcher is a rank's child.
            None => command.env_remove(timeline::PARTS).env_remove(timeline::FILE),
        };
        let number = rank + self.first();
        if number > 0 {
            // Only rank 0 listens.
            command.env_remove(PROMETHEUS_PORT);
        }
        // The socket stays open here until the rank has inherited it.
        let socket = match &self.multi_host {
            None => None,
            Some(context) => {
                let setup = |source| LaunchError::Setup { what: "creating a socket for a rank", source };
                let socket = context.pmi.socket().map_err(setup)?;
                // If an mpirun has started this launcher, the ranks are not part of its job.
                for (name, _) in std::env::vars_os() {
                    if ["OMPI_COMM_WORLD_", "PMIX_", "JSM_NAMESPACE_", "PALS_"]
                        .iter()
                        .any(|start| name.to_string_lossy().starts_with(start))
                    {
                        command.env_remove(name);
                    }
                }
                command.env(PMI_FD, socket.as_raw_fd().to_string()).env("PMI_RANK", number.to_string());
                Some(socket)
            }
        };
        match &self.multi_host {
            Some(context) if context.hosts == 1 => command.env(BACKEND, "mpi"),
            _ => command.env_remove(BACKEND),
        };
        match &job.script {
            Some(script) => command.env(SCRIPT, script),
            None => command.env_remove(SCRIPT),
        };
        command.env_remove(RECORD);
        command.envs(job.run.variables());
        match self.record.path() {
            Some(path) => command.env(RUN_FOLDERS, path),
            None => command.env_remove(RUN_FOLDERS),
        };
        command.env("RANK", number.to_string()).env("LOCAL_RANK", rank.to_string()).env(SHM_FD, fd.to_string());
        match &job.cores {
            Some(cores) => {
                core_binding::bind(&mut command, cores.share(rank, job.world)?);
                command.env(BOUND, "1");
            }
            None => {
                command.env_remove(BOUND);
            }
        }
        // Each rank gets its own process group: a signal then also reaches the rank's helpers, and Ctrl-C reaches only
        // the launcher, which passes it on.
        command.process_group(0);
        die_with_parent(&mut command, Signal::KILL);
        let is_watched = job.run.dashboard.is_some();
        if job.world > 1 || is_watched || job.multi_host.as_ref().is_some_and(|context| context.hosts > 1) {
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        } else if std::io::IsTerminal::is_terminal(&std::io::stdin()) {
            // The kernel stops a background process group that reads from the terminal.
            command.stdin(Stdio::null());
        }
        let started = command.spawn();
        drop(socket);
        let mut child = started.map_err(|source| LaunchError::RankNotStarted {
            rank: number,
            program: job.program.clone(),
            source,
        })?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let pid = Pid::from_child(&child);
        self.all.push(RankProcess { child, pid, request: StopRequest::Nothing, end: None });
        if let Some(out) = out {
            output.forward_lines(rank, out, ConsoleStream::Out)?;
        }
        if let Some(err) = err {
            output.forward_lines(rank, err, ConsoleStream::Err)?;
        }
        Ok(())
    }

    /// Returns the first rank of this host.
    fn first(&self) -> usize {
        self.multi_host.as_ref().map_or(0, |context| context.first)
    }

    /// Waits until every rank has ended.
    fn supervise(&mut self, events: &Receiver<LauncherEvent>) {
        loop {
            self.collect_ended();
            if self.all.iter().all(|rank| rank.end.is_some()) {
                return;
            }
            let next = self.send_due_signals();
            match events.recv_timeout(next.saturating_duration_since(Instant::now()).min(TICK)) {
                // Many ranks often end at the same time.
                Ok(event) => [event].into_iter().chain(events.try_iter()).for_each(|event| self.handle(event)),
                Err(RecvTimeoutError::Timeout) => {}
                // The listening thread cannot end first; if it did, the tick would still suffice.
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
            }
        }
    }

    fn collect_ended(&mut self) {
        for index in 0..self.all.len() {
            let rank = &mut self.all[index];
            if rank.end.is_some() || !rank.has_ended() {
                continue;
            }
            let ended = rank.collect();
            let before_failure = matches!(self.cause, ShutdownCause::Running);
            let end = EndedRank { rank: index, ended, request: rank.request, before_failure };
            rank.end = Some(end);
            self.record.ended(index + self.multi_host.as_ref().map_or(0, |context| context.first), &end);
            if ended.is_failure() {
                self.region.mark_dead(index, &format!("its process {ended}"));
            } else {
                self.region.mark_left(index);
            }
            if before_failure && ended.is_failure() {
                self.cause = ShutdownCause::Failure { first: end, at: Instant::now() };
            }
        }
    }

    /// Sends due signals to ranks that should have ended, and returns the time at which the next signal is due.
    fn send_due_signals(&mut self) -> Instant {
        let now = Instant::now();
        let (term, kill) = match self.cause {
            ShutdownCause::Running => return now + TICK,
            ShutdownCause::Failure { at, .. } | ShutdownCause::Elsewhere { at } => {
                (at + SELF_EXIT_TIMEOUT, at + SELF_EXIT_TIMEOUT + SIGTERM_TIMEOUT)
            }
            ShutdownCause::Interrupted { at, .. } => (at + self.grace, at + self.grace),
        };
        if now >= kill {
            self.request_stop(StopRequest::Kill);
            now + TICK
        } else if now >= term {
            self.request_stop(StopRequest::Terminate);
            kill
        } else {
            term
        }
    }

    fn request_stop(&mut self, request: StopRequest) {
        for rank in self.all.iter_mut().filter(|rank| rank.end.is_none() && rank.request != request) {
            rank.request = request;
            if request == StopRequest::Kill {
                rank.signal(Signal::KILL);
            } else {
                rank.signal(Signal::TERM);
                // A stopped rank must be continued before it can end.
                rank.signal(Signal::CONT);
            }
        }
    }

    fn signal_all(&self, signal: Signal) {
        self.all.iter().for_each(|rank| rank.signal(signal));
    }

    fn handle(&mut self, event: LauncherEvent) {
        if let LauncherEvent::End(signal) = event {
            self.asked = Some(signal);
            self.multi_host.iter().for_each(|context| (context.tell)(signal));
        }
        match (event, self.cause) {
            (LauncherEvent::Child, _) => {}
            (LauncherEvent::PeerMessage, _) => {
                let remote_failure = self.multi_host.as_ref().and_then(|context| lock(&context.remote_failure).clone());
                if let Some((rank, why)) = remote_failure {
                    self.region.mark_remote_death(rank, &why);
                    self.record.failed_elsewhere(rank, &why);
                    if matches!(self.cause, ShutdownCause::Running) {
                        self.cause = ShutdownCause::Elsewhere { at: Instant::now() };
                    }
                }
            }
            (LauncherEvent::Pass(signal), _) => self.signal_all(signal),
            (LauncherEvent::Suspend, _) => {
                self.signal_all(Signal::STOP);
                signals::suspend_self();
                self.signal_all(Signal::CONT);
            }
            (LauncherEvent::End(signal), ShutdownCause::Running) => {
                self.cause = ShutdownCause::Interrupted { signal, at: Instant::now() };
                if let Some(text) = self.on_signal {
                    eprint(text);
                }
                self.signal_all(signal);
            }
            (LauncherEvent::End(again), ShutdownCause::Interrupted { signal, at })
                if again == signal && at.elapsed() < DUPLICATE_SIGNAL_WINDOW => {}
            // The end is requested for the second time, or during the shutdown after a failure.
            (LauncherEvent::End(_), _) => self.request_stop(StopRequest::Kill),
        }
    }

    /// Returns how the run ended. Must be called after every rank has ended.
    fn end(&self, tails: &[StderrTail]) -> RunEnd {
        match self.cause {
            ShutdownCause::Running => RunEnd::Well,
            ShutdownCause::Elsewhere { .. } => RunEnd::Elsewhere,
            ShutdownCause::Failure { first, at } => RunEnd::Failed(self.failure(first, at, tails)),
            ShutdownCause::Interrupted { signal, .. } => RunEnd::Interrupted(signal),
        }
    }

    fn failure(&self, first: EndedRank, at: Instant, tails: &[StderrTail]) -> RunFailure {
        let ended_ranks: Vec<EndedRank> = self.all.iter().filter_map(|rank| rank.end).collect();
        // The rank that ended first need not be the cause: a rank that hangs, or lingers after its error, makes the
        // others end before it.
        let blamed = self.region.first_failure();
        let culprit = blamed.and_then(|(rank, fault)| {
            let end = ended_ranks.iter().find(|end| end.rank == rank)?;
            Some(CulpritRank { end: *end, fault })
        });
        let mut culprit = culprit.unwrap_or(CulpritRank { end: first, fault: RankFault::Died });
        let mut words = self.own_error_output(&culprit, tails);
        // Ranks that fail together end in any order. The rank that the others blame is the cause.
        let pointed_at = words.iter().find_map(|line| rank_pointed_at(line));
        let by_itself = |end: &&EndedRank| end.ended.is_failure() && end.request == StopRequest::Nothing;
        if let Some(end) = ended_ranks.iter().filter(by_itself).find(|end| Some(end.rank + self.first()) == pointed_at)
        {
            culprit = CulpritRank { end: *end, fault: RankFault::Died };
            words = self.own_error_output(&culprit, tails);
        }
        // From here on, ranks are numbered across all hosts.
        let first_here = self.first();
        let numbered = |end: EndedRank| EndedRank { rank: end.rank + first_here, ..end };
        let (culprit, ended_ranks) = (
            CulpritRank { end: numbered(culprit.end), ..culprit },
            ended_ranks.into_iter().map(numbered).collect::<Vec<_>>(),
        );
        let after = at - self.started;
        let by_itself = culprit.end.request == StopRequest::Nothing && culprit.end.ended.is_failure();
        RunFailure {
            after,
            headline: failure_report::headline(&culprit, after, ended_ranks.len()),
            report: failure_report::of_failure(&culprit, after, &words, &ended_ranks),
            rank: culprit.end.rank,
            blames: words.iter().find_map(|line| rank_pointed_at(line)),
            code: if by_itself { culprit.end.ended.exit_code() } else { first.ended.exit_code() },
            asked: self.asked,
        }
    }
}

impl RankProcesses {
    /// Returns the rank's own error output about its failure.
    fn own_error_output(&self, culprit: &CulpritRank, tails: &[StderrTail]) -> Vec<String> {
        let rank = culprit.end.rank;
        let by_itself = culprit.end.request == StopRequest::Nothing && culprit.end.ended != RankExitStatus::Signal(9);
        let reason = self.region.last_words(rank);
        match tails.get(rank) {
            Some(tail) => tail.last_words(reason.as_deref(), by_itself),
            None => reason.iter().flat_map(|reason| reason.lines()).map(str::to_string).collect(),
        }
    }
}

impl Drop for RankProcesses {
    /// Ends the ranks that are already running if starting the others has failed.
    fn drop(&mut self) {
        self.signal_all(Signal::KILL);
        for rank in self.all.iter_mut().filter(|rank| rank.end.is_none()) {
            rank.collect();
        }
    }
}
