//! Reads the lines that have been appended to the files of a run since they were last read.

use super::metrics::{MetricsLine, ParsedLine};
use super::{EARLIER_LOG, EVENTS, LAUNCH, LOG, METRICS, SAMPLES, json_line_reader};
use crate::error::{Error, Result};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::io::{BufRead as _, ErrorKind, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

/// The maximum number of bytes of a file that one call of [`RunTail::read_new`] reads. Older lines are skipped.
const MAX_NEW_BYTES: u64 = 4 << 20;
/// The maximum number of bytes of the log that one call of [`RunTail::read_new`] reads.
const MAX_NEW_LOG_BYTES: u64 = 256 << 10;

/// A reader of the lines that are appended to the files of a run.
#[derive(Debug, Clone)]
pub struct RunTail {
    folder: PathBuf,
    positions: [u64; 5],
}

/// The lines that have been appended.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct NewRunLines {
    /// The lines of `metrics.jsonl`.
    pub metrics: Vec<MetricsLine>,
    /// Whether lines of `metrics.jsonl` were skipped or the file was replaced, so that all metrics must be read again.
    pub has_gap: bool,
    /// The events.
    pub events: Vec<Map<String, Value>>,
    /// The samples.
    pub samples: Vec<Map<String, Value>>,
    /// The events of the launcher.
    pub launch: Vec<Map<String, Value>>,
    /// The lines of the log.
    pub log: Vec<String>,
}

impl NewRunLines {
    /// Returns whether there is nothing new.
    pub fn is_empty(&self) -> bool {
        let Self { metrics, has_gap, events, samples, launch, log } = self;
        !has_gap && metrics.is_empty() && events.is_empty() && samples.is_empty() && launch.is_empty() && log.is_empty()
    }
}

impl RunTail {
    /// Begins at the given byte positions in `metrics.jsonl`, `events.jsonl`, `samples.jsonl`, `launch.jsonl` and
    /// `log.txt`.
    pub fn new(folder: impl Into<PathBuf>, positions: [u64; 5]) -> Self {
        Self { folder: folder.into(), positions }
    }

    /// Begins at the end of `metrics.jsonl`, and at the beginning of the other files.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn without_metrics(folder: impl Into<PathBuf>) -> Result<Self> {
        let folder = folder.into();
        let path = folder.join(METRICS);
        match length(&path) {
            Ok(len) => Ok(Self::new(folder, [len.unwrap_or_default(), 0, 0, 0, 0])),
            Err(source) => Err(Error::Io { action: "read", path, source }),
        }
    }

    /// Returns the positions from which the next call of [`read_new`](Self::read_new) reads.
    pub fn positions(&self) -> [u64; 5] {
        self.positions
    }

    /// Reads the complete lines that have been appended since the last call. Damaged lines are left out.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn read_new(&mut self) -> Result<NewRunLines> {
        let mut new_lines = NewRunLines::default();
        let [metrics, events, samples, launch, log] = &mut self.positions;
        let read_objects = |name: &str, at: &mut u64, lines: &mut Vec<Map<String, Value>>| {
            appended(&self.folder.join(name), at, &mut |line| lines.push(line))
        };
        new_lines.has_gap =
            appended(&self.folder.join(METRICS), metrics, &mut |line: ParsedLine| new_lines.metrics.extend(line.0))?;
        read_objects(EVENTS, events, &mut new_lines.events)?;
        read_objects(SAMPLES, samples, &mut new_lines.samples)?;
        read_objects(LAUNCH, launch, &mut new_lines.launch)?;
        new_lines.log = appended_text(&self.folder, log)?;
        Ok(new_lines)
    }
}

/// Calls `on_line` with the lines after `position`, and advances `position`. Returns whether lines were skipped, or
/// whether the file is shorter than before.
fn appended<T: DeserializeOwned>(path: &Path, position: &mut u64, on_line: &mut dyn FnMut(T)) -> Result<bool> {
    let wrong = |source| Error::Io { action: "read", path: path.to_owned(), source };
    let Some(len) = length(path).map_err(wrong)? else { return Ok(std::mem::take(position) > 0) };
    let was_replaced = len < *position;
    if was_replaced {
        *position = 0;
    }
    if len == *position {
        return Ok(was_replaced);
    }
    let mut file = json_line_reader::open(path).map_err(wrong)?;
    let skips_lines = len - *position > MAX_NEW_BYTES;
    if skips_lines {
        *position = next_line(&mut file, len - MAX_NEW_BYTES).map_err(wrong)?;
    }
    *position = json_line_reader::complete_lines(file, *position, &mut |line: std::result::Result<T, String>| {
        line.into_iter().for_each(&mut *on_line)
    })
    .map_err(wrong)?;
    Ok(was_replaced || skips_lines)
}

/// Returns the lines of the log after `position`, and advances `position`. If a new file has begun, the rest of the
/// earlier file comes first.
fn appended_text(folder: &Path, position: &mut u64) -> Result<Vec<String>> {
    let (path, earlier) = (folder.join(LOG), folder.join(EARLIER_LOG));
    let wrong = |source| Error::Io { action: "read", path: path.clone(), source };
    let len = length(&path).map_err(wrong)?.unwrap_or_default();
    let mut lines = Vec::new();
    let from_beginning = *position == 0 && len < MAX_NEW_LOG_BYTES;
    if len < *position || from_beginning {
        let end = length(&earlier).map_err(wrong)?.unwrap_or_default();
        let start = if from_beginning { end.saturating_sub(MAX_NEW_LOG_BYTES - len) } else { *position };
        if start < end {
            text_lines(&earlier, start, &mut lines).map_err(wrong)?;
        }
        *position = 0;
    }
    if len > *position {
        *position = text_lines(&path, *position, &mut lines).map_err(wrong)?;
    }
    Ok(lines)
}

/// Adds the complete lines of a text after a position, but only those in the last [`MAX_NEW_LOG_BYTES`] bytes. Returns
/// the position after them.
fn text_lines(path: &Path, start: u64, lines: &mut Vec<String>) -> std::io::Result<u64> {
    let mut file = json_line_reader::open(path)?;
    let len = file.metadata()?.len();
    let first = len.saturating_sub(MAX_NEW_LOG_BYTES);
    let start = if first > start { next_line(&mut file, first)? } else { start };
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(2 * MAX_NEW_LOG_BYTES).read_to_end(&mut bytes)?;
    let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    lines.extend(String::from_utf8_lossy(&bytes[..end]).lines().map(str::to_owned));
    Ok(start + end as u64)
}

/// Returns the first position at or after `start` at which a line begins.
fn next_line(file: &mut std::fs::File, start: u64) -> std::io::Result<u64> {
    if start == 0 {
        return Ok(0);
    }
    file.seek(SeekFrom::Start(start - 1))?;
    let mut reader = std::io::BufReader::new(file);
    Ok(start - 1 + reader.skip_until(b'\n')? as u64)
}

/// Returns the length of a file, or `None` if it does not exist.
fn length(path: &Path) -> std::io::Result<Option<u64>> {
    match std::fs::metadata(path) {
        Ok(found) => Ok(Some(found.len())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::io::Write as _;

    fn append(folder: &Path, name: &str, text: &str) {
        let mut file = OpenOptions::new().create(true).append(true).open(folder.join(name)).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    fn steps(new_lines: &NewRunLines) -> Vec<u64> {
        let step = |line: &MetricsLine| match line {
            MetricsLine::Session { from_step, .. } => *from_step,
            MetricsLine::Values(row) => row.step,
        };
        new_lines.metrics.iter().map(step).collect()
    }

    #[test]
    fn each_line_is_seen_once_when_it_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let mut tail = RunTail::new(dir.path(), [0; 5]);
        assert!(tail.read_new().unwrap().is_empty());
        append(dir.path(), METRICS, "{\"session\":1,\"from_step\":0}\n{\"step\":1,\"loss\":2}\n{\"st");
        append(dir.path(), EVENTS, "{\"event\":\"start\"}\nxx\n");
        append(dir.path(), LOG, "a\nb");
        let new_lines = tail.read_new().unwrap();
        assert_eq!((steps(&new_lines), new_lines.has_gap, new_lines.events.len()), (vec![0, 1], false, 1));
        assert_eq!(new_lines.log, ["a"]);
        assert!(tail.read_new().unwrap().is_empty());
        append(dir.path(), METRICS, "ep\":2,\"loss\":1}\n");
        append(dir.path(), LOG, "c\n");
        let new_lines = tail.read_new().unwrap();
        assert_eq!((steps(&new_lines), new_lines.log), (vec![2], vec!["bc".into()]));
        let again = RunTail::new(dir.path(), tail.positions()).read_new().unwrap();
        assert!(again.is_empty(), "{again:?}");
    }

    #[test]
    fn another_file_in_the_place_of_the_first_is_a_gap() {
        let dir = tempfile::tempdir().unwrap();
        append(dir.path(), METRICS, "{\"step\":1,\"loss\":2}\n{\"step\":2,\"loss\":2}\n");
        let mut tail = RunTail::new(dir.path(), [0; 5]);
        assert!(!tail.read_new().unwrap().has_gap);
        std::fs::write(dir.path().join(METRICS), "{\"step\":5,\"loss\":2}\n").unwrap();
        let new_lines = tail.read_new().unwrap();
        assert_eq!((new_lines.has_gap, steps(&new_lines)), (true, vec![5]));
        std::fs::remove_file(dir.path().join(METRICS)).unwrap();
        assert!(tail.read_new().unwrap().has_gap && tail.read_new().unwrap().is_empty());
    }

    #[test]
    fn a_look_after_a_long_time_reads_the_newest_part() {
        let dir = tempfile::tempdir().unwrap();
        let line = |step: u64| format!("{{\"step\":{step:08},\"loss\":2.5}}\n").replace(":0", ":1");
        let text: String = (0..200_000).map(line).collect();
        assert!(text.len() as u64 > MAX_NEW_BYTES + 1000);
        append(dir.path(), METRICS, &text);
        append(dir.path(), LOG, &"0123456789\n".repeat(100_000));
        let mut tail = RunTail::new(dir.path(), [0; 5]);
        let new_lines = tail.read_new().unwrap();
        assert!(new_lines.has_gap && new_lines.metrics.len() > 100_000 && new_lines.metrics.len() < 200_000);
        let log = new_lines.log;
        assert!(log.iter().all(|line| line == "0123456789") && log.len() > 20_000 && log.len() < 30_000);
        assert!(tail.read_new().unwrap().is_empty());
    }

    #[test]
    fn a_log_that_was_rotated_is_read_to_its_end_first() {
        let dir = tempfile::tempdir().unwrap();
        append(dir.path(), LOG, "one\n");
        let mut tail = RunTail::new(dir.path(), [0; 5]);
        assert_eq!(tail.read_new().unwrap().log, ["one"]);
        append(dir.path(), LOG, "two\n");
        std::fs::rename(dir.path().join(LOG), dir.path().join(EARLIER_LOG)).unwrap();
        append(dir.path(), LOG, "3\n");
        assert_eq!(tail.read_new().unwrap().log, ["two", "3"]);
        assert_eq!(RunTail::new(dir.path(), [0; 5]).read_new().unwrap().log, ["one", "two", "3"]);
    }
}
