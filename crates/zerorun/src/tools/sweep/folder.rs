//! The folder of a sweep.
//!
//! ```text
//!   sweep.json       the definition, written once
//!   journal.jsonl    what has happened
//!   trials/0001/     the configuration, logs, checkpoints and result of a trial
//!   runs/            the records of the trials, for `zerorun runs`
//!   best/            the best configuration, as files that can be run without the sweep
//! ```

use super::definition::FREE_KEYS;
use super::error::SweepToolError;
use crate::error::{Error, Result};
use crate::tools::trial_subprocess::write_atomically;
use candle_zero::files::{self, FolderLock, FolderLockOutcome};
use serde_json::{Map, Value, json};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

const DEFINITION: &str = "sweep.json";
const JOURNAL: &str = "journal.jsonl";
/// The version of the files.
const FORMAT: u64 = 1;
const MAX_DEFINITION_BYTES: u64 = 16 << 20;
/// The time for which a killed process may still hold the lock of the folder.
const LOCK_RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// The folder of a sweep.
#[derive(Debug, Clone)]
pub(super) struct SweepFolder {
    path: PathBuf,
}

/// A sweep as its folder describes it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct StoredSweep {
    /// The definition as written: the keys of the sweep file and of flags.
    pub(super) definition: Map<String, Value>,
    /// The directory in which trials run.
    pub(super) directory: PathBuf,
    /// The configuration on which those of the trials are based, or null.
    pub(super) configuration: Value,
}

impl StoredSweep {
    fn to_json(&self) -> Value {
        json!({
            "format": FORMAT,
            "definition": self.definition,
            "directory": self.directory.to_string_lossy(),
            "configuration": self.configuration,
        })
    }

    /// Returns the differences between this stored sweep and the `requested` one.
    fn differences(&self, requested: &Self) -> Vec<String> {
        let text = |value: Option<&Value>| value.map_or("none".to_owned(), Value::to_string);
        let mut names: Vec<&String> = self.definition.keys().chain(requested.definition.keys()).collect();
        names.sort_unstable();
        names.dedup();
        let fixed = names.into_iter().filter(|name| !FREE_KEYS.contains(&name.as_str()));
        let changed = fixed.filter_map(|name| {
            let (before, after) = (self.definition.get(name), requested.definition.get(name));
            (before != after).then(|| format!("{name}: {} -> {}", text(before), text(after)))
        });
        let mut changed: Vec<String> = changed.collect();
        if self.directory != requested.directory {
            changed.push(format!("directory: {} -> {}", self.directory.display(), requested.directory.display()));
        }
        if self.configuration != requested.configuration {
            changed.push("the file given with --ds_config has changed".into());
        }
        changed
    }
}

impl SweepFolder {
    /// Returns the folder at `path`, as an absolute path.
    pub(super) fn at(path: &Path) -> Result<Self> {
        let path =
            std::path::absolute(path).map_err(|source| Error::Io { action: "find", path: path.to_owned(), source })?;
        Ok(Self { path })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn journal(&self) -> PathBuf {
        self.path.join(JOURNAL)
    }

    /// Returns the file with the definition, which every sweep has.
    pub(super) fn definition(&self) -> PathBuf {
        self.path.join(DEFINITION)
    }

    /// Returns the folder of the records of trials.
    pub(super) fn runs(&self) -> PathBuf {
        self.path.join("runs")
    }

    /// Returns the folder of a trial.
    pub(super) fn trial(&self, number: usize) -> PathBuf {
        self.path.join("trials").join(format!("{number:04}"))
    }

    /// Returns the name of a trial's run.
    pub(super) fn run_name(number: usize) -> String {
        format!("trial-{number:04}")
    }

    /// Returns the folder of the best configuration.
    pub(super) fn best(&self) -> PathBuf {
        self.path.join("best")
    }

    fn error(&self, problem: impl Into<String>) -> Error {
        SweepToolError::Folder { folder: self.path.clone(), problem: problem.into() }.into()
    }

    /// Reads the sweep in the folder.
    pub(super) fn read(&self) -> Result<StoredSweep> {
        let path = self.definition();
        let text = match files::read_text(&path, MAX_DEFINITION_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(self.error("there is no sweep in it; give the folder that was the --out of a sweep"));
            }
            text => text.map_err(|source| Error::Io { action: "read", path: path.clone(), source })?,
        };
        let damaged = || self.error(format!("its file {DEFINITION} is damaged; give another folder with --out"));
        let stored: Value = serde_json::from_str(&text).map_err(|_| damaged())?;
        match stored["format"].as_u64() {
            Some(FORMAT) => {}
            Some(newer) if newer > FORMAT => {
                let problem =
                    format!("the sweep in it has format {newer}, but this version reads {FORMAT}; use a newer zerorun");
                return Err(self.error(problem));
            }
            _ => return Err(damaged()),
        }
        let directory = stored["directory"].as_str().map(PathBuf::from).ok_or_else(damaged)?;
        let definition = stored["definition"].as_object().cloned().ok_or_else(damaged)?;
        Ok(StoredSweep { definition, directory, configuration: stored["configuration"].clone() })
    }

    /// Returns whether the folder contains a sweep. A folder that contains other files, except hidden ones, but no
    /// sweep is refused.
    pub(super) fn has_sweep(&self) -> Result<bool> {
        let io = |source| Error::Io { action: "read", path: self.path.clone(), source };
        let entries = match std::fs::read_dir(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            entries => entries.map_err(io)?,
        };
        let names: Vec<String> = entries
            .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
            .collect::<std::io::Result<_>>()
            .map_err(io)?;
        if names.iter().any(|name| name == DEFINITION) {
            return Ok(true);
        }
        match names.iter().find(|name| !name.starts_with('.')) {
            Some(other) => {
                let problem = format!("the folder contains {other}, but no sweep; give another folder with --out");
                Err(self.error(problem))
            }
            None => Ok(false),
        }
    }

    /// Locks the folder, which is created if it does not exist.
    pub(super) fn lock(&self) -> Result<FolderLock> {
        let io = |action| move |source| Error::Io { action, path: self.path.clone(), source };
        std::fs::create_dir_all(&self.path).map_err(io("create"))?;
        match FolderLock::acquire(&self.path, LOCK_RELEASE_TIMEOUT).map_err(io("lock"))? {
            FolderLockOutcome::Held(lock) => Ok(lock),
            FolderLockOutcome::Busy(pid) => {
                let pid = pid.map_or(String::new(), |pid| format!(" (process {pid})"));
                Err(self.error(format!(
                    "another process{pid} is running the sweep in it; wait until that process ends, or give another \
                     folder with --out"
                )))
            }
        }
    }

    /// Writes the sweep or, if the folder already contains one, checks that it is the same, apart from
    /// [`FREE_KEYS`].
    pub(super) fn store(&self, sweep: &StoredSweep) -> Result<()> {
        if self.has_sweep()? {
            let differences = self.read()?.differences(sweep);
            if !differences.is_empty() {
                let differences = differences.join("; ");
                return Err(SweepToolError::OtherSweep { folder: self.path.clone(), differences }.into());
            }
            return Ok(());
        }
        write_atomically(&self.path.join(DEFINITION), &format!("{:#}\n", sweep.to_json()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_continues_only_in_its_own_folder_and_with_its_own_settings() {
        let dir = tempfile::tempdir().unwrap();
        let message = |error: Error| error.to_string().replace(dir.path().to_str().unwrap(), "DIR");
        let definition = |text: &str| serde_json::from_str::<Map<String, Value>>(text).unwrap();
        let sweep = StoredSweep {
            definition: definition(r#"{"steps": 8, "parallel": 1, "seed": 2}"#),
            directory: "/work".into(),
            configuration: Value::Null,
        };
        let folder = SweepFolder::at(&dir.path().join("new")).unwrap();
        assert!(!folder.has_sweep().unwrap());
        insta::assert_snapshot!(message(folder.read().unwrap_err()), @"DIR/new: there is no sweep in it; give the folder that was the --out of a sweep");
        let lock = folder.lock().unwrap();
        let other = StoredSweep {
            definition: definition(r#"{"steps": 9, "parallel": 4, "trials": 3}"#),
            directory: "/".into(),
            configuration: json!({}),
        };
        folder.store(&sweep).unwrap();
        folder.store(&sweep).unwrap();
        let with_free_keys = StoredSweep {
            definition: definition(r#"{"steps": 8, "parallel": 7, "seed": 2, "memory": 5}"#),
            ..sweep.clone()
        };
        folder.store(&with_free_keys).unwrap();
        assert_eq!(folder.read().unwrap(), sweep);
        insta::assert_snapshot!(message(folder.store(&other).unwrap_err()), @"DIR/new: the sweep in it was begun with different settings: seed: 2 -> none; steps: 8 -> 9; trials: none -> 3; directory: /work -> /; the file given with --ds_config has changed; continue it with `zerorun sweep resume DIR/new`, or give another folder with --out");
        drop(lock);
        for (text, expected) in [("{", "damaged"), ("{\"format\": 2}", "newer"), ("{\"format\": 1}", "damaged")] {
            std::fs::write(folder.path().join(DEFINITION), text).unwrap();
            assert!(message(folder.read().unwrap_err()).contains(expected), "{text}");
        }
        std::fs::write(dir.path().join("thesis.txt"), "x").unwrap();
        let mine = SweepFolder::at(dir.path()).unwrap();
        std::fs::remove_dir_all(folder.path()).unwrap();
        insta::assert_snapshot!(message(mine.has_sweep().unwrap_err()), @"DIR: the folder contains thesis.txt, but no sweep; give another folder with --out");
    }
}
