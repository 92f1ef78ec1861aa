//! Runs the ranks as processes that start and end together.
//!
//! When a rank fails, the others are informed through the shared memory and may exit on their own. Ranks that do not
//! exit get SIGTERM, and finally SIGKILL. If the launcher itself ends, for whatever reason, the kernel kills the ranks.

use super::console::{ConsoleStream, eprint};
use super::core_binding;
use super::failure_report::{self, CulpritRank, EndedRank, RankExitStatus, StopRequest};
use super::job_record::JobRecordWriter;
use super::local_job_spec::{LocalJobSpec, MultiHostContext, common_environment};
use super::nodes::secret::SECRET;
use super::rank_output::RankOutputForwarder;
use super::signals::{self, LauncherEvent, die_with_parent};
use super::stderr_tail::StderrTail;
use crate::error::{LaunchError, Result};
use candle_zero::comm::RankFault;
use candle_zero::comm::agree::rank_pointed_at;
use candle_zero::comm::rank_env::{BACKEND, BOUND, PMI_FD, SCRIPT, SHM_FD};
use candle_zero::comm::shm::region::SharedMemoryRegion;
use candle_zero::monitor::PROMETHEUS_PORT;
use candle_zero::runs::{RECORD, RUN_FOLDERS};
use candle_zero::timeline;
use candle_zero::util::lock;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long the other ranks may take to exit on their own after a failure.
const SELF_EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the other ranks may take to exit after SIGTERM.
const SIGTERM_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the ranks may take to end after a signal to the launcher, unless `--grace` is given. This leaves time for a
/// checkpoint; Slurm and Kubernetes allow the same by default.
pub(crate) const DEFAULT_GRACE: Duration = Duration::from_secs(30);
/// The time within which two identical signals count as one. `timeout` and some schedulers send a signal both to the
/// launcher and to its process group.
const DUPLICATE_SIGNAL_WINDOW: Duration = Duration::from_millis(250);
/// The delay after which the end of a child process is noticed even if its event is lost.
const TICK: Duration = Duration::from_millis(500);

/// The way in which a run ended.
#[derive(Debug)]
pub(crate) enum RunEnd {
    /// All ranks exited with code 0.
    Well,
    /// All ranks exited with code 0, but some of their output could not be passed on. This has been reported.
    OutputLost,
    /// The launcher received this signal.
    Interrupted(Signal),
    /// Another host of the job is lost or has failed.
    EndedByOtherHost,
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
    pub(crate) end_signal: Option<Signal>,
}

/// Runs the ranks until they end. Must be called on the main thread.
pub(crate) fn run(job: &LocalJobSpec, events: &Receiver<LauncherEvent>) -> Result<RunEnd> {
    let region = SharedMemoryRegion::create(job.world)?;
    let context = job.multi_host.as_ref();
    let host_and_first_rank = context.map_or((None, 0), |context| (context.host.clone(), context.first));
    let counts = [job.world, context.map_or(job.world, |context| context.pmi.world())];
    let record = Arc::new(JobRecordWriter::begin(&job.run, job.restart, host_and_first_rank.1, counts));
    let mut output = RankOutputForwarder::new(host_and_first_rank, Arc::clone(&record));
    let common = common_environment(job)?;
    let mut ranks = RankProcesses {
        region,
        processes: Vec::with_capacity(job.world),
        started: Instant::now(),
        cause: ShutdownCause::Running,
        end_signal: None,
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
    for rank in ranks.processes.len()..job.world {
        ranks.region.mark_dead(rank, "it was not started: the job was asked to end");
    }
    ranks.region.mark_all_started();
    ranks.supervise(events);
    let drained = output.drain(events);
    ranks.end_signal = drained.end_signal.or(ranks.end_signal);
    let end = ranks.end(&drained.tails);
    if let RunEnd::Failed(failure) = &end {
        record.failed(failure.rank, failure.headline.trim_start_matches("zerorun: "));
    }
    record.finish();
    Ok(match end {
        RunEnd::Well if drained.output_lost => RunEnd::OutputLost,
        end => end,
    })
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
    OtherHost { at: Instant },
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
    processes: Vec<RankProcess>,
    started: Instant,
    cause: ShutdownCause,
    /// The last signal that asked the launcher to end.
    end_signal: Option<Signal>,
    grace: Duration,
    on_signal: Option<&'static str>,
    multi_host: Option<MultiHostContext>,
    record: Arc<JobRecordWriter>,
}

impl RankProcesses {
    fn start(
        &mut self,
        rank: usize,
        job: &LocalJobSpec,
        common: &[(&str, String)],
        output: &mut RankOutputForwarder,
    ) -> Result<()> {
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
        self.processes.push(RankProcess { child, pid, request: StopRequest::Nothing, end: None });
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
            if self.processes.iter().all(|rank| rank.end.is_some()) {
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
        for index in 0..self.processes.len() {
            let rank = &mut self.processes[index];
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
            ShutdownCause::Failure { at, .. } | ShutdownCause::OtherHost { at } => {
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
        for rank in self.processes.iter_mut().filter(|rank| rank.end.is_none() && rank.request != request) {
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
        self.processes.iter().for_each(|rank| rank.signal(signal));
    }

    fn handle(&mut self, event: LauncherEvent) {
        if let LauncherEvent::End(signal) = event {
            self.end_signal = Some(signal);
            self.multi_host.iter().for_each(|context| (context.forward_signal)(signal));
        }
        match (event, self.cause) {
            (LauncherEvent::Child, _) => {}
            (LauncherEvent::PeerMessage, _) => {
                let remote_failure = self.multi_host.as_ref().and_then(|context| lock(&context.remote_failure).clone());
                if let Some((rank, why)) = remote_failure {
                    self.region.mark_remote_death(rank, &why);
                    self.record.failed_elsewhere(rank, &why);
                    if matches!(self.cause, ShutdownCause::Running) {
                        self.cause = ShutdownCause::OtherHost { at: Instant::now() };
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
            (LauncherEvent::End(repeated), ShutdownCause::Interrupted { signal, at })
                if repeated == signal && at.elapsed() < DUPLICATE_SIGNAL_WINDOW => {}
            // The end is requested for the second time, or during the shutdown after a failure.
            (LauncherEvent::End(_), _) => self.request_stop(StopRequest::Kill),
        }
    }

    /// Returns how the run ended. Must be called after every rank has ended.
    fn end(&self, tails: &[StderrTail]) -> RunEnd {
        match self.cause {
            ShutdownCause::Running => RunEnd::Well,
            ShutdownCause::OtherHost { .. } => RunEnd::EndedByOtherHost,
            ShutdownCause::Failure { first, at } => RunEnd::Failed(self.failure(first, at, tails)),
            ShutdownCause::Interrupted { signal, .. } => RunEnd::Interrupted(signal),
        }
    }

    fn failure(&self, first: EndedRank, at: Instant, tails: &[StderrTail]) -> RunFailure {
        let ended_ranks: Vec<EndedRank> = self.processes.iter().filter_map(|rank| rank.end).collect();
        // The rank that ended first need not be the cause: a rank that hangs, or lingers after its error, makes the
        // others end before it.
        let recorded_failure = self.region.first_failure();
        let culprit = recorded_failure.and_then(|(rank, fault)| {
            let end = ended_ranks.iter().find(|end| end.rank == rank)?;
            Some(CulpritRank { end: *end, fault })
        });
        let mut culprit = culprit.unwrap_or(CulpritRank { end: first, fault: RankFault::Died });
        let mut error_lines = self.own_error_output(&culprit, tails);
        // Ranks that fail together end in any order. The rank that the others blame is the cause.
        let blamed_rank = error_lines.iter().find_map(|line| rank_pointed_at(line));
        let by_itself = |end: &&EndedRank| end.ended.is_failure() && end.request == StopRequest::Nothing;
        if let Some(end) = ended_ranks.iter().filter(by_itself).find(|end| Some(end.rank + self.first()) == blamed_rank)
        {
            culprit = CulpritRank { end: *end, fault: RankFault::Died };
            error_lines = self.own_error_output(&culprit, tails);
        }
        // From here on, ranks are numbered across all hosts.
        let first_rank = self.first();
        let with_global_rank = |end: EndedRank| EndedRank { rank: end.rank + first_rank, ..end };
        let (culprit, ended_ranks) = (
            CulpritRank { end: with_global_rank(culprit.end), ..culprit },
            ended_ranks.into_iter().map(with_global_rank).collect::<Vec<_>>(),
        );
        let after = at - self.started;
        let by_itself = culprit.end.request == StopRequest::Nothing && culprit.end.ended.is_failure();
        RunFailure {
            after,
            headline: failure_report::headline(&culprit, after, ended_ranks.len()),
            report: failure_report::of_failure(&culprit, after, &error_lines, &ended_ranks),
            rank: culprit.end.rank,
            blames: error_lines.iter().find_map(|line| rank_pointed_at(line)),
            code: if by_itself { culprit.end.ended.exit_code() } else { first.ended.exit_code() },
            end_signal: self.end_signal,
        }
    }
}

impl RankProcesses {
    /// Returns the rank's own error output about its failure.
    fn own_error_output(&self, culprit: &CulpritRank, tails: &[StderrTail]) -> Vec<String> {
        let rank = culprit.end.rank;
        let by_itself = culprit.end.request == StopRequest::Nothing && culprit.end.ended != RankExitStatus::Signal(9);
        let reason = self.region.abort_reason(rank);
        match tails.get(rank) {
            Some(tail) => tail.failure_lines(reason.as_deref(), by_itself),
            None => reason.iter().flat_map(|reason| reason.lines()).map(str::to_string).collect(),
        }
    }
}

impl Drop for RankProcesses {
    /// Ends the ranks that are already running if starting the others failed.
    fn drop(&mut self) {
        self.signal_all(Signal::KILL);
        for rank in self.processes.iter_mut().filter(|rank| rank.end.is_none()) {
            rank.collect();
        }
    }
}
