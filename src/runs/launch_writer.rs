//! The launcher's part of the record of a run: the output of the ranks, and how each rank ended.

use super::line_appender::LineAppender;
use super::redact_secrets::without_secrets;
use super::{EARLIER_LOG, LAUNCH, LOG, now, utc};
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The maximum number of bytes of `log.txt`. When the file is full, it replaces `log.1.txt`, and a new file begins.
const MAX_LOG: u64 = 4 << 20;
/// The maximum number of bytes of a line of the log.
const MAX_LOG_LINE: usize = 8 << 10;

/// The writer of the launcher's part of a record, whose other parts are written by other processes.
#[derive(Debug)]
pub struct LaunchWriter {
    folder: PathBuf,
    launch: LineAppender,
    log: LineAppender,
    max_log: u64,
}

impl LaunchWriter {
    /// Opens the launcher's files in the folder of a run.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn open(folder: impl Into<PathBuf>) -> Result<Self> {
        let folder = folder.into();
        let (launch, log) = (LineAppender::open(&folder, LAUNCH)?, LineAppender::open(&folder, LOG)?);
        Ok(Self { folder, launch, log, max_log: MAX_LOG })
    }

    /// Returns the folder of the run.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Adds a line that a rank has written. `prefix` identifies the rank.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn line(&mut self, time: f64, prefix: &str, text: &[u8]) -> Result<()> {
        let is_cut = text.len() > MAX_LOG_LINE;
        let text = String::from_utf8_lossy(&text[..text.len().min(MAX_LOG_LINE)]);
        // Colours and other terminal commands mean nothing in a file.
        let text = without_secrets(&plain(&text));
        let line = format!("{} {prefix}{text}{}", utc(time), if is_cut { " ..." } else { "" });
        if self.log.len > 0 && self.log.len + line.len() as u64 >= self.max_log {
            let (from, to) = (self.folder.join(LOG), self.folder.join(EARLIER_LOG));
            std::fs::rename(&from, to).map_err(|source| Error::Io { action: "rename", path: from, source })?;
            self.log = LineAppender::open(&self.folder, LOG)?;
        }
        self.log.push_text(&line);
        self.log.flush()
    }

    /// Adds an event to `launch.jsonl`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn event(&mut self, mut event: Map<String, Value>) -> Result<()> {
        event.insert("time".into(), now().into());
        self.launch.push(&event);
        self.launch.flush()
    }
}

/// Returns a line without escape sequences and other control characters, except tabs.
fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            // A sequence such as ESC [ 1 m ends with a character from `@` to `~`, such as a letter.
            '\u{1b}' if letters.next_if_eq(&'[').is_some() => {
                while letters.next_if(|letter| !('@'..='~').contains(letter)).is_some() {}
                letters.next();
            }
            '\t' => out.push('\t'),
            letter if letter.is_control() => {}
            letter => out.push(letter),
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_written_with_its_time_and_rank_and_without_colors_and_secrets() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = LaunchWriter::open(dir.path()).unwrap();
        writer.line(0.0, "[rank 1] ", b"\x1b[1;31mred\x1b[0m\ta\xff\x07 hf_abcdefghijklmnopqrstuv").unwrap();
        writer.line(60.0, "[rank 0] ", &[b'x'; MAX_LOG_LINE + 1]).unwrap();
        let log = std::fs::read_to_string(dir.path().join(LOG)).unwrap();
        let (first, second) = log.trim_end().split_once('\n').unwrap();
        assert_eq!(first, "1970-01-01 00:00:00 [rank 1] red\ta\u{fffd} ***");
        assert!(second.starts_with("1970-01-01 00:01:00 [rank 0] xxx") && second.ends_with("x ..."), "{second}");
    }

    #[test]
    fn the_log_keeps_the_newest_lines_in_two_bounded_files() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = LaunchWriter { max_log: 1000, ..LaunchWriter::open(dir.path()).unwrap() };
        for number in 0..200 {
            writer.line(0.0, "", format!("line {number}").as_bytes()).unwrap();
        }
        let [newer, older] = [LOG, EARLIER_LOG].map(|name| std::fs::read_to_string(dir.path().join(name)).unwrap());
        assert!(newer.len() <= 1000 && older.len() <= 1000 && older.len() > 900);
        let numbers: Vec<usize> =
            [older, newer].concat().lines().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
        assert_eq!(*numbers.last().unwrap(), 199);
        assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{numbers:?}");
    }
}
