//! The finished experiments, one JSON line each, in a file that is replaced atomically.

use super::search_space::TuneCandidate;
use super::trial_outcome::{RepeatedTrials, TrialOutcome};
use crate::error::{Error, OutputError, Result, ToolError};
use crate::tools::trial_subprocess::write_atomically;
use candle_zero::util::counted;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt::Write as _;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A candidate and its outcome.
pub(super) struct TrialRow {
    pub(super) candidate: TuneCandidate,
    pub(super) outcome: TrialOutcome,
    /// The number of samples per step, if it differs from that of the original configuration.
    pub(super) other_batch: Option<usize>,
    /// The summary of repeated runs. The outcome is the median run.
    pub(super) runs: Option<RepeatedTrials>,
}

/// One line of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct TuneResultLine {
    id: String,
    changes: Map<String, Value>,
    #[serde(flatten)]
    outcome: TrialOutcome,
}

/// The beginning of every line.
const LINE_PREFIX: &str = "{\"id\":\"";

/// The file of finished experiments.
pub(super) struct TuneResultsFile {
    path: PathBuf,
    lines: Vec<TuneResultLine>,
    /// The lock, held until the search ends.
    _lock: File,
}

impl TuneResultsFile {
    /// Reads `results.jsonl` in `folder`, which is created if it does not exist, and locks the folder.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let io = |action| move |source| Error::Io { action, path: folder.to_owned(), source };
        std::fs::create_dir_all(folder).map_err(io("create"))?;
        let lock = File::open(folder).map_err(io("open"))?;
        // If the file system does not support locks, the search runs without one.
        if flock(&lock, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
            let folder = folder.display();
            let problem = format!(
                "another search is running in {folder}; wait until it ends, or give another folder with --results_dir"
            );
            return Err(ToolError::Tune { problem }.into());
        }
        let path = folder.join("results.jsonl");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(source) => return Err(Error::Io { action: "read", path, source }),
        };
        let mut lines = Vec::new();
        let complete_len = text.rfind('\n').map_or(0, |end| end + 1);
        let (complete_lines, rest) = text.split_at(complete_len);
        // After a crash, the end of the last line may be missing on disk. The experiment in that line is run
        // again.
        let is_ours = rest.starts_with(LINE_PREFIX) || (!complete_lines.is_empty() && LINE_PREFIX.starts_with(rest));
        let is_cut = rest.is_empty() || (is_ours && serde_json::from_str::<Value>(rest).is_err());
        for line in complete_lines.lines().chain((!is_cut).then_some(rest)) {
            match serde_json::from_str(line) {
                Ok(line) => lines.push(line),
                // An experiment recorded by another version is run again. A file with other contents must not be
                // overwritten.
                Err(_) if serde_json::from_str::<Value>(line).is_ok_and(|line| line["id"].is_string()) => {}
                Err(_) => {
                    let problem = "it contains something other than records of zerorun tune's experiments; give another \
                                   folder with --results_dir";
                    return Err(OutputError::Refused { path, problem: problem.into() }.into());
                }
            }
        }
        Ok(Self { path, lines, _lock: lock })
    }

    /// Returns the recorded outcome of an experiment if it succeeded. Otherwise, the experiment is run again: it may
    /// have needed more time, more memory or a correction.
    pub(super) fn find(&self, id: &str) -> Option<TrialOutcome> {
        let mut finished = self.lines.iter().filter(|line| line.outcome.is_success());
        finished.find(|line| line.id == id).map(|line| line.outcome.clone())
    }

    /// Adds a finished experiment.
    pub(super) fn add(&mut self, id: &str, candidate: &TuneCandidate, outcome: &TrialOutcome) -> Result<()> {
        self.lines.retain(|line| line.id != id);
        self.lines.push(TuneResultLine { id: id.into(), changes: candidate.0.clone(), outcome: outcome.clone() });
        let mut text = String::new();
        for line in &self.lines {
            let json =
                serde_json::to_string(line).unwrap_or_else(|e| unreachable!("strings and numbers are valid JSON: {e}"));
            _ = writeln!(text, "{json}");
        }
        write_atomically(&self.path, &text)
    }
}

/// Formats the rows as a table, in the given order.
pub(super) fn table(rows: &[TrialRow]) -> String {
    let names: Vec<String> = rows.iter().map(|row| row.candidate.to_string()).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0);
    let lines = rows.iter().zip(&names).map(|(row, name)| {
        let batch = row.other_batch.filter(|_| row.outcome.is_success());
        let batch = batch.map_or(String::new(), |samples| format!(", train batch {samples}"));
        let runs = row
            .runs
            .as_ref()
            .map(|runs| format!(", {} within {:.1} %", counted(runs.count, "run"), runs.spread * 100.0));
        format!("{name:width$}  {}{}{batch}", row.outcome, runs.unwrap_or_default())
    });
    lines.collect::<Vec<_>>().join("\n")
}
