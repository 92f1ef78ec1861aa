//! The results of trials, from their records and checkpoints.

use super::folder::SweepFolder;
use super::journal::JobResult;
use crate::error::Result;
use crate::launch::signals::name;
use crate::tools::failure_reason::failure_reason;
use candle_zero::checkpoint::newest_checkpoint;
use candle_zero::runs::{RecordedRun, RunsFolder};
use candle_zero::sweep::SweepJob;
use candle_zero::util::counted;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::ExitStatus;

/// The outcome of a job.
#[derive(Debug)]
pub(super) enum JobOutcome {
    /// The job reached its last step, or the trial has failed.
    Result(JobResult),
    /// A signal ended the job before its last step. The value is the name of the signal.
    Killed(String),
    /// The job reached its last step, but did not record the metric. The strings are the names of all values that the
    /// trial has recorded.
    NoMetric(Vec<String>),
}

/// The outcome of the process of a job.
#[derive(Debug)]
pub(super) enum ProcessOutcome {
    Job(JobOutcome),
    /// Another process is still training the trial.
    Busy,
    /// The host was lost, for this reason.
    HostLost(String),
}

/// The reader of the results of trials.
#[derive(Debug, Clone)]
pub(super) struct TrialResultReader {
    pub(super) folder: SweepFolder,
    pub(super) metric: String,
    /// The number of steps of a complete trial.
    pub(super) steps: u64,
}

impl TrialResultReader {
    /// Returns the folder of the checkpoints of a trial.
    pub(super) fn checkpoints(&self, number: usize) -> PathBuf {
        self.folder.trial(number).join("checkpoints")
    }

    /// Returns the log of a job.
    pub(super) fn log(&self, job: &SweepJob) -> PathBuf {
        self.folder.trial(job.trial).join(format!("log-{}.txt", job.to))
    }

    /// Returns the step of the newest checkpoint of a trial, or 0 if there is none.
    pub(super) fn saved_step(&self, trial: usize) -> u64 {
        let newest = newest_checkpoint(&self.checkpoints(trial)).ok().flatten();
        newest.map_or(0, |(_, manifest)| manifest.global_steps)
    }

    /// Returns how a job ended, after its launcher has exited.
    pub(super) fn end(&self, job: &SweepJob, status: ExitStatus) -> Result<JobOutcome> {
        // If a signal has killed a process, the launcher exits with 128 plus the number of the signal, as shells do.
        const SIGNAL_CODES: i32 = 128;
        const MAX_SIGNAL: i32 = 64;
        let code_signal =
            status.code().map(|code| code - SIGNAL_CODES).filter(|number| (1..=MAX_SIGNAL).contains(number));
        let signal = status.signal().or(code_signal);
        if let Some(signal) = signal {
            return Ok(JobOutcome::Killed(name(signal)));
        }
        if !status.success() {
            let why = failure_reason(&self.log(job));
            return Ok(JobOutcome::Result(Err(why.strip_prefix("zerorun: ").unwrap_or(&why).to_owned())));
        }
        let recorded = self.record_of(job)?;
        let reached = if job.to < self.steps { self.saved_step(job.trial) } else { recorded.steps };
        if reached != job.to {
            let why = match job.to < self.steps {
                true => format!(
                    "it ended with step {reached} saved, but must pause after step {}; the script must save a \
                     checkpoint to --save and end when Engine::stop_requested returns true, and continue with --resume",
                    job.to
                ),
                false => format!(
                    "it ended after {reached} of {}; the script must train for --steps steps",
                    counted(job.to, "step")
                ),
            };
            return Ok(JobOutcome::Result(Err(why)));
        }
        Ok(match recorded.value {
            Some(value) => JobOutcome::Result(Ok(value)),
            None => JobOutcome::NoMetric(recorded.names),
        })
    }

    /// Returns the step that a running trial has reached according to its record.
    pub(super) fn recorded_step(&self, trial: usize) -> Option<u64> {
        self.runs_of(trial).ok()?.first().map(|run| run.summary().steps)
    }

    /// Returns the records of a trial, newest first. A trial that was killed before its first checkpoint has several.
    fn runs_of(&self, trial: usize) -> Result<Vec<RecordedRun>> {
        let name = SweepFolder::run_name(trial);
        let folder = RunsFolder::find(Some(self.folder.runs()));
        let ids = match folder.path().is_dir() {
            true => folder.ids()?,
            false => Vec::new(),
        };
        let trial_ids = ids.into_iter().filter(|id| id.strip_prefix(&name).is_some_and(|rest| rest.starts_with('-')));
        let mut runs: Vec<RecordedRun> = trial_ids
            .filter_map(|id| RecordedRun::open(folder.path().join(id)).ok())
            .filter(|run| run.info().name == name)
            .collect();
        runs.sort_by(|a, b| b.info().created.total_cmp(&a.info().created).then_with(|| b.id().cmp(&a.id())));
        Ok(runs)
    }

    /// Returns what a trial has recorded: the metric in the steps of a job, and the last step and the names of all
    /// values.
    fn record_of(&self, job: &SweepJob) -> Result<TrialRecord> {
        let mut record = TrialRecord::default();
        for run in self.runs_of(job.trial)? {
            let metrics = run.metrics()?;
            record.steps = record.steps.max(metrics.rows.last().map_or(0, |row| row.step));
            record.names.extend(metrics.names().into_iter().map(str::to_owned));
            let mut rows = metrics.rows.iter().rev().filter(|row| row.step > job.from && row.step <= job.to);
            let value = rows.find_map(|row| row.values.get(&self.metric));
            // If a trial was trained again, its records have the same values.
            record.value = record.value.or(value.copied());
        }
        record.names.sort();
        record.names.dedup();
        Ok(record)
    }
}

/// The part of a trial's record that the result of a job depends on.
#[derive(Debug, Default)]
struct TrialRecord {
    /// The newest value of the metric in the steps of the job.
    value: Option<f64>,
    /// The last recorded step of the trial.
    steps: u64,
    /// The names of all values.
    names: Vec<String>,
}
