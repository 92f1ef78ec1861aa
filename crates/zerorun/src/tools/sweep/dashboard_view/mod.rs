//! The sweeps in a folder, as the dashboard shows them.
//!
//! ```text
//!   folder -> SweepLocation, one for each sweep
//!             SweepReading: sweep.json, journal.jsonl up to its last complete line -> JSON
//! ```
//!
//! A reading is kept, so that each line of a journal is read once, however often the page asks. If a line is damaged or
//! does not fit the others, the page names the line, and later lines give only what they contain themselves: which
//! trials run, and their results. The parameters of trials that begin later are then unknown, because the journal does
//! not contain them.

mod trials;

use super::definition::SweepDefinition;
use super::folder::SweepFolder;
use super::journal::{Journal, JournalEvent, ReplayedSweep};
use crate::dashboard::{SweepLocation, SweepReader};
use crate::error::{Error, Result};
use candle_zero::sweep::{ParameterDomain, Sweep, SweepGoal};
use candle_zero::util::{counted, lock};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;
use trials::{BestSoFar, TrialView};

/// The maximum number of trials that the page receives, the best first. Running trials beyond this number
/// are sent, too.
const MAX_TRIALS: usize = 500;

/// The reader of the sweeps in a folder.
#[derive(Debug)]
pub(crate) struct DashboardSweepReader {
    folder: PathBuf,
    /// The sweeps that were read, by folder.
    readings: Mutex<BTreeMap<PathBuf, SweepReading>>,
}

impl DashboardSweepReader {
    /// Returns the reader of the sweep whose folder, or whose folder of runs, is `folder`, or else of the sweeps in
    /// `folder`.
    pub(crate) fn new(folder: &Path) -> Self {
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Self { folder, readings: Mutex::default() }
    }
}

/// Returns the sweep in a folder.
fn sweep_in(path: &Path) -> Option<SweepFolder> {
    SweepFolder::at(path).ok().filter(|folder| folder.definition().is_file())
}

/// Returns the name of a sweep: that of its folder.
fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

impl SweepReader for DashboardSweepReader {
    fn locations(&self) -> Vec<SweepLocation> {
        let location = |folder: &SweepFolder, runs: Option<PathBuf>, prefix: String| SweepLocation {
            name: name_of(folder.path()),
            folder: folder.path().to_owned(),
            runs,
            prefix,
        };
        if let Some(sweep) = sweep_in(&self.folder) {
            return vec![location(&sweep, Some(sweep.runs()), String::new())];
        }
        if let Some(parent) = self.folder.parent().and_then(sweep_in)
            && parent.runs() == self.folder
        {
            return vec![location(&parent, None, String::new())];
        }
        // A folder that cannot be read is reported with the list of runs.
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let folders = entries.filter_map(|entry| sweep_in(&entry.path()));
        let mut locations: Vec<SweepLocation> = folders
            .map(|folder| location(&folder, Some(folder.runs()), format!("{}/", name_of(folder.path()))))
            .collect();
        locations.sort_by(|a, b| a.name.cmp(&b.name));
        locations
    }

    fn read(&self, location: &SweepLocation) -> Result<Value> {
        let mut readings = lock(&self.readings);
        let folder = SweepFolder::at(&location.folder)?;
        let stamp = DefinitionStamp::of(&folder)?;
        let length = folder.journal().metadata().map_or(0, |journal| journal.len());
        let cached = readings.remove(&location.folder).filter(|cached| cached.stamp == stamp && cached.bytes <= length);
        let mut reading = match cached {
            Some(cached) => cached,
            None => SweepReading::begin(&folder, stamp)?,
        };
        reading.read_new_lines()?;
        let json = reading.to_json(&location.name);
        readings.insert(location.folder.clone(), reading);
        Ok(json)
    }
}

/// The state of the definition's file, which changes if another sweep is begun in the folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DefinitionStamp {
    modified: Option<SystemTime>,
    length: u64,
}

impl DefinitionStamp {
    fn of(folder: &SweepFolder) -> Result<Self> {
        let path = folder.definition();
        let metadata = path.metadata().map_err(|source| Error::Io { action: "read", path, source })?;
        Ok(Self { modified: metadata.modified().ok(), length: metadata.len() })
    }
}

/// A sweep according to the part of its journal that has been read.
#[derive(Debug)]
struct SweepReading {
    stamp: DefinitionStamp,
    definition: SweepDefinition,
    /// The number of trials of the complete sweep, without branches.
    trial_count: usize,
    journal: PathBuf,
    /// The number of bytes and of lines of the journal that were read.
    bytes: u64,
    lines: usize,
    trials: ReadTrials,
    best: BestSoFar,
    /// The message about the first line that is damaged or does not fit the others. `problems` counts this line and the
    /// damaged lines after it.
    problem: Option<String>,
    problems: usize,
}

/// The trials according to the part of the journal that has been read.
#[derive(Debug)]
enum ReadTrials {
    /// All lines fit together, so everything is known.
    Replayed(Box<ReplayedSweep>),
    /// After a damaged line, only what single lines contain is known.
    FromLines(BTreeMap<usize, TrialView>),
}

impl SweepReading {
    /// Reads the definition of the sweep in a folder.
    fn begin(folder: &SweepFolder, stamp: DefinitionStamp) -> Result<Self> {
        let stored = folder.read()?;
        let origin = folder.definition().display().to_string();
        let definition = SweepDefinition::new(&origin, &stored.definition)?;
        let sweep = Sweep::new(definition.settings.clone())?;
        Ok(Self {
            stamp,
            trial_count: sweep.trial_count(),
            best: BestSoFar::new(definition.settings.goal),
            definition,
            journal: folder.journal(),
            bytes: 0,
            lines: 0,
            trials: ReadTrials::Replayed(Box::new(ReplayedSweep::new(sweep))),
            problem: None,
            problems: 0,
        })
    }

    /// Reads the lines that have been added to the journal since the last read.
    fn read_new_lines(&mut self) -> Result<()> {
        let (path, from) = (self.journal.clone(), self.bytes);
        let end = Journal::lines_from(&path, from, &mut |line| self.add(line));
        self.bytes = end.map_err(|source| Error::Io { action: "read", path, source })?;
        Ok(())
    }

    fn add(&mut self, line: &[u8]) {
        self.lines += 1;
        let Some(event) = JournalEvent::of_line(line) else {
            self.record_damage("is damaged");
            return;
        };
        if let ReadTrials::Replayed(replayed) = &mut self.trials
            && let Err(problem) = replayed.repeat(event.clone())
        {
            self.record_damage(problem);
        }
        if let ReadTrials::FromLines(trials) = &mut self.trials {
            TrialView::add(trials, &event, self.definition.settings.steps);
        }
        self.best.add(&event);
    }

    fn record_damage(&mut self, problem: &str) {
        self.problems += 1;
        if let ReadTrials::Replayed(replayed) = &self.trials {
            let steps = self.definition.settings.steps;
            let known = TrialView::all(replayed).into_iter().map(|trial| (trial.number, trial.settle(steps)));
            self.trials = ReadTrials::FromLines(known.collect());
        }
        if self.problem.is_none() {
            let (path, line) = (self.journal.display(), self.lines);
            self.problem = Some(format!(
                "{path}: line {line} {problem}; the contents of the other lines are shown, but the parameters of \
                 trials that begin later are unknown"
            ));
        }
    }

    fn to_json(&self, name: &str) -> Value {
        let settings = &self.definition.settings;
        let mut trials = match &self.trials {
            ReadTrials::Replayed(replayed) => TrialView::all(replayed),
            ReadTrials::FromLines(trials) => trials.values().cloned().collect(),
        };
        trials.sort_by(|a, b| a.order(b, settings.goal));
        let count = |is: fn(&TrialView) -> bool| trials.iter().filter(|trial| is(trial)).count();
        let shown: Vec<Value> = trials
            .iter()
            .enumerate()
            .filter(|(rank, trial)| *rank < MAX_TRIALS || trial.is_running())
            .map(|(_, trial)| trial.to_json())
            .collect();
        let more = match self.problems {
            0 | 1 => String::new(),
            more => format!("; the journal has {}", counted(more - 1, "more damaged line")),
        };
        json!({
            "name": name,
            "metric": self.definition.metric,
            "mode": match settings.goal { SweepGoal::Minimize => "min", SweepGoal::Maximize => "max" },
            "steps": settings.steps,
            "scheduler": settings.scheduler.name(),
            "parameters": settings.space.parameters().iter().map(|(name, domain)| axis(name, domain)).collect::<Vec<_>>(),
            "trial_count": self.trial_count,
            "begun": trials.len(),
            "running": count(TrialView::is_running),
            "failed": count(TrialView::has_failed),
            "best": trials.first().filter(|trial| trial.is_usable()).map(|trial| trial.number),
            "trials": shown,
            "best_so_far": self.best.to_json(),
            "problem": self.problem.as_ref().map(|problem| format!("{problem}{more}")),
        })
    }
}

/// Returns a parameter with its values.
fn axis(name: &str, domain: &ParameterDomain) -> Value {
    let mut axis = match domain {
        ParameterDomain::Choice(values) => json!({"values": values}),
        ParameterDomain::Real { low, high, log, .. } => json!({"low": low, "high": high, "log": log}),
        ParameterDomain::Integer { low, high, log, .. } => json!({"low": low, "high": high, "log": log}),
        _ => json!({}),
    };
    axis["name"] = name.into();
    axis["kind"] = domain.kind().into();
    axis
}

#[cfg(test)]
mod tests;
