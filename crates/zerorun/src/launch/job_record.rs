//! The launcher's part of the records of runs: the output of the ranks, and how they have ended.
//!
//! ```text
//!   launcher   creates a file, and names it in CANDLE_ZERO_RUN_FOLDERS
//!   rank 0     appends the folder of each run that it records (candle_zero::runs)
//!   launcher   from then on writes `log.txt` and `launch.jsonl` in these folders, first what has been collected
//! ```
//!
//! Only the launcher of rank 0 learns the folders, so the records have the output of the ranks of that host.

use super::console::eprint;
use super::failure_report::{EndedRank, StopRequest};
use super::ranks::LocalJob;
use crate::dashboard::ServedFolder;
use candle_zero::runs::{LaunchWriter, RunsFolder};
use candle_zero::util::{host_name, lock};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tempfile::NamedTempFile;

/// The maximum number of bytes of lines that are collected before a run begins. Older ones are dropped.
const MAX_WAITING: usize = 256 << 10;
/// The time between two looks for new folders.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// The maximum number of runs of a job.
const MAX_RUNS: usize = 64;

/// The launcher's part of the records of a job's runs.
#[derive(Debug)]
pub(super) struct JobRecord {
    /// The file to which rank 0 appends the folders; `None`: nothing is recorded, or on another host.
    announced: Option<NamedTempFile>,
    state: Mutex<JobRecordState>,
    served: Option<ServedFolder>,
}

#[derive(Debug, Default)]
struct JobRecordState {
    writers: Vec<LaunchWriter>,
    /// What is written into the folders of runs that begin later.
    events: Vec<Map<String, Value>>,
    lines: VecDeque<WaitingLine>,
    waiting_bytes: usize,
    looked: Option<Instant>,
    is_given_up: bool,
}

/// A line that a rank has written before its run has begun.
#[derive(Debug)]
struct WaitingLine {
    time: f64,
    prefix: String,
    text: Vec<u8>,
}

impl JobRecord {
    /// Begins the record of a start of the job.
    pub(super) fn begin(job: &LocalJob) -> Self {
        let context = job.multi_host.as_ref();
        let is_off = job.run.folder.as_ref().is_some_and(|folder| RunsFolder::is_off(folder));
        let has_first = context.is_none_or(|context| context.first == 0);
        // Without the file, which needs a folder for temporary files, there is no log.
        let file = || tempfile::Builder::new().prefix("candle-zero-runs-").tempfile().ok();
        let announced = (!is_off && has_first).then(file).flatten();
        let record = Self { announced, state: Mutex::default(), served: job.run.served.clone() };
        let ranks = context.map_or(job.world, |context| context.pmi.world());
        record.event(json!({"event": "start", "restart": job.restart, "ranks": ranks, "here": job.world}));
        record
    }

    /// Returns the file for the ranks' variable.
    pub(super) fn path(&self) -> Option<&Path> {
        self.announced.as_ref().map(NamedTempFile::path)
    }

    /// Adds a line of a rank's output.
    pub(super) fn line(&self, prefix: &str, text: &[u8]) {
        let Some(file) = &self.announced else { return };
        let mut state = lock(&self.state);
        self.look(&mut state, file, false);
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        if state.writers.is_empty() {
            state.wait(WaitingLine { time, prefix: prefix.to_owned(), text: text.to_owned() });
        } else {
            state.write(|writer| writer.line(time, prefix, text));
        }
    }

    /// Adds the end of a rank, whose number among all ranks is given.
    pub(super) fn ended(&self, rank: usize, end: &EndedRank) {
        let how = match end.request {
            StopRequest::Nothing => end.ended.to_string(),
            StopRequest::Terminate => "was stopped by zerorun after another rank had failed".to_owned(),
            StopRequest::Kill => "was killed by zerorun because it did not end".to_owned(),
        };
        let outcome = match (end.ended.is_failure(), end.request) {
            (false, _) => "ended",
            (true, StopRequest::Nothing) => "failed",
            (true, _) => "stopped",
        };
        self.event(json!({"event": "rank", "rank": rank, "host": host_name(), "outcome": outcome, "how": how}));
    }

    /// Adds that a rank on another host has failed.
    pub(super) fn failed_elsewhere(&self, rank: usize, why: &str) {
        self.event(json!({"event": "rank", "rank": rank, "outcome": "failed", "how": why}));
    }

    /// Adds the message about the failure of the job.
    pub(super) fn failed(&self, rank: usize, message: &str) {
        self.event(json!({"event": "failure", "rank": rank, "message": message}));
    }

    /// Writes what is still waiting.
    pub(super) fn finish(&self) {
        if let Some(file) = &self.announced {
            self.look(&mut lock(&self.state), file, true);
        }
    }

    fn event(&self, event: Value) {
        let (Some(file), Value::Object(event)) = (&self.announced, event) else { return };
        let mut state = lock(&self.state);
        self.look(&mut state, file, true);
        state.write(|writer| writer.event(event.clone()));
        state.events.push(event);
    }

    /// Looks for folders that rank 0 has announced.
    fn look(&self, state: &mut JobRecordState, file: &NamedTempFile, at_once: bool) {
        if !at_once && state.looked.is_some_and(|at| at.elapsed() < LOOK_INTERVAL) {
            return;
        }
        state.looked = Some(Instant::now());
        let text = std::fs::read_to_string(file.path()).unwrap_or_default();
        let complete = text.rsplit_once('\n').map_or("", |(complete, _)| complete);
        for folder in complete.lines().map(PathBuf::from).take(MAX_RUNS) {
            if !state.is_given_up && !state.writers.iter().any(|writer| writer.folder() == folder) {
                if let (Some(served), Some(runs)) = (&self.served, folder.parent()) {
                    served.change(runs);
                }
                state.open(folder);
            }
        }
    }
}

impl JobRecordState {
    /// Begins to write into the folder of a run.
    fn open(&mut self, folder: PathBuf) {
        let written = LaunchWriter::open(folder).and_then(|mut writer| {
            self.events.iter().try_for_each(|event| writer.event(event.clone()))?;
            for WaitingLine { time, prefix, text } in self.lines.drain(..) {
                writer.line(time, &prefix, &text)?;
            }
            Ok(writer)
        });
        self.waiting_bytes = 0;
        match written {
            Ok(writer) => self.writers.push(writer),
            Err(error) => self.give_up(&error),
        }
    }

    fn wait(&mut self, line: WaitingLine) {
        self.waiting_bytes += line.text.len();
        self.lines.push_back(line);
        while self.waiting_bytes > MAX_WAITING
            && let Some(oldest) = self.lines.pop_front()
        {
            self.waiting_bytes -= oldest.text.len();
        }
    }

    fn write(&mut self, mut write: impl FnMut(&mut LaunchWriter) -> candle_zero::Result<()>) {
        if let Err(error) = self.writers.iter_mut().try_for_each(&mut write) {
            self.give_up(&error);
        }
    }

    fn give_up(&mut self, error: &candle_zero::Error) {
        self.is_given_up = true;
        self.writers.clear();
        eprint(&format!("zerorun: the output of the ranks is no longer recorded: {error}"));
    }
}
