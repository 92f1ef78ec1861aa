//! Determines, from the program, the configuration and the environment, whether a run is recorded, under which name and
//! where.

use super::error::NAME_RULE;
use super::{DEFAULT_FOLDER, RECORD, RUN, RUNS_DIR};
use crate::config::RunRecordConfig;
use crate::error::{Result, RunError};
use serde_json::Value;
use std::ffi::OsString;
use std::path::PathBuf;

/// The words that, in place of a folder, switch recording off.
const OFF: [&str; 4] = ["off", "none", "false", "0"];

/// The maximum number of bytes of a run's name.
const MAX_NAME: usize = 100;

/// A program's request that its run be recorded, for [`EngineBuilder::run`](crate::EngineBuilder::run).
#[derive(Debug, Clone, PartialEq)]
pub struct RunSpec {
    name: String,
    folder: Option<PathBuf>,
    settings: Value,
    total_steps: Option<u64>,
    command: Option<Vec<String>>,
    is_default: bool,
}

impl RunSpec {
    /// Requests a record with this name. Its folder is named after the run and the time at which the job began.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            folder: None,
            settings: Value::Null,
            total_steps: None,
            command: None,
            is_default: false,
        }
    }

    /// Requests a record by default, without a request from the user: the name is changed to an allowed one, and if the
    /// folder cannot be written, a message reports this, and the program trains without a record.
    pub fn by_default(name: &str) -> Self {
        let allowed: String = name.chars().map(|letter| if is_allowed(letter) { letter } else { '-' }).collect();
        let name = allowed.trim_start_matches(|letter: char| !letter.is_alphanumeric());
        let name = name.chars().scan(0, |bytes, letter| {
            *bytes += letter.len_utf8();
            (*bytes <= MAX_NAME).then_some(letter)
        });
        let name = name.collect::<String>().trim_end().to_owned();
        Self { is_default: true, ..Self::new(if name.is_empty() { "run".to_owned() } else { name }) }
    }

    /// Returns an error that states the rule unless `name` can be the name of a run.
    ///
    /// # Errors
    /// The rule, as text.
    pub fn check_name(name: &str) -> std::result::Result<(), &'static str> {
        let is_name = !name.is_empty()
            && name.len() <= MAX_NAME
            && name.chars().all(is_allowed)
            && name.starts_with(char::is_alphanumeric)
            && !name.ends_with(' ');
        if is_name { Ok(()) } else { Err(NAME_RULE) }
    }

    /// Sets the folder of runs. The configuration's `run.folder` and the environment variable `CANDLE_ZERO_RUNS_DIR`
    /// take precedence. The default is `runs` in the working directory.
    #[must_use]
    pub fn folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Records the settings of the program that are not part of the configuration. Values of keys that name a password
    /// or a token are not recorded.
    #[must_use]
    pub fn settings(mut self, settings: Value) -> Self {
        self.settings = settings;
        self
    }

    /// Records the number of steps of the complete run.
    #[must_use]
    pub fn total_steps(mut self, steps: u64) -> Self {
        self.total_steps = Some(steps);
        self
    }

    /// Records this command line instead of that of the process.
    #[must_use]
    pub fn command(mut self, words: Vec<String>) -> Self {
        self.command = Some(words);
        self
    }

    /// Returns the settings of the program, and the number of steps of the complete run.
    pub(crate) fn settings_and_steps(&self) -> (Value, Option<u64>) {
        (self.settings.clone(), self.total_steps)
    }
}

/// Returns the name of a run, whether it is recorded or not: the name in the environment, in the section `run` or in
/// the program's request, or else the name of the program.
pub(crate) fn run_name(
    spec: Option<&RunSpec>,
    config: Option<&RunRecordConfig>,
    variable: impl Fn(&str) -> Option<OsString>,
) -> String {
    let env_name = variable(RUN).filter(|value| !value.is_empty()).map(|name| name.to_string_lossy().into_owned());
    let config_name = || config.and_then(|config| config.name.clone());
    env_name.or_else(config_name).or_else(|| spec.map(|spec| spec.name.clone())).unwrap_or_else(program_name)
}

impl From<&str> for RunSpec {
    fn from(name: &str) -> Self {
        Self::new(name)
    }
}

impl From<String> for RunSpec {
    fn from(name: String) -> Self {
        Self::new(name)
    }
}

/// A record that will be written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RecordPlan {
    pub name: String,
    /// The folder of runs.
    pub folder: PathBuf,
    pub settings: Value,
    pub total_steps: Option<u64>,
    pub command: Option<Vec<String>>,
    /// Whether the record was requested explicitly, and not only by default. A folder that cannot be written is then an
    /// error.
    pub is_required: bool,
}

impl RecordPlan {
    /// Combines the settings of the program, the section `run` and the environment. Returns `None` if nothing is
    /// recorded. The environment takes precedence, then the section.
    ///
    /// # Errors
    /// [`RunError::Name`].
    pub fn new(
        spec: Option<RunSpec>,
        config: Option<&RunRecordConfig>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Self>> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let (env_name, folder, is_watched) = (variable(RUN), variable(RUNS_DIR), variable(RECORD).is_some());
        let is_off = folder.as_ref().is_some_and(|folder| is_off(folder));
        let is_requested =
            spec.is_some() || env_name.is_some() || is_watched || config.is_some_and(|config| config.enabled);
        let is_disabled = env_name.is_none() && !is_watched && config.is_some_and(|config| !config.enabled);
        if !is_requested || is_off || is_disabled {
            return Ok(None);
        }
        let is_required = env_name.is_some()
            || is_watched
            || folder.is_some()
            || config.is_some()
            || spec.as_ref().is_some_and(|spec| !spec.is_default);
        let section = config.cloned().unwrap_or_default();
        let spec = spec.unwrap_or_else(|| RunSpec::by_default(&program_name()));
        let (name, source_name) = match (env_name, section.name) {
            (Some(name), _) => (name.to_string_lossy().into_owned(), "--run or CANDLE_ZERO_RUN"),
            (None, Some(name)) => (name, "run.name"),
            (None, None) => (spec.name, "EngineBuilder::run"),
        };
        if RunSpec::check_name(&name).is_err() {
            return Err(RunError::Name { source_name, name }.into());
        }
        let folder = folder.map(PathBuf::from).or(section.folder).or(spec.folder);
        Ok(Some(Self {
            name,
            folder: folder.unwrap_or_else(|| DEFAULT_FOLDER.into()),
            settings: spec.settings,
            total_steps: spec.total_steps,
            command: spec.command,
            is_required,
        }))
    }
}

/// Returns whether the value of `CANDLE_ZERO_RUNS_DIR` or `--runs` switches recording off.
pub(super) fn is_off(folder: &std::ffi::OsStr) -> bool {
    folder.to_str().is_some_and(|folder| OFF.iter().any(|off| folder.eq_ignore_ascii_case(off)))
}

/// Returns whether a run's name may contain this character. Characters that are special in a shell, a path or a web
/// page are excluded.
fn is_allowed(letter: char) -> bool {
    letter.is_alphanumeric() || "._-+=@ ".contains(letter)
}

/// Returns the name of this program.
fn program_name() -> String {
    let program = std::env::args_os().next().unwrap_or_default();
    PathBuf::from(program).file_stem().map_or("run".into(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn plan(
        spec: Option<RunSpec>,
        config: Option<RunRecordConfig>,
        variables: &[(&str, &str)],
    ) -> Result<Option<RecordPlan>> {
        let lookup =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
        RecordPlan::new(spec, config.as_ref(), lookup)
    }

    fn config(enabled: bool, name: &str, folder: &str) -> RunRecordConfig {
        let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        RunRecordConfig { enabled, name: text(name), folder: text(folder).map(PathBuf::from) }
    }

    fn describe(plan: Result<Option<RecordPlan>>) -> String {
        let Some(plan) = plan.unwrap() else { return "off".into() };
        format!("{} in {}{}", plan.name, plan.folder.display(), if plan.is_required { "" } else { ", if possible" })
    }

    #[test]
    fn nothing_is_recorded_unless_something_asks_for_it_and_off_has_the_last_word() {
        let spec = || Some(RunSpec::new("a"));
        assert_eq!(describe(plan(None, None, &[])), "off");
        assert_eq!(describe(plan(None, None, &[(RUNS_DIR, "x")])), "off", "a folder by itself requests no record");
        assert_eq!(describe(plan(spec(), None, &[(RUNS_DIR, "OFF")])), "off");
        assert_eq!(describe(plan(spec(), Some(config(false, "", "")), &[])), "off");
        assert_eq!(describe(plan(None, Some(config(true, "", "")), &[(RUNS_DIR, "0"), (RUN, "x")])), "off");
        assert_eq!(describe(plan(spec(), None, &[(RUNS_DIR, "")])), "a in runs");
        assert_eq!(describe(plan(Some(RunSpec::by_default("a")), None, &[])), "a in runs, if possible");
    }

    #[test]
    fn the_environment_precedes_the_section_and_the_section_precedes_the_program() {
        let spec = || Some(RunSpec::new("a").folder("pa"));
        assert_eq!(describe(plan(spec(), None, &[])), "a in pa");
        assert_eq!(describe(plan(spec(), Some(config(true, "b", "pb")), &[])), "b in pb");
        assert_eq!(describe(plan(spec(), Some(config(true, "b", "")), &[])), "b in pa");
        assert_eq!(describe(plan(spec(), Some(config(true, "b", "pb")), &[(RUN, "c"), (RUNS_DIR, "pc")])), "c in pc");
        assert_eq!(describe(plan(None, None, &[(RUN, "c")])), "c in runs");
        assert_eq!(describe(plan(spec(), Some(config(false, "", "")), &[(RUN, "c")])), "c in pa");
    }

    #[test]
    fn names_that_make_no_folder_are_refused_and_default_names_are_changed() {
        let wrong = |name: &str| plan(Some(RunSpec::new(name)), None, &[]).unwrap_err().to_string();
        insta::assert_snapshot!(wrong("a/b"), @"EngineBuilder::run is `a/b`, which cannot be the name of a run; give 1 to 100 bytes of letters, digits, inner spaces or . _ - + = @, and begin with a letter or digit");
        for name in ["", ".", "..", "-x", "a\nb", "a\u{1b}[1m", "<b>", &"x".repeat(101), " a"] {
            assert!(wrong(name).contains("give 1 to 100 bytes of letters"), "{name}");
        }
        insta::assert_snapshot!(plan(None, Some(config(true, "a:b", "")), &[]).unwrap_err(), @"run.name is `a:b`, which cannot be the name of a run; give 1 to 100 bytes of letters, digits, inner spaces or . _ - + = @, and begin with a letter or digit");
        insta::assert_snapshot!(plan(None, None, &[(RUN, "../x")]).unwrap_err(), @"--run or CANDLE_ZERO_RUN is `../x`, which cannot be the name of a run; give 1 to 100 bytes of letters, digits, inner spaces or . _ - + = @, and begin with a letter or digit");
        for (name, expected) in [("a/b c", "a-b c"), ("..", "run"), ("", "run"), ("modèle", "modèle"), ("--x", "x")] {
            assert_eq!(plan(Some(RunSpec::by_default(name)), None, &[]).unwrap().unwrap().name, expected);
        }
        let long = plan(Some(RunSpec::by_default(&"é".repeat(300))), None, &[]).unwrap().unwrap().name;
        assert_eq!(long.len(), 100);
    }
}
