//! The journal of a sweep: a file to which lines are appended, each of which is on disk before the sweep continues.
//!
//! ```text
//!   {"event":"begin","parallel":2}                         a process begins or continues the sweep
//!   {"event":"start","trial":3,"from":0,"to":4}            the sweep handed out this job
//!   {"event":"place","trial":3,"host":"worker-1"}          with a hostfile: the trial is started on this host
//!   {"event":"end","trial":3,"to":4,"value":1.5}           the job ended with this metric, or with an "error"
//!   {"event":"take","trial":3}                             the sweep has received the job's result
//! ```
//!
//! A sweep makes the same decisions if it receives the same results in the same order, so these lines are all that is
//! needed to continue it. The hosts have no effect on decisions. An incomplete last line, left by a process that was
//! killed, is removed.

use super::error::SweepToolError;
use crate::error::{Error, Result};
use candle_zero::files;
use candle_zero::sweep::{JobResultOrder, Sweep, SweepDecision, SweepJob};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

/// The maximum size of a journal in bytes, enough for thousands of trials with many pauses.
const MAX_BYTES: u64 = 1 << 30;

/// The result of a job: the metric, or the reason why the trial has failed.
pub(super) type JobResult = std::result::Result<f64, String>;

/// A line of the journal.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum JournalEvent {
    Begin { parallel: usize },
    Start(SweepJob),
    Place { trial: usize, host: String },
    End { trial: usize, to: u64, result: JobResult },
    Take { trial: usize },
}

impl JournalEvent {
    fn to_json(&self) -> Value {
        match self {
            Self::Begin { parallel } => json!({"event": "begin", "parallel": parallel}),
            Self::Start(SweepJob { trial, from, to }) => {
                json!({"event": "start", "trial": trial, "from": from, "to": to})
            }
            Self::Place { trial, host } => json!({"event": "place", "trial": trial, "host": host}),
            Self::End { trial, to, result: Ok(value) } => {
                // JSON has no numbers that are not finite.
                let value = if value.is_finite() { json!(value) } else { json!(value.to_string()) };
                json!({"event": "end", "trial": trial, "to": to, "value": value})
            }
            Self::End { trial, to, result: Err(why) } => {
                json!({"event": "end", "trial": trial, "to": to, "error": why})
            }
            Self::Take { trial } => json!({"event": "take", "trial": trial}),
        }
    }

    /// Reads a line; `None` if it is damaged.
    pub(super) fn of_line(line: &[u8]) -> Option<Self> {
        serde_json::from_slice(line).ok().and_then(|line| Self::of_json(&line))
    }

    fn of_json(line: &Map<String, Value>) -> Option<Self> {
        let number = |key: &str| line.get(key).and_then(Value::as_u64);
        let index = |key: &str| number(key).and_then(|number| usize::try_from(number).ok());
        match line.get("event")?.as_str()? {
            "begin" => Some(Self::Begin { parallel: index("parallel")? }),
            "start" => Some(Self::Start(SweepJob { trial: index("trial")?, from: number("from")?, to: number("to")? })),
            "place" => Some(Self::Place { trial: index("trial")?, host: line.get("host")?.as_str()?.to_owned() }),
            "end" => {
                let result = match (line.get("value"), line.get("error")) {
                    (Some(Value::String(text)), _) => Ok(text.parse().ok()?),
                    (Some(value), _) => Ok(value.as_f64()?),
                    (None, error) => Err(error?.as_str()?.to_owned()),
                };
                Some(Self::End { trial: index("trial")?, to: number("to")?, result })
            }
            "take" => Some(Self::Take { trial: index("trial")? }),
            _ => None,
        }
    }
}

/// The journal, open for writing.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
}

/// The state of a sweep according to its journal.
#[derive(Debug)]
pub(super) struct ReplayedSweep {
    pub(super) sweep: Sweep,
    pub(super) order: JobResultOrder,
    /// The results that the sweep has not received yet, by trial.
    pub(super) results: BTreeMap<usize, JobResult>,
    /// The host on which each trial was last started in the last session, if that session had a hostfile.
    pub(super) hosts: BTreeMap<usize, String>,
    /// The number of trials at a time in the last session.
    pub(super) parallel: Option<usize>,
}

impl ReplayedSweep {
    /// Creates the state before the first event of a journal, from a new sweep.
    pub(super) fn new(mut sweep: Sweep) -> Self {
        // The limit on failures may have been changed since the journal was written.
        sweep.set_max_failures(usize::MAX);
        Self { sweep, order: JobResultOrder::new(), results: BTreeMap::new(), hosts: BTreeMap::new(), parallel: None }
    }

    /// Replays an event, or returns why it does not fit the earlier ones.
    pub(super) fn repeat(&mut self, event: JournalEvent) -> std::result::Result<(), &'static str> {
        match event {
            JournalEvent::Begin { parallel } => {
                self.parallel = Some(parallel);
                self.hosts.clear();
            }
            JournalEvent::Start(job) => {
                if self.sweep.ask() != SweepDecision::Train(job) {
                    return Err("starts a trial that this sweep would not start");
                }
                self.order.begin(&job);
            }
            JournalEvent::Place { trial, host } => {
                if !self.order.running().any(|running| running == trial) {
                    return Err("places a trial that is not running");
                }
                self.hosts.insert(trial, host);
            }
            JournalEvent::End { trial, result, .. } => {
                if !self.order.running().any(|running| running == trial) {
                    return Err("ends a trial that is not running");
                }
                self.results.insert(trial, result);
            }
            JournalEvent::Take { trial } => {
                let result = self.results.remove(&trial).ok_or("takes a result that does not exist")?;
                self.sweep.tell(trial, result).map_err(|_| "takes the result of a trial that is not running")?;
                self.order.end(trial);
            }
        }
        Ok(())
    }
}

impl Journal {
    /// Reads the complete lines of the journal at `path`, and returns them with their total length in bytes.
    fn read(path: &Path) -> Result<(Vec<JournalEvent>, u64)> {
        let bytes = match files::read(path, MAX_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok((Vec::new(), 0)),
            bytes => bytes.map_err(|source| Error::Io { action: "read", path: path.to_owned(), source })?,
        };
        let complete = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let mut events = Vec::new();
        for (at, line) in bytes[..complete].split_inclusive(|byte| *byte == b'\n').enumerate() {
            events.push(JournalEvent::of_line(line).ok_or_else(|| {
                let problem = "is damaged; give another folder with --out to begin again, or restore the file";
                SweepToolError::Journal { path: path.to_owned(), line: at + 1, problem: problem.into() }
            })?);
        }
        Ok((events, complete as u64))
    }

    /// Replays the events in the journal at `path` with `sweep`, which must be new.
    pub(super) fn replay(path: &Path, sweep: Sweep) -> Result<ReplayedSweep> {
        Ok(Self::replay_with_length(path, sweep)?.0)
    }

    /// Opens the journal at `path` to continue it, and replays its events with `sweep`, which must be new.
    pub(super) fn open(path: &Path, sweep: Sweep) -> Result<(Self, ReplayedSweep)> {
        let (replayed, complete) = Self::replay_with_length(path, sweep)?;
        let write_error = |source| Error::Io { action: "write to", path: path.to_owned(), source };
        let file = OpenOptions::new().append(true).create(true).open(path).map_err(write_error)?;
        file.set_len(complete).map_err(write_error)?;
        files::sync_folder(files::folder_of(path)).map_err(write_error)?;
        Ok((Self { path: path.to_owned(), file }, replayed))
    }

    fn replay_with_length(path: &Path, sweep: Sweep) -> Result<(ReplayedSweep, u64)> {
        let (events, complete) = Self::read(path)?;
        let max_failures = sweep.settings().max_failures;
        let mut replayed = ReplayedSweep::new(sweep);
        for (at, event) in events.into_iter().enumerate() {
            replayed.repeat(event).map_err(|problem| {
                let problem = format!(
                    "{problem}; the journal belongs to another sweep or version; give another folder with --out"
                );
                SweepToolError::Journal { path: path.to_owned(), line: at + 1, problem }
            })?;
        }
        replayed.sweep.set_max_failures(max_failures);
        Ok((replayed, complete))
    }

    /// Passes every complete line of the journal at `path`, starting at byte `from`, to `on_line`; a line that is too
    /// long is passed as an empty one. Returns the position after the last complete line. A missing journal has no
    /// lines.
    pub(super) fn lines_from(path: &Path, from: u64, on_line: &mut dyn FnMut(&[u8])) -> std::io::Result<u64> {
        match files::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(from),
            file => files::complete_lines(file?, from, &mut |_, line| on_line(line.unwrap_or_default())),
        }
    }

    /// Adds a line, which is on disk when the function returns.
    pub(super) fn add(&mut self, event: &JournalEvent) -> Result<()> {
        let line = format!("{}\n", event.to_json());
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|source| Error::Io { action: "write to", path: self.path.clone(), source })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_zero::sweep::{ParameterDomain, SweepSettings, SweepSpace, TrialScheduler};

    fn sweep() -> Sweep {
        let space = SweepSpace::new().with("--lr", ParameterDomain::uniform(0.0, 1.0));
        let mut settings = SweepSettings::new(space, 8);
        (settings.trials, settings.scheduler) = (Some(6), TrialScheduler::Asha { min_steps: 1, eta: 2 });
        Sweep::new(settings).unwrap()
    }

    /// Runs a sweep with two trials at a time, and writes a journal.
    fn run(path: &Path, result: impl Fn(&SweepJob) -> JobResult) -> Sweep {
        let (mut journal, ReplayedSweep { mut sweep, mut order, mut results, .. }) =
            Journal::open(path, sweep()).unwrap();
        journal.add(&JournalEvent::Begin { parallel: 2 }).unwrap();
        loop {
            while order.running().count() < 2
                && let SweepDecision::Train(job) = sweep.ask()
            {
                journal.add(&JournalEvent::Start(job)).unwrap();
                order.begin(&job);
                let result = result(&job);
                journal.add(&JournalEvent::End { trial: job.trial, to: job.to, result: result.clone() }).unwrap();
                results.insert(job.trial, result);
            }
            let Some(trial) = order.next() else { return sweep };
            // If the result is missing, the sweep was killed after the trial had started.
            let result = results.remove(&trial).unwrap_or_else(|| {
                let reached = sweep.trial(trial).unwrap();
                let candle_zero::sweep::TrialState::Running { to } = reached.state else { panic!("{reached:?}") };
                let result = result(&SweepJob { trial, from: reached.reached(), to });
                journal.add(&JournalEvent::End { trial, to, result: result.clone() }).unwrap();
                result
            });
            journal.add(&JournalEvent::Take { trial }).unwrap();
            sweep.tell(trial, result).unwrap();
            order.end(trial);
        }
    }

    fn result(job: &SweepJob) -> JobResult {
        match job.trial {
            2 => Err("no \"data\"\n".into()),
            3 => Ok(f64::NAN),
            trial => Ok(trial as f64 * 0.1 + 1.0 / job.to as f64),
        }
    }

    #[test]
    fn a_kill_at_any_byte_leads_to_the_same_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let uninterrupted = run(&path, result);
        let bytes = std::fs::read(&path).unwrap();
        let best = uninterrupted.best().unwrap().number;
        assert_eq!((best, uninterrupted.failures()), (1, 1));
        // 43 is a prime number, so lines are cut at many different positions.
        for cut in (0..bytes.len()).step_by(43) {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            let resumed = run(&path, result);
            assert_eq!(format!("{:?}", resumed.trials()), format!("{:?}", uninterrupted.trials()), "cut at {cut}");
            let replayed = Journal::replay(&path, sweep()).unwrap();
            assert_eq!(replayed.sweep.steps_done(), uninterrupted.steps_done());
            assert_eq!((replayed.parallel, replayed.results.len()), (Some(2), 0));
        }
    }

    #[test]
    fn a_journal_that_is_damaged_or_of_another_sweep_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let refusal = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let error = Journal::replay(&path, sweep()).unwrap_err().to_string();
            error.replace(dir.path().to_str().unwrap(), "DIR")
        };
        let start = "{\"event\":\"start\",\"trial\":1,\"from\":0,\"to\":1}\n";
        let wrong = [
            refusal("{\"event\":\"begin\",\"parallel\":1}\nxx\n"),
            refusal("{\"event\":\"begin\"}\n"),
            refusal("{\"event\":\"start\",\"trial\":1,\"from\":0,\"to\":3}\n"),
            refusal("{\"event\":\"end\",\"trial\":1,\"to\":1,\"value\":1}\n"),
            refusal(&format!("{start}{{\"event\":\"take\",\"trial\":1}}\n")),
        ];
        insta::assert_snapshot!(wrong.join("\n"), @r"
        DIR/journal.jsonl: line 2 is damaged; give another folder with --out to begin again, or restore the file
        DIR/journal.jsonl: line 1 is damaged; give another folder with --out to begin again, or restore the file
        DIR/journal.jsonl: line 1 starts a trial that this sweep would not start; the journal belongs to another sweep or version; give another folder with --out
        DIR/journal.jsonl: line 1 ends a trial that is not running; the journal belongs to another sweep or version; give another folder with --out
        DIR/journal.jsonl: line 2 takes a result that does not exist; the journal belongs to another sweep or version; give another folder with --out
        ");
    }
}
