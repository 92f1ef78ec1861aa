//! Writes Weights & Biases runs without a network: `wandb sync` uploads them, and `wandb leet` shows them.
//!
//! ```text
//! wandb/offline-run-YYYYmmdd_HHMMSS-ID/run-ID.wandb      the log of records (transaction_log.rs, records.rs)
//!                                      candle-zero.json  the job and its checkpoints, to continue the run (run_folder.rs)
//! ```
//!
//! A run that resumes after a restart, or from one of its checkpoints, is continued in the same file.

mod records;
mod run_folder;
mod transaction_log;

use super::{Monitor, MonitorEvent, RunDescription, RunEnding, RunMilestone};
use crate::config::WandbConfig;
use crate::error::{Error, MonitorError, Result};
use crate::notice::emit;
use crate::wall_clock::now;
use records::{ReadBackRecord, RecordBuilder, RecordHead, WandbRunIdentity};
use run_folder::WandbRunFolder;
use std::ffi::OsString;
use std::path::PathBuf;
use transaction_log::TransactionLog;

/// A tag of the engine's events, which are written at each step.
const ENGINE_TAG: &str = "Train/Samples/lr";
/// The name of the folder of runs, in the working directory or in the folder that `WANDB_DIR` names.
const FOLDER: &str = "wandb";

/// The environment variables that have the same meaning as in wandb.
const DIR: &str = "WANDB_DIR";
const MODE: &str = "WANDB_MODE";
const NAME: &str = "WANDB_NAME";
const RUN_ID: &str = "WANDB_RUN_ID";

/// A monitor that writes a Weights & Biases run into a folder `offline-run-...`. The run begins with the first step.
/// Nothing is sent over a network.
#[derive(Debug)]
pub struct WandbMonitor {
    config: WandbConfig,
    /// The folder of runs.
    folder: PathBuf,
    /// The name that the environment gives.
    name: Option<String>,
    /// The id that the environment gives.
    id: Option<String>,
    run: Option<OpenWandbRun>,
}

/// A run that is being written.
#[derive(Debug)]
struct OpenWandbRun {
    identity: WandbRunIdentity,
    folder: WandbRunFolder,
    log: TransactionLog,
    builder: RecordBuilder,
}

impl WandbMonitor {
    /// Creates the monitor, or returns `None` if `WANDB_MODE` is `disabled`. The folder of runs is created if it is
    /// missing: `wandb` in the working directory, or in the folder that `WANDB_DIR` names.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder, or a folder in it, cannot be created; [`MonitorError::WandbRunId`] if
    /// `WANDB_RUN_ID` cannot be part of a file name.
    pub fn create(config: &WandbConfig) -> Result<Option<Self>> {
        Self::from_environment(config, |name| std::env::var_os(name))
    }

    fn from_environment(config: &WandbConfig, variable: impl Fn(&str) -> Option<OsString>) -> Result<Option<Self>> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| variable(name).map(|value| value.to_string_lossy().into_owned());
        if text(MODE).is_some_and(|mode| mode.eq_ignore_ascii_case("disabled")) {
            return Ok(None);
        }
        let id = text(RUN_ID);
        if let Some(value) = id.as_ref().filter(|id| !run_folder::is_id(id)) {
            return Err(MonitorError::WandbRunId { value: value.clone() }.into());
        }
        let folder = variable(DIR).map_or(FOLDER.into(), |folder| PathBuf::from(folder).join(FOLDER));
        let probe = std::fs::create_dir_all(&folder).and_then(|()| tempfile::tempdir_in(&folder));
        probe.map_err(|source| Error::Io { action: "write to", path: folder.clone(), source })?;
        Ok(Some(Self { config: config.clone(), folder, name: text(NAME), id, run: None }))
    }

    /// Begins a run, or continues the run that this job wrote before or whose checkpoint was loaded.
    fn begin(&mut self, run: &RunDescription) -> Result<()> {
        for folder in WandbRunFolder::continued_by(run, &self.folder) {
            let samples = run.samples;
            let mut last = 0;
            let resumed = folder.resume_log(|record| is_before(record, samples, &mut last))?;
            let Some(log) = resumed else { continue };
            let identity = folder.identity().clone();
            let mut open = OpenWandbRun { identity, folder, log, builder: RecordBuilder::after(last) };
            let record = open.builder.config(run);
            open.append(&[record])?;
            open.folder.remember(run)?;
            return self.announce(open, "is continued in");
        }
        let identity = WandbRunIdentity {
            id: self.id.clone().unwrap_or_else(run_folder::new_id),
            display_name: self.name.clone().unwrap_or_else(|| run.name.clone()),
            start: now(),
        };
        let (folder, file) = WandbRunFolder::create(&self.folder, &identity, run)?;
        let path = folder.log_path();
        let log = TransactionLog::begin(file).map_err(|source| Error::Io { action: "write", path, source })?;
        let mut open = OpenWandbRun { identity, folder, log, builder: RecordBuilder::default() };
        let records = [open.builder.header(), open.builder.run(&open.identity, &self.config, run)];
        open.append(&records)?;
        self.announce(open, "is written to")
    }

    fn announce(&mut self, run: OpenWandbRun, phrase: &str) -> Result<()> {
        let (id, path) = (&run.identity.id, run.folder.path().display());
        emit(&format!("Weights & Biases run {id} {phrase} {path}; upload it with wandb sync"));
        self.run = Some(run);
        Ok(())
    }
}

/// Returns whether a record must be kept because it belongs to the first `samples` samples, and if so, sets `last` to
/// its number. The rows that the program itself logs may count steps differently, so this function always returns true
/// for them.
fn is_before(record: &[u8], samples: u64, last: &mut u64) -> bool {
    let head = RecordHead::read(record, ENGINE_TAG);
    let is_kept = match head.kind {
        ReadBackRecord::Row { step, is_engine_row } => !is_engine_row || step <= samples,
        ReadBackRecord::Exit => false,
        ReadBackRecord::Other => true,
    };
    if is_kept {
        *last = head.num;
    }
    is_kept
}

impl OpenWandbRun {
    fn append(&mut self, records: &[Vec<u8>]) -> Result<()> {
        let path = self.folder.log_path();
        self.log.append(records).map_err(|source| Error::Io { action: "write", path, source })
    }

    /// Removes the engine's first row after more than `samples` samples, and everything after that row.
    fn rewind(&mut self, samples: u64) -> Result<()> {
        let mut last = 0;
        let path = self.folder.log_path();
        let rewound = self.log.rewind(|record| is_before(record, samples, &mut last));
        rewound.map_err(|source| Error::Io { action: "rewind", path, source })?;
        self.builder = RecordBuilder::after(last);
        Ok(())
    }

    fn end(mut self, ending: RunEnding) -> Result<()> {
        let record = self.builder.exit(ending, now() - self.identity.start);
        self.append(&[record])
    }
}

impl Monitor for WandbMonitor {
    /// Writes one row for all events of a step. Events before the beginning or after the end of the run are not
    /// written.
    fn write(&mut self, events: &[MonitorEvent]) -> Result<()> {
        let Some(run) = &mut self.run else { return Ok(()) };
        let (time, start) = (now(), run.identity.start);
        let rows = events.chunk_by(|a, b| a.step == b.step);
        let records: Vec<Vec<u8>> = rows.flat_map(|row| run.builder.row(row[0].step, row, time, start)).collect();
        run.append(&records)
    }

    fn note(&mut self, milestone: &RunMilestone<'_>) -> Result<()> {
        match (milestone, &mut self.run) {
            (RunMilestone::Begins(run), _) => self.begin(run),
            (RunMilestone::Loaded { samples }, Some(run)) => run.rewind(*samples),
            (RunMilestone::Saved { folder }, Some(run)) => run.folder.remember_checkpoints(folder),
            (RunMilestone::Ends(ending), run) => run.take().map_or(Ok(()), |run| run.end(*ending)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::path::Path;

    /// Returns a monitor whose runs are in `folder`.
    fn monitor(folder: &Path) -> WandbMonitor {
        let config = WandbConfig { group: None, team: None, project: "p".into() };
        let variable = |name: &str| (name == DIR).then(|| folder.as_os_str().to_owned());
        WandbMonitor::from_environment(&config, variable).unwrap().unwrap()
    }

    fn description(restart: u64, loaded: Option<(&Path, u64)>) -> RunDescription {
        RunDescription {
            name: "gpt".into(),
            job: "20260101-000000-abcdef".into(),
            restart,
            world_size: 2,
            configuration: json!({"seed": 1}),
            loaded_from: loaded.map(|(folder, _)| folder.to_owned()),
            samples: loaded.map_or(0, |(_, samples)| samples),
            ..RunDescription::default()
        }
    }

    /// Writes the rows of the engine after these numbers of samples.
    fn train(monitor: &mut WandbMonitor, samples: impl IntoIterator<Item = u64>) {
        for samples in samples {
            let events = [("train_loss", 1.0 / samples as f64), ("lr", 0.1)];
            let events = events.map(|(name, value)| MonitorEvent::new(format!("Train/Samples/{name}"), value, samples));
            monitor.write(&events).unwrap();
        }
    }

    /// Returns the numbers and the kinds of a run's records: the step of a row, `exit`, or nothing.
    fn records(folder: &Path) -> Vec<(u64, String)> {
        let mut files = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path());
        let path = files.find(|path| path.extension().is_some_and(|end| end == "wandb")).unwrap();
        let mut found = Vec::new();
        let file = std::fs::OpenOptions::new().read(true).append(true).open(path).unwrap();
        TransactionLog::resume(file, |record| {
            let head = RecordHead::read(record, ENGINE_TAG);
            let text = match head.kind {
                ReadBackRecord::Row { step, .. } => step.to_string(),
                ReadBackRecord::Exit => "exit".into(),
                ReadBackRecord::Other => String::new(),
            };
            found.push((head.num, text));
            true
        })
        .unwrap();
        found
    }

    fn rows(folder: &Path) -> Vec<String> {
        records(folder).into_iter().map(|(_, text)| text).filter(|text| !text.is_empty()).collect()
    }

    fn folders(folder: &Path) -> Vec<PathBuf> {
        let mut all: Vec<PathBuf> =
            std::fs::read_dir(folder.join(FOLDER)).unwrap().map(|entry| entry.unwrap().path()).collect();
        all.sort();
        all
    }

    #[test]
    fn a_killed_run_continues_after_its_checkpoint_with_each_step_once() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = dir.path().join("checkpoints");
        std::fs::create_dir(&checkpoints).unwrap();
        let mut first = monitor(dir.path());
        first.note(&RunMilestone::Begins(&description(0, None))).unwrap();
        train(&mut first, [8, 16, 24]);
        first.note(&RunMilestone::Saved { folder: &checkpoints }).unwrap();
        // A row of the program itself, which counts steps differently.
        first.write(&[MonitorEvent::new("epoch_loss", 0.5, 1_000_000)]).unwrap();
        train(&mut first, [32, 40]);
        let folder = first.run.as_ref().unwrap().folder.path().to_owned();
        let path = first.run.as_ref().unwrap().folder.log_path();
        drop(first);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 5]).unwrap();

        let mut resumed = monitor(dir.path());
        let mut run = description(0, Some((&checkpoints, 24)));
        run.job = "20260102-000000-abcdef".into();
        resumed.note(&RunMilestone::Begins(&run)).unwrap();
        assert_eq!(resumed.run.as_ref().unwrap().folder.path(), folder);
        train(&mut resumed, [32, 40, 48]);
        resumed.note(&RunMilestone::Loaded { samples: 40 }).unwrap();
        train(&mut resumed, [48, 56]);
        resumed.note(&RunMilestone::Ends(RunEnding::Finished)).unwrap();
        assert_eq!(rows(&folder), ["8", "16", "24", "1000000", "32", "40", "48", "56", "exit"]);
        let numbers: Vec<u64> = records(&folder).into_iter().map(|(number, _)| number).collect();
        assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
        assert_eq!(folders(dir.path()).len(), 1);
    }

    #[test]
    fn a_job_that_is_restarted_continues_its_run_and_another_job_begins_its_own() {
        let dir = tempfile::tempdir().unwrap();
        // Two engines of one process.
        let [mut a, mut b] = [(), ()].map(|()| monitor(dir.path()));
        for monitor in [&mut a, &mut b] {
            monitor.note(&RunMilestone::Begins(&description(0, None))).unwrap();
            train(monitor, [8]);
            monitor.note(&RunMilestone::Ends(RunEnding::Failed)).unwrap();
        }
        drop((a, b));
        assert_eq!(folders(dir.path()).len(), 2);
        let [mut a, mut b] = [(), ()].map(|()| monitor(dir.path()));
        for monitor in [&mut a, &mut b] {
            monitor.note(&RunMilestone::Begins(&description(1, None))).unwrap();
            train(monitor, [8, 16]);
        }
        assert_eq!(folders(dir.path()).len(), 2);
        drop((a, b));
        for folder in folders(dir.path()) {
            assert_eq!(rows(&folder), ["8", "16"]);
        }
        let other = RunDescription { job: "20260103-000000-abcdef".into(), ..description(7, None) };
        monitor(dir.path()).note(&RunMilestone::Begins(&other)).unwrap();
        let renamed = RunDescription { name: "bert".into(), ..description(7, None) };
        monitor(dir.path()).note(&RunMilestone::Begins(&renamed)).unwrap();
        assert_eq!(folders(dir.path()).len(), 4);
    }

    #[test]
    fn a_run_that_another_process_writes_and_a_damaged_one_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = monitor(dir.path());
        first.note(&RunMilestone::Begins(&description(0, None))).unwrap();
        train(&mut first, [8]);
        let path = first.run.as_ref().unwrap().folder.log_path();
        first.note(&RunMilestone::Ends(RunEnding::Stopped)).unwrap();
        std::fs::write(&path, "damaged").unwrap();
        monitor(dir.path()).note(&RunMilestone::Begins(&description(1, None))).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "damaged");
        assert_eq!(folders(dir.path()).len(), 2);
    }

    #[test]
    fn the_environment_names_folder_run_and_id_or_switches_the_monitor_off() {
        let dir = tempfile::tempdir().unwrap();
        let create_with = |name: &'static str, value: &'static str| {
            let folder = dir.path().as_os_str().to_owned();
            let variable = move |requested: &str| match requested {
                DIR => Some(folder.clone()),
                _ => (requested == name).then(|| value.into()),
            };
            WandbMonitor::from_environment(&WandbConfig::default(), variable)
        };
        assert!(create_with(MODE, "disabled").unwrap().is_none());
        for _ in 0..2 {
            let mut named = create_with(RUN_ID, "my_run-1").unwrap().unwrap();
            named.note(&RunMilestone::Begins(&description(0, None))).unwrap();
            assert!(named.run.as_ref().unwrap().folder.log_path().ends_with("run-my_run-1.wandb"));
        }
        let mut named = create_with(NAME, "a name").unwrap().unwrap();
        named.note(&RunMilestone::Begins(&description(0, None))).unwrap();
        assert_eq!(named.run.unwrap().identity.display_name, "a name");
        insta::assert_snapshot!(create_with(RUN_ID, "../x").unwrap_err(), @"environment variable WANDB_RUN_ID is `../x`; give 1 to 64 ASCII letters, digits, `-` or `_`, or remove it");
        std::fs::write(dir.path().join("file"), "").unwrap();
        let file = dir.path().join("file").into_os_string();
        let error = WandbMonitor::from_environment(&WandbConfig::default(), |name| (name == DIR).then(|| file.clone()));
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("cannot write to ") && error.contains("file/wandb: "), "{error}");
    }

    #[test]
    fn ids_have_eight_letters_and_differ() {
        let ids: std::collections::BTreeSet<String> = (0..100).map(|_| run_folder::new_id()).collect();
        assert!(ids.len() > 90 && ids.iter().all(|id| id.len() == 8 && run_folder::is_id(id)), "{ids:?}");
        for id in ["", "a/b", "a b", "é", &"x".repeat(65)] {
            assert!(!run_folder::is_id(id), "{id}");
        }
    }
}
