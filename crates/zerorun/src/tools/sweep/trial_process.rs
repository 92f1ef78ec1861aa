//! Trials as processes: their start, their end, and their results.
//!
//! A trial's launcher has the file `running` in the trial's folder as its standard input, and the file is locked for as
//! long as any process of the trial is running. If the sweep is killed, the kernel sends SIGTERM to the launchers of
//! its trials, which save a checkpoint and end. The next start of the sweep waits until these files are unlocked.

use super::folder::SweepFolder;
use super::journal::JobResult;
use super::trial_command::{CommandTemplate, TrialPlaces};
use crate::error::{Error, LaunchError, Result};
use crate::launch::signals::name;
use crate::tools::run_log::last_words;
use crate::tools::trial_setup::{as_trial, write_whole};
use candle_zero::checkpoint::{list_checkpoints, newest_checkpoint};
use candle_zero::files::AtomicFolder;
use candle_zero::runs::{RecordedRun, RunsFolder};
use candle_zero::stop_signal::STOP_AT;
use candle_zero::sweep::{SweepJob, SweepTrial};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

/// The environment variables that set the number of threads of a rank.
pub(super) const THREADS: [&str; 2] = ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"];

/// The settings for starting trials.
#[derive(Debug)]
pub(super) struct TrialStarter {
    /// The executable of `zerorun`.
    pub(super) launcher: PathBuf,
    pub(super) template: CommandTemplate,
    pub(super) folder: SweepFolder,
    /// The directory in which trials run.
    pub(super) directory: PathBuf,
    /// The number of threads of a rank; `None` if the user's variables set it.
    pub(super) threads: Option<usize>,
    pub(super) metric: String,
    /// The number of steps of a complete trial.
    pub(super) steps: u64,
}

/// How a job ended.
#[derive(Debug)]
pub(super) enum JobEnd {
    /// The job reached its last step, or the trial has failed.
    Result(JobResult),
    /// A signal ended the job before its last step. The value is the name of the signal.
    Killed(String),
    /// The job reached its last step, but did not record the metric. The values are the names that it recorded.
    NoMetric(Vec<String>),
}

impl TrialStarter {
    /// Returns the files and folders of a trial.
    pub(super) fn places(&self, trial: &SweepTrial) -> TrialPlaces {
        let folder = self.folder.trial(trial.number);
        TrialPlaces {
            ds_config: folder.join("ds_config.json"),
            record: Some((self.folder.runs(), SweepFolder::run_name(trial.number))),
            is_branch: trial.branch.is_some(),
            folder,
        }
    }

    fn checkpoints(&self, number: usize) -> PathBuf {
        self.folder.trial(number).join("checkpoints")
    }

    /// Writes what a trial needs before its first job: its configuration, and the checkpoint that it branches from.
    /// Existing files are left unchanged.
    pub(super) fn prepare(&self, trial: &SweepTrial) -> Result<()> {
        let places = self.places(trial);
        create(&places.folder)?;
        if let Some(config) = self.template.configuration_of(&trial.parameters)
            && !places.ds_config.exists()
        {
            write_whole(&places.ds_config, &format!("{config:#}\n"))?;
        }
        let own = self.checkpoints(trial.number);
        let Some(branch) = trial.branch.filter(|_| !own.exists()) else { return Ok(()) };
        let donor = self.checkpoints(branch.trial);
        let at_step = |tag: &(String, Result<candle_zero::checkpoint::Manifest>)| {
            tag.1.as_ref().is_ok_and(|manifest| manifest.global_steps == branch.step)
        };
        let Some((tag, _)) = list_checkpoints(&donor).tags.into_iter().find(at_step) else {
            let text = format!("trial {} has no checkpoint of step {} there", branch.trial, branch.step);
            let source = std::io::Error::new(std::io::ErrorKind::NotFound, text);
            return Err(Error::Io { action: "branch from", path: donor, source });
        };
        let copy = || -> std::io::Result<()> {
            let new = AtomicFolder::beside(&own)?;
            copy_folder(&donor.join(&tag), &new.path().join(&tag))?;
            let latest = new.path().join("latest");
            std::fs::write(&latest, &tag)?;
            File::open(&latest)?.sync_all()?;
            new.finish()
        };
        copy().map_err(|source| Error::Io { action: "copy a checkpoint to", path: own.clone(), source })
    }

    /// Starts a job. Returns `None` if a process of an earlier session of the sweep is still training this trial.
    pub(super) fn start(&self, trial: &SweepTrial, job: &SweepJob) -> Result<Option<Child>> {
        let places = self.places(trial);
        let Some(lock) = lock(&places.folder.join("running"))? else { return Ok(None) };
        let mut command = Command::new(&self.launcher);
        command.args(self.template.words_of(&trial.parameters, &places)).current_dir(&self.directory);
        as_trial(&mut command, &self.log(job))?;
        if job.to < self.steps {
            command.env(STOP_AT, job.to.to_string());
        }
        if let Some(threads) = self.threads {
            command.envs(THREADS.map(|name| (name, threads.to_string())));
        }
        command.stdin(Stdio::from(lock));
        // Ctrl-C reaches only the sweep, which passes it on.
        command.process_group(0);
        let child = command.spawn();
        child.map(Some).map_err(|source| LaunchError::Setup { what: "starting a trial", source }.into())
    }

    /// Returns the log of a job.
    pub(super) fn log(&self, job: &SweepJob) -> PathBuf {
        self.folder.trial(job.trial).join(format!("log-{}.txt", job.to))
    }

    /// Returns the step of the newest checkpoint of a trial.
    pub(super) fn saved_step(&self, trial: usize) -> u64 {
        let newest = newest_checkpoint(&self.checkpoints(trial)).ok().flatten();
        newest.map_or(0, |(_, manifest)| manifest.global_steps)
    }

    /// Returns how a job has ended, after its launcher has exited.
    pub(super) fn end(&self, job: &SweepJob, status: ExitStatus) -> Result<JobEnd> {
        // If a signal has killed a process, the launcher, as shells do, exits with 128 plus the number of the signal.
        const SIGNAL_CODES: i32 = 128;
        const MAX_SIGNAL: i32 = 64;
        let of_code = status.code().map(|code| code - SIGNAL_CODES).filter(|number| (1..=MAX_SIGNAL).contains(number));
        let signal = status.signal().or(of_code);
        if let Some(signal) = signal {
            return Ok(JobEnd::Killed(name(signal)));
        }
        if !status.success() {
            let why = last_words(&self.log(job));
            return Ok(JobEnd::Result(Err(why.strip_prefix("zerorun: ").unwrap_or(&why).to_owned())));
        }
        let recorded = self.recorded(job)?;
        let reached = if job.to < self.steps { self.saved_step(job.trial) } else { recorded.steps };
        if reached != job.to {
            let why = match job.to < self.steps {
                true => format!(
                    "it ended with step {reached} saved, but must pause after step {}; the script must save a \
                     checkpoint to --save and end when Engine::stop_requested returns true, and continue with --resume",
                    job.to
                ),
                false => {
                    format!("it ended after {reached} of {} steps; the script must train for --steps steps", job.to)
                }
            };
            return Ok(JobEnd::Result(Err(why)));
        }
        Ok(match recorded.value {
            Some(value) => JobEnd::Result(Ok(value)),
            None => JobEnd::NoMetric(recorded.names),
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
        let own = ids.into_iter().filter(|id| id.strip_prefix(&name).is_some_and(|rest| rest.starts_with('-')));
        let mut runs: Vec<RecordedRun> = own
            .filter_map(|id| RecordedRun::open(folder.path().join(id)).ok())
            .filter(|run| run.info().name == name)
            .collect();
        runs.sort_by(|a, b| b.info().created.total_cmp(&a.info().created).then_with(|| b.id().cmp(&a.id())));
        Ok(runs)
    }

    /// Returns what a trial recorded in the steps of a job.
    fn recorded(&self, job: &SweepJob) -> Result<RecordedValue> {
        let mut found = RecordedValue::default();
        for run in self.runs_of(job.trial)? {
            let metrics = run.metrics()?;
            found.steps = found.steps.max(metrics.rows.last().map_or(0, |row| row.step));
            found.names.extend(metrics.names().into_iter().map(str::to_owned));
            let mut rows = metrics.rows.iter().rev().filter(|row| row.step > job.from && row.step <= job.to);
            let value = rows.find_map(|row| row.values.get(&self.metric));
            // If a trial was trained again, its records have the same values.
            found.value = found.value.or(value.copied());
        }
        found.names.sort();
        found.names.dedup();
        Ok(found)
    }
}

/// The record of a trial in the steps of a job.
#[derive(Debug, Default)]
struct RecordedValue {
    /// The newest value of the metric.
    value: Option<f64>,
    /// The last recorded step of the trial.
    steps: u64,
    /// The names of all values.
    names: Vec<String>,
}

fn create(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|source| Error::Io { action: "create", path: folder.to_owned(), source })
}

/// Opens and locks a file; `None` if another process holds the lock.
fn lock(path: &Path) -> Result<Option<File>> {
    let io = |source| Error::Io { action: "lock", path: path.to_owned(), source };
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(None),
        // If the file system has no locks, it is unknown whether another process is training the trial.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOLCK | Errno::INVAL) => Ok(Some(file)),
        Err(errno) => Err(io(errno.into())),
    }
}

/// Copies a folder with everything in it, and syncs the copies.
fn copy_folder(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target)?;
            File::open(&target)?.sync_all()?;
        }
    }
    candle_zero::files::sync_folder(to)
}
