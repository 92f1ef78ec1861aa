//! `summary.json`: a summary of the metrics and events of a run, so that listing runs does not require reading those
//! files.
//!
//! The summary contains the number of bytes of each file that it covers. A reader compares these numbers with the
//! lengths of the files, and adds the lines that have been appended since. If a file is shorter, or if steps were
//! repeated, the reader starts again from the beginning.

use super::metrics::{FileMetrics, LOSS, MetricsLine, MetricsRow, ParsedLine};
use super::{EVENTS, FORMAT, MAX_FILE_BYTES, METRICS, SUMMARY, json_line_reader};
use crate::error::{Error, Result};
use crate::files;
use crate::monitor::RunEnding;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::io::ErrorKind;
use std::path::Path;

/// The names of the loss on validation data: the one that `zerorun finetune` records, and common ones.
const VALIDATION_LOSS: [&str; 5] = ["val_loss", "validation_loss", "eval_loss", "Validation/loss", "eval/loss"];

/// A value and its step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ValueAtStep {
    /// The number of steps.
    pub step: u64,
    /// The value. Values that are not finite are `null` in JSON.
    #[serde(deserialize_with = "nan_if_null")]
    pub value: f64,
}

fn nan_if_null<'de, D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// The state of a run, known without reading its metrics.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RunSummary {
    /// The version of the format.
    pub format: u64,
    /// The number of bytes of `metrics.jsonl` that are included.
    pub metrics_bytes: u64,
    /// The number of bytes of `events.jsonl` that are included.
    pub events_bytes: u64,
    /// The number of steps.
    pub steps: u64,
    /// The loss of the last step.
    pub loss: Option<ValueAtStep>,
    /// The lowest loss of a step.
    pub best_loss: Option<ValueAtStep>,
    /// The last loss on validation data.
    pub validation: Option<ValueAtStep>,
    /// The lowest loss on validation data.
    pub best_validation: Option<ValueAtStep>,
    /// The duration of all sessions but the last one, in seconds.
    pub earlier_seconds: f64,
    /// The time at which the last session began, in seconds since 1970.
    pub session_started: f64,
    /// The time of the last record, in seconds since 1970.
    pub last_time: f64,
    /// The number of processes that have recorded the run, one after the other.
    pub sessions: u64,
    /// The number of times that the launcher had restarted the job when the last session began.
    pub restart: u64,
    /// The outcome of the run, or `None` if the run has not ended or was killed.
    pub outcome: Option<RunEnding>,
    /// The last error of the last session.
    pub error: Option<String>,
    /// The folder of the run's checkpoints.
    pub checkpoints: Option<String>,
    /// The step of the last checkpoint.
    pub checkpoint_step: Option<u64>,
    /// The process that records, or has recorded, the run.
    pub pid: Option<u32>,
    /// The host of that process.
    pub host: String,
    /// The first damaged line, if there is one.
    pub problem: Option<String>,
}

/// The error for repeated steps: the summary includes their earlier records, and is therefore invalid.
#[derive(Debug, PartialEq)]
pub(super) struct StepsRepeated;

impl RunSummary {
    /// Reads the summary of a run, and brings it up to date if the files have changed since it was written.
    ///
    /// # Errors
    /// The files cannot be read. Damage is not an error: it is named in [`RunSummary::problem`].
    pub(super) fn load(folder: &Path) -> Result<Self> {
        // A summary is only an index: one that is missing or damaged is computed again.
        let stored = json_line_reader::read(&folder.join(SUMMARY), MAX_FILE_BYTES).ok();
        let stored: Option<Self> = stored.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        match stored.filter(|stored| stored.format == FORMAT) {
            Some(stored) => stored.refreshed(folder),
            None => Self::of_files(folder),
        }
    }

    /// Adds the lines that have been appended to the files of the run since the summary was made. If a file has become
    /// shorter, or if steps were repeated, computes the summary again from the complete files.
    ///
    /// # Errors
    /// The errors of [`load`](Self::load).
    pub(super) fn refreshed(mut self, folder: &Path) -> Result<Self> {
        let length = |name: &str| match folder.join(name).metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
            found => found.map(|found| found.len()).map_err(|source| Error::Io {
                action: "read",
                path: folder.join(name),
                source,
            }),
        };
        let (metrics, events) = (length(METRICS)?, length(EVENTS)?);
        let is_shorter = metrics < self.metrics_bytes || events < self.events_bytes;
        if is_shorter || metrics > self.metrics_bytes && self.add_metrics(folder)? == Err(StepsRepeated) {
            return Self::of_files(folder);
        }
        if events > self.events_bytes {
            self.add_events(folder)?;
        }
        Ok(self)
    }

    /// Computes the summary from the complete files.
    pub(super) fn of_files(folder: &Path) -> Result<Self> {
        let whole = FileMetrics::read(folder)?;
        let mut summary = Self {
            format: FORMAT,
            metrics_bytes: whole.bytes,
            problem: whole.problem.map(|message| format!("{METRICS}: {message}")),
            ..Self::default()
        };
        for (start, end) in whole.sessions {
            summary.begin_session(start);
            summary.last_time = summary.last_time.max(end);
        }
        for row in whole.rows.values() {
            _ = summary.add_row(row);
        }
        summary.add_events(folder)?;
        Ok(summary)
    }

    /// Adds the lines of metrics that have been appended.
    fn add_metrics(&mut self, folder: &Path) -> Result<std::result::Result<(), StepsRepeated>> {
        let mut repeated = false;
        let mut add = |summary: &mut Self, line: ParsedLine| match line.0 {
            Some(MetricsLine::Session { from_step, time, .. }) => {
                repeated |= from_step < summary.steps;
                summary.begin_session(time);
            }
            Some(MetricsLine::Values(row)) => repeated |= summary.add_row(&row).is_err(),
            None => {
                _ = summary.problem.get_or_insert_with(|| format!("{METRICS}: a line has neither a step nor a session"))
            }
        };
        let start = self.metrics_bytes;
        self.metrics_bytes = self.add_lines(folder, METRICS, start, &mut add)?;
        Ok(if repeated { Err(StepsRepeated) } else { Ok(()) })
    }

    /// Adds the events that have been appended.
    fn add_events(&mut self, folder: &Path) -> Result<()> {
        let start = self.events_bytes;
        self.events_bytes =
            self.add_lines(folder, EVENTS, start, &mut |summary, event: Map<_, _>| summary.add_event(&event))?;
        Ok(())
    }

    fn add_lines<T: DeserializeOwned>(
        &mut self,
        folder: &Path,
        name: &str,
        start: u64,
        add: &mut dyn FnMut(&mut Self, T),
    ) -> Result<u64> {
        let path = folder.join(name);
        let wrong = |source| Error::Io { action: "read", path: path.clone(), source };
        let file = match json_line_reader::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
            file => file.map_err(wrong)?,
        };
        let end = json_line_reader::complete_lines(file, start, &mut |line| match line {
            Ok(line) => add(self, line),
            Err(message) => _ = self.problem.get_or_insert_with(|| format!("{name}: {message}")),
        });
        end.map_err(wrong)
    }

    /// Begins another session at `time`.
    pub(super) fn begin_session(&mut self, time: f64) {
        if self.session_started > 0.0 {
            self.earlier_seconds += (self.last_time - self.session_started).max(0.0);
        }
        (self.session_started, self.last_time) = (time, time);
    }

    /// Adds the values of a step, which must not repeat an earlier step.
    pub(super) fn add_row(&mut self, row: &MetricsRow) -> std::result::Result<(), StepsRepeated> {
        let (step, loss) = (row.step, row.values.get(LOSS).copied());
        if step < self.steps || step == self.steps && loss.is_some() && self.loss.is_some_and(|last| last.step == step)
        {
            return Err(StepsRepeated);
        }
        if self.session_started == 0.0 {
            self.session_started = row.time;
        }
        self.steps = step;
        self.last_time = self.last_time.max(row.time);
        let update_best = |best: &mut Option<ValueAtStep>, value: f64| {
            if value.is_finite() && best.is_none_or(|best| value < best.value) {
                *best = Some(ValueAtStep { step, value });
            }
        };
        if let Some(value) = loss {
            self.loss = Some(ValueAtStep { step, value });
            update_best(&mut self.best_loss, value);
        }
        if let Some(value) = VALIDATION_LOSS.iter().find_map(|name| row.values.get(*name)).copied() {
            self.validation = Some(ValueAtStep { step, value });
            update_best(&mut self.best_validation, value);
        }
        Ok(())
    }

    /// Adds an event. Unknown events are ignored: a newer version may have written them.
    pub(super) fn add_event(&mut self, event: &Map<String, Value>) {
        let text = |key: &str| event.get(key).and_then(Value::as_str).map(str::to_owned);
        let number = |key: &str| event.get(key).and_then(Value::as_u64);
        match event.get("event").and_then(Value::as_str) {
            Some("start") => {
                self.sessions = number("session").unwrap_or(self.sessions.saturating_add(1));
                self.restart = number("restart").unwrap_or_default();
                self.pid = number("pid").and_then(|pid| u32::try_from(pid).ok());
                self.host = text("host").unwrap_or_default();
                (self.outcome, self.error) = (None, None);
            }
            Some("checkpoint") => {
                self.checkpoints = text("folder").or(self.checkpoints.take());
                self.checkpoint_step = number("step").or(self.checkpoint_step);
            }
            Some("error") => self.error = text("message"),
            Some("end") => {
                self.outcome = event.get("outcome").and_then(|outcome| RunEnding::deserialize(outcome).ok());
                self.error = text("message").or(self.error.take());
                let time = event.get("time").and_then(Value::as_f64).unwrap_or_default();
                self.last_time = self.last_time.max(time);
            }
            _ => {}
        }
    }

    /// Returns the time that all sessions have taken up to the last record, in seconds.
    pub fn seconds(&self) -> f64 {
        self.earlier_seconds + (self.last_time - self.session_started).max(0.0)
    }

    /// Replaces the summary in a folder.
    pub(super) fn store(&self, folder: &Path) -> std::io::Result<()> {
        let bytes = serde_json::to_vec(self).expect("text and numbers are JSON");
        // The file is not synced to disk: a reader notices if it is missing or does not belong to the other files.
        files::replace_unsynced(&folder.join(SUMMARY), files::UNFINISHED, &bytes)
    }
}
