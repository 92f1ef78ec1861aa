//! A folder of runs.

use super::recorded::RecordedRun;
use super::{
    DEFAULT_FOLDER, EARLIER_LOG, EVENTS, EXPERTS, INFO, LAUNCH, LOG, METRICS, RANKS, RUNS_DIR, RecordedState,
    RunRequest, SAMPLES, SUMMARY, record_plan,
};
use crate::error::{Error, Result, RunError};
use crate::files::{FolderLock, FolderLockOutcome, LOCK, unfinished_files};
use crate::util::{list, suggest_names};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A folder of runs.
#[derive(Debug, Clone)]
pub struct RunsFolder {
    folder: PathBuf,
}

/// A run in a folder, or the reason why it cannot be read.
#[derive(Debug)]
#[non_exhaustive]
pub struct ListedRun {
    /// The name of its folder.
    pub id: String,
    /// The run.
    pub run: Result<RecordedRun>,
}

impl RunsFolder {
    /// Returns the folder that is given, or the one that `CANDLE_ZERO_RUNS_DIR` names, or `runs`.
    pub fn find(given: Option<PathBuf>) -> Self {
        let variable = std::env::var_os(RUNS_DIR).filter(|folder| !folder.is_empty() && !record_plan::is_off(folder));
        Self { folder: given.or(variable.map(PathBuf::from)).unwrap_or_else(|| DEFAULT_FOLDER.into()) }
    }

    /// Returns whether this text, such as `off`, switches recording off when it is given in place of a folder.
    pub fn is_off(folder: &Path) -> bool {
        record_plan::is_off(folder.as_os_str())
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Returns the names of the folders that contain a run, sorted. Anything else in the folder is ignored.
    ///
    /// # Errors
    /// [`RunError::NoFolder`]; the folder cannot be read.
    pub fn ids(&self) -> Result<Vec<String>> {
        let wrong = |source: std::io::Error| match source.kind() {
            ErrorKind::NotFound => Error::from(RunError::NoFolder { folder: self.folder.clone() }),
            _ => Error::Io { action: "read", path: self.folder.clone(), source },
        };
        let mut ids = Vec::new();
        for entry in std::fs::read_dir(&self.folder).map_err(wrong)? {
            let entry = entry.map_err(wrong)?;
            if !entry.file_type().is_ok_and(|kind| kind.is_file()) && is_run(&entry.path()) {
                ids.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
        ids.sort();
        Ok(ids)
    }

    /// Reads all runs, sorted by name. A run that cannot be read does not hide the others.
    ///
    /// # Errors
    /// The errors of [`ids`](Self::ids).
    pub fn runs(&self) -> Result<Vec<ListedRun>> {
        self.refreshed_runs(&mut BTreeMap::new())
    }

    /// Reads all runs like [`runs`](Self::runs). `running` contains the runs that were running at the last call, by
    /// folder. For these, only the records added since then are read.
    ///
    /// # Errors
    /// The errors of [`ids`](Self::ids).
    pub fn refreshed_runs(&self, running: &mut BTreeMap<PathBuf, RecordedRun>) -> Result<Vec<ListedRun>> {
        let read = |id: String| {
            let folder = self.folder.join(&id);
            let run = match running.remove(&folder) {
                Some(mut run) => run.refresh().map(|()| run),
                None => RecordedRun::open(&folder),
            };
            ListedRun { id, run }
        };
        let runs: Vec<_> = self.ids()?.into_iter().map(read).collect();
        // The runs of this folder that remain in the map have been removed.
        running.retain(|folder, _| folder.parent() != Some(&self.folder));
        let is_running = |run: &&RecordedRun| run.state() == RecordedState::Running;
        let still_running = runs.iter().filter_map(|listed| listed.run.as_ref().ok()).filter(is_running);
        running.extend(still_running.map(|run| (run.folder().to_owned(), run.clone())));
        Ok(runs)
    }

    /// Returns the folder of a run, which is given by the name of its folder, or by a prefix that matches only one run.
    ///
    /// # Errors
    /// [`RunError::NoRun`]; [`RunError::Ambiguous`]; the errors of [`ids`](Self::ids).
    pub fn named(&self, name: &str) -> Result<PathBuf> {
        // A shell completes the path of a folder with a slash.
        let name = name.trim_end_matches('/');
        let path = Path::new(name);
        let name = match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
            (Some(parent), Some(last)) if parent == self.folder => last,
            _ => name,
        };
        let ids = self.ids()?;
        let matching: Vec<&String> = ids.iter().filter(|id| id.starts_with(name)).collect();
        match matching[..] {
            _ if ids.iter().any(|id| id == name) => Ok(self.folder.join(name)),
            [only] if !name.is_empty() => Ok(self.folder.join(only)),
            [] | [_] => {
                let hint = suggest_names(name, ids.iter().map(String::as_str));
                Err(RunError::NoRun { name: name.into(), folder: self.folder.clone(), hint }.into())
            }
            _ => Err(RunError::Ambiguous { name: name.into(), count: matching.len(), names: list(&matching) }.into()),
        }
    }

    /// Reads the run that `name` selects.
    ///
    /// # Errors
    /// The errors of [`named`](Self::named) and of [`RecordedRun::open`].
    pub fn open(&self, name: &str) -> Result<RecordedRun> {
        RecordedRun::open(self.named(name)?)
    }

    /// Removes the record of a run: the files that belong to it, and the folder if it is then empty. Returns the folder
    /// if it contains other files.
    ///
    /// # Errors
    /// [`RunError::Running`] unless `forced`; a folder that does not exist or is a link; files that cannot be removed.
    pub fn remove(&self, id: &str, forced: bool) -> Result<Option<PathBuf>> {
        let folder = self.folder.join(id);
        let wrong = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { action: "remove", path, source }
        };
        if folder.symlink_metadata().map_err(wrong(&folder))?.is_symlink() {
            let source = std::io::Error::new(
                ErrorKind::InvalidInput,
                "it is a link; remove the link, or the folder it leads to",
            );
            return Err(wrong(&folder)(source));
        }
        let running = || RecordedRun::open(&folder).ok().filter(|run| run.state() == RecordedState::Running);
        // While the folder is locked, no other process continues the run.
        let lock = match FolderLock::acquire(&folder, Duration::ZERO).map_err(wrong(&folder))? {
            FolderLockOutcome::Held(lock) => Some(lock),
            FolderLockOutcome::Busy(pid) if !forced => {
                let pid = pid.or(running().and_then(|run| run.summary().pid));
                return Err(RunError::Running { name: id.into(), pid }.into());
            }
            FolderLockOutcome::Busy(_) => None,
        };
        let record_files = [METRICS, EVENTS, SAMPLES, SUMMARY, RANKS, EXPERTS, LAUNCH, LOG, EARLIER_LOG];
        let requests = RunRequest::ALL.map(RunRequest::file_name);
        let mut paths: Vec<PathBuf> = record_files.into_iter().chain(requests).map(|name| folder.join(name)).collect();
        paths.extend(unfinished_files(&folder));
        // This file is removed after the others, so that an interrupted removal can be repeated.
        paths.push(folder.join(INFO));
        paths.extend(lock.is_none().then(|| folder.join(LOCK)));
        for path in paths {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(wrong(&path)(error)),
                _ => {}
            }
        }
        drop(lock);
        match std::fs::remove_dir(&folder) {
            Ok(()) => Ok(None),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(Some(folder)),
            Err(error) => Err(wrong(&folder)(error)),
        }
    }
}

/// Returns whether a folder contains a run, even a damaged one. A folder without the files of a run, such as one whose
/// process was killed immediately after creating it, is not a run.
fn is_run(folder: &Path) -> bool {
    [INFO, EVENTS, METRICS].iter().any(|name| folder.join(name).symlink_metadata().is_ok_and(|found| found.is_file()))
}
