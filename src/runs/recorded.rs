//! A recorded run, as read from its folder.

use super::json_line_reader;
use super::requests::leave_request;
use super::{
    EVENTS, LAUNCH, MAX_FILE_BYTES, RANKS, RecordedLoads, RunEnding, RunInfo, RunMetrics, RunRequest, RunSummary,
    SAMPLES, now,
};
use crate::error::{Error, Result};
use crate::files::LOCK;
use crate::json_leaves::json_leaves;
use crate::util::host_name;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::{Map, Value, json};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// The state of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum RecordedState {
    /// A process is recording the run.
    Running,
    /// The run ended as planned.
    Finished,
    /// A signal or a request asked the run to end, and it ended after a step.
    Stopped,
    /// An error ended the run.
    Failed,
    /// The process ended without recording how: the process was killed, or the machine was switched off.
    Killed,
}

impl RecordedState {
    /// All states.
    pub const ALL: [Self; 5] = [Self::Running, Self::Finished, Self::Stopped, Self::Failed, Self::Killed];

    /// Returns the name of the state.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Killed => "killed",
        }
    }
}

/// A recorded run.
#[derive(Debug, Clone)]
pub struct RecordedRun {
    folder: PathBuf,
    info: RunInfo,
    summary: RunSummary,
    state: RecordedState,
}

impl RecordedRun {
    /// Reads the description and the summary of the run in a folder.
    ///
    /// # Errors
    /// [`RunError::Damaged`](crate::error::RunError::Damaged) or [`RunError::Newer`](crate::error::RunError::Newer) if
    /// the description cannot be understood; files that cannot be read.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        Self::read(folder.as_ref(), None)
    }

    /// Reads the description again, and everything that has been recorded since the run was last read.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open). The run then remains as it was.
    pub fn refresh(&mut self) -> Result<()> {
        *self = Self::read(&self.folder, Some(self))?;
        Ok(())
    }

    /// Reads the run in a folder. `earlier` is the result of an earlier call.
    fn read(folder: &Path, earlier: Option<&Self>) -> Result<Self> {
        // The lock is checked before the files are read. If the run ends between these two steps, the files record how
        // it ended.
        let lock = LockState::of(folder);
        let info = RunInfo::read(folder)?;
        let summary = match earlier.filter(|earlier| earlier.info == info) {
            Some(earlier) => earlier.summary.clone().refreshed(folder)?,
            None => RunSummary::load(folder)?,
        };
        let state = match (lock.is_held(&summary), summary.outcome) {
            (true, _) => RecordedState::Running,
            (false, Some(RunEnding::Finished)) => RecordedState::Finished,
            (false, Some(RunEnding::Stopped)) => RecordedState::Stopped,
            (false, Some(RunEnding::Failed)) => RecordedState::Failed,
            (false, None) if summary.error.is_some() => RecordedState::Failed,
            (false, None) => RecordedState::Killed,
        };
        Ok(Self { folder: folder.to_owned(), info, summary, state })
    }

    /// Returns the name of the folder, which no other run in the same folder of runs has.
    pub fn id(&self) -> String {
        self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the description.
    pub fn info(&self) -> &RunInfo {
        &self.info
    }

    /// Returns the summary.
    pub fn summary(&self) -> &RunSummary {
        &self.summary
    }

    /// Returns the state.
    pub fn state(&self) -> RecordedState {
        self.state
    }

    /// Returns the time that the run has taken so far, without pauses between sessions, in seconds.
    pub fn seconds(&self) -> f64 {
        match self.state {
            RecordedState::Running => self.summary.earlier_seconds + (now() - self.summary.session_started).max(0.0),
            _ => self.summary.seconds(),
        }
    }

    /// Reads all values by step.
    ///
    /// # Errors
    /// The file cannot be read. Damaged lines are not an error: the first one is named in
    /// [`RunMetrics::problem`](super::RunMetrics::problem).
    pub fn metrics(&self) -> Result<RunMetrics> {
        RunMetrics::read(&self.folder)
    }

    /// Reads all events, oldest first. Damaged lines are left out.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn events(&self) -> Result<Vec<Map<String, Value>>> {
        self.lines(EVENTS)
    }

    /// Reads the texts that the model has generated, oldest first. Damaged lines are left out.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn samples(&self) -> Result<Vec<Map<String, Value>>> {
        self.lines(SAMPLES)
    }

    /// Reads the launcher's records, oldest first: starts, how ranks ended, and failures of the job. Damaged lines are
    /// left out.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn launch_events(&self) -> Result<Vec<Map<String, Value>>> {
        self.lines(LAUNCH)
    }

    /// Reads the last report of the ranks, with the memory and the times of each. Returns `None` if there is no report,
    /// or if it is damaged.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn ranks(&self) -> Result<Option<Value>> {
        let path = self.folder.join(RANKS);
        match json_line_reader::read(&path, MAX_FILE_BYTES) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io { action: "read", path, source }),
        }
    }

    /// Reads the newest loads of the experts of a mixture. Returns `None` if the run has recorded none.
    ///
    /// # Errors
    /// [`RunError::Damaged`](crate::error::RunError::Damaged); the file cannot be read.
    pub fn expert_loads(&self) -> Result<Option<RecordedLoads>> {
        RecordedLoads::read(&self.folder)
    }

    /// Sends a request to the program that records this run. The program finds the request at the end of a step: within
    /// about a second or, if a step takes longer, at the end of that step. The program acts on the request if it calls
    /// [`Engine::stop_requested`](crate::Engine::stop_requested) or
    /// [`Engine::save_requested`](crate::Engine::save_requested).
    ///
    /// # Errors
    /// The request cannot be written.
    pub fn request(&self, request: RunRequest) -> Result<()> {
        leave_request(&self.folder, request)
    }

    /// Returns the facts that a list of runs shows about this run.
    pub fn to_json(&self) -> Value {
        let (info, summary) = (&self.info, &self.summary);
        json!({
            "id": self.id(),
            "name": info.name,
            "state": self.state.name(),
            "folder": self.folder,
            "created": info.created,
            "seconds": self.seconds(),
            "steps": summary.steps,
            "total_steps": info.total_steps,
            "loss": summary.loss,
            "best_loss": summary.best_loss,
            "val_loss": summary.validation,
            "best_val_loss": summary.best_validation,
            "restarts": summary.sessions.saturating_sub(1),
            "checkpoints": summary.checkpoints,
            "checkpoint_step": summary.checkpoint_step,
            "error": summary.error,
            "damaged": summary.problem,
        })
    }

    /// Returns the resolved configuration and the program's settings as leaves: dotted names and values.
    pub fn settings(&self) -> Vec<(String, Value)> {
        let mut all = Vec::new();
        for (name, tree) in [("settings", &self.info.settings), ("configuration", &self.info.configuration)] {
            json_leaves(name, tree, &mut |name, value| {
                if !value.is_null() && !value.is_object() {
                    all.push((name, value.clone()));
                }
            });
        }
        all
    }

    fn lines(&self, name: &str) -> Result<Vec<Map<String, Value>>> {
        let path = self.folder.join(name);
        let wrong = |source| Error::Io { action: "read", path: path.clone(), source };
        let file = match json_line_reader::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(vec![]),
            file => file.map_err(wrong)?,
        };
        let mut all = Vec::new();
        json_line_reader::complete_lines(file, 0, &mut |line: std::result::Result<_, String>| all.extend(line))
            .map_err(wrong)?;
        Ok(all)
    }
}

/// The state of a run's lock.
enum LockState {
    Held,
    Free,
    /// The file system has no locks, or the lock is another user's.
    Unknown,
}

impl LockState {
    fn of(folder: &Path) -> Self {
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let mut open = std::fs::OpenOptions::new();
        let file = match open.read(true).custom_flags(flags.bits().cast_signed()).open(folder.join(LOCK)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Self::Free,
            Err(_) => return Self::Unknown,
            Ok(file) => file,
        };
        // A writer that begins at this instant waits for the lock.
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) => Self::Held,
            Err(_) => Self::Unknown,
            Ok(()) => {
                _ = flock(&file, FlockOperation::Unlock);
                Self::Free
            }
        }
    }

    fn is_held(&self, summary: &RunSummary) -> bool {
        match self {
            Self::Held => true,
            Self::Free => false,
            Self::Unknown => {
                let is_alive = |pid: u32| Path::new(&format!("/proc/{pid}")).exists();
                summary.outcome.is_none() && summary.host == host_name() && summary.pid.is_some_and(is_alive)
            }
        }
    }
}
