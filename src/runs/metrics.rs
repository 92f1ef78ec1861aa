//! `metrics.jsonl`: values by step.
//!
//! ```text
//!   {"session": 1, "from_step": 0, "time": ...}     a process begins or continues the run after this step
//!   {"step": 1, "time": ..., "loss": ..., ...}      values of a step; several lines of a step are merged
//! ```
//!
//! A run that continues from a checkpoint repeats the steps after the checkpoint; the earlier records of these steps
//! are dropped.

use super::{METRICS, json_line_reader};
use crate::error::{Error, Result};
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Formatter;
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

/// A line as read from the file; `None` if it is of neither kind.
pub(super) struct ParsedLine(pub Option<MetricsLine>);

impl<'de> Deserialize<'de> for ParsedLine {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(LineVisitor)
    }
}

struct LineVisitor;

impl<'de> Visitor<'de> for LineVisitor {
    type Value = ParsedLine;

    fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut line: A) -> std::result::Result<ParsedLine, A::Error> {
        let (mut session, mut from_step, mut step) = (None, None, None);
        let (mut time, mut values) = (None, BTreeMap::new());
        while let Some(name) = line.next_key::<String>()? {
            let value: LineValue = line.next_value()?;
            match name.as_str() {
                "session" => session = Some(value),
                "from_step" => from_step = Some(value),
                "step" => step = Some(value),
                "time" => time = value.number(),
                _ => values.extend(value.number().map(|number| (name, number))),
            }
        }
        let time = time.filter(|time| time.is_finite()).unwrap_or_default();
        let whole = |value: Option<LineValue>| value.and_then(LineValue::whole);
        let line = match session {
            Some(session) => session.whole().zip(whole(from_step)).map(|(number, from_step)| MetricsLine::Session {
                number,
                from_step,
                time,
            }),
            None => {
                let from_step = from_step.and_then(LineValue::number);
                values.extend(from_step.map(|number| ("from_step".to_owned(), number)));
                whole(step).map(|step| MetricsLine::Values(MetricsRow { step, time, values }))
            }
        };
        Ok(ParsedLine(line))
    }
}

/// A value of a line. JSON has no numbers that are not finite, so they are recorded as text.
#[derive(Clone, Copy)]
enum LineValue {
    Whole(u64),
    Number(f64),
    Other,
}

impl LineValue {
    fn whole(self) -> Option<u64> {
        match self {
            Self::Whole(number) => Some(number),
            Self::Number(_) | Self::Other => None,
        }
    }

    fn number(self) -> Option<f64> {
        match self {
            Self::Whole(number) => Some(number as f64),
            Self::Number(number) => Some(number),
            Self::Other => None,
        }
    }
}

impl<'de> Deserialize<'de> for LineValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = LineValue;

    fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str("a value")
    }

    fn visit_u64<E>(self, number: u64) -> std::result::Result<LineValue, E> {
        Ok(LineValue::Whole(number))
    }

    fn visit_i64<E>(self, number: i64) -> std::result::Result<LineValue, E> {
        Ok(LineValue::Number(number as f64))
    }

    fn visit_f64<E>(self, number: f64) -> std::result::Result<LineValue, E> {
        Ok(LineValue::Number(number))
    }

    fn visit_str<E>(self, text: &str) -> std::result::Result<LineValue, E> {
        Ok(match text {
            "NaN" => LineValue::Number(f64::NAN),
            "Infinity" => LineValue::Number(f64::INFINITY),
            "-Infinity" => LineValue::Number(f64::NEG_INFINITY),
            _ => LineValue::Other,
        })
    }

    fn visit_bool<E>(self, _: bool) -> std::result::Result<LineValue, E> {
        Ok(LineValue::Other)
    }

    fn visit_unit<E>(self) -> std::result::Result<LineValue, E> {
        Ok(LineValue::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<LineValue, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(LineValue::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> std::result::Result<LineValue, A::Error> {
        while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(LineValue::Other)
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
pub(super) struct FileMetrics {
    pub rows: BTreeMap<u64, MetricsRow>,
    /// The beginning and the end of each session, in seconds since 1970.
    pub sessions: Vec<(f64, f64)>,
    /// The number of bytes up to the end of the last complete line.
    pub bytes: u64,
    pub problem: Option<String>,
}

impl FileMetrics {
    /// Reads the file in a folder. A missing file has no rows.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(METRICS);
        let wrong = |source| Error::Io { action: "read", path: path.clone(), source };
        let mut whole = Self::default();
        let file = match json_line_reader::open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(whole),
            file => file.map_err(wrong)?,
        };
        let mut problem = None;
        let mut on_line = |line: std::result::Result<ParsedLine, String>| {
            let line = line.and_then(|line| line.0.ok_or_else(|| "a line has neither a step nor a session".to_owned()));
            match line {
                Ok(line) => whole.add(line),
                Err(message) => _ = problem.get_or_insert(message),
            }
        };
        let bytes = json_line_reader::complete_lines(file, 0, &mut on_line).map_err(wrong)?;
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
                let merged =
                    self.rows.entry(row.step).or_insert_with(|| MetricsRow { step: row.step, ..MetricsRow::default() });
                merged.time = merged.time.max(row.time);
                merged.values.extend(row.values);
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
        let whole = FileMetrics::read(folder)?;
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

    fn read(text: &str) -> FileMetrics {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(METRICS), text).unwrap();
        FileMetrics::read(dir.path()).unwrap()
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
    fn values_of_other_kinds_are_left_out() {
        let text = "{\"step\":3,\"a\":true,\"b\":null,\"c\":[1,{\"d\":[]}],\"e\":{\"f\":{\"g\":1}},\"h\":\"x\",\"i\":-7,\"j\":1e3,\
                    \"from_step\":18446744073709551615,\"time\":\"Infinity\"}\n";
        let row = read(text).rows[&3].clone();
        let expected = [("from_step", 1.8446744073709552e19), ("i", -7.0), ("j", 1000.0)];
        assert_eq!(row.values, expected.map(|(name, value)| (name.to_owned(), value)).into());
        assert_eq!(row.time, 0.0);
        for text in [
            "{\"session\":1}",
            "{\"session\":-1,\"from_step\":0}",
            "{\"session\":null,\"step\":1}",
            "{\"step\":1.0}",
            "{}",
        ] {
            let whole = read(&format!("{text}\n"));
            assert_eq!((whole.rows.len(), whole.sessions.len()), (0, 0), "{text}");
            assert_eq!(whole.problem.unwrap(), "a line has neither a step nor a session", "{text}");
        }
        assert_eq!(read("[1]\n").problem.unwrap(), "the line at byte 0 is not a JSON object");
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
