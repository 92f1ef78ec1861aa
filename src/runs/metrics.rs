//! `metrics.jsonl`: values by step.
//!
//! ```text
//!   {"session": 1, "from_step": 0, "time": ...}     a process begins or continues the run after this step
//!   {"step": 1, "time": ..., "loss": ..., ...}      values of a step; several lines of a step are merged
//! ```
//!
//! A run that continues from a checkpoint repeats the steps after the checkpoint; the earlier records of these steps
//! are dropped.

use super::{METRICS, lines};
use crate::error::{Error, Result};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// The name of the value that the engine records in every step. A line that contains this value begins a step, even if
/// that step was recorded before.
pub(super) const LOSS: &str = "loss";

/// The values of a step.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MetricsRow {
    /// The number of optimizer steps so far.
    pub step: u64,
    /// The time at which the step ended, in seconds since 1970.
    pub time: f64,
    /// The values by name. They may be NaN or infinite.
    pub values: BTreeMap<String, f64>,
}

/// All values of a run, by step.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct RunMetrics {
    /// The rows, sorted by step.
    pub rows: Vec<MetricsRow>,
    /// The first damaged line, if there is one.
    pub problem: Option<String>,
    /// The number of bytes up to the end of the last complete line, from which a [`RunTail`](super::RunTail) continues.
    pub bytes: u64,
}

/// A line of the file.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum MetricsLine {
    /// A process begins or continues the run after a step: the records of later steps are dropped.
    Session {
        /// The number of the process, counted from 1.
        number: u64,
        /// The step.
        from_step: u64,
        /// The time at which the process began, in seconds since 1970.
        time: f64,
    },
    /// Values of a step. The values of all lines of a step are merged, except that a line with the value `loss` begins
    /// the step anew.
    Values(MetricsRow),
}

impl MetricsLine {
    /// Reads a line. Returns `None` if it is of neither kind.
    pub(super) fn of(line: Map<String, Value>) -> Option<Self> {
        let time = line.get("time").and_then(number).filter(|time| time.is_finite()).unwrap_or_default();
        if let Some(session) = line.get("session") {
            let from_step = line.get("from_step").and_then(Value::as_u64)?;
            return Some(Self::Session { number: session.as_u64()?, from_step, time });
        }
        let step = line.get("step")?.as_u64()?;
        let is_value = |name: &str| name != "step" && name != "time";
        let values = line.into_iter().filter(|(name, _)| is_value(name));
        let values = values.filter_map(|(name, value)| Some((name, number(&value)?))).collect();
        Some(Self::Values(MetricsRow { step, time, values }))
    }
}

/// Returns a recorded number. JSON has no numbers that are not finite, so they are recorded as text.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::String(text) => match text.as_str() {
            "NaN" => Some(f64::NAN),
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            _ => None,
        },
        other => other.as_f64(),
    }
}

/// Returns the JSON of a number, which is text if the number is not finite.
pub fn json_number(number: f64) -> Value {
    match serde_json::Number::from_f64(number) {
        Some(number) => Value::Number(number),
        None if number.is_nan() => "NaN".into(),
        None if number > 0.0 => "Infinity".into(),
        None => "-Infinity".into(),
    }
}

/// The contents of the complete file: its rows, and the times of its sessions.
#[derive(Default)]
pub(super) struct WholeMetrics {
    pub rows: BTreeMap<u64, MetricsRow>,
    /// The beginning and the end of each session, in seconds since 1970.
    pub sessions: Vec<(f64, f64)>,
    /// The number of bytes up to the end of the last complete line.
    pub bytes: u64,
    pub problem: Option<String>,
}

impl WholeMetrics {
    /// Reads the file in a folder. A missing file has no rows.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(METRICS);
        let wrong = |source| Error::Io { action: "read", path: path.clone(), source };
        let mut whole = Self::default();
        let file = match lines::open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(whole),
            file => file.map_err(wrong)?,
        };
        let mut problem = None;
        let mut each = |line: std::result::Result<Map<String, Value>, String>| {
            let line = line.and_then(|line| {
                MetricsLine::of(line).ok_or_else(|| "a line has neither a step nor a session".to_owned())
            });
            match line {
                Ok(line) => whole.add(line),
                Err(why) => _ = problem.get_or_insert(why),
            }
        };
        let bytes = lines::complete_lines(file, 0, &mut each).map_err(wrong)?;
        (whole.bytes, whole.problem) = (bytes, problem);
        Ok(whole)
    }

    fn add(&mut self, line: MetricsLine) {
        match line {
            MetricsLine::Session { from_step, time, .. } => {
                self.forget_after(from_step);
                self.sessions.push((time, time));
            }
            MetricsLine::Values(row) => {
                if row.values.contains_key(LOSS) {
                    self.forget_after(row.step.saturating_sub(1));
                }
                match self.sessions.last_mut() {
                    Some((_, last)) => *last = last.max(row.time),
                    None => self.sessions.push((row.time, row.time)),
                }
                let known =
                    self.rows.entry(row.step).or_insert_with(|| MetricsRow { step: row.step, ..MetricsRow::default() });
                known.time = known.time.max(row.time);
                known.values.extend(row.values);
            }
        }
    }

    /// Drops the records of later steps, which are about to be repeated.
    fn forget_after(&mut self, step: u64) {
        if let Some(after) = step.checked_add(1) {
            self.rows.split_off(&after);
        }
    }
}

impl RunMetrics {
    /// Reads the values in the folder of a run.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let whole = WholeMetrics::read(folder)?;
        Ok(Self { rows: whole.rows.into_values().collect(), problem: whole.problem, bytes: whole.bytes })
    }

    /// Returns the rows as JSON lines, in the format of the record.
    pub fn to_json_lines(&self) -> String {
        let line = |row: &MetricsRow| {
            let mut line: Map<String, Value> =
                row.values.iter().map(|(name, value)| (name.clone(), json_number(*value))).collect();
            line.insert("step".into(), row.step.into());
            line.insert("time".into(), json_number(row.time));
            format!("{}\n", Value::from(line))
        };
        self.rows.iter().map(line).collect()
    }

    /// Returns the names of all values, sorted.
    pub fn names(&self) -> Vec<&str> {
        let names: std::collections::BTreeSet<&str> =
            self.rows.iter().flat_map(|row| row.values.keys().map(String::as_str)).collect();
        names.into_iter().collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(text: &str) -> WholeMetrics {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(METRICS), text).unwrap();
        WholeMetrics::read(dir.path()).unwrap()
    }

    fn losses(text: &str) -> Vec<(u64, f64)> {
        read(text).rows.values().map(|row| (row.step, row.values[LOSS])).collect()
    }

    #[test]
    fn repeated_steps_replace_the_earlier_ones_and_all_that_came_after() {
        let first = "{\"session\":1,\"from_step\":0,\"time\":1}\n{\"step\":1,\"time\":2,\"loss\":3}\n\
                     {\"step\":2,\"time\":3,\"loss\":2}\n{\"step\":2,\"val_loss\":9}\n{\"step\":3,\"time\":4,\"loss\":1}\n";
        assert_eq!(losses(first), [(1, 3.0), (2, 2.0), (3, 1.0)]);
        let resumed = format!("{first}{{\"session\":2,\"from_step\":1,\"time\":10}}\n");
        assert_eq!(losses(&resumed), [(1, 3.0)]);
        let resumed = format!("{resumed}{{\"step\":2,\"time\":12,\"loss\":5}}\n");
        assert_eq!(losses(&resumed), [(1, 3.0), (2, 5.0)]);
        assert_eq!(read(&resumed).sessions, [(1.0, 4.0), (10.0, 12.0)]);
        assert!(!read(&resumed).rows[&2].values.contains_key("val_loss"));
        // There is no line for the session.
        assert_eq!(losses(&format!("{first}{{\"step\":2,\"loss\":7}}\n")), [(1, 3.0), (2, 7.0)]);
    }

    #[test]
    fn lines_of_one_step_add_up_and_numbers_that_are_not_finite_survive() {
        let mut line = Map::new();
        for (name, value) in [("a", f64::NAN), ("b", f64::INFINITY), ("c", f64::NEG_INFINITY), ("d", 0.1)] {
            line.insert(name.into(), json_number(value));
        }
        line.insert("step".into(), 4.into());
        let text = format!("{{\"step\":4,\"loss\":1,\"name\":\"x\"}}\n{}\n", Value::from(line));
        let row = read(&text).rows[&4].clone();
        assert_eq!(row.values.keys().collect::<Vec<_>>(), ["a", "b", "c", "d", "loss"]);
        assert!(row.values["a"].is_nan() && row.values["c"] == f64::NEG_INFINITY && row.values["d"] == 0.1);
    }

    #[test]
    fn damage_is_named_and_the_other_lines_are_read() {
        let whole = read(
            "{\"step\":1,\"loss\":1}\nxx\n{\"x\":1}\n{\"step\":2,\"loss\":2}\n{\"step\":18446744073709551615,\"loss\":1}\n{\"st",
        );
        assert_eq!(whole.problem.unwrap(), "the line at byte 20 is not a JSON object");
        assert_eq!(whole.rows.len(), 3);
        assert_eq!(read("{\"step\":-1}\n").problem.unwrap(), "a line has neither a step nor a session");
    }
}
