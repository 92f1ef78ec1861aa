//! Runs a sweep: hands out jobs to processes, several at a time, and collects their results.

use super::best_trial_files;
use super::definition::{ResultDeliveryOrder, SweepDefinition};
use super::error::SweepToolError;
use super::journal::{Journal, JournalEvent, ReplayedSweep};
use super::report::{SweepDisplay, summary, trials_table};
use super::trial_hosts::{SlotLease, TrialHosts};
use super::trial_process::{TrialProcess, TrialStartOutcome};
use super::trial_results::{JobOutcome, ProcessOutcome};
use super::trial_starter::TrialStarter;
use crate::error::Result;
use crate::launch::console::{eprint, print};
use crate::launch::signals::{LauncherEvent, listen, suspend_self};
use candle_zero::sweep::{SweepDecision, SweepJob, TrialState};
use candle_zero::util::{counted, list, suggest_names};
use rustix::process::Signal;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// The interval at which the runner checks which trials have ended.
const TICK: Duration = Duration::from_millis(50);
/// The interval at which a host is asked whether an earlier process that is still training a trial has ended.
const BUSY_INTERVAL: Duration = Duration::from_secs(1);

/// A job in progress.
#[derive(Debug)]
struct RunningJob {
    job: SweepJob,
    process: JobProcessState,
    /// The number of times that the job was killed after it had saved its newest checkpoint.
    kills: u32,
    /// The step of the newest checkpoint when the job was last killed or, before that, when the job began in this
    /// session.
    saved: u64,
    /// Whether another process (of an earlier session of the sweep, or on a lost host) has kept the job waiting.
    was_busy: bool,
    /// The host that the journal names.
    host: Option<String>,
}

/// The state of a job's process.
#[derive(Debug)]
enum JobProcessState {
    /// The process is started as soon as there are free slots and no other process is training the trial, but not
    /// before this time.
    Due(Option<Instant>),
    Started(TrialProcess, SlotLease),
    /// The result of the job is known.
    Ended,
}

/// The outcome of a sweep.
enum SweepEnd {
    Complete,
    Interrupted(Signal),
}

/// A sweep in progress.
pub(super) struct SweepRunner {
    pub(super) definition: SweepDefinition,
    pub(super) starter: TrialStarter,
    pub(super) journal: Journal,
    pub(super) state: ReplayedSweep,
    /// The number of trials at a time.
    pub(super) parallel: usize,
    hosts: TrialHosts,
    /// The host that was lost last, and the reason.
    last_lost_host: Option<(String, String)>,
    jobs: Vec<RunningJob>,
    display: SweepDisplay,
}

impl SweepRunner {
    pub(super) fn new(
        definition: SweepDefinition,
        starter: TrialStarter,
        (journal, state): (Journal, ReplayedSweep),
        (parallel, hosts): (usize, TrialHosts),
    ) -> Self {
        let display = SweepDisplay::new(&definition.metric);
        Self { definition, starter, journal, state, parallel, hosts, last_lost_host: None, jobs: Vec::new(), display }
    }

    /// Runs the sweep to its end, and writes the best configuration. Must be called on the main thread, because the
    /// kernel ends the trials when the thread that started them ends.
    pub(super) fn run(mut self) -> Result<ExitCode> {
        let (_sender, events) = listen()?;
        self.journal.add(&JournalEvent::Begin { parallel: self.parallel })?;
        self.state.hosts.clear();
        for trial in self.state.order.running().collect::<Vec<_>>() {
            let has_result = self.state.results.contains_key(&trial);
            if let Some(trial) = self.state.sweep.trial(trial)
                && let TrialState::Running { to } = trial.state
            {
                let job = SweepJob { trial: trial.number, from: trial.reached(), to };
                self.push(job, has_result);
            }
        }
        let outcome = self.work(&events);
        self.display.clear();
        if outcome.is_err() {
            self.stop_all(&events, Signal::TERM);
        }
        match outcome? {
            SweepEnd::Interrupted(signal) => {
                eprint(&format!(
                    "zerorun: the sweep was stopped, and its trials are saved: {}; continue it with `zerorun sweep \
                     resume {}`",
                    summary(&self.state.sweep, &self.definition.metric),
                    self.starter.results.folder.path().display()
                ));
                // Shells report a signal with the same exit code.
                Ok(ExitCode::from(128u8.saturating_add(u8::try_from(signal.as_raw()).unwrap_or(0))))
            }
            SweepEnd::Complete => self.finish(),
        }
    }

    /// Runs jobs until the sweep has ended or is interrupted.
    fn work(&mut self, events: &Receiver<LauncherEvent>) -> Result<SweepEnd> {
        loop {
            self.hand_out()?;
            if self.jobs.is_empty() {
                return Ok(SweepEnd::Complete);
            }
            self.start_due()?;
            self.collect()?;
            if self.take()? {
                continue;
            }
            let results = &self.starter.results;
            self.display.refresh(&self.state.sweep, &self.state.hosts, |trial| results.recorded_step(trial));
            match events.recv_timeout(TICK) {
                Ok(LauncherEvent::End(signal)) => {
                    self.display.line(
                        "the running trials save a checkpoint, and then the sweep ends; a second signal kills them",
                    );
                    self.stop_all(events, Signal::TERM);
                    return Ok(SweepEnd::Interrupted(signal));
                }
                Ok(LauncherEvent::Suspend) => {
                    self.signal(Signal::TSTP);
                    suspend_self();
                    self.signal(Signal::CONT);
                }
                Ok(LauncherEvent::Child | LauncherEvent::Pass(_) | LauncherEvent::PeerMessage)
                | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
            }
        }
    }

    /// Asks the sweep for jobs until enough are in progress.
    fn hand_out(&mut self) -> Result<()> {
        while self.jobs.len() < self.parallel
            && let SweepDecision::Train(job) = self.state.sweep.ask()
        {
            if let Some(trial) = self.state.sweep.trial(job.trial) {
                // A checkpoint to branch from is copied now, before the trial that saved it continues.
                self.starter.prepare(trial)?;
                self.display.print_start(trial, &job, self.starter.results.steps);
            }
            self.journal.add(&JournalEvent::Start(job))?;
            self.state.order.begin(&job);
            self.push(job, false);
        }
        Ok(())
    }

    fn push(&mut self, job: SweepJob, has_result: bool) {
        let process = if has_result { JobProcessState::Ended } else { JobProcessState::Due(None) };
        let saved = self.starter.results.saved_step(job.trial);
        self.jobs.push(RunningJob { job, process, kills: 0, saved, was_busy: false, host: None });
    }

    /// Starts the jobs that are due, on hosts with free slots.
    fn start_due(&mut self) -> Result<()> {
        for at in 0..self.jobs.len() {
            let JobProcessState::Due(until) = self.jobs[at].process else { continue };
            if until.is_none_or(|until| until <= Instant::now()) {
                self.start_job(at)?;
            }
        }
        let any = |is: fn(&JobProcessState) -> bool| self.jobs.iter().any(|running| is(&running.process));
        let is_stuck = any(|process| matches!(process, JobProcessState::Due(_)))
            && !any(|process| matches!(process, JobProcessState::Started(..)))
            && self.hosts.are_lost();
        match &self.last_lost_host {
            Some((host, why)) if is_stuck => {
                let folder = self.starter.results.folder.path().to_owned();
                Err(SweepToolError::NoHostLeft { host: host.clone(), why: why.clone(), folder }.into())
            }
            _ => Ok(()),
        }
    }

    /// Starts a job, if there are free slots for it.
    fn start_job(&mut self, at: usize) -> Result<()> {
        let job = self.jobs[at].job;
        let trial = self.state.sweep.trial(job.trial).expect("the trial of a job exists").clone();
        // The host that last trained this trial may still have the checkpoint in memory.
        while let Some(lease) = self.hosts.acquire(self.state.hosts.get(&job.trial).map(String::as_str)) {
            match self.starter.start(&trial, &job, self.hosts.remote_name(lease), self.hosts.devices(lease))? {
                TrialStartOutcome::Started(process) => {
                    let running = &mut self.jobs[at];
                    running.process = JobProcessState::Started(process, lease);
                    if let Some(host) = self.hosts.name(lease).filter(|host| running.host.as_deref() != Some(*host)) {
                        running.host = Some(host.to_owned());
                        self.state.hosts.insert(job.trial, host.to_owned());
                        self.display.line(&format!("trial {} runs on {host}", job.trial));
                        self.journal.add(&JournalEvent::Place { trial: job.trial, host: host.to_owned() })?;
                    }
                    return Ok(());
                }
                TrialStartOutcome::Busy => {
                    self.hosts.release(lease);
                    self.wait_for_other(at, None);
                    return Ok(());
                }
                TrialStartOutcome::Unreachable(why) => {
                    self.hosts.release(lease);
                    self.lose_host(lease, why);
                }
            }
        }
        Ok(())
    }

    /// Makes a job wait for a process that is still training its trial.
    fn wait_for_other(&mut self, at: usize, until: Option<Instant>) {
        let running = &mut self.jobs[at];
        running.process = JobProcessState::Due(until);
        if !std::mem::replace(&mut running.was_busy, true) {
            self.display.line(&format!(
                "a process of the killed sweep, or one on a lost host, is still saving trial {}; waiting for that \
                 process to end",
                running.job.trial
            ));
        }
    }

    /// Records that the host of these slots is lost, so that no more trials are started on it.
    fn lose_host(&mut self, lease: SlotLease, why: String) {
        if let Some(host) = self.hosts.mark_lost(lease) {
            self.display.line(&format!(
                "warning: host {host} is lost: {why}; no more trials are started on it, and its trials continue on \
                 other hosts from their newest checkpoints"
            ));
            self.last_lost_host = Some((host.to_owned(), why));
        }
    }

    /// Collects the results of the jobs that have ended.
    fn collect(&mut self) -> Result<()> {
        for at in 0..self.jobs.len() {
            let running = &mut self.jobs[at];
            let JobProcessState::Started(process, lease) = &mut running.process else { continue };
            let lease = *lease;
            let Some(process_outcome) = process.end(&self.starter.results, &running.job)? else { continue };
            self.hosts.release(lease);
            let (job, metric) = (running.job, &self.definition.metric);
            let job_outcome = match process_outcome {
                ProcessOutcome::Job(job_outcome) => job_outcome,
                ProcessOutcome::Busy => {
                    self.wait_for_other(at, Some(Instant::now() + BUSY_INTERVAL));
                    continue;
                }
                ProcessOutcome::HostLost(why) => {
                    running.process = JobProcessState::Due(None);
                    self.lose_host(lease, why);
                    continue;
                }
            };
            let result = match job_outcome {
                JobOutcome::Result(result) => result,
                JobOutcome::Killed(signal) => {
                    let saved = self.starter.results.saved_step(job.trial);
                    running.kills = if saved > running.saved { 1 } else { running.kills + 1 };
                    running.saved = saved;
                    if running.kills <= self.definition.retries {
                        self.display.line(&format!(
                            "trial {} was killed by {signal}; it continues after step {saved}",
                            job.trial
                        ));
                        running.process = JobProcessState::Due(None);
                        continue;
                    }
                    let times = counted(running.kills, "time");
                    Err(format!("it was killed {times} after step {saved}, the last time by {signal}"))
                }
                JobOutcome::NoMetric(names) => {
                    running.process = JobProcessState::Ended;
                    let hint = suggest_names(metric, names.iter().map(String::as_str));
                    let found = match (names.is_empty(), names.contains(metric)) {
                        (true, _) => "there is no record; the script must train with candle-zero's engine".to_owned(),
                        (_, true) => "the metric has values at other steps; record it at the end of each part of a \
                                      trial, for example with --eval_every"
                            .to_owned(),
                        (_, false) => {
                            let hint = hint.map_or(String::new(), |hint| format!("; {hint}"));
                            format!("the recorded values are {}{hint}", list(&names))
                        }
                    };
                    let (metric, trial, first, last) = (metric.clone(), job.trial, job.from + 1, job.to);
                    return Err(SweepToolError::NoMetric { metric, trial, first, last, found }.into());
                }
            };
            running.process = JobProcessState::Ended;
            self.journal.add(&JournalEvent::End { trial: job.trial, to: job.to, result: result.clone() })?;
            self.state.results.insert(job.trial, result);
        }
        Ok(())
    }

    /// Passes the next result to the sweep, if it is known. Returns whether it was known.
    fn take(&mut self) -> Result<bool> {
        let next = match self.definition.order {
            ResultDeliveryOrder::Steps => self.state.order.next(),
            ResultDeliveryOrder::Finish => self.state.results.keys().next().copied(),
        };
        let Some((trial, result)) = next.and_then(|trial| Some((trial, self.state.results.remove(&trial)?))) else {
            return Ok(false);
        };
        self.journal.add(&JournalEvent::Take { trial })?;
        self.state.sweep.tell(trial, result)?;
        self.state.order.end(trial);
        self.jobs.retain(|running| running.job.trial != trial);
        if let Some(trial) = self.state.sweep.trial(trial) {
            self.display.print_result(&self.state.sweep, trial);
        }
        Ok(true)
    }

    fn signal(&mut self, signal: Signal) {
        for running in &mut self.jobs {
            if let JobProcessState::Started(process, _) = &mut running.process {
                process.signal(signal);
            }
        }
    }

    /// Sends a signal to all trials, and waits until they have ended. A further signal from the user kills them.
    fn stop_all(&mut self, events: &Receiver<LauncherEvent>, signal: Signal) {
        self.signal(signal);
        loop {
            for running in &mut self.jobs {
                if let JobProcessState::Started(process, _) = &mut running.process
                    && process.has_ended()
                {
                    running.process = JobProcessState::Ended;
                }
            }
            if !self.jobs.iter().any(|running| matches!(running.process, JobProcessState::Started(..))) {
                return;
            }
            match events.recv_timeout(TICK) {
                // The ranks of a launcher die with it.
                Ok(LauncherEvent::End(_)) => self.signal(Signal::KILL),
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
                _ => {}
            }
        }
    }

    /// Writes and prints the result of a sweep that has ended.
    fn finish(self) -> Result<ExitCode> {
        let (sweep, metric) = (&self.state.sweep, &self.definition.metric);
        let script = best_trial_files::write(&self.starter, sweep)?;
        let mut text = trials_table(sweep, &self.state.hosts, metric);
        if let (Some(script), Some(best)) = (&script, sweep.best()) {
            let value = best.value().unwrap_or(f64::NAN);
            text += &format!(
                "\nbest: trial {}, {metric} {value} after step {}\nsh {} OUT trains it from its first step\n",
                best.number,
                best.reached(),
                script.display()
            );
        }
        let is_printed = print(text.trim_end());
        if sweep.has_failed() {
            let mut failed = sweep.trials().iter().rev().filter_map(|trial| match &trial.state {
                TrialState::Failed(why) => Some(why.clone()),
                _ => None,
            });
            let (failures, most) = (sweep.failures(), sweep.settings().max_failures);
            return Err(
                SweepToolError::TooManyFailures { failures, most, last: failed.next().unwrap_or_default() }.into()
            );
        }
        if script.is_none() {
            eprint("zerorun: no trial has a result; correct the command, and begin again with another --out");
        }
        Ok(if is_printed && script.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
