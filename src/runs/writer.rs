//! Writes the record of a run, on rank 0.
//!
//! Lines are collected in memory and passed to the system about once a second and at every event, so that recording a
//! step costs microseconds. A killed process loses at most the lines that have been recorded since lines were last
//! passed on. Nothing is synced to disk.

use super::expert_loads::{BlockLoads, ExpertLoadsFile, RecordedLoads};
use super::info::{RunInfo, RunVersions};
use super::line_appender::LineAppender;
use super::metrics::{LOSS, MetricsRow, json_number};
use super::rank_report::RankReport;
use super::recorded::RecordedRun;
use super::redact_secrets::{command_without_secrets, settings_without_secrets, without_secrets};
use super::requests::{RunRequest, take_requests};
use super::summary::RunSummary;
use super::{
    EVENTS, FORMAT, GitRevision, INFO, JOB, METRICS, RANKS, RUN_FOLDERS, RecordPlan, RunMachine, SAMPLES, new_job, now,
};
use crate::comm::rank_env::SCRIPT;
use crate::error::{Error, Result};
use crate::files::{self, FolderLock, FolderLockOutcome};
use crate::monitor::RunEnding;
use crate::stop_signal::RESTART;
use serde_json::{Map, Value, json};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The time since the last flush after which [`RunWriter::record`] passes all collected lines to the system.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);
/// The number of bytes of collected metrics at which [`RunWriter::record`] passes all lines to the system, even if
/// [`FLUSH_INTERVAL`] has not elapsed.
const FLUSH_BYTES: usize = 1 << 16;
/// The time between two summaries.
const SUMMARY_INTERVAL: Duration = Duration::from_secs(10);
/// The time for which a killed process may still hold the lock of its run.
const LOCK_RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum number of runs with the same name that begin in the same second.
const MAX_SAME_NAMES: usize = 10_000;
/// The maximum number of bytes of a recorded message or sample.
const MAX_TEXT: usize = 1 << 18;

/// The facts that are known when the record begins.
#[derive(Debug, Clone)]
pub(crate) struct RunStart {
    pub world_size: usize,
    pub configuration: Value,
    /// The time at which the engine was built, in seconds since 1970.
    pub time: f64,
    /// The checkpoint that was loaded, if there is one.
    pub loaded: Option<LoadedFrom>,
}

/// A checkpoint that was loaded.
#[derive(Debug, Clone)]
pub(crate) struct LoadedFrom {
    /// The folder of checkpoints.
    pub folder: PathBuf,
    pub path: PathBuf,
    pub step: u64,
}

/// The writer of a run. The folder is locked as long as the writer exists.
#[derive(Debug)]
pub(crate) struct RunWriter {
    folder: PathBuf,
    _lock: FolderLock,
    metrics: LineAppender,
    events: LineAppender,
    samples: LineAppender,
    experts: ExpertLoadsFile,
    summary: RunSummary,
    last_flush: Instant,
    last_summary: Option<Instant>,
}

/// The outcome of an attempt to write into a folder.
enum FolderAttempt {
    Opened(Box<RunWriter>),
    /// The folder belongs to another run, or another process is writing to it.
    Taken,
}

impl RunWriter {
    /// Begins a record, or continues an existing one: that of the same job before its restart, or that of the run with
    /// this name whose checkpoint was loaded.
    ///
    /// # Errors
    /// A folder that cannot be written or locked; an existing record that cannot be read; too many runs with this name
    /// that began in the same second.
    pub fn open(plan: &RecordPlan, start: &RunStart) -> Result<Self> {
        Self::open_as(plan, start, job(), restart())
    }

    /// Opens the record as part of `job`, which its launcher has restarted `restart` times.
    fn open_as(plan: &RecordPlan, start: &RunStart, job: &str, restart: u64) -> Result<Self> {
        create_folder(&plan.folder)?;
        files::sweep_unfinished(&plan.folder);
        for folder in start.loaded.iter().flat_map(|loaded| runs_that_saved(plan, loaded)) {
            let is_continued =
                |_: &RunInfo, summary: &RunSummary| summary.restart < restart || !is_of_job(&folder, job);
            if let Some(FolderAttempt::Opened(writer)) = Self::continue_in(&folder, plan, start, restart, is_continued)?
            {
                return Ok(*writer);
            }
        }
        // A job's id begins with the time at which the job began.
        let stamp = job.rsplit_once('-').map_or(job, |(stamp, _)| stamp);
        let stem = format!("{}-{}", plan.name, stamp);
        for number in 1..=MAX_SAME_NAMES {
            let folder = plan.folder.join(if number == 1 { stem.clone() } else { format!("{stem}-{number}") });
            match std::fs::create_dir(&folder) {
                Ok(()) => return Self::begin_in(folder, plan, start, job, restart),
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    return Err(Error::Io { action: "create", path: folder, source: error });
                }
                Err(_) => {}
            }
            let is_continued = |info: &RunInfo, summary: &RunSummary| info.job == job && summary.restart < restart;
            match Self::continue_in(&folder, plan, start, restart, is_continued)? {
                Some(FolderAttempt::Opened(writer)) => return Ok(*writer),
                Some(FolderAttempt::Taken) | None => {}
            }
        }
        let text = format!("there are already {MAX_SAME_NAMES} runs with names that begin with {stem}");
        let source = std::io::Error::new(ErrorKind::AlreadyExists, text);
        Err(Error::Io { action: "create a run in", path: plan.folder.clone(), source })
    }

    /// Begins a record in a folder that this process has just created.
    fn begin_in(folder: PathBuf, plan: &RecordPlan, start: &RunStart, job: &str, restart: u64) -> Result<Self> {
        let Some(lock) = lock(&folder, LOCK_RELEASE_TIMEOUT)? else {
            let source = std::io::Error::new(ErrorKind::WouldBlock, "another process has locked it");
            return Err(Error::Io { action: "write to", path: folder, source });
        };
        let directory = std::env::current_dir().unwrap_or_default();
        let info = RunInfo {
            format: FORMAT,
            name: plan.name.clone(),
            job: job.to_owned(),
            created: start.time,
            command: command(plan),
            directory: directory.display().to_string(),
            machine: RunMachine::current(),
            versions: RunVersions::current(),
            git: GitRevision::of(&directory),
            world_size: start.world_size,
            total_steps: plan.total_steps,
            settings: settings_without_secrets(plan.settings.clone()),
            configuration: settings_without_secrets(start.configuration.clone()),
        };
        info.write(&folder)?;
        Self::begin_session(
            folder,
            lock,
            (RunSummary { format: FORMAT, ..RunSummary::default() }, info),
            plan,
            start,
            restart,
        )
    }

    /// Continues the record in a folder if `is_continued` holds and no other process writes to it. Returns `None` if
    /// the folder has no record that can be read.
    fn continue_in(
        folder: &Path,
        plan: &RecordPlan,
        start: &RunStart,
        restart: u64,
        is_continued: impl Fn(&RunInfo, &RunSummary) -> bool,
    ) -> Result<Option<FolderAttempt>> {
        let Ok(info) = RunInfo::read(folder) else { return Ok(None) };
        let fits = |info: &RunInfo| RunSummary::load(folder).is_ok_and(|summary| is_continued(info, &summary));
        if info.name != plan.name || !fits(&info) {
            return Ok(Some(FolderAttempt::Taken));
        }
        let Some(lock) = lock(folder, LOCK_RELEASE_TIMEOUT)? else { return Ok(Some(FolderAttempt::Taken)) };
        // Another process may have continued the record before this one got the lock.
        if !fits(&info) {
            return Ok(Some(FolderAttempt::Taken));
        }
        let summary = RunSummary::of_files(folder)?;
        let writer = Self::begin_session(folder.to_owned(), lock, (summary, info), plan, start, restart)?;
        Ok(Some(FolderAttempt::Opened(Box::new(writer))))
    }

    /// Begins a session: records that this process writes the run from now on.
    fn begin_session(
        folder: PathBuf,
        lock: FolderLock,
        (summary, info): (RunSummary, RunInfo),
        plan: &RecordPlan,
        start: &RunStart,
        restart: u64,
    ) -> Result<Self> {
        let [metrics, events, samples] = [METRICS, EVENTS, SAMPLES].map(|name| LineAppender::open(&folder, name));
        let mut writer = Self {
            _lock: lock,
            metrics: metrics?,
            events: events?,
            samples: samples?,
            experts: ExpertLoadsFile::default(),
            summary,
            last_flush: Instant::now(),
            last_summary: None,
            folder,
        };
        // Requests that an earlier process has not seen are removed, and so are files that it left unfinished.
        take_requests(&writer.folder);
        files::remove_unfinished(&writer.folder);
        announce(&writer.folder);
        let session = writer.summary.sessions + 1;
        let from_step = start.loaded.as_ref().map_or(0, |loaded| loaded.step);
        let mut event = object(json!({
            "event": "start",
            "format": FORMAT,
            "session": session,
            "restart": restart,
            "pid": std::process::id(),
            "host": crate::util::host_name(),
            "world_size": start.world_size,
            "command": command(plan),
            "step": from_step,
        }));
        if let Some(loaded) = &start.loaded {
            event.insert("loaded".into(), without_secrets(&loaded.path.to_string_lossy()).into());
        }
        let configuration = settings_without_secrets(start.configuration.clone());
        if configuration != info.configuration {
            event.insert("configuration".into(), configuration);
        }
        let settings = settings_without_secrets(plan.settings.clone());
        if settings != info.settings {
            event.insert("settings".into(), settings);
        }
        writer.push_event(event, start.time);
        writer.continue_after(from_step, session, start.time)?;
        writer.flush()?;
        writer.summarize();
        Ok(writer)
    }

    /// Records that the steps after `step` come next, even if they were recorded before.
    fn continue_after(&mut self, step: u64, session: u64, time: f64) -> Result<()> {
        let repeats = step < self.summary.steps;
        self.metrics.push(&object(json!({"session": session, "from_step": step, "time": time})));
        self.summary.begin_session(time);
        if repeats {
            // The contributions of the repeated steps are removed from the summary.
            self.flush()?;
            let bytes = (self.metrics.len, self.events.len);
            self.summary = RunSummary::of_files(&self.folder)?;
            debug_assert_eq!(bytes, (self.summary.metrics_bytes, self.summary.events_bytes));
        }
        Ok(())
    }

    /// Records that a checkpoint was loaded after the run had begun.
    pub fn loaded(&mut self, loaded: &LoadedFrom) -> Result<()> {
        let path = without_secrets(&loaded.path.to_string_lossy());
        self.push_event(object(json!({"event": "load", "path": path, "step": loaded.step})), now());
        self.continue_after(loaded.step, self.summary.sessions, now())?;
        self.flush()
    }

    /// Returns the folder of the run.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Records values of a step. A value replaces an earlier one of the same step that has the same name.
    pub fn record(&mut self, step: u64, values: impl IntoIterator<Item = (String, f64)>) -> Result<()> {
        let time = now();
        let row = MetricsRow { step, time, values: values.into_iter().collect() };
        let mut line = Map::new();
        line.insert("step".into(), step.into());
        line.insert("time".into(), time.into());
        // These names have other meanings in the file.
        let is_free = |name: &str| !["step", "time", "session", "from_step"].contains(&name);
        line.extend(
            row.values
                .iter()
                .filter(|(name, _)| is_free(name))
                .map(|(name, value)| (name.clone(), json_number(*value))),
        );
        self.metrics.push(&line);
        if self.summary.add_row(&row).is_err() {
            self.flush()?;
            self.summary = RunSummary::of_files(&self.folder)?;
        }
        let is_due = self.last_flush.elapsed() >= FLUSH_INTERVAL || self.metrics.pending.len() >= FLUSH_BYTES;
        // The first step is visible immediately.
        let is_first = self.summary.best_loss.is_some_and(|best| best.step == step) && self.summary.steps <= 1;
        if is_due || is_first && row.values.contains_key(LOSS) { self.flush() } else { Ok(()) }
    }

    /// Records a text that the model has generated.
    pub fn sample(&mut self, step: u64, prompt: &str, text: &str) -> Result<()> {
        let (prompt, text) = (shortened(prompt), shortened(text));
        self.samples.push(&object(json!({"step": step, "time": now(), "prompt": prompt, "text": text})));
        self.flush()
    }

    /// Records that a checkpoint is complete.
    pub fn checkpoint(&mut self, step: u64, folder: &Path, path: &Path) -> Result<()> {
        let [path, folder] = [path, &absolute(folder)].map(|path| without_secrets(&path.to_string_lossy()));
        let event = json!({"event": "checkpoint", "step": step, "path": path, "folder": folder});
        self.push_event(object(event), now());
        self.flush()
    }

    /// Records that a checkpoint could not be saved.
    pub fn failed_checkpoint(&mut self, step: u64, message: &str) -> Result<()> {
        let message = shortened(&without_secrets(message)).to_owned();
        self.push_event(object(json!({"event": "failed checkpoint", "step": step, "message": message})), now());
        self.flush()
    }

    /// Records an error.
    pub fn error(&mut self, step: u64, message: &str) -> Result<()> {
        let message = shortened(&without_secrets(message)).to_owned();
        self.push_event(object(json!({"event": "error", "step": step, "message": message})), now());
        self.flush()
    }

    /// Replaces the last report of the ranks. `answers` are the requests that the program responds to.
    pub fn ranks(&mut self, step: u64, answers: &[RunRequest], ranks: &[RankReport]) -> Result<()> {
        let report = json!({
            "step": step,
            "time": now(),
            "session": self.summary.sessions,
            "answers": answers.iter().map(|request| request.name()).collect::<Vec<_>>(),
            "ranks": ranks.iter().enumerate().map(|(rank, report)| report.to_json(rank)).collect::<Vec<_>>(),
        });
        let path = self.folder.join(RANKS);
        // The file is not synced to disk, because the next report replaces it.
        files::replace_unsynced(&path, files::UNFINISHED, report.to_string().as_bytes()).map_err(|source| Error::Io {
            action: "write",
            path,
            source,
        })
    }

    /// Records how often the routers of a mixture chose each expert in a step. About once a second, the newest loads
    /// replace those in the record.
    pub fn expert_loads(&mut self, step: u64, blocks: Vec<BlockLoads>) -> Result<()> {
        let loads = RecordedLoads { step, time: now(), session: self.summary.sessions, blocks };
        self.experts.put(&self.folder, loads)
    }

    /// Returns the requests that have arrived since the last call, and records them.
    pub fn take_requests(&mut self, step: u64) -> Result<Vec<RunRequest>> {
        let requests = take_requests(&self.folder);
        for request in &requests {
            let event = json!({"event": "request", "step": step, "request": request.name()});
            self.push_event(object(event), now());
        }
        if !requests.is_empty() {
            self.flush()?;
        }
        Ok(requests)
    }

    /// Ends the record.
    pub fn end(mut self, step: u64, outcome: RunEnding, message: Option<&str>) -> Result<()> {
        self.experts.flush(&self.folder)?;
        let mut event = object(json!({"event": "end", "step": step, "outcome": outcome}));
        if let Some(message) = message {
            event.insert("message".into(), shortened(&without_secrets(message)).into());
        }
        self.push_event(event, now());
        self.flush()?;
        self.summarize();
        Ok(())
    }

    fn push_event(&mut self, mut event: Map<String, Value>, time: f64) {
        event.insert("time".into(), time.into());
        self.summary.add_event(&event);
        self.events.push(&event);
    }

    /// Passes all collected lines to the system.
    pub fn flush(&mut self) -> Result<()> {
        self.last_flush = Instant::now();
        self.metrics.flush()?;
        self.events.flush()?;
        self.samples.flush()?;
        if self.last_summary.is_none_or(|at| at.elapsed() >= SUMMARY_INTERVAL) {
            self.summarize();
        }
        Ok(())
    }

    /// Replaces the summary. Readers do not depend on it.
    fn summarize(&mut self) {
        (self.summary.metrics_bytes, self.summary.events_bytes) = (self.metrics.len, self.events.len);
        self.last_summary = Some(Instant::now());
        _ = self.summary.store(&self.folder);
    }
}

/// Creates the folder of runs, and checks that runs can be created in it.
pub(crate) fn check_folder(folder: &Path) -> Result<()> {
    create_folder(folder)?;
    let probe = tempfile::Builder::new().prefix(files::UNFINISHED).tempdir_in(folder);
    probe.map(|_| ()).map_err(|source| Error::Io { action: "create a run in", path: folder.to_owned(), source })
}

fn create_folder(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|source| Error::Io { action: "create", path: folder.to_owned(), source })
}

/// Locks the folder of a run. Returns `None` if another process has locked it.
fn lock(folder: &Path, timeout: Duration) -> Result<Option<FolderLock>> {
    match FolderLock::acquire(folder, timeout) {
        Ok(FolderLockOutcome::Held(lock)) => Ok(Some(lock)),
        Ok(FolderLockOutcome::Busy(_)) => Ok(None),
        Err(source) => Err(Error::Io { action: "lock", path: folder.to_owned(), source }),
    }
}

/// Sends the path of the run's folder to the launcher. Without a launcher, or if it is gone, no other process needs the
/// path.
fn announce(folder: &Path) {
    let Some(path) = std::env::var_os(RUN_FOLDERS).filter(|path| !path.is_empty()) else { return };
    let folder = absolute(folder);
    if let (Ok(mut file), Some(folder)) = (std::fs::OpenOptions::new().append(true).open(path), folder.to_str()) {
        _ = file.write_all(format!("{folder}\n").as_bytes());
    }
}

/// Returns the id of the job that this process belongs to.
pub(crate) fn job() -> &'static str {
    static JOB_ID: OnceLock<String> = OnceLock::new();
    let is_id = |id: &String| {
        (8..=64).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    JOB_ID.get_or_init(|| std::env::var(JOB).ok().filter(is_id).unwrap_or_else(new_job))
}

/// Returns the number of times that the launcher has restarted this job.
pub(crate) fn restart() -> u64 {
    std::env::var(RESTART).ok().and_then(|number| number.parse().ok()).unwrap_or_default()
}

fn is_of_job(folder: &Path, job: &str) -> bool {
    RunInfo::read(folder).is_ok_and(|info| info.job == job)
}

/// Returns the folders of the runs, newest first, that have this name and save their checkpoints in the folder from
/// which a checkpoint was loaded.
fn runs_that_saved(plan: &RecordPlan, loaded: &LoadedFrom) -> Vec<PathBuf> {
    let checkpoints = without_secrets(&absolute(&loaded.folder).to_string_lossy());
    let entries = std::fs::read_dir(&plan.folder).into_iter().flatten().flatten();
    let mut runs: Vec<(f64, PathBuf)> = entries
        .map(|entry| entry.path())
        .filter(|folder| folder.join(INFO).is_file())
        .filter_map(|folder| RecordedRun::open(&folder).ok())
        .filter(|run| run.info().name == plan.name && run.summary().checkpoints.as_ref() == Some(&checkpoints))
        .map(|run| (run.info().created, run.folder().to_owned()))
        .collect();
    runs.sort_by(|a, b| b.0.total_cmp(&a.0));
    runs.into_iter().map(|(_, folder)| folder).collect()
}

/// Returns a folder's path with all links resolved, or the address of an object store unchanged.
fn absolute(folder: &Path) -> PathBuf {
    folder.canonicalize().unwrap_or_else(|_| folder.to_owned())
}

/// Returns the command line without secrets.
fn command(plan: &RecordPlan) -> Vec<String> {
    let process_command = || {
        let mut words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
        // The program is in the launcher's cache, so its path differs from what the user typed.
        if let (Some(script), false) = (std::env::var_os(SCRIPT).filter(|script| !script.is_empty()), words.is_empty())
        {
            words.splice(..1, ["zerorun".to_owned(), script.to_string_lossy().into_owned()]);
        }
        words
    };
    command_without_secrets(&plan.command.clone().unwrap_or_else(process_command))
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(entries) => entries,
        other => unreachable!("an object was written, not {other}"),
    }
}

/// Returns at most the first [`MAX_TEXT`] bytes of a text.
fn shortened(text: &str) -> &str {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
